from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.maths.mixing import weighted_mean
from polyfed.random import stream

WEIGHTS = st.lists(st.floats(0.01, 1000), min_size=1, max_size=6)


def _states(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    return [
        {
            "w": torch.randn(3, 4, generator=stream(k, "w"), dtype=torch.float64).to(dtype),
            "b": torch.randn(3, generator=stream(k, "b"), dtype=torch.float64).to(dtype),
            "count": torch.tensor(7 * k + 3),
        }
        for k in range(count)
    ]


def _literal_mean(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Eq. (1), one number at a time."""
    mean = {}
    for name, first in states[0].items():
        flat = []
        for i in range(first.numel()):
            total = 0.0
            for state, w in zip(states, weights, strict=True):
                total += w * float(state[name].flatten()[i])
            flat.append(total / sum(weights))
        mean[name] = torch.tensor(flat, dtype=torch.float64).reshape(first.shape)
    return mean


@given(weights=WEIGHTS)
def test_equals_the_literal_mean(weights: list[float]) -> None:
    states = _states(len(weights))
    got, wanted = weighted_mean(states, weights), _literal_mean(states, weights)
    assert got.keys() == wanted.keys()
    for name in ("w", "b"):
        torch.testing.assert_close(got[name].double(), wanted[name], rtol=0, atol=1e-5)
    assert abs(float(got["count"]) - float(wanted["count"])) <= 0.5 + 1e-9


@given(weights=WEIGHTS, factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_only_the_ratio_of_weights_matters(weights: list[float], factor: float) -> None:
    states = _states(len(weights))
    one = weighted_mean(states, weights)
    other = weighted_mean(states, [factor * w for w in weights])
    assert all(torch.equal(one[name], other[name]) for name in one)


@given(weights=WEIGHTS)
def test_the_mean_lies_between_the_extremes(weights: list[float]) -> None:
    states = _states(len(weights))
    mean = weighted_mean(states, weights)["w"]
    stacked = torch.stack([state["w"] for state in states])
    assert bool((mean >= stacked.amin(0) - 1e-5).all())
    assert bool((mean <= stacked.amax(0) + 1e-5).all())


@given(weights=st.lists(st.floats(0.01, 1000), min_size=2, max_size=6))
def test_the_order_matters_to_rounding_only(weights: list[float]) -> None:
    states = _states(len(weights))
    one, other = weighted_mean(states, weights), weighted_mean(states[::-1], weights[::-1])
    torch.testing.assert_close(one["w"], other["w"], rtol=0, atol=1e-5)


def test_weights_belong_to_their_state() -> None:
    """(1 * 0 + 3 * 4) / 4 = 3, not 1."""
    states = [{"w": torch.tensor(0.0)}, {"w": torch.tensor(4.0)}]
    assert weighted_mean(states, [1, 3])["w"].item() == 3.0


def test_one_state_comes_back_bit_for_bit() -> None:
    (state,) = _states(1)
    mean = weighted_mean([state], [37])
    assert all(torch.equal(mean[name], state[name]) for name in state)


def test_a_weight_of_zero_leaves_a_state_out() -> None:
    one, other = _states(2)
    mean = weighted_mean([one, other], [1, 0])
    assert all(torch.equal(mean[name], one[name]) for name in one)


def test_the_given_states_are_not_changed() -> None:
    states, again = _states(3), _states(3)
    mean = weighted_mean(states, [1, 2, 3])
    mean["w"].zero_()
    for state, before in zip(states, again, strict=True):
        assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [
        ([3, 4], [1, 1], 4),  # 3.5: to the even one
        ([3, 4], [3, 1], 3),
        ([3, 4], [1, 3], 4),
        ([0, 10], [1, 9], 9),
        ([2**53 + 2, 2**53 + 2], [1, 1], 2**53 + 2),  # float32 would lose it
    ],
)
def test_integers_are_averaged_in_float64_and_rounded(
    values: list[int], weights: list[float], mean: int
) -> None:
    got = weighted_mean([{"n": torch.tensor(v)} for v in values], weights)["n"]
    assert got.dtype == torch.int64
    assert int(got) == mean


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    mean = weighted_mean(_states(3, dtype), [1, 2, 3])
    assert mean["w"].dtype == dtype
    assert mean["count"].dtype == torch.int64

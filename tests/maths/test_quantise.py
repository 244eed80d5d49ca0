from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.maths.quantise import halve, quantise, restore
from polyfed.random import stream

VECTORS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(VECTORS)
def test_nothing_is_further_off_than_half_a_quantum(values: list[float]) -> None:
    x = torch.tensor(values)
    q, scale = quantise(x)
    assert q.dtype == torch.int8
    assert float(scale) == pytest.approx(max(map(abs, values)) / 127, rel=1e-6, abs=1e-45)
    error = (restore(q, scale).double() - x.double()).abs()
    assert bool((error <= 0.5000001 * float(scale) + 1e-6 * x.abs().double() + 1e-44).all())


def test_the_literal_formula() -> None:
    x = torch.randn(50, generator=stream(0, "x"))
    s = max(abs(float(v)) for v in x) / 127
    wanted = [round(float(v) / s) for v in x]
    assert quantise(x)[0].tolist() == wanted


def test_zeros_and_what_is_too_small_for_a_scale() -> None:
    for tiny in (0.0, 1e-45):
        q, scale = quantise(torch.tensor([tiny, -tiny]))
        assert q.tolist() == [0, 0]
        assert restore(q, scale).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_finite_scale(bad: float) -> None:
    q, scale = quantise(torch.tensor([1.0, bad]))
    assert q.dtype == torch.int8
    assert not bool(scale.isfinite())


def test_half_precision_keeps_finite_numbers_finite_and_others_not() -> None:
    x = torch.tensor([1.0, 1e6, -1e6, math.inf, math.nan, 0.1])
    got = halve(x)
    assert got.dtype == torch.float16
    assert got[:4].tolist() == [1.0, 65504.0, -65504.0, math.inf]
    assert math.isnan(float(got[4]))
    assert float(got[5]) == pytest.approx(0.1, rel=1e-3)


def test_with_error_feedback_sums_are_kept_to_one_quantum() -> None:
    lost, sent, arrived, scale = (
        torch.zeros(30),
        torch.zeros(30),
        torch.zeros(30),
        torch.tensor(0.0),
    )
    for t in range(50):
        x = torch.randn(30, generator=stream(0, "x", t))
        q, scale = quantise(x + lost)
        lost = x + lost - restore(q, scale)
        sent, arrived = sent + x, arrived + restore(q, scale)
    assert bool(((sent - arrived).abs() <= 0.5001 * scale + 1e-5).all())

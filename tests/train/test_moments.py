"""Adam of the rows of a stack in one pass: on a CPU by Triton's interpreter, or by torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from polyfed.core.phase import Optimiser
from polyfed.train import optimisers, stepper
from polyfed.train.cohort import Cohort, Kept, fit_cohort
from polyfed.train.loop import fit
from polyfed.train.optimisers import Optimisers
from polyfed.train.track import Job
from train import test_cohort as cohorts
from train import test_unequal_rows as unequal
from train.test_unequal_rows import node, phase, seen  # noqa: F401

LITERAL = Path(__file__).parent / "literal_moments.py"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
ADAMS = {name: cohorts.SETTINGS[name] for name in ("adam", "adamw")}


@pytest.mark.parametrize("name", ADAMS)
def test_is_the_adam_of_torch_of_every_row(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(LITERAL), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    off = json.loads(done.stdout)
    assert off.pop("weight") < 1e-6
    assert off.pop("step") == 0
    assert off.pop("exp_avg") < 1e-6
    assert off.pop("exp_avg_sq") < 2e-6  # thirty times 0.999, rounded
    assert not off


class Literal:
    """In the kernel's place: what it does, by torch."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(
        self, grid: tuple[int, int], *tensors: Any, DECOUPLED: bool, FIRST: float, **more: Any
    ) -> None:
        *stacked, rates = tensors
        rows, block, second = grid[1], more["BLOCK"], more["SECOND"]
        self.rows.append(rows)
        assert rates.shape == (rows, 2)
        assert grid[0] == sum(-(-size // block) for size in more["SIZES"])
        for size, *own, count in zip(more["SIZES"], *stacked, strict=True):
            assert all(t.is_contiguous() and t.numel() == rows * size for t in own)
            assert count.shape == (rows,)
            w, g, m, v = (t.view(rows, size) for t in own)
            lr, decay, t = *rates[:, :, None].unbind(1), count[:, None].double()
            g = g if DECOUPLED else g + decay * w
            w *= 1 - lr * decay * DECOUPLED
            m.copy_(FIRST * m + (1 - FIRST) * g)
            v.copy_(second * v + (1 - second) * g * g)
            denominator = (v / (1 - second**t)).sqrt() + more["SMALL"]
            w -= (lr * m / (1 - FIRST**t) / denominator).float()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stacks, too, and on a CPU."""
    monkeypatch.setattr(optimisers, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(optimisers, "_WORTH_IT", 0)
    optimisers._has_kernel.cache_clear()


@pytest.fixture
def literal(monkeypatch: pytest.MonkeyPatch, everywhere: None) -> Literal:
    made = Literal()
    monkeypatch.setattr("polyfed.train.moments._kernel", made)
    return made


@pytest.mark.parametrize(
    "test",
    [
        *(
            partial(unequal.test_it_equals_the_loop_and_computes_no_row_that_is_done, keep=keep)
            for keep in (None, "here")
        ),
        unequal.test_rows_whose_optimisers_have_made_other_numbers_of_steps,
        unequal.test_nodes_of_unequal_size_that_keep_their_optimisers_are_one_stack,
        unequal.test_a_stack_is_lent_to_nodes_whose_optimisers_count_otherwise,
    ],
)
def test_rows_of_unequal_length(
    test: Callable[..., None],
    seen: list[int | str],  # noqa: F811
    literal: Literal,
) -> None:
    test(settings="adamw", seen=seen)
    assert set(literal.rows) >= {row for row in seen if row != "made"}


@pytest.mark.parametrize(
    "test",
    [
        unequal.test_a_stack_that_has_not_stepped_takes_what_its_nodes_kept_elsewhere,
        unequal.test_nodes_with_an_optimiser_and_without_are_not_one_stack,
        unequal.test_early_stopping,
        *(partial(cohorts.test_equals_one_by_one, sizes) for sizes in cohorts.SIZES),
    ],
)
def test_stacks(test: Callable[..., None], literal: Literal) -> None:
    test(settings="adamw")
    assert literal.rows


@pytest.mark.parametrize(
    "test",
    [
        cohorts.test_optimiser_settings_differ_by_row,
        partial(cohorts.test_a_stack_with_kept_optimisers_is_used_again, "adam"),
        *(partial(cohorts.test_equals_one_by_one, sizes, "adam") for sizes in cohorts.SIZES),
        *(
            partial(cohorts.test_a_stack_goes_on_with_another_learning_rate, sizes, "adam", keep)
            for sizes in ([9, 9], [24, 8, 5])
            for keep in (None, "here")
        ),
    ],
)
def test_stacks_by_adam(test: Callable[..., None], literal: Literal) -> None:
    test()
    assert literal.rows


@pytest.mark.parametrize("sizes", [[40, 24, 17, 9, 5], [5, 40, 5, 5, 40]], ids=str)
@pytest.mark.parametrize("settings", ADAMS)
def test_each_row_has_its_own_settings(settings: str, sizes: list[int], literal: Literal) -> None:
    """Also where the last rows are left out, or others left behind."""
    ours, kept = [node(i, n) for i, n in enumerate(sizes)], Kept()
    alone = [replace(n, model=n.model.copy(), memory={}) for n in ours]
    own = [replace(ADAMS[settings], lr=0.03 / (i + 1), weight_decay=0.1 * i) for i in range(5)]
    phases = [phase(optimiser=each, keep="here") for each in own]
    for k in range(2):
        fit_cohort([Job(n, p, ("p", k)) for n, p in zip(ours, phases, strict=True)], kept=kept)
        for n, one, p in zip(ours, alone, phases, strict=True):
            fit(one, p, "p", k)
            states = one.model.state() | one.memory
            for name, t in (n.model.state() | n.memory).items():
                torch.testing.assert_close(t, states[name], rtol=1e-4, atol=1e-5, msg=name)
    assert set(literal.rows) == ({1, 2, 3, 4, 5} if sizes[0] == 40 else {1, 2, 5})


@pytest.mark.parametrize("keep", [None, "here"])
def test_steps_that_were_captured_have_another_learning_rate(
    keep: str | None, literal: Literal
) -> None:
    """A CUDA graph has the rates' place in memory: they change there, for any number of rows."""
    group, kept, before = [node(i, n) for i, n in enumerate([24, 12, 5])], Kept(), None
    for visit, lr in enumerate((0.02, 0.01, 0.005)):
        each = phase(optimiser=replace(ADAMS["adamw"], lr=lr), keep=keep)
        fit_cohort([Job(n, each, ("p", visit)) for n in group], kept=kept)
        (stack,) = kept.values()
        assert stack.optimisers is not None
        groups = [
            *stack.optimisers.groups,
            *(g for of in stack.optimisers._first.values() for g in of),
        ]
        rates = [g.optimiser.rates for g in groups]  # type: ignore[union-attr]
        assert [len(t) for t in rates] == [3, 2, 1]
        assert all(t[:, 0].tolist() == pytest.approx([lr] * len(t)) for t in rates)
        now = [stack.stepper, *(t.data_ptr() for t in rates)]
        assert now == (before or now)
        before = now


def made(settings: Sequence[Optimiser], change: Callable[[nn.Module], object] = id) -> Optimisers:
    ours = [node(i, 8) for i in range(len(settings))]
    for n in ours:
        change(n.model.net)
    jobs = [Job(n, phase(optimiser=s), ("p",)) for n, s in zip(ours, settings, strict=True)]
    with ours[0].model.moving("trunk", "head") as parameters:
        cohort = Cohort(jobs, parameters, graph=False)
        cohort.begin(jobs)
    assert cohort.optimisers is not None
    return cohort.optimisers


def test_what_is_not_for_one_pass(literal: Literal, monkeypatch: pytest.MonkeyPatch) -> None:
    adam, adamw = ADAMS.values()
    slower = replace(adam, lr=0.001)
    assert made([adam, slower]).in_one_pass
    assert made([adamw, adamw]).in_one_pass
    assert not made([adam, adamw]).in_one_pass
    assert not made([Optimiser(name="sgd")] * 2).in_one_pass
    assert not made([adam, adam], lambda net: net.double()).in_one_pass
    monkeypatch.setattr(optimisers, "_WORTH_IT", 3 * 39)
    assert made([adam] * 3).in_one_pass
    assert not made([adam] * 2).in_one_pass
    monkeypatch.setattr(optimisers, "_DEVICES", ("cuda",))
    assert not made([adam] * 3).in_one_pass


def test_where_there_is_no_kernel_there_is_torch(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is said once."""
    none = {(1, 1): Mock(side_effect=RuntimeError("no"))}
    monkeypatch.setattr("polyfed.train.moments._kernel", none)
    with pytest.warns(UserWarning, match=r"stacks have torch's Adam here \(no\)"):
        assert not made([ADAMS["adam"]]).in_one_pass
    assert not made([ADAMS["adam"]]).in_one_pass


def test_what_has_no_gradient_stays_and_has_no_state(literal: Literal) -> None:
    one = made([ADAMS["adamw"]] * 3)
    parts = one.groups[0].stretches[0].parts
    before = [part.clone() for part in parts]
    turned = torch.ones(parts[0].mT.shape).mT  # in another layout
    one.step([turned, None, None, torch.ones_like(parts[3])], 3)
    assert [torch.equal(p, q) for p, q in zip(parts, before, strict=True)] == [
        False, True, True, False,
    ]  # fmt: skip
    kept = one.state_of(1)
    entries = ("step", "exp_avg", "exp_avg_sq")
    assert list(kept) == [f"{name}/{entry}" for name in ("0.weight", "2.bias") for entry in entries]
    assert kept["2.bias/step"].shape == ()
    assert kept["2.bias/step"] == 1
    one.step([None] * 4, 3)
    assert one.state_of(1)["2.bias/step"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", ADAMS)
def test_cuda_graphs_step_every_row_as_the_loop_does(
    settings: str, monkeypatch: pytest.MonkeyPatch, everywhere: None
) -> None:
    """Two phases that keep states, rows of unequal length; one of the loop; one at another rate."""
    monkeypatch.setattr(stepper, "_FEW_ROWS", 2)
    sizes, device, kept = [160, 150, 100, 80, 60, 33, 20, 9], torch.device("cuda"), Kept()
    ours = [node(i, n).working_copy(0, device, {}) for i, n in enumerate(sizes)]
    each = phase(optimiser=ADAMS[settings], keep="here")
    unequal.compare(ours, each, 2, kept)
    (one,) = kept.values()
    assert one.optimisers is not None
    assert one.optimisers.in_one_pass
    assert one.stepper is not None
    assert set(one.stepper.graphs) == {8, 4, 2}
    for n in ours:
        fit(n, each, "alone")
    unequal.compare(ours, each, 1, kept)
    captured = dict(one.stepper.graphs)
    unequal.compare(ours, replace(each, optimiser=replace(ADAMS[settings], lr=1e-4)), 1, kept)
    assert list(kept.values()) == [one]
    assert one.stepper.graphs == captured

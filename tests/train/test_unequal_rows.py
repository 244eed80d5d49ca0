"""Rows of unequal length: a stack leaves out those at its end that are done, and is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Optimiser, Phase, cross_entropy
from polyfed.random import ambient
from polyfed.train import cohort, stepper
from polyfed.train.cohort import Cohort, Kept, fit_cohort
from polyfed.train.loop import fit
from polyfed.train.stepper import Stepper
from polyfed.train.together import Trainer
from polyfed.train.track import Job

SETTINGS = {
    "sgd": Optimiser(name="sgd", lr=0.1),
    "momentum": Optimiser(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.02),
    "adamw": Optimiser(name="adamw", lr=0.02, weight_decay=0.1),
}
LENT = [12, 12, 12], [16, 12, 8], [12, 8, 5]
SIZES = [40, 33, 24, 24, 17, 9, 5]  # batches of four, the last of them smaller


def node(i: int, size: int) -> Node:
    draw = torch.Generator().manual_seed(i)
    with ambient(i):
        net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(size, 5, generator=draw)
    held_out = torch.randn(8, 5, generator=draw)
    data = {"train": (x, x[:, :3].argmax(1)), "val_es": (held_out, held_out[:, 3:].argmax(1))}
    model = Model.split(net, trunk="0", head="2")
    return Node(f"N{i}", Data(may_miss_classes=True, **data), model)


def phase(**settings: Any) -> Phase:
    plain: dict[str, Any] = {"label": "p", "objective": cross_entropy, "batch": 4, "epochs": 2}
    return Phase(**(plain | settings))


def compare(
    ours: Sequence[Node], each: Phase, times: int, kept: Kept, *, graph: bool = True
) -> None:
    """Phases of these nodes, stacked, against the loop."""
    alone = [replace(n, model=n.model.copy(), memory=dict(n.memory)) for n in ours]
    for k in range(times):
        fitted = fit_cohort([Job(n, each, ("p", k)) for n in ours], kept=kept, graph=graph)
        for n, own, done in zip(ours, alone, fitted, strict=True):
            wanted = fit(own, each, "p", k)
            assert (done.epochs, done.steps) == (wanted.epochs, wanted.steps)
            assert done.loss == pytest.approx(wanted.loss, rel=1e-3)
            states = own.model.state() | own.memory
            for name, t in (n.model.state() | n.memory).items():
                torch.testing.assert_close(t, states[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """How many rows took each step, and when a stack was made."""
    noted: list[int | str] = []
    begin, step = Cohort.__init__, Stepper._step

    def made(self: Cohort, *args: Any, **named: Any) -> None:
        noted.append("made")
        begin(self, *args, **named)

    def taken(self: Stepper, width: int) -> None:
        noted.append(self.count)
        step(self, width)

    monkeypatch.setattr(Cohort, "__init__", made)
    monkeypatch.setattr(Stepper, "_step", taken)
    return noted


@pytest.mark.parametrize("keep", [None, "here"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_it_equals_the_loop_and_computes_no_row_that_is_done(
    settings: str, keep: str | None, seen: list[int | str]
) -> None:
    steps = [2 * -(-n // 4) for n in SIZES]
    once = [sum(own > k for own in steps) for k in range(max(steps))]
    ours, kept = [node(i, n) for i, n in enumerate(SIZES)], Kept()
    compare(ours, phase(optimiser=SETTINGS[settings], keep=keep), 3, kept)
    assert seen == ["made", *once * 3]
    assert len(kept) == 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_whose_optimisers_have_made_other_numbers_of_steps(
    settings: str, seen: list[int | str]
) -> None:
    """As nodes that did not take part in every round have them."""
    each = phase(optimiser=SETTINGS[settings], keep="here")
    ours, kept = [node(i, 12) for i in range(4)], Kept()
    for n, times in zip(ours, (1, 2, 2, 3), strict=True):
        for k in range(times):
            fit(n, each, "before", k)
    compare(ours, each, 3, kept)
    assert seen == ["made", *[4] * 18]


@pytest.mark.parametrize("settings", SETTINGS)
def test_nodes_of_unequal_size_that_keep_their_optimisers_are_one_stack(
    settings: str, seen: list[int | str]
) -> None:
    each = phase(optimiser=SETTINGS[settings], keep="here")
    ours, trainer = [node(i, n) for i, n in enumerate(SIZES)], Trainer("always")
    for k in range(3):
        trainer.train([Job(n, each, ("p", k)) for n in ours])
    steps = [2 * -(-n // 4) for n in SIZES]
    once = [sum(own > k for own in steps) for k in range(max(steps))]
    assert seen == ["made", *once * 3]


def test_rows_with_other_optimisers_follow_each_other(seen: list[int | str]) -> None:
    rates = [0.1, 0.1, 0.1, 0.1, 0.02, 0.02, 0.02]
    ours = [node(i, n) for i, n in enumerate(SIZES)]
    alone = [replace(n, model=n.model.copy()) for n in ours]
    each = [phase(optimiser=Optimiser(name="sgd", lr=lr, momentum=0.9)) for lr in rates]
    kept = Kept()
    for k in range(2):
        fit_cohort([Job(n, p, ("p", k)) for n, p in zip(ours, each, strict=True)], kept=kept)
        for n, own, p in zip(ours, alone, each, strict=True):
            fit(own, p, "p", k)
            for name, t in n.model.state().items():
                torch.testing.assert_close(t, own.model.state()[name], rtol=1e-3, atol=2e-5)
    assert set(seen) == {"made", *(sum(-(-n // 4) > k for n in SIZES) for k in range(10))}


def test_rows_that_end_before_others_that_precede_them_are_left_behind(
    seen: list[int | str],
) -> None:
    """As early stopping may have it: then a smaller stack is made, and not kept."""
    ours = [node(i, n) for i, n in enumerate([5, 5, 5, 40])]
    kept = Kept()
    compare(ours, phase(), 1, kept)
    assert seen == ["made", *[4] * 4, *[1] * 16]
    assert not kept


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_stack_that_has_not_stepped_takes_what_its_nodes_kept_elsewhere(settings: str) -> None:
    each, kept = phase(optimiser=SETTINGS[settings], keep="here"), Kept()
    ours = [node(i, 12) for i in range(3)]
    fit_cohort([Job(n, replace(each, epochs=0), ("none",)) for n in ours], kept=kept)
    for n in ours:
        fit(n, each, "elsewhere")
    compare(ours, each, 2, kept)
    assert len(kept) == 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_nodes_with_an_optimiser_and_without_are_not_one_stack(settings: str) -> None:
    each, trainer = phase(optimiser=SETTINGS[settings], keep="here"), Trainer("always")
    ours = [node(i, 12) for i in range(4)]
    alone = [replace(n, model=n.model.copy(), memory={}) for n in ours]
    for k, some in enumerate((slice(2, 4), slice(0, 4), slice(1, 4))):
        trainer.train([Job(n, each, ("p", k)) for n in ours[some]])
        for own in alone[some]:
            fit(own, each, "p", k)
    for n, own in zip(ours, alone, strict=True):
        states = own.model.state() | own.memory
        for name, t in (n.model.state() | n.memory).items():
            torch.testing.assert_close(t, states[name], rtol=1e-3, atol=2e-5, msg=name)


def test_one_sample_at_a_time(seen: list[int | str]) -> None:
    """Whose steps are of all rows: see `deferred`."""
    draw = torch.Generator().manual_seed(1)
    ours = []
    for i, size in enumerate([9, 5, 2]):
        with ambient(i):
            net = nn.Sequential(nn.Linear(260, 4), nn.Sigmoid(), nn.Linear(4, 3))
        x = torch.randn(size, 260, generator=draw)
        data = Data(may_miss_classes=True, train=(x, x[:, :3].argmax(1)))
        ours.append(Node(f"N{i}", data, Model.split(net, trunk="0", head="2")))
    compare(ours, phase(batch=1, optimiser=SETTINGS["sgd"]), 2, Kept())
    assert seen == ["made", "made"], "its steps are its own"


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_stack_is_lent_to_nodes_whose_optimisers_count_otherwise(
    settings: str, seen: list[int | str]
) -> None:
    each, kept = phase(optimiser=SETTINGS[settings], keep="here"), Kept()
    groups = [[node(10 * g + i, n) for i, n in enumerate(sizes)] for g, sizes in enumerate(LENT)]
    alone = [[replace(n, model=n.model.copy(), memory={}) for n in group] for group in groups]
    for k in range(3):
        for ours, theirs in zip(groups, alone, strict=True):
            fit_cohort([Job(n, each, ("p", k)) for n in ours], kept=kept, kind="net")
            for n, own in zip(ours, theirs, strict=True):
                fit(own, each, "p", k)
                states = own.model.state() | own.memory
                for name, t in (n.model.state() | n.memory).items():
                    torch.testing.assert_close(t, states[name], rtol=1e-3, atol=2e-5, msg=name)
    assert seen.count("made") == 1


def test_a_smaller_stack_has_its_own_first_rows() -> None:
    ours = [node(i, 5) for i in range(4)]
    jobs = [Job(n, phase(), ("p",)) for n in ours]
    with ours[0].model.moving("trunk", "head") as parameters:
        one = Cohort(jobs, parameters, graph=False)
        one.begin(jobs)
        one.first(1)
        for track in one.rows[:2]:
            track.is_done = True
        one._shrink()
        for name, t in one.first(1)[0].items():
            assert t.data_ptr() == one.moving[name].data_ptr()
            assert torch.equal(t[0], ours[2].model.net.state_dict()[name])


@pytest.mark.parametrize("settings", SETTINGS)
def test_early_stopping(settings: str) -> None:
    ours, kept = [node(i, n) for i, n in enumerate(SIZES)], Kept()
    stop = EarlyStop(patience=1)
    compare(ours, phase(epochs=6, stop=stop, optimiser=SETTINGS[settings]), 2, kept)


def test_with_graphs_half_of_the_rows_are_left_out_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stepper, "_FEW_ROWS", 2)
    ours = [node(i, 9) for i in range(9)]
    made: list[Stepper] = []
    begin = Stepper.__init__
    monkeypatch.setattr(Stepper, "__init__", lambda s, c: (made.append(s), begin(s, c))[1])
    kept = Kept()  # a stepper lives as long as its stack
    fit_cohort([Job(n, phase(), ("p",)) for n in ours], kept=kept)
    (one,) = made
    one.graph_from = 10**9
    one.count = 9
    counts = []
    for needed in (9, 6, 5, 4, 3, 2, 1):
        one.leave_out(needed)
        counts.append(one.count)
    assert counts == [9, 9, 5, 5, 3, 2, 2]
    one.begin(one.tracks)
    assert one.count == 9, "all of them go on"
    one.taken.clear()
    one.leave_out(1)
    assert one.count == 9, "no step was taken: there is no state"


@pytest.mark.parametrize(("steps", "leaves"), [(100, False), (5000, True)])
def test_with_graphs_a_smaller_stack_must_be_worth_it(steps: int, leaves: bool) -> None:
    ours = [node(i, 5) for i in range(4)]
    jobs = [Job(n, phase(epochs=None, steps=steps), ("p",)) for n in ours]
    with ours[0].model.moving("trunk", "head") as parameters:
        one = Cohort(jobs, parameters, graph=False)
        one.begin(jobs)
        assert one._is_sparse(one.rows[:2], 4)
        assert not one._is_sparse(one.rows[:3], 4)
        one.graph = True
        assert one._is_sparse(one.rows[:2], 4) is leaves
        assert (2 * steps >= cohort._WORTH_A_CAPTURE) is leaves


def test_the_trainer_puts_the_longest_first(seen: list[int | str]) -> None:
    ours = [node(i, n) for i, n in enumerate(reversed(SIZES))]
    trainer = Trainer("always")
    for k in range(2):
        trainer.train([Job(n, phase(), ("p", k)) for n in ours])
    steps = [2 * -(-n // 4) for n in SIZES]
    once = [sum(own > k for own in steps) for k in range(max(steps))]
    assert seen == ["made", *once * 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", [None, "here"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_cuda_graphs_of_fewer_rows(
    settings: str, keep: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "_FEW_ROWS", 2)
    device, kept = torch.device("cuda"), Kept()
    sizes = [160, 150, 100, 80, 60, 33, 20, 9]
    ours = [node(i, n).working_copy(0, device, {}) for i, n in enumerate(sizes)]
    compare(ours, phase(optimiser=SETTINGS[settings], keep=keep), 3, kept)
    (one,) = kept.values()
    assert one.stepper is not None
    assert set(one.stepper.graphs) == {8, 4, 2}

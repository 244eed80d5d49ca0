"""Stacked = one by one, exactly to float rounding; with dropout, the same distribution."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import (
    EarlyStop,
    MatchOutput,
    Optimiser,
    PerSample,
    Phase,
    SquaredError,
    cross_entropy,
)
from polyfed.random import ambient
from polyfed.train import cohort, deferred, stepper, together
from polyfed.train.cohort import fit_cohort, score_cohort
from polyfed.train.course import Course
from polyfed.train.evaluate import accuracy
from polyfed.train.loop import Fitted, fit
from polyfed.train.stepper import CannotStackError
from polyfed.train.together import Exam, StackWarning, Trainer, measure, remembered
from polyfed.train.track import Job, Pool, Track

SIZES = ([24] * 4, [24, 17, 9, 30], [5, 40], [1, 8, 8])
SETTINGS = {
    "sgd": Optimiser(name="sgd", lr=0.1),
    "momentum": Optimiser(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.02),
    "adam": Optimiser(name="adam", lr=0.02, weight_decay=0.01),
    "adamw": Optimiser(name="adamw", lr=0.02, weight_decay=0.1),
}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(dropout))
        self.top = nn.Linear(width, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.top(self.body(x)) * self.scale
        return out


def node(i: int, size: int, net: nn.Module | None = None, *, seed: int = 0) -> Node:
    draw = torch.Generator().manual_seed(100 * seed + i)
    if net is None:
        with ambient(i):
            net = Net()
    splits = {"train": size, "val_es": 7 + i, "test": 11 + 3 * i}
    data = {}
    for name, n in splits.items():
        x = torch.randn(n, 5, generator=draw)
        data[name] = (x, x[:, :3].argmax(1))
    model = Model.split(net, body="body", top=...) if isinstance(net, Net) else None
    return Node(
        f"N{i}",
        Data(may_miss_classes=True, **data),
        model or Model.split(net, all=...),
        seed=seed,
        memory={"goal": torch.randn(size, 6, generator=draw)},
    )


def nodes(sizes: list[int], make: Callable[[int], nn.Module] | None = None) -> list[Node]:
    return [node(i, n, None if make is None else make(i)) for i, n in enumerate(sizes)]


def phase(**settings: Any) -> Phase:
    plain: dict[str, Any] = {"label": "p", "objective": cross_entropy, "batch": 4}
    if not {"epochs", "steps"} & settings.keys():
        plain["epochs"] = 3
    return Phase(**(plain | settings))


def both(
    sizes: list[int], *phases: Phase, make: Callable[[int], nn.Module] | None = None
) -> tuple[list[Node], list[Node]]:
    """Nodes after the same phases, one by one and stacked; what was reported is the same."""
    alone, stacked = nodes(sizes, make), nodes(sizes, make)
    kept: cohort.Kept = {}
    with torch.random.fork_rng(devices=[]):
        for k, each in enumerate(phases):
            one = [fit(n, each, "path", k) for n in alone]
            two = fit_cohort([Job(n, each, ("path", k)) for n in stacked], kept=kept)
            _same_reports(one, two)
    return alone, stacked


def _same_reports(one: list[Fitted], two: list[Fitted]) -> None:
    for a, b in zip(one, two, strict=True):
        assert (a.label, a.epochs, a.steps) == (b.label, b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-6, nan_ok=True)


def check(alone: list[Node], stacked: list[Node], tolerance: float = 2e-5) -> None:
    moved = False
    for i, (a, b) in enumerate(zip(alone, stacked, strict=True)):
        start = node(i, len(a.data["train"])).model.state() if isinstance(a.model.net, Net) else {}
        for name, t in a.model.state().items():
            torch.testing.assert_close(b.model.state()[name], t, rtol=1e-4, atol=tolerance)
            moved |= name not in start or not torch.equal(t, start[name])
        assert a.memory.keys() == b.memory.keys()
        for name, t in a.memory.items():
            torch.testing.assert_close(b.memory[name], t, rtol=1e-4, atol=tolerance)
    assert moved


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_one_by_one(sizes: list[int], settings: str) -> None:
    check(*both(sizes, *[phase(optimiser=SETTINGS[settings])] * 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"parts": ("top",)},
        {"parts": ("body",)},
        {"batch": 1, "steps": 13, "objective": SquaredError()},
        {"batch": 0.3},
        {"batch": 1000},
        {"steps": 7},
        {"epochs": 0},
        {"steps": 5, "walk": True},
        {"keep": "here"},
        {"objective": MatchOutput("body", 0.7), "target": "goal", "parts": ("body",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_kind_of_phase(sizes: list[int], settings: dict[str, Any]) -> None:
    mild = Optimiser(name="sgd", lr=0.01, momentum=0.5, weight_decay=0.02)
    each = phase(optimiser=mild, **settings)
    alone, stacked = both(sizes, each, each, each)
    if settings != {"epochs": 0}:
        check(alone, stacked)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_is_each_nodes_own(sizes: list[int], patience: int) -> None:
    each = phase(
        epochs=12, stop=EarlyStop(patience=patience), optimiser=Optimiser(name="adam", lr=0.2)
    )
    ends = {f.epochs for f in fit_cohort([Job(n, each, ("path", 0)) for n in nodes(sizes)])}
    if max(sizes) > 20:
        assert len(ends) > 1, "the case is too easy: all stop together"
    check(*both(sizes, each, each), tolerance=1e-3)


def test_a_node_without_the_split_trains_to_the_end() -> None:
    each = phase(epochs=4, stop=EarlyStop(split="nowhere"))
    check(*both([9, 17], each))


def test_finished_nodes_do_not_move() -> None:
    """Moments would carry a node on: rows that are done must not be written back."""
    each = phase(epochs=2, batch=2, optimiser=SETTINGS["momentum"])
    check(*both([4, 40], each), tolerance=1e-5)


def test_optimiser_settings_differ_by_row() -> None:
    sizes, kinds = [12, 12, 12, 12], [0.1, 0.01, 0.1, 0.03]
    alone, stacked = nodes(sizes), nodes(sizes)
    jobs = [phase(optimiser=Optimiser(name="adam", lr=lr)) for lr in kinds]
    for n, each in zip(alone, jobs, strict=True):
        fit(n, each, "path")
    Trainer("always").train([Job(n, p, ("path",)) for n, p in zip(stacked, jobs, strict=True)])
    check(alone, stacked)


def test_data_that_rows_share_is_kept_once() -> None:
    one = nodes([12])[0]
    rows = [Node(f"R{i}", one.data, one.model.copy()) for i in range(3)]
    fit_cohort([Job(r, phase(), ("path", i)) for i, r in enumerate(rows)])
    alone = [Node(f"R{i}", one.data, one.model.copy()) for i in range(3)]
    for i, a in enumerate(alone):
        fit(a, phase(), "path", i)
    for a, b in zip(alone, rows, strict=True):
        for name, t in a.model.state().items():
            torch.testing.assert_close(b.model.state()[name], t, rtol=1e-4, atol=1e-5)


def test_convolutions_and_float64() -> None:
    def make(i: int) -> nn.Module:
        with ambient(i):
            layers = (nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, (1, 3)), nn.ReLU(), nn.Flatten())
            return nn.Sequential(*layers, nn.Linear(6, 3)).double()

    each = phase(optimiser=SETTINGS["adam"])
    alone, stacked = nodes([9, 12], make), nodes([9, 12], make)
    for group in (alone, stacked):
        for n in group:
            n.data = Data(train=(n.data["train"].x.double(), n.data["train"].y))
    for n in alone:
        fit(n, each, "path")
    fit_cohort([Job(n, each, ("path",)) for n in stacked])
    for a, b in zip(alone, stacked, strict=True):
        for name, t in a.model.state().items():
            torch.testing.assert_close(b.model.state()[name], t, rtol=1e-9, atol=1e-11)


def test_dropout_has_the_same_distribution() -> None:
    """Means over many nodes of what one phase does; and no two rows share their noise."""

    def make(_: int) -> nn.Module:
        with ambient(0):
            return Net(dropout=0.5, width=40)

    each = phase(epochs=1, batch=8, optimiser=Optimiser(name="sgd", lr=0.5))
    ends = []
    for way in ("alone", "stacked"):
        group = [node(0, 8, make(0), seed=0) for _ in range(120)]
        for i, n in enumerate(group):
            n.name = f"N{i}"
        jobs = [Job(n, each, ("path",)) for n in group]
        if way == "alone":
            for n in group:
                fit(n, each, "path")
        else:
            fit_cohort(jobs)
        ends.append(torch.stack([n.model.state()["top.weight"] for n in group]))
    assert len({tuple(t.flatten().tolist()) for t in ends[1]}) > 100
    spread = ends[0].std(0) / 120**0.5
    assert float(((ends[0].mean(0) - ends[1].mean(0)) / (2**0.5 * spread + 1e-9)).abs().max()) < 4.5
    ratio = ends[1].std(0).mean() / ends[0].std(0).mean()
    assert 0.9 < float(ratio) < 1.1


def test_same_seed_same_bits() -> None:
    each = phase(optimiser=SETTINGS["adam"])
    ends = []
    for _ in range(2):
        torch.rand(3)
        with ambient(5):
            group = nodes([9, 12], lambda i: Net(dropout=0.3))
        before = torch.random.get_rng_state()
        fit_cohort([Job(n, each, ("path",)) for n in group])
        assert torch.equal(before, torch.random.get_rng_state())
        ends.append([t for n in group for t in n.model.state().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


PIECES = [
    phase(optimiser=SETTINGS["adam"]),
    phase(steps=9, walk=True),
    phase(epochs=9, stop=EarlyStop(patience=1), optimiser=Optimiser(name="adam", lr=0.2)),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("each", PIECES, ids=["epochs", "walk", "stop"])
def test_the_table_of_batches_may_be_small(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], each: Phase
) -> None:
    wholes, pieces = nodes(sizes), nodes(sizes)
    want = [fit_cohort([Job(n, each, ("path", k)) for n in wholes]) for k in range(2)]
    monkeypatch.setattr(stepper, "_TABLE", 1)
    assert [fit_cohort([Job(n, each, ("path", k)) for n in pieces]) for k in range(2)] == want
    for a, b in zip(wholes, pieces, strict=True):
        assert all(torch.equal(t, b.model.state()[k]) for k, t in a.model.state().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("each", PIECES, ids=["epochs", "walk", "stop"])
def test_cuda_batches_are_prepared_ahead(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], each: Phase
) -> None:
    ends = []
    for ahead in (1 << 18, 1):
        monkeypatch.setattr(stepper, "_AHEAD", ahead)
        group = [n.working_copy(0, torch.device("cuda"), {}) for n in nodes(sizes)]
        kept: cohort.Kept = {}
        for k in range(3):
            fit_cohort([Job(n, each, ("path", k)) for n in group], kept=kept)
        ends.append([t for n in group for t in n.model.state().values()])
    alone = [n.working_copy(0, torch.device("cuda"), {}) for n in nodes(sizes)]
    for k in range(3):
        for n in alone:
            fit(n, each, "path", k)
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)
    if each.stop is None:  # else a tie may end another epoch
        for a, t in zip((t for n in alone for t in n.model.state().values()), ends[0], strict=True):
            torch.testing.assert_close(a, t, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
def test_a_track_writes_the_batches_of_its_course(size: int, drop_last: bool, walk: bool) -> None:
    each = phase(steps=11, batch=size, drop_last=drop_last, walk=walk)
    job = Job(node(0, 10), each, ("path",))
    job.node.memory["walk/train"] = torch.tensor([2, 1])
    batches = []
    for order, sizes in Course(job.node, each, 10, ("path",), pairs=False):
        batches += [b.tolist() for b in order[: sum(sizes)].split(sizes)]
    job.node.memory["walk/train"] = torch.tensor([2, 1])
    track, width, found = Track(job), max(map(len, batches)) + 1, []
    for count in (6, 2, 1, 2):
        places, inside = np.full((count, width), -1), np.zeros((count, width), np.float32)
        widths = track.widths(count)
        track.take(count, places, inside)
        found += [row[row >= 0].tolist() for row in places]
        assert widths == [len(b) for b in found[-count:]]
        for row, one in zip(places, inside, strict=True):
            assert (one == (row >= 0)).all()
            assert (np.diff(one) <= 0).all(), "from the left"
    assert found == batches


def test_accuracy_of_many() -> None:
    group = nodes([5, 6, 7])
    got = score_cohort(group, "test")
    assert got == [accuracy(n.model, n.data["test"]) for n in group]
    assert len(set(got)) > 1


# ---- what is done together -----------------------------------------------------------------------


def groups(trainer: Trainer, jobs: list[Job]) -> list[list[int]]:
    return [sorted(g) for g in trainer._job_groups(jobs)]


def test_only_what_is_alike_is_stacked() -> None:
    class Scaled(Net):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

    def jobs(a: Node, b: Node, p: Phase | None = None, q: Phase | None = None) -> list[Job]:
        return [Job(a, p or phase(), ("x",)), Job(b, q or p or phase(), ("x",))]

    trainer = Trainer("always")
    one, two = nodes([9, 12])
    assert groups(trainer, jobs(one, two)) == [[0, 1]]
    assert groups(trainer, jobs(one, two, phase(batch=3), phase(batch=4))) == [[0, 1]]
    assert groups(Trainer("never"), jobs(one, two)) == [[0], [1]]
    apart = [
        jobs(one, two, phase(), phase(parts=("top",))),
        jobs(one, two, phase(), phase(epochs=5)),
        jobs(one, two, phase(), phase(objective=SquaredError())),
        jobs(one, two, phase(), phase(optimiser=Optimiser(name="sgd"))),
        jobs(one, two, phase(), phase(batch=1)),
        jobs(one, two, phase(batch=4), phase(batch=5)),
        jobs(one, node(1, 12, Net(width=7))),
        jobs(one, node(1, 12, Net(dropout=0.5))),
        jobs(node(0, 9, Scaled(1.0)), node(1, 9, Scaled(2.0))),
        jobs(one, node(1, 12, nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))),
    ]
    for pair in apart:
        assert groups(Trainer("always"), pair) == [[0], [1]]
    assert groups(trainer, jobs(node(0, 9, Scaled(1.0)), node(1, 9, Scaled(1.0)))) == [[0, 1]]


def test_kept_optimisers_must_have_made_as_many_steps() -> None:
    one, two = nodes([8, 8])
    each = phase(keep="here", optimiser=SETTINGS["adam"])
    fit(one, each, "before")
    assert groups(Trainer("always"), [Job(n, each, ("x",)) for n in (one, two)]) == [[0], [1]]
    fit(two, each, "before")
    assert groups(Trainer("always"), [Job(n, each, ("x",)) for n in (one, two)]) == [[0, 1]]


@pytest.mark.parametrize("settings", ["adam", "momentum"])
def test_a_stack_with_kept_optimisers_is_used_again(settings: str) -> None:
    each, kept = phase(keep="here", optimiser=SETTINGS[settings]), cohort.Kept()
    alone, stacked, seen = nodes([9, 9]), nodes([9, 9]), set()
    for i in range(4):
        if i == 2:  # as if they had never been trained
            for n in (*alone, *stacked):
                n.memory.clear()
        losses = [fit(n, each, "path", i).loss for n in alone]
        fitted = fit_cohort([Job(n, each, ("path", i)) for n in stacked], kept=kept)
        assert [f.loss for f in fitted] == pytest.approx(losses, rel=1e-5)
        for one, other in zip(alone, stacked, strict=True):
            for p, q in zip(one.model.net.parameters(), other.model.net.parameters(), strict=True):
                assert torch.allclose(p, q, atol=1e-6)
            assert one.memory.keys() == other.memory.keys()
        seen |= {id(c) for c in kept.values()}
    assert len(seen) == 1


@dataclass(frozen=True)
class Branching(PerSample):
    """Control flow on data: no stack can follow it."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        out = model(x)
        return out.square().sum(1) if bool(out.sum() > 0) else out.abs().sum(1)


@dataclass(frozen=True)
class MeanOnly:
    """A person's own objective, without `losses`."""

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return model(x).square().mean()


@dataclass(frozen=True)
class Decay:
    """A rule that is not gradient descent."""

    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        for p in model.net.parameters():
            p.mul_(0.9)
        return x.mean()


def test_what_cannot_be_stacked_is_done_one_by_one_and_said() -> None:
    norm = [nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)]
    cases: list[tuple[list[Node], Phase, str]] = [
        (nodes([9, 12]), phase(objective=Branching()), "cannot be stacked"),
        (nodes([9, 12], lambda i: norm[i]), phase(), "BatchNorm keeps statistics"),
        (nodes([9, 12]), phase(objective=Decay()), "a rule of its own"),
        (nodes([9, 9]), phase(objective=MeanOnly(), stop=EarlyStop()), "no `losses`"),
    ]
    for group, each, why in cases:
        alone = [replace(n, model=n.model.copy(), memory=dict(n.memory)) for n in group]
        with torch.random.fork_rng(devices=[]):
            for n in alone:
                fit(n, each, "path")
        with pytest.warns(StackWarning, match=why):
            Trainer("always").train([Job(n, each, ("path",)) for n in group])
        for a, b in zip(alone, group, strict=True):
            assert all(torch.equal(t, b.model.state()[k]) for k, t in a.model.state().items())


def test_an_objective_without_losses_needs_equal_sizes() -> None:
    each = phase(objective=MeanOnly())
    for sizes, expected in (([9, 12], [[0], [1]]), ([9, 9], [[0, 1]])):
        jobs = [Job(n, each, ("x",)) for n in nodes(sizes)]
        assert groups(Trainer("always"), jobs) == expected
    check(*both([9, 9], each))


def test_a_real_error_is_raised_as_it_is() -> None:
    @dataclass(frozen=True)
    class Broken(PerSample):
        def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            raise ValueError("a mistake of its author")

    jobs = [Job(n, phase(objective=Broken()), ("x",)) for n in nodes([9, 9])]
    with pytest.raises(CannotStackError, match="a mistake"):
        fit_cohort(jobs)
    with (
        pytest.raises(ValueError, match="a mistake of its author"),
        pytest.warns(StackWarning),
    ):
        Trainer("always").train(jobs)


def test_large_groups_are_cut_to_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_CPU_BYTES", 3000)
    jobs = [Job(n, phase(), ("x",)) for n in nodes([9] * 7)]
    pieces = groups(Trainer("always"), jobs)
    assert sorted(i for piece in pieces for i in piece) == list(range(7))
    assert 1 < max(map(len, pieces)) < 7


def test_data_that_rows_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_CPU_BYTES", 5 * 4 * 57 * 4 + 9 * 5 * 4)
    own, one = nodes([9] * 5), node(0, 9)
    alike = [replace(one, model=n.model) for n in own]
    weights = sum(p.numel() for p in one.model.net.parameters())
    assert weights == 57
    assert Trainer()._most_rows([Job(n, phase(), ("x",)) for n in alike]) == 5
    assert Trainer()._most_rows([Job(n, phase(), ("x",)) for n in own]) == 4


def test_a_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class There:
        x = SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: 0, element_size=lambda: 4)

    total = 4 * 4 * 57 * 4 * 100
    memory = {"own": total // 20, "free": total}
    monkeypatch.setattr(together, "_split", lambda _: There)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory["free"], total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: memory["own"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory["own"] + total // 40)
    jobs = [Job(n, phase(), ("x",)) for n in nodes([9, 9])]
    assert [Trainer(share=s)._most_rows(jobs) for s in (1.0, 0.25)] == [100, 25]
    there = torch.device("cuda")
    kept: Any = dict.fromkeys(range(6))
    assert [cohort._is_full(kept, there, s) for s in (1.0, 0.25)] == [False, True]
    assert not cohort._is_full(kept, there, 0.25, 1)
    for free, full in ((total // 9, False), (total // 11, True)):  # others have the rest
        memory["free"] = free
        assert cohort._is_full(kept, there, 1.0) == full
    memory["free"] = total // 10 - total // 20 - total // 40  # and this process may use what it has
    assert [Trainer(share=s)._most_rows(jobs) for s in (1.0, 0.25, 0.05)] == [10, 10, 5]
    del kept[0]
    assert not cohort._is_full(kept, there, 0.25)


@pytest.mark.parametrize("keep", [None, "here"])
@pytest.mark.parametrize("settings", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sizes", [[9, 9], [24, 8, 5]], ids=str)
def test_a_stack_goes_on_with_another_learning_rate(
    sizes: list[int], settings: str, keep: str | None
) -> None:
    """As LI's do, whose rates fall every ten visits."""
    its, kept, seen = SETTINGS[settings], cohort.Kept(), set()
    alone, stacked = nodes(sizes), nodes(sizes)
    for visit, factor in enumerate((1, 1, 0.25, 0.01, 1)):
        each = phase(keep=keep, optimiser=replace(its, lr=its.lr * factor))
        losses = [fit(n, each, "path", visit).loss for n in alone]
        fitted = fit_cohort([Job(n, each, ("path", visit)) for n in stacked], kept=kept)
        assert [f.loss for f in fitted] == pytest.approx(losses, rel=1e-4)
        check(alone, stacked)
        seen |= {id(c) for c in kept.values()}
    assert len(seen) == 1


def test_so_does_one_whose_first_updates_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps have the rates they were made with: they are made anew."""
    monkeypatch.setattr(deferred, "_WIDE", 5)
    alone, stacked = (
        nodes([8, 8], lambda _: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))) for _ in range(2)
    )
    for one, other in zip(alone, stacked, strict=True):
        other.model.load(one.model.state())
    kept, seen = cohort.Kept(), set()
    for visit, lr in enumerate((0.1, 0.01, 0.05)):
        its = Optimiser(name="sgd", lr=lr)
        each = phase(epochs=1, objective=SquaredError(), batch=1, optimiser=its)
        losses = [fit(n, each, "path", visit).loss for n in alone]
        fitted = fit_cohort([Job(n, each, ("path", visit)) for n in stacked], kept=kept)
        assert [f.loss for f in fitted] == pytest.approx(losses, rel=1e-4)
        (stack,) = kept.values()
        assert type(stack.stepper).__name__ == "DeferredStepper"
        seen.add(id(stack))
    check(alone, stacked)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["Stepper", "DeferredStepper"])
def test_a_stack_that_is_let_go_is_gone_at_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Not only when Python looks for cycles: on a GPU a stack holds gigabytes."""
    monkeypatch.setattr(deferred, "_WIDE", 5)
    settings = {"objective": SquaredError(), "batch": 1, "optimiser": SETTINGS["sgd"]}
    each = phase(epochs=1, **(settings if kind == "DeferredStepper" else {}))
    kept, seen = cohort.Kept(), []

    def train() -> None:
        group = nodes([8, 8], lambda _: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
        fit_cohort([Job(n, each, ("v",)) for n in group], kept=kept)

    train()  # what is imported for the first time may keep a traceback, and with it the stack
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            train()
            (stack,) = kept.values()
            assert type(stack.stepper).__name__ == kind
            seen.append(weakref.ref(stack))
            del stack
        assert [stack() is not None for stack in seen] == [False, False, True]
    finally:
        gc.enable()


def test_auto_measures_once_and_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    answer = [True]

    def measured(jobs: list[Job]) -> bool:
        asked.append(len(jobs))
        return answer[0]

    monkeypatch.setattr(together, "measure", measured)
    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    jobs = [Job(n, phase(steps=60), ("x",)) for n in nodes([9, 12])]
    assert groups(Trainer("auto"), jobs) == [[0, 1]]
    answer[0] = False
    assert groups(Trainer("auto"), jobs) == [[0, 1]]
    assert asked == [2]
    other = [Job(n, phase(steps=61), ("x",)) for n in nodes([9, 12])]
    assert groups(Trainer("auto"), other) == [[0], [1]]
    few = [Job(n, phase(steps=10), ("x",)) for n in nodes([9, 12])]
    assert groups(Trainer("auto"), few) == [[0, 1]]
    assert len(asked) == 2


def test_on_a_cpu_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack sums in another order: measured, the same seed could come to other numbers."""

    def never(*args: Any) -> bool:
        raise AssertionError("nothing is measured on a CPU, and no earlier answer is taken")

    monkeypatch.setattr(together, "measure", never)
    monkeypatch.setattr(together, "remembered", never)
    for steps in (10, 60):
        jobs = [Job(n, phase(steps=steps), ("x",)) for n in nodes([9, 12])]
        assert groups(Trainer("auto"), jobs) == [[0], [1]]


def test_a_measurement_changes_nothing() -> None:
    group = nodes([9, 12])
    before = [n.model.state() for n in group]
    assert measure([Job(n, phase(), ("x",)) for n in group]) in (True, False)
    for n, state in zip(group, before, strict=True):
        assert all(torch.equal(t, n.model.state()[k]) for k, t in state.items())


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remembered("question", lambda: True) is True


def test_exams_follow_the_training() -> None:
    trainer, group = Trainer("always"), nodes([9, 12, 8])
    exams = [Exam(n) for n in group]
    assert [len(g) for g in trainer._exam_groups(exams)] == [1, 1, 1]
    trainer.train([Job(n, phase(), ("x",)) for n in group])
    group[2].score = lambda model, split: 0.25
    assert sorted(len(g) for g in trainer._exam_groups(exams)) == [1, 2]
    assert [d.result for d in trainer.examine(exams)] == [
        accuracy(group[0].model, group[0].data["test"]),
        accuracy(group[1].model, group[1].data["test"]),
        0.25,
    ]


@pytest.fixture(autouse=True)
def _no_other_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("always", StackWarning)
        yield


# ---- a stack of one ------------------------------------------------------------------------------


def one_by_graph(
    monkeypatch: pytest.MonkeyPatch, stack: together.Stack, phase: Phase, **fields: Any
) -> tuple[list[int], Node]:
    """Sizes of the stacks that a trainer makes of one job, as if it were on a GPU."""
    stacks: list[int] = []

    def counted(jobs: Any, **more: Any) -> list[Fitted]:
        stacks.append(len(jobs))
        return fit_cohort(jobs, **more)

    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    monkeypatch.setattr(together, "fit_cohort", counted)
    monkeypatch.setattr(together, "measure", lambda jobs: fields.get("pays", True))
    monkeypatch.setattr(together, "remembered", lambda text, ask: ask())
    alone = node(0, 24)
    Trainer(stack, graph=fields.get("graph", True)).train([Job(alone, phase, ())])
    return stacks, alone


LONG = Phase(label="p", objective=cross_entropy, steps=60, batch=8, keep="all")


@pytest.mark.parametrize("stack", ["auto", "always"])
def test_on_a_gpu_one_node_is_a_stack_of_one(
    monkeypatch: pytest.MonkeyPatch, stack: together.Stack
) -> None:
    stacks, there = one_by_graph(monkeypatch, stack, LONG)
    assert stacks == [1]
    here = node(0, 24)
    fit(here, LONG)
    for name, t in here.model.state().items():
        assert torch.allclose(t, there.model.state()[name], atol=1e-5)
    assert there.memory.keys() == here.memory.keys()


@pytest.mark.parametrize(
    ("stack", "phase", "fields"),
    [
        ("never", LONG, {}),
        ("auto", LONG, {"graph": False}),
        ("auto", LONG, {"pays": False}),
        ("auto", replace(LONG, steps=49), {}),
    ],
)
def test_or_it_is_trained_by_the_loop(
    monkeypatch: pytest.MonkeyPatch, stack: together.Stack, phase: Phase, fields: dict[str, Any]
) -> None:
    assert one_by_graph(monkeypatch, stack, phase, **fields)[0] == []


def test_one_node_that_cannot_be_stacked_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def refuses(jobs: Any, **more: Any) -> list[Fitted]:
        tried.append(len(jobs))
        raise together.CannotStackError("no")

    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    monkeypatch.setattr(together, "fit_cohort", refuses)
    trainer, there = Trainer("always"), node(0, 24)
    with pytest.warns(StackWarning, match="cannot be stacked"):
        trainer.train([Job(there, LONG, ())])
    trainer.train([Job(there, LONG, ())])
    assert tried == [1]


def shifted(nodes: list[Node], extra: int) -> list[Node]:
    """The same nodes with fewer samples each, for other data in the same memory."""
    return [
        replace(n, data=Data(**{k: Split(s.x[extra:] + 1, s.y[extra:]) for k, s in n.data.items()}))
        for n in nodes
    ]


@pytest.mark.parametrize("keep", [None, "here"])
@pytest.mark.parametrize("settings", ["sgd", "adam"])
def test_a_stack_is_lent_to_other_nodes(
    settings: str, keep: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LI's runs in step need it, whose trunks are at other nodes in every phase."""
    made: list[str] = []
    for kind in (cohort.Cohort, stepper.Stepper):
        begin = kind.__init__

        def noted(self: Any, *args: Any, begin: Any = begin, **named: Any) -> None:
            made.append(type(self).__name__)
            begin(self, *args, **named)

        monkeypatch.setattr(kind, "__init__", noted)
    each = phase(keep=keep, optimiser=SETTINGS[settings], parts=("top",), epochs=None, steps=7)
    sizes = [24, 17, 9], [20, 17, 12], [24, 19, 10]
    there = [  # the body rests, so its dropout does
        [node(i, n, Net(dropout=0.5), seed=k) for i, n in enumerate(own)]
        for k, own in enumerate(sizes)
    ]
    there[2] = shifted(there[2], 2)
    alone = [[replace(n, model=n.model.copy(), memory=dict(n.memory)) for n in g] for g in there]
    kept: cohort.Kept = {}
    for visit in range(3):
        for ours, theirs in zip(there, alone, strict=True):
            fitted = fit_cohort([Job(n, each, ("v", visit)) for n in ours], kept=kept, kind="net")
            for n, own, done in zip(ours, theirs, fitted, strict=True):
                wanted = fit(own, each, "v", visit)
                assert done.loss == pytest.approx(wanted.loss, rel=1e-5)
                for a, b in zip(n.model.state().values(), own.model.state().values(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(kept) == 1
    assert made == ["Cohort", "Stepper"]
    heavier = replace(each, optimiser=replace(each.optimiser, weight_decay=0.3), keep=None)
    for its, other, kind in (
        (each, 0, "another"),
        (each, 1, None),
        (each, 2, None),
        (heavier, 0, None),
    ):
        fit_cohort([Job(n, its, ("v", 9)) for n in there[other]], kept=kept, kind=kind)
    fit_cohort([Job(n, each, ("v", 9)) for n in there[1]], kept=kept, kind="net")
    fit_cohort([Job(n, heavier, ("v", 9)) for n in there[2]], kept=kept, kind="net")
    assert made == ["Cohort", "Stepper"] * 7  # of another kind, or of none that is known
    assert len(kept) == 1


def test_a_stack_whose_rows_share_their_data_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their data are not written over: the second time there is a copy for others to fill."""
    made: list[int] = []
    begin = stepper.Stepper.__init__
    monkeypatch.setattr(
        stepper.Stepper, "__init__", lambda self, c: (made.append(1), begin(self, c))[1]
    )
    kept: cohort.Kept = {}
    for k in range(4):
        one = node(0, 12, seed=k)
        x, alike = one.data["train"].x.clone(), [one, replace(one, model=one.model.copy())]
        alone = replace(one, model=one.model.copy())
        fit_cohort([Job(n, phase(), ("v",)) for n in alike], kept=kept, kind="net")
        fit(alone, phase(), "v")
        for n in alike:
            for a, b in zip(n.model.state().values(), alone.model.state().values(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(one.data["train"].x, x)
    assert len(made) == 2


def test_data_in_a_pool_is_replaced_where_it_fits() -> None:
    x, y = torch.randn(6, 2), torch.arange(6)
    pool = Pool([Split(x[:4], y[:4]), Split(x[4:], y[4:])])
    where = pool.x.data_ptr(), pool.x.shape
    one = Split(x[:3] + 1, y[:3] + 6)
    assert pool.refill([one, one])
    assert (pool.x.data_ptr(), pool.x.shape, pool.lengths) == (*where, [3, 3])
    got, labels = pool.take(torch.tensor([[0, 2], [1, 1]]))
    assert torch.equal(got, one.x[torch.tensor([[0, 2], [1, 1]])])
    assert labels is not None
    assert labels.tolist() == [[6, 8], [7, 7]]
    assert pool.refill([Split(one.x, y[:3]), Split(one.x, y[3:])])
    assert pool.take(torch.tensor([[0], [0]]))[1].tolist() == [[0], [3]]  # type: ignore[union-attr]
    for wrong in (Split(torch.randn(7, 2), torch.arange(7)), Split(x[:3].double(), y[:3])):
        assert not pool.refill([wrong, wrong])
    assert not pool.refill([Split(x[:3]), Split(x[:3])])
    shared = Pool([Split(x, y)] * 2)
    assert shared.x is x  # nobody's data is overwritten
    assert not shared.refill([one, one])
    own = Pool([Split(x, y)] * 2, own=True)
    assert own.refill([one, one])
    assert not torch.equal(own.x[:3], x[:3])


def test_a_stack_kept_for_later_finds_parameters_that_have_moved() -> None:
    alone, stacked = nodes([8, 8]), nodes([8, 8])
    each, kept = phase(), cohort.Kept()
    for time in range(2):
        for one in alone:
            fit(one, each, "path", time)
        fit_cohort([Job(n, each, ("path", time)) for n in stacked], kept=kept)
        for p in (p for n in stacked for p in n.model.net.parameters()):
            p.data = p.data.clone()  # as `net.to` does
    assert len(kept) == 1
    for one, other in zip(alone, stacked, strict=True):
        for name, value in one.model.state().items():
            torch.testing.assert_close(other.model.state()[name], value, rtol=1e-5, atol=1e-6)

"""What of a filter sees only padding stays out of a stack, and ends as in the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import CrossEntropy, EarlyStop, Optimiser, Phase, cross_entropy
from polyfed.models import resnet18_224
from polyfed.random import ambient
from polyfed.train import cohort, columns
from polyfed.train.cohort import Kept, fit_cohort
from polyfed.train.loop import fit
from polyfed.train.track import Job
from polyfed.train.unseen import arguments, decay, put_back, seeing_lines, seen

ADAMW = Optimiser(name="adamw", lr=0.01, weight_decay=0.5)
PHASE = Phase(label="p", objective=cross_entropy, epochs=2, batch=4, optimiser=ADAMW)
MIDDLE, LOWER = (slice(1, 2), slice(1, 2)), (slice(1, 3), slice(1, 3))


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns on a CPU, too."""
    monkeypatch.setattr(columns, "_DEVICES", ("cpu",))


def net() -> nn.Module:
    """Pictures of 4, 2, 1 and 1 pixels."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def node(seed: int, size: int, make: Callable[[], nn.Module] = net) -> Node:
    with ambient(seed, "net"):
        own = make().double()
        x = torch.randn(size, 2, 4, 4, dtype=torch.float64)
        y = torch.randint(3, (size,))
    given = Node(f"N{seed}", Data(train=(x, y), held=(x, y)), Model.split(own, all=...))
    return given.working_copy(0, torch.device("cpu"), {})


def jobs(*sizes: int, phase: Phase = PHASE) -> list[Job]:
    return [Job(node(k, n), phase, ("path",)) for k, n in enumerate(sizes)]


def both(sizes: tuple[int, ...], phases: list[Phase]) -> tuple[list[Job], list[Job], Kept]:
    """The same phases by a stack, which is kept, and one by one."""
    ours, theirs, kept = jobs(*sizes), jobs(*sizes), Kept()
    for time, phase in enumerate(phases):
        path = ("path", time)
        fit_cohort([Job(job.node, phase, path) for job in ours], kept=kept)
        for job in theirs:
            fit(job.node, phase, *path)
    return ours, theirs, kept


def assert_close(ours: list[Job], theirs: list[Job]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.node.model.state(), b.node.model.state())
        assert a.node.memory.keys() == b.node.memory.keys()
        for name, t in b.node.memory.items():
            torch.testing.assert_close(a.node.memory[name], t)


def shapes(kept: Kept) -> list[tuple[int, ...]]:
    (stack,) = kept.values()
    return [tuple(t.shape[2:]) for t in stack.moving.values() if t.dim() == 5]


def test_lines_are_those_that_see_something() -> None:
    assert seeing_lines(jobs(8)[0]) == {"3.weight": LOWER, "5.weight": MIDDLE}


def test_most_of_the_published_resnet_sees_nothing_in_small_images() -> None:
    """6.9 of 11.2 million numbers."""
    made = resnet18_224((3, 32, 32), 10, width=4)
    data = Data(train=(torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)))
    own = Node("N", data, Model.split(made, all=...)).working_copy(0, torch.device("cpu"), {})
    lines = seeing_lines(Job(own, PHASE, ("path",)))
    named = dict(made.named_parameters())
    assert set(lines) == {
        f"trunk.{block}.{half}.0.weight" for block in (9, 10) for half in ("first", "second")
    }
    left = sum(named[n].numel() - seen(named[n], own).numel() for n, own in lines.items())
    assert left * (64 // 4) ** 2 == 6_946_816


OPTIMISERS = [
    ADAMW,
    replace(ADAMW, weight_decay=0.0),
    Optimiser(name="adam", lr=0.01),
    Optimiser(name="sgd", lr=0.1),
    Optimiser(name="sgd", lr=0.1, momentum=0.9),
]


@pytest.mark.parametrize("keep", [None, "here"])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (12, 3, 8)], ids=str)
def test_a_stack_without_them_is_the_loop(
    sizes: tuple[int, ...], optimiser: Optimiser, keep: str | None
) -> None:
    """Also when it is used again, and rows that are done earlier decay no further."""
    phase = replace(PHASE, optimiser=optimiser, keep=keep)
    ours, theirs, kept = both(sizes, [phase] * 3)
    if len(set(sizes)) == 1:
        assert [s[-2:] for s in shapes(kept)] == [(3, 3), (2, 2), (1, 1)]
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": Optimiser(name="adam", lr=0.01, weight_decay=0.5)},
        {"optimiser": Optimiser(name="sgd", lr=0.01, weight_decay=0.5)},
        {"stop": EarlyStop("held", 1)},
    ],
    ids=str,
)
def test_what_could_move_otherwise_stays_in(change: dict[str, object]) -> None:
    phase = replace(PHASE, **change)  # type: ignore[arg-type]
    if "stop" not in change:
        ours, theirs, kept = both((8, 8), [phase])
        assert [s[-2:] for s in shapes(kept)] == [(3, 3)] * 3
        assert_close(ours, theirs)
    assert seeing_lines(jobs(8, phase=phase)[0]) == {}


def test_moments_that_are_not_zero_keep_it_in() -> None:
    """As when a node trained on larger pictures before: they decay, and move the weights."""
    phase = replace(PHASE, keep="here", optimiser=Optimiser(name="adam", lr=0.01))
    ours, theirs, kept = both((8, 8), [phase])
    assert [s[-2:] for s in shapes(kept)] == [(3, 3), (2, 2), (1, 1)]
    for work in (ours, theirs):
        memory = work[1].node.memory
        (name,) = [n for n in memory if n.endswith("5.weight/exp_avg")]
        memory[name] = memory[name].clone().index_fill_(2, torch.tensor([0]), 0.3)
    before = ours[1].node.model.state()["5.weight"].clone()
    fit_cohort([Job(job.node, phase, ("again",)) for job in ours], kept=kept)
    for job in theirs:
        fit(job.node, phase, "again")
    assert_close(ours, theirs)
    assert (ours[1].node.model.state()["5.weight"] != before)[:, :, 0].all()


class Tied(nn.Module):
    """Filters that are used otherwise, too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Conv2d(2, 2, 3, padding=1), how
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x if self.how == "on two sizes" else x[..., :1, :1])
        if self.how == "on two sizes":
            x = self.layer(x[..., :1, :1])
        if self.how == "twice":
            x = self.layer(x)
        if self.how == "as numbers":
            x = x + self.layer.weight.square().sum()
        if self.how == "with a word":
            x = x + functional.conv2d(weight=self.layer.weight, input=x, padding=1)
        out: Tensor = self.last(x.flatten(1))
        return out


@pytest.mark.parametrize(
    ("how", "is_less"),
    [
        ("once", True),
        ("twice", True),
        ("with a word", False),
        ("on two sizes", False),
        ("as numbers", False),
    ],
)
def test_filters_that_are_used_otherwise_stay_whole(how: str, is_less: bool) -> None:
    ours, theirs = [[node(k, 8, lambda: Tied(how)) for k in range(2)] for _ in range(2)]
    lines = seeing_lines(Job(ours[0], PHASE, ("path",)))
    assert lines == ({"layer.weight": MIDDLE} if is_less else {})
    fit_cohort([Job(own, PHASE, ("path",)) for own in ours])
    for own, other in zip(ours, theirs, strict=True):
        fit(other, PHASE, "path")
        torch.testing.assert_close(own.model.state(), other.model.state())


@dataclass(frozen=True)
class Penalised(CrossEntropy):
    """An objective that sees the weights."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return super().losses(model, x, y) + sum(p.abs().sum() for p in model.net.parameters())

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return self.losses(model, x, y).mean()


def test_objectives_that_may_see_weights_have_all_of_them() -> None:
    assert seeing_lines(jobs(8, phase=replace(PHASE, objective=Penalised()))[0]) == {}


def test_elsewhere_stacks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where convolutions are not computed by columns."""
    monkeypatch.setattr(columns, "_DEVICES", ("cuda",))
    assert seeing_lines(jobs(8)[0]) == {}


def test_a_stack_that_is_lent_leaves_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "_KEPT", (1, 1))
    monkeypatch.setattr(cohort, "_is_full", lambda kept, *_: len(kept) > 0)
    kept, phase = Kept(), replace(PHASE, epochs=None, steps=3)
    ours, theirs = [jobs(8, 8, 8, 8, phase=phase) for _ in range(2)]
    for pair in (slice(0, 2), slice(2, 4)):
        fit_cohort(ours[pair], kept=kept, kind="kind")
        kept = kept or Kept()
    for job in theirs:
        fit(job.node, job.phase, *job.path)
    assert_close(ours, theirs)


def test_arguments_are_those_of_the_smaller_filter() -> None:
    """Padding is less by what was left out above and on the left."""
    x, weight = torch.randn(2, 3, 1, 2), torch.randn(4, 3, 3, 3)
    how = {"padding": (1, 2), "dilation": (1, 2)}
    lines = slice(1, 2), slice(0, 3)
    given = arguments(lines, x, seen(weight, lines), **how)  # type: ignore[arg-type]
    assert given[4] == (0, 2)
    torch.testing.assert_close(functional.conv2d(*given), functional.conv2d(x, weight, **how))  # type: ignore[arg-type]


def test_decay_is_that_of_the_steps() -> None:
    t = torch.full((2, 2, 3, 3), 8.0)
    decay(t, MIDDLE, replace(ADAMW, lr=1.0), 3)
    wanted = torch.full((3, 3), 1.0)
    wanted[1, 1] = 8
    assert torch.equal(t, wanted.expand(2, 2, 3, 3))


def test_what_is_kept_is_of_the_whole_filter() -> None:
    whole = torch.ones(2, 2, 3, 3)
    full = put_back(torch.full((2, 2, 1, 1), 5.0), MIDDLE, whole)
    assert full.shape == whole.shape
    assert full.sum() == 2 * 2 * 5
    assert put_back(torch.tensor(3.0), MIDDLE, whole) == 3

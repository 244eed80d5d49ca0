"""Plain SGD one sample at a time, with the first layer's updates put off: the numbers stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import CrossEntropy, Optimiser, Phase, SquaredError
from polyfed.models.mlp import sigmoid_mlp
from polyfed.random import ambient
from polyfed.train import cohort, deferred
from polyfed.train.cohort import fit_cohort
from polyfed.train.deferred import DeferredStepper, first_layer
from polyfed.train.loop import fit
from polyfed.train.track import Job

PLAIN = Optimiser(name="sgd", lr=0.3)


class Own(CrossEntropy):
    """An objective that may do anything with the data."""


def network(kind: str) -> nn.Module:
    if kind == "no bias":
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))
    if kind == "one layer":
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    if kind == "float64":
        return sigmoid_mlp(6, 5, 4, 3).double()
    return sigmoid_mlp(6, 5, 4, 3)


def node(i: int, size: int, kind: str = "sigmoids") -> Node:
    draw = torch.Generator().manual_seed(i)
    with ambient(i):
        net = network(kind)
    dtype = next(net.parameters()).dtype
    x = torch.randn(size, 2, 3, generator=draw, dtype=dtype)
    data = Data(may_miss_classes=True, train=(x, torch.randint(0, 3, (size,), generator=draw)))
    return Node(f"N{i}", data, Model.split(net, all=...))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of 3 samples and no least width; a list of the rows of all deferred stacks."""
    made: list[int] = []

    class Seen(DeferredStepper):
        def __init__(self, of: cohort.Cohort) -> None:
            super().__init__(of)
            made.append(len(of.rows))

    monkeypatch.setattr(deferred, "_CHUNK", 3)
    monkeypatch.setattr(deferred, "_WIDE", 1)
    monkeypatch.setattr(cohort, "DeferredStepper", Seen)
    return made


def trained(sizes: list[int], phases: list[Phase], kind: str = "sigmoids") -> list[list[Tensor]]:
    """All parameters after the phases, one by one and stacked; rows differ in learning rate."""
    alone, stacked = ([node(i, n, kind) for i, n in enumerate(sizes)] for _ in range(2))
    kept: cohort.Kept = {}
    for k, phase in enumerate(phases):
        rates = [0.1 * (1 + i) * phase.optimiser.lr for i in range(len(sizes))]
        own = [replace(phase, optimiser=replace(phase.optimiser, lr=lr)) for lr in rates]
        one = [fit(n, p, "path", k) for n, p in zip(alone, own, strict=True)]
        jobs = [Job(n, p, ("path", k)) for n, p in zip(stacked, own, strict=True)]
        two = fit_cohort(jobs, kept=kept)
        assert [f.loss for f in two] == pytest.approx([f.loss for f in one], rel=1e-4, abs=1e-6)
        assert [f.steps for f in two] == [f.steps for f in one]
    return [[t for n in group for t in n.model.net.parameters()] for group in (alone, stacked)]


def phase(**settings: Any) -> Phase:
    return Phase(**({"label": "p", "objective": SquaredError(), "batch": 1, "optimiser": PLAIN}
                    | ({} if "epochs" in settings else {"steps": 8}) | settings))  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "kind", "settings"),
    [
        ([7, 7], "sigmoids", {}),
        ([5, 9, 2], "sigmoids", {"epochs": 2}),
        ([9, 5, 2], "sigmoids", {"epochs": 2}),
        ([1, 8], "sigmoids", {"steps": 1}),
        ([5, 9, 2], "no bias", {"walk": True, "steps": 5}),
        ([1, 8], "one layer", {"objective": CrossEntropy()}),
        ([5, 9, 2], "float64", {"objective": CrossEntropy()}),
    ],
    ids=str,
)
def test_equals_one_by_one(
    sizes: list[int], kind: str, settings: dict[str, Any], small: list[int]
) -> None:
    one, two = trained(sizes, [phase(**settings)] * 2, kind)
    tight = {"rtol": 1e-10, "atol": 1e-12} if kind == "float64" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(two, one, **tight)
    assert small


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": 2},
        {"optimiser": Optimiser(name="sgd", lr=0.1, momentum=0.5)},
        {"optimiser": Optimiser(name="sgd", lr=0.1, weight_decay=0.5)},
        {"optimiser": Optimiser(name="adam", lr=0.1)},
        {"objective": Own()},
    ],
    ids=str,
)
def test_other_phases_are_not_deferred(settings: dict[str, Any], small: list[int]) -> None:
    one, two = trained([6, 6], [phase(**settings)])
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    assert not small


def test_a_first_layer_that_rests_or_is_narrow(
    small: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(parts: tuple[str, ...]) -> None:
        nodes = [node(i, 6) for i in range(2)]
        for each in nodes:
            each.model = Model.split(each.model.net, trunk="trunk", head="head")
        fit_cohort([Job(n, phase(parts=parts), ("path",)) for n in nodes])

    go(("head",))
    assert not small
    go(("trunk",))
    assert small == [2]
    monkeypatch.setattr(deferred, "_WIDE", 7)
    go(("trunk",))
    assert small == [2]


def test_first_layer() -> None:
    linear = nn.Linear(3, 2)
    assert first_layer(linear) is linear
    assert first_layer(nn.Sequential(nn.Sequential(nn.Flatten()), linear)) is None
    assert first_layer(nn.Sequential(nn.Flatten(), nn.Sequential(linear, nn.ReLU()))) is linear
    assert first_layer(nn.Sequential(nn.ReLU(), linear)) is None
    assert first_layer(nn.Sequential()) is None
    assert first_layer(nn.Conv2d(1, 1, 1)) is None

"""Walks, kept optimisers, rules, and what objectives may do after a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data
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
from polyfed.errors import ConfigError
from polyfed.random import ambient, stream
from polyfed.train.course import Course, batch_sizes
from polyfed.train.loop import fit


def node(n: int = 10) -> Node:
    x = torch.randn(n, 3, generator=stream(0, "x"))
    x[:, 0] = torch.arange(n)
    with ambient(0, "init"):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = Data(train=(x, torch.arange(n) % 2))
    return Node("N", data, Model.split(net, trunk=..., head="2"))


@dataclass(frozen=True)
class Noted:
    seen: list[list[int]]

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        self.seen.append([int(i) for i in x[:, 0]])
        return cross_entropy(model, x, y)


def walk(one: Node, seen: list[list[int]], steps: int, batch: int = 4, *path: Any) -> None:
    phase = Phase(label="p", objective=Noted(seen), steps=steps, batch=batch, walk=True)
    fit(one, phase, *(path or ("path",)))


def test_a_walk_goes_on_where_the_last_one_stopped() -> None:
    seen: list[list[int]] = []
    one = node(10)
    for steps in (1, 3, 2, 5):
        walk(one, seen, steps)
    whole: list[list[int]] = []
    walk(node(10), whole, 11)
    assert seen == whole
    epochs = [seen[i : i + 3] for i in range(0, 9, 3)]
    assert [[len(b) for b in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    orders = [[i for batch in epoch for i in batch] for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3, "each epoch is shuffled anew"


def test_a_walk_does_not_depend_on_where_it_is_called_from() -> None:
    seen: list[list[int]] = []
    other: list[list[int]] = []
    walk(node(), seen, 4, 4, "here")
    walk(node(), other, 4, 4, "there", 7)
    assert seen == other


@pytest.mark.parametrize("way", ["walk", "epochs"])
def test_without_shuffling_samples_come_in_their_order(way: str) -> None:
    seen: list[list[int]] = []
    how: dict[str, Any] = {"walk": True, "steps": 2} if way == "walk" else {"epochs": 1}
    one = node(10)
    for _ in range(3):
        phase = Phase(label="p", objective=Noted(seen), batch=4, shuffle=False, **how)
        fit(one, phase, "path")
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == (epoch * 2 if way == "walk" else epoch * 3)


def test_a_walk_takes_steps_only() -> None:
    with pytest.raises(ConfigError, match="a walk takes steps and no stopping rule"):
        Phase(label="p", objective=cross_entropy, epochs=1, walk=True)
    with pytest.raises(ConfigError, match="a walk takes steps"):
        Phase(label="p", objective=cross_entropy, steps=1, walk=True, stop=EarlyStop())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_kept_optimiser_goes_on(name: Any) -> None:
    """Two phases of 3 and 4 steps are one of 7, if the optimiser is kept."""
    settings = Optimiser(name=name, lr=0.05, momentum=0.9 if name == "sgd" else 0.0)

    def train(one: Node, steps: int, keep: str | None) -> None:
        phase = Phase(
            label="p", objective=cross_entropy, steps=steps, batch=4, walk=True, keep=keep,
            optimiser=settings,
        )  # fmt: skip
        fit(one, phase, "path")

    kept, whole, fresh = node(), node(), node()
    train(kept, 3, "here")
    train(kept, 4, "here")
    train(whole, 7, None)
    train(fresh, 3, None)
    train(fresh, 4, None)
    for key, t in whole.model.state().items():
        assert torch.equal(kept.model.state()[key], t)
    assert not torch.equal(fresh.model.state()["0.weight"], whole.model.state()["0.weight"])
    assert all(isinstance(t, Tensor) for t in kept.memory.values())


def test_optimisers_are_kept_by_name_and_by_parameter() -> None:
    one = node()

    def train(part: str, keep: str) -> None:
        phase = Phase(
            label="p", objective=cross_entropy, parts=(part,), steps=2, batch=4, keep=keep
        )
        fit(one, phase, "path")

    train("head", "a")
    train("trunk", "b")
    names = {n for n in one.memory if n.startswith("optimiser ")}
    assert {n.partition("/")[0] for n in names} == {"optimiser a", "optimiser b"}
    assert {n.split("/")[1] for n in names if n.startswith("optimiser a")} == {"2.weight", "2.bias"}
    assert float(one.memory["optimiser a/2.weight/step"]) == 2


@dataclass(frozen=True)
class Shrink:
    """Not gradient descent: every batch takes a tenth of the weights."""

    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        assert not torch.is_grad_enabled()
        for p in model.parameters("head"):
            p.mul_(0.9)
        return torch.tensor(float(len(x)))


def test_a_rule_takes_the_optimisers_place() -> None:
    one = node(10)
    before = one.model.state()
    done = fit(one, Phase(label="p", objective=Shrink(), epochs=2, batch=4), "path")
    assert (done.steps, done.epochs) == (6, 2)
    assert done.loss == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
    for name, t in one.model.state().items():
        factor = 0.9**6 if name.startswith("2.") else 1.0
        torch.testing.assert_close(t, before[name] * factor)


def test_a_rule_has_no_loss_to_stop_by() -> None:
    one = node()
    one.data = Data(train=one.data["train"], val_es=one.data["train"])
    phase = Phase(label="p", objective=Shrink(), epochs=2, stop=EarlyStop())
    with pytest.raises(ConfigError, match="a rule has no loss to stop early by"):
        fit(one, phase, "path")


def test_after_step_follows_every_step() -> None:
    calls: list[float] = []

    class Watching(PerSample):
        def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            calls.append(float(model.state()["2.bias"].sum()))
            return model(x).square().sum(1)

        def after_step(self, model: Model) -> None:
            calls.append(float(model.state()["2.bias"].sum()))

    fit(node(8), Phase(label="p", objective=Watching(), epochs=1, batch=4), "path")
    assert len(calls) == 4
    assert calls[1] == calls[2] != calls[0]


@pytest.mark.parametrize("objective", [cross_entropy, SquaredError(), MatchOutput("trunk", 0.3)])
def test_an_objective_is_the_mean_of_its_losses(objective: PerSample) -> None:
    one = node(6)
    x, y = one.data["train"].x, one.data["train"].y
    if isinstance(objective, MatchOutput):
        y = torch.randn(6, 4, generator=stream(0, "y"))
    losses = objective.losses(one.model, x, y)
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), objective(one.model, x, y))


def test_squared_error() -> None:
    one = node(4)
    x, y = one.data["train"].x, one.data["train"].y
    assert y is not None
    out = one.model(x)
    by_hand = [0.5 * sum((out[i, k] - float(k == y[i])) ** 2 for k in range(2)) for i in range(4)]
    got = SquaredError().losses(one.model, x, y)
    torch.testing.assert_close(got, torch.stack([torch.as_tensor(v) for v in by_hand]))
    targets = torch.rand(4, 2, generator=stream(0, "t"))
    got = SquaredError().losses(one.model, x, targets)
    torch.testing.assert_close(got, (out - targets).square().sum(1) / 2)
    with pytest.raises(ConfigError, match="needs labels or targets"):
        SquaredError()(one.model, x, None)


def test_cuts_say_all_of_the_sizes() -> None:
    found: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for n, size, first in product(range(1, 12), range(1, 6), range(4)):
        for pairs, drop_last in product((False, True), repeat=2):
            one = Node("N", memory={"walk/train": torch.tensor([0, first])})
            phase = Phase(
                label="p",
                objective=cross_entropy,
                steps=1,
                batch=size,
                walk=True,
                drop_last=drop_last,
            )
            course = Course(one, phase, n, ("path",), pairs=pairs)
            assert course.widest == max(course.sizes)
            start = first if first < len(course.sizes) else 0
            sizes = batch_sizes(n, min(n, size), pairs=pairs)
            assert course.sizes == (sizes[:-1] if drop_last and sizes[-1] < sizes[0] else sizes)
            assert found.setdefault(course.cuts, (start, course.sizes)) == (start, course.sizes)
    assert len(set(map(repr, found.values()))) == len(found)

"""Steps of single samples written out: what autograd and torch's SGD make of the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import CrossEntropy, EarlyStop, Optimiser, Phase, SquaredError
from polyfed.models.mlp import sigmoid_mlp
from polyfed.random import ambient
from polyfed.train import by_sample, loop, together
from polyfed.train.by_sample import BySample, can_write_out
from polyfed.train.course import Course
from polyfed.train.loop import fit
from polyfed.train.together import Trainer
from polyfed.train.track import Job

PHASE = Phase(
    label="p",
    objective=SquaredError(),
    epochs=2,
    batch=1,
    optimiser=Optimiser(name="sgd", lr=0.5),
)
WIDTHS = {"two layers": (6, 4, 3), "three layers": (6, 5, 4, 3), "four layers": (6, 5, 4, 4, 3)}


def node(widths: tuple[int, ...] = (6, 5, 4, 3), size: int = 11, **options: Any) -> Node:
    dtype = options.get("dtype", torch.float64)
    draw = torch.Generator().manual_seed(0)
    with ambient(1):
        net = sigmoid_mlp(*widths).to(dtype)
    x = torch.randn(size, 2, widths[0] // 2, generator=draw, dtype=dtype)
    y = options.get("y", torch.randint(0, widths[-1], (size,), generator=draw))
    data = Data(may_miss_classes=True, train=(x, y), val_es=(x[:4], y[:4]))
    first = next(n for n, m in net.named_modules() if isinstance(m, nn.Linear))
    return Node("N", data, Model.split(net, trunk=first, head=...))


def literally(of: Node, phase: Phase) -> list[float]:
    """Autograd and torch's SGD, a sample at a time; the losses of the last epoch."""
    split, model = of.data["train"], of.model
    sgd = torch.optim.SGD(model.net.parameters(), lr=phase.optimiser.lr)
    losses: list[float] = []
    for order, sizes in Course(of, phase, len(split), ("path",), pairs=False):
        losses = []
        for i in order[: len(sizes)]:
            out = model.net(split.x[i : i + 1])[0]
            y = split.y[i] if split.y is not None else torch.tensor(0)
            target = y if y.is_floating_point() else torch.eye(len(out), dtype=out.dtype)[y]
            loss = ((out - target) ** 2).sum() / 2
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(float(loss.detach()))
    return losses


def parameters(of: Node) -> list[Tensor]:
    return [p.detach() for p in of.model.net.parameters()]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four samples: eleven are three of them, of which the last is shorter."""
    monkeypatch.setattr(by_sample, "_CHUNK", 4)


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_are_those_of_autograd(kind: str, dtype: torch.dtype) -> None:
    one, two = node(WIDTHS[kind], dtype=dtype), node(WIDTHS[kind], dtype=dtype)
    before = parameters(node(WIDTHS[kind], dtype=dtype))
    assert can_write_out(one.model, PHASE, one.data["train"])
    fitted, losses = fit(one, PHASE, "path"), literally(two, PHASE)
    near = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, literal, start in zip(parameters(one), parameters(two), before, strict=True):
        torch.testing.assert_close(ours, literal, rtol=near, atol=near)
        assert (literal - start).abs().max() > 1e-3  # all of it moved
    assert fitted.loss == pytest.approx(sum(losses) / len(losses), rel=near)
    assert (fitted.epochs, fitted.steps) == (2, 22)


@pytest.mark.parametrize("outputs", [1, 3])
def test_targets_may_be_numbers(outputs: int) -> None:
    y = torch.linspace(0, 1, 11 * outputs, dtype=torch.float64).view(11, outputs)
    one, two = (node((6, 4, outputs), y=y[:, 0] if outputs == 1 else y) for _ in range(2))
    fit(one, PHASE, "path")
    literally(two, PHASE)
    for ours, literal in zip(parameters(one), parameters(two), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


def test_a_walk_goes_on_where_it_stopped() -> None:
    walk = replace(PHASE, epochs=None, steps=7, walk=True)
    one, two = node(), node()
    for _ in range(3):
        fit(one, walk, "path")
        literally(two, walk)
    for ours, literal in zip(parameters(one), parameters(two), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


def test_early_stopping_sees_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = replace(PHASE, epochs=5, stop=EarlyStop(patience=1))
    one, two = node(), node()
    fitted = fit(one, stops, "path")
    monkeypatch.setattr(loop, "can_write_out", lambda *_: False)
    assert fitted.loss == pytest.approx(fit(two, stops, "path").loss, rel=1e-12)
    for ours, literal in zip(parameters(one), parameters(two), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


class Other(SquaredError):  # noqa: N818
    """An objective that may do anything."""


def frozen() -> Node:
    found = node()
    next(found.model.net.parameters()).requires_grad_(False)
    return found


def other(net: nn.Module) -> Node:
    return replace(node(), model=Model.split(net.double(), all=...))


def tied() -> Node:
    net = sigmoid_mlp(6, 6, 6, 3)
    layers = by_sample.sigmoid_layers(net)
    layers[1].weight = layers[0].weight
    return other(net)


def strided() -> Node:
    found = node()
    weight = by_sample.sigmoid_layers(found.model.net)[1].weight
    weight.data = weight.data.T.contiguous().T
    return found


def narrow() -> Node:
    found = node()
    found.model.precision = "bfloat16"
    return found


def elsewhere() -> Node:
    found = node()
    split = found.data["train"]
    found.data._splits["train"] = Split(split.x.to("meta"), split.y)
    return found


SGD = PHASE.optimiser
REFUSED: dict[str, tuple[Callable[[], Node], dict[str, Any]]] = {
    "another objective": (node, {"objective": CrossEntropy()}),
    "one made of it": (node, {"objective": Other()}),
    "batches": (node, {"batch": 2}),
    "Adam": (node, {"optimiser": Optimiser(lr=0.1)}),
    "momentum": (node, {"optimiser": replace(SGD, momentum=0.9)}),
    "weight decay": (node, {"optimiser": replace(SGD, weight_decay=0.1)}),
    "a part": (node, {"parts": ("head",)}),
    "a frozen layer": (frozen, {}),
    "one layer": (lambda: other(nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Sigmoid())), {}),
    "other gates": (
        lambda: other(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))),
        {},
    ),
    "weights twice": (tied, {}),
    "weights in another order": (strided, {}),
    "several labels": (lambda: node(y=torch.zeros(11, 3, dtype=torch.int64)), {}),
    "targets of another width": (lambda: node(y=torch.zeros(11, 2, dtype=torch.float64)), {}),
    "bfloat16": (narrow, {}),
    "halves": (lambda: node(dtype=torch.float16), {}),
    "another device": (elsewhere, {}),
    "other inputs": (lambda: other(sigmoid_mlp(3, 4, 3)), {}),
    "inputs of another type": (
        lambda: replace(node(), data=Data(train=(torch.zeros(2, 6), torch.tensor([0, 1])))),
        {},
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_everything_else_is_left_to_autograd(why: str) -> None:
    make, changes = REFUSED[why]
    of, phase = make(), replace(PHASE, **changes)
    assert not can_write_out(of.model, phase, of.data["train"])


def test_parts_that_are_all_are_taken() -> None:
    of = node()
    assert can_write_out(of.model, replace(PHASE, parts=("head", "trunk")), of.data["train"])


def test_classes_that_are_not_there_are_an_error() -> None:
    of = node(y=torch.full((11,), 3))
    with pytest.raises(RuntimeError, match="Class values"):
        fit(of, PHASE, "path")


def test_a_network_that_diverged_stays_so_without_a_warning() -> None:
    of = node()
    first, *_, last = by_sample.sigmoid_layers(of.model.net)
    with torch.no_grad():
        first.bias[:] = 1e6  # gates that are wide open, of no slope
        last.weight[0, 0] = float("inf")
    assert math.isnan(fit(of, PHASE, "path").loss)


def test_blas_has_one_thread_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def blas() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    seen: list[list[int]] = []
    steps = BySample._steps

    def watched(self: BySample, *arrays: Any) -> Any:
        seen.append(blas())
        return steps(self, *arrays)

    monkeypatch.setattr(BySample, "_steps", watched)
    by_sample._blas.cache_clear()
    with by_sample._blas().limit(limits=2, user_api="blas"):
        before = blas()
        fit(node(), PHASE, "path")
        assert blas() == before
    assert len(seen) == 6
    assert all(each == [1] * len(before) for each in seen)


@pytest.mark.parametrize(("stack", "stacks"), [("auto", 0), ("always", 1)])
def test_stacks_are_not_made_of_them_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, stack: Any, stacks: int
) -> None:
    made: list[int] = []
    fit_cohort = together.fit_cohort

    def seen(jobs: Any, **more: Any) -> Any:
        made.append(len(jobs))
        return fit_cohort(jobs, **more)

    monkeypatch.setattr(together, "fit_cohort", seen)
    nodes = [replace(node(), name=f"N{i}") for i in range(3)]
    Trainer(stack).train([Job(each, PHASE, ("path",)) for each in nodes])
    assert len(made) == stacks

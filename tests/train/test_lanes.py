"""Lanes: networks with BatchNorm side by side end where the loop of one node takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Optimiser, Phase, cross_entropy
from polyfed.random import ambient
from polyfed.train.alike import structure
from polyfed.train.augment import Rotated
from polyfed.train.lanes import Lanes, can_take, lane_key
from polyfed.train.loop import fit
from polyfed.train.track import Job

PHASE = Phase(label="local", objective=cross_entropy, epochs=2, batch=6, optimiser=Optimiser())


def node(k: int, count: int) -> Node:
    """So many small pictures of three classes, and a network with BatchNorm and a frozen buffer."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(count, 1, 4, 4, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    with ambient(0, "init"):
        trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        net = nn.Sequential(trunk, nn.Linear(16, 3))
    net.register_buffer("own", torch.full((2,), float(k)), persistent=False)
    return Node(f"M{k}", Data(train=(x, y)), Model.split(net, trunk="0", head="1"), seed=3)


def jobs(*counts: int, phase: Phase = PHASE) -> list[Job]:
    return [Job(node(k, n), phase, ("tick", 1, "local", 0)) for k, n in enumerate(counts)]


def tensors(job: Job) -> dict[str, Tensor]:
    net = job.node.model.net
    return {n: t.detach().clone() for n, t in (*net.named_parameters(), *net.named_buffers())}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [(), ("head",)])
def test_lanes_equal_the_loop_bit_for_bit(count: int, parts: tuple[str, ...]) -> None:
    """Epochs end in short batches, one of a single sample; fewer and more lanes than nodes."""
    phase = replace(PHASE, parts=parts)
    ours, theirs = (jobs(72, 66, 73, 75, 72, phase=phase) for _ in range(2))
    lanes = Lanes(ours, count, graph=False)
    for _ in range(2):  # a second phase in the same lanes begins with a new optimiser
        fitted = lanes.fit(ours)
        wanted = [fit(job.node, job.phase, *job.path) for job in theirs]
        for mine, other, got, want in zip(ours, theirs, fitted, wanted, strict=True):
            for name, t in tensors(other).items():
                assert torch.equal(tensors(mine)[name], t), name
            assert (got.label, got.epochs, got.steps) == (want.label, want.epochs, want.steps)
            assert got.loss == pytest.approx(want.loss, rel=1e-6)


def test_a_buffer_that_is_not_stored_moves_in_with_its_node() -> None:
    """The proportions of unlabelled sets are such buffers."""
    ours = jobs(72, 72)
    seen: list[float] = []

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.append(float(model.net.get_buffer("own")[0]))
        return cross_entropy(model, x, y)

    ours = [Job(j.node, replace(PHASE, objective=objective, epochs=1), j.path) for j in ours]
    Lanes(ours, 1, graph=False).fit(ours)
    assert seen == [0.0] * 12 + [1.0] * 12


def test_chance_is_that_of_the_nodes_and_the_round() -> None:
    def drawn(names: str, tick: int) -> list[float]:
        seen: list[float] = []

        def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            seen.append(float(torch.rand(())))
            return cross_entropy(model, x, y)

        phase = replace(PHASE, objective=objective, epochs=1)
        made = zip(jobs(72, 72), names, strict=True)
        ours = [Job(replace(j.node, name=n), phase, ("tick", tick)) for j, n in made]
        Lanes(ours, 2, graph=False).fit(ours)
        return seen

    first = drawn("ab", 1)
    assert len(set(first)) == 24
    assert drawn("ab", 1) == first
    assert not {*first} & {*drawn("ab", 2)}
    assert not {*first} & {*drawn("ac", 1)}


def test_the_nodes_own_network_is_left_as_it_was() -> None:
    (job,) = jobs(72)
    job.node.model.net.eval()
    Lanes([job], 1, graph=False).fit([job])
    assert not job.node.model.net.training
    assert all(p.requires_grad and p.grad is None for p in job.node.model.net.parameters())


@dataclass(frozen=True)
class Acting:
    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return cross_entropy(model, x, y)

    def after_step(self, model: Model) -> None:
        return


@pytest.mark.parametrize(
    ("change", "count", "expected"),
    [
        ({}, 72, True),
        ({"stop": EarlyStop()}, 72, False),
        ({"keep": "all"}, 72, False),
        ({"epochs": None, "steps": 30}, 72, False),
        ({"objective": Acting()}, 72, False),
        ({}, 11, False),
        ({}, 12, True),
        ({"epochs": 0}, 72, False),
    ],
)
def test_what_fits_a_lane(change: dict[str, Any], count: int, expected: bool) -> None:
    (job,) = jobs(count, phase=replace(PHASE, **change))
    assert can_take(job) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda j: replace(j, phase=replace(j.phase, objective=Rotated(cross_entropy))),
        lambda j: replace(j, phase=replace(j.phase, batch=7)),
        lambda j: replace(j, phase=replace(j.phase, parts=("head",))),
        lambda j: replace(j, phase=replace(j.phase, optimiser=Optimiser(lr=0.5))),
        lambda j: replace(j, node=replace(j.node, data=Data(train=j.node.data["train"].x))),
    ],
)
def test_keys_differ_where_a_lane_would(change: Callable[[Job], Job]) -> None:
    job, other = jobs(72, 66)
    net = structure(job.node.model.net)
    assert lane_key(job, net) == lane_key(other, net)
    assert lane_key(job, net) != lane_key(change(job), net)
    assert lane_key(job, net) != lane_key(job, None)

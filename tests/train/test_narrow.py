"""Adam in one pass: on a CPU by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from polyfed.core.data import Data
from polyfed.core.model import Model, Precision
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser, Phase, cross_entropy
from polyfed.random import ambient
from polyfed.train.augment import Rotated
from polyfed.train.lanes import Lanes, _narrow, lane_key
from polyfed.train.loop import fit
from polyfed.train.surrogate import L1Penalty
from polyfed.train.track import Job

LITERAL = Path(__file__).parent / "literal_narrow.py"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
ROTATED = Rotated(L1Penalty(cross_entropy, 1e-3), 10.0)
PHASE = Phase(
    label="local",
    objective=ROTATED,
    epochs=3,
    batch=20,
    optimiser=Optimiser(lr=2e-3),
)


@needs_triton
@pytest.mark.parametrize("weight", ["0", "0.01"])
def test_is_autocast_and_adam_and_the_penalty(weight: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(LITERAL), weight]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss, weights, copies, layouts = map(float, done.stdout.split())
    assert loss < 1e-5
    assert weights < 1e-6
    assert copies < 2**-7
    assert layouts == 0


def job(precision: Precision = "bfloat16", k: int = 0, phase: Phase = PHASE) -> Job:
    generator = torch.Generator().manual_seed(k)
    y = torch.randint(3, (150,), generator=generator)
    x = torch.randn(150, 2, 6, 6, generator=generator) + y[:, None, None, None]
    with ambient(0, "init"):
        trunk = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        net = nn.Sequential(trunk, nn.Linear(128, 3))
    node = Node(f"M{k}", Data(train=(x, y)), Model.split(net, trunk="0", head="1"), seed=3)
    node.model.precision = precision
    return Job(node, phase, ("tick", 1))


@needs_triton
def test_a_penalty_is_found_wherever_it_is() -> None:
    from polyfed.train.narrow import without_l1

    assert without_l1(cross_entropy) == (cross_entropy, 0)
    assert without_l1(ROTATED) == (Rotated(cross_entropy, 10.0), 1e-3)
    assert without_l1(L1Penalty(L1Penalty(cross_entropy, 0.25), 0.5)) == (cross_entropy, 0.75)


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": Optimiser(name="sgd")},
        {"optimiser": Optimiser(name="adamw")},
        {"optimiser": Optimiser(weight_decay=0.1)},
        {"keep": "all"},
    ],
    ids=str,
)
def test_other_phases_are_for_the_optimiser_of_torch(change: dict[str, Any]) -> None:
    own = job(phase=replace(PHASE, **change))
    assert _narrow(own, own.node.model.parameters()) is None


def test_so_are_other_precisions() -> None:
    own = job("float32")
    assert _narrow(own, own.node.model.parameters()) is None
    half = job()
    half.node.model.net.double()
    assert _narrow(half, half.node.model.parameters()) is None


@needs_triton
def test_where_there_is_no_kernel_there_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polyfed.train.narrow._kernel", {(1,): Mock(side_effect=RuntimeError("no"))}
    )
    monkeypatch.setattr("polyfed.train.narrow._BLOCK", 1 << 20)
    own = job()
    with pytest.warns(UserWarning, match=r"Adam takes several passes here \(no\)"):
        assert _narrow(own, own.node.model.parameters()) is None
    lanes = Lanes([own], 1, graph=False)
    assert lanes.fit([own])[0].steps == 24


def test_lanes_are_shared_by_phases_that_keep_alike() -> None:
    assert lane_key(job(), 1) == lane_key(job(k=1), 1)
    assert lane_key(job(), 1) != lane_key(job(phase=replace(PHASE, keep="all")), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 3])
def test_cuda_lanes_learn_as_the_loop_does(count: int) -> None:
    """In bfloat16 every rounding goes on to all later steps: the way is the same, roughly."""
    device = torch.device("cuda")

    def there() -> list[Job]:
        made = [job(k=k) for k in range(count)]
        return [replace(j, node=j.node.working_copy(3, device, {})) for j in made]

    ours, theirs = there(), there()
    before = [p.detach().clone() for p in ours[0].node.model.net.parameters()]
    lanes = Lanes(ours, count, graph=True)
    assert all(lane.narrow is not None for lane in lanes.lanes)
    for _ in range(2):
        got = [f.loss for f in lanes.fit(ours)]
        assert got == pytest.approx([fit(j.node, j.phase, *j.path).loss for j in theirs], rel=0.1)
    assert not lanes.refusal
    way, other = (
        torch.cat(
            [
                (p - b).detach().flatten()
                for p, b in zip(jobs[0].node.model.net.parameters(), before, strict=True)
            ]
        )
        for jobs in (ours, theirs)
    )
    assert torch.cosine_similarity(way, other, dim=0) > 0.95

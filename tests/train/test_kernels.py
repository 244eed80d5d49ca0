"""The chunk as one kernel: on a CPU by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import CrossEntropy, Optimiser, PerSample, Phase, SquaredError
from polyfed.models.mlp import sigmoid_mlp
from polyfed.random import ambient
from polyfed.train import cohort
from polyfed.train.cohort import Cohort, fit_cohort
from polyfed.train.deferred import FusedStepper, can_fuse
from polyfed.train.loop import fit
from polyfed.train.track import Job

LITERAL = Path(__file__).parent / "literal_chunk.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", ["kernels", "narrow"])
def test_kernels_are_as_they_are_written(name: str) -> None:
    """The check of types, which wraps what it checks, leaves them alone: else none compiles."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    module = import_module(f"polyfed.train.{name}")
    made = [f for f in vars(module).values() if isinstance(f, (JITFunction, InterpretedFunction))]
    assert made
    assert all(f.fn.__globals__ is vars(module) for f in made)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "widths",
    [
        "30-20-10-4",
        "20-32-7-3",  # one piece of each
        "40-70-18-35-9",  # three, three, two and two, cut short
        "20-300-100-10",
    ],
)
def test_is_the_literal_chunk(widths: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(LITERAL), widths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6


def node(i: int, widths: tuple[int, ...]) -> Node:
    draw = torch.Generator().manual_seed(i)
    with ambient(i):
        net = sigmoid_mlp(*widths)
    x = torch.rand(90 + i, widths[0], generator=draw)
    y = torch.randint(0, widths[-1], (90 + i,), generator=draw)
    return Node(f"N{i}", Data(may_miss_classes=True, train=(x, y)), Model.split(net, all=...))


def phase(lr: float = 0.3, objective: PerSample = SquaredError()) -> Phase:  # noqa: B008
    sgd = Optimiser(name="sgd", lr=lr)
    return Phase(label="s", objective=objective, steps=150, batch=1, optimiser=sgd)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", [(784, 300, 100, 10), (784, 300, 100, 10, 10), (300, 40, 8, 3)])
def test_cuda_is_the_loop(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FusedStepper] = []

    class Seen(FusedStepper):
        def __init__(self, of: Cohort) -> None:
            super().__init__(of)
            made.append(self)

    monkeypatch.setattr(cohort, "FusedStepper", Seen)
    alone = [node(i, widths) for i in range(5)]
    losses = [fit(each, phase(0.1 * (i + 1)), "t").loss for i, each in enumerate(alone)]
    moved = [node(i, widths).working_copy(0, torch.device("cuda"), {}) for i in range(5)]
    jobs = [Job(each, phase(0.1 * (i + 1)), ("t",)) for i, each in enumerate(moved)]
    fitted = fit_cohort(jobs)
    assert made
    assert [f.loss for f in fitted] == pytest.approx(losses, rel=1e-4)
    for one, other in zip(alone, moved, strict=True):
        for p, q in zip(one.model.net.parameters(), other.model.net.parameters(), strict=True):
            assert torch.allclose(p, q.cpu(), atol=2e-5)


def test_where_the_kernel_cannot_be_made_the_steps_are_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*args: object) -> None:
        raise RuntimeError("no such chip\nand more")

    stub = ModuleType("polyfed.train.kernels")
    stub.run_chunk = refuses  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr("polyfed.train.deferred.find_spec", lambda name: name)
    monkeypatch.setattr(FusedStepper, "works", True)
    short = replace(phase(), steps=8)
    one, other = node(0, (300, 9, 8, 3)), node(0, (300, 9, 8, 3))
    fit(one, short, "t")
    for _ in range(2):  # the second says nothing
        of = Cohort([Job(other, short, ("t",))], list(other.model.net.parameters()), graph=True)
        of.begin([Job(other, short, ("t",))])
        with (
            pytest.warns(UserWarning, match="no such chip") if FusedStepper.works else nullcontext()
        ):
            of.run()
        assert isinstance(of.stepper, FusedStepper)
        for p, q in zip(one.model.net.parameters(), other.model.net.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-6)
        other = node(0, (300, 9, 8, 3))


@pytest.mark.parametrize(
    ("widths", "objective", "fits"),
    [
        ((300, 9, 8, 3), SquaredError(), True),
        ((300, 9, 8, 3), CrossEntropy(), False),
        ((300, 9, 8, 7, 3), SquaredError(), True),
        ((300, 9, 3), SquaredError(), False),
        ((300, 600, 300, 3), SquaredError(), False),
    ],
)
def test_which_networks_there_is_a_kernel_for(
    widths: tuple[int, ...],
    objective: PerSample,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polyfed.train.deferred.find_spec", lambda name: name)
    one = node(0, widths)
    with one.model.moving("all") as parameters:
        of = Cohort([Job(one, phase(objective=objective), ("t",))], parameters, graph=True)
        of.begin([Job(one, phase(objective=objective), ("t",))])
        assert can_fuse(of) is fits
        of.graph = False  # on a CPU
        assert not can_fuse(of)

"""What a run came to, and whether two came to the same: for the conformance checks."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed import topologies
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.engines.local import LocalEngine, Settings
from polyfed.engines.progress import Progress
from polyfed.record import Recorder
from polyfed.train.together import Stack

_ARRIVAL = 1e-4  # sums in another order differ by rounding


class BrokenError(Exception):
    """What a check found."""


def spy_on(method: Method, replaced: Mapping[str, Any]) -> Method:
    """The same method, with some of its functions replaced."""
    spied = {"__slots__": (), **{name: staticmethod(f) for name, f in replaced.items()}}
    spy = copy.copy(method)
    object.__setattr__(spy, "__class__", type("Spy", (type(method),), spied))
    return spy


class Keeper(Progress):
    """Copies the run folder after every tick: what a run killed just then leaves behind."""

    def __init__(self, scratch: Path) -> None:
        self.folder, self._scratch = scratch / "run", scratch

    def copy_of(self, tick: int) -> Path:
        """The folder as it was after a tick."""
        return self._scratch / f"after-{tick}"

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Copy it."""
        shutil.copytree(self.folder, self.copy_of(tick))


def engine_for(
    method: Method,
    nodes: Sequence[Node],
    *,
    seed: int = 0,
    absent: Mapping[int, tuple[Name, ...]] | None = None,
    stack: Stack = "never",
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    spied: Mapping[str, Any] | None = None,
) -> LocalEngine:
    """The engine for a run; `spied` replaces some of the method's functions."""
    engine = LocalEngine(
        method,
        nodes,
        topologies.make(method.topologies[0]),
        Settings(seed=seed, absent=absent, stack=stack),
        recorder or Recorder.in_memory(),
        progress or Progress(),
    )
    if spied:
        engine.method = spy_on(method, spied)
    return engine


@dataclass(frozen=True)
class Outcome:
    """What a run came to: models and memories, and its logs without the clock."""

    tensors: Mapping[str, Tensor]
    metrics: Sequence[Mapping[str, Any]]
    ledger: Sequence[Mapping[str, Any]]
    faults: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, engine: LocalEngine) -> Outcome:
        """What an engine that has run came to."""
        tensors: dict[str, Tensor] = {}
        for node in [*engine.nodes.values(), *engine.places.values()]:
            state = node.model.state()
            tensors |= {f"'{name}' of {node.name}": t for name, t in state.items()}
            memory = node.memory
            tensors |= {f"memory '{n}' of {node.name}": t.clone() for n, t in memory.items()}
        recorder = engine.recorder
        crossings = [vars(crossing) for crossing in recorder.ledger.crossings()]
        metrics = [m for m in recorder.metrics.records if "seconds" not in m]
        return cls(tensors, _read(metrics), _read(crossings), _read(recorder.faults.records))


def outcome_of(method: Method, nodes: Sequence[Node], **settings: Any) -> Outcome:
    """Run a method; what it came to."""
    engine = engine_for(method, nodes, **settings)
    engine.run()
    return Outcome.of(engine)


def _read(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records as a folder gives them back: JSON, and its NaN is null."""

    def null(value: str) -> None:
        return None

    return [json.loads(json.dumps(record), parse_constant=null) for record in records]


def check_same(one: Outcome, other: Outcome, what: str) -> None:
    """Raise BrokenError where two runs differ, by a bit or by a record."""
    changed = difference(one.tensors, other.tensors)
    if changed:
        raise BrokenError(f"{what}: {changed}.")
    for log in ("metrics", "ledger", "faults"):
        here, there = getattr(one, log), getattr(other, log)
        if len(here) != len(there):
            raise BrokenError(f"{what}: {len(here)} and {len(there)} records of {log}.")
        for a, b in zip(here, there, strict=True):
            if a != b:
                raise BrokenError(f"{what}: {log} {a} and {b}.")


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The name of the first value that differs, a tensor by a bit; empty if none does."""
    for name in [*one, *other]:
        if not _equal(one.get(name), other.get(name)):
            return name
    return ""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        bits = (one.shape, one.dtype) == (other.shape, other.dtype)
        return bits and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by rounding only."""
    scale = 1.0 + float(one.double().abs().max()) if one.numel() else 1.0
    return one.shape == other.shape and bool(
        ((one.double() - other.double()).abs() <= _ARRIVAL * scale).all()
    )


def check_finite(outcome: Outcome) -> None:
    """Raise BrokenError if a tensor holds NaN or infinity."""
    for name, tensor in outcome.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BrokenError(f"NaN or infinity in {name}.")


def portrait(node: Node) -> dict[str, Any]:
    """Everything about a node that a run could change."""
    net, about = node.model.net, {"seed": node.seed, "notes": dict(node.notes)}
    tensors = {f"'{name}'": t for name, t in node.model.state().items()}
    tensors |= {f"memory '{name}'": t.clone() for name, t in node.memory.items()}
    for name, split in node.data.items():
        tensors[f"the inputs of '{name}'"] = split.x.clone()
        if split.y is not None:
            tensors[f"the labels of '{name}'"] = split.y.clone()
    modes = {f"the mode of '{name}'": module.training for name, module in net.named_modules()}
    moving = {f"requires_grad of '{name}'": p.requires_grad for name, p in net.named_parameters()}
    return {**about, **tensors, **modes, **moving}

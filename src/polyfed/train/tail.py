"""Phases that move only the last parts of a network: the frozen rest computes once.

    model(x) = tail(front(x)), and front is frozen and in eval mode while tail moves

So what leaves the front stays the same for the whole phase. It is computed once, in large batches,
and the phase becomes one of a small network, the tail, with these outputs as its data: the same
steps to float rounding. The tail is made of the network's own modules under their own names, so
training it trains the network, and what is kept in memory is named as ever.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.model import Model, evaluating
from polyfed.core.phase import CrossEntropy, SquaredError
from polyfed.train.course import Course
from polyfed.train.evaluate import rows_per_batch
from polyfed.train.track import Job

_CPU_ROWS = 64  # at once: beyond, what convolutions put out leaves the caches
_OF_OUTPUTS = (CrossEntropy, SquaredError)  # objectives that see the network's output only


@dataclass(frozen=True)
class Cut:
    """A network in two.

    Attributes:
        front: what rests; it has parameters.
        tail: the parts that move.
    """

    front: nn.Sequential
    tail: Model

    def features(self, x: Tensor, most: float) -> Tensor | None:
        """What leaves the front, in the tail's precision, computed in large batches.

        Args:
            x: inputs of the network.
            most: bytes that the features may take; None if they take more, or are not one tensor
                with a row for each input.
        """
        chunks: list[Tensor] = []
        with evaluating(self.front):
            for chunk in x.split(rows_per_batch(x) if x.is_cuda else _CPU_ROWS):
                out = self.tail.compute(self._one_tensor, chunk)
                if out.shape[:1] != chunk.shape[:1]:
                    return None
                if out[:1].numel() * out.element_size() * len(x) > most:
                    return None
                chunks.append(out)
        return torch.cat(chunks)

    def _one_tensor(self, x: Tensor) -> Tensor:
        """What leaves the front, or no rows if that is several tensors."""
        out = self.front(x)
        return out if isinstance(out, Tensor) else x.new_empty(0)


def cut(model: Model, parts: Sequence[str]) -> Cut | None:
    """Cut a network before these parts, if they are the last children of Sequentials.

    Args:
        model: the network.
        parts: the parts that move.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> found = cut(Model.split(net, trunk=..., head="2"), ["head"])
    >>> found.front, found.tail.names()
    (Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (1): ReLU()
    ), ['2.weight', '2.bias'])
    """
    named = {part: modules for part, modules in model.parts.items() if part in parts}
    halves = _halves(model.net, "", {name for modules in named.values() for name in modules})
    if halves is None:
        return None
    front, tail = nn.Sequential(*halves[0]), halves[1]
    same_state = set(tail.state_dict()) == set(model.names(*parts))
    own = [id(p) for p in model.parameters(*parts)]
    same_parameters = [id(p) for p in tail.parameters()] == own
    with model.moving(*parts):
        rests = not any(m.training for m in _working(front))
        moves = all(m.training for m in _working(tail))
    if not (same_state and same_parameters and rests and moves):
        return None
    if not any(True for _ in front.parameters()):
        return None
    return Cut(front, Model(tail, named, model.precision))


def _working(net: nn.Module) -> Iterator[nn.Module]:
    """The modules that may do one thing in training and another in eval mode."""
    return (m for m in net.modules() if type(m) is not nn.Sequential)


def _halves(
    net: nn.Module, prefix: str, moving: set[str]
) -> tuple[list[nn.Module], nn.Sequential] | None:
    """The modules before the first that moves, and a Sequential of the others, with their names."""
    if type(net) is not nn.Sequential or net._forward_hooks or net._forward_pre_hooks:
        return None
    front, tail = list[nn.Module](), OrderedDict[str, nn.Module]()
    for name, child in zip(net._modules, net, strict=True):  # also those that are there twice
        path = f"{prefix}{name}"
        if tail or path in moving:
            tail[name] = child
        elif any(m.startswith(f"{path}.") for m in moving):
            inner = _halves(child, f"{path}.", moving)
            if inner is None:
                return None
            front += inner[0]
            tail[name] = inner[1]
        else:
            front.append(child)
    return front, nn.Sequential(tail)


class Tails:
    """Puts jobs on tails where that is possible; the cuts are kept for later phases."""

    def __init__(self) -> None:
        self._cuts: dict[Hashable, tuple[nn.Module, Cut | None]] = {}  # the network stays alive
        self._made: set[int] = set()

    def made(self, model: Model) -> bool:
        """Whether a model is a tail."""
        return id(model) in self._made

    def take(self, jobs: Sequence[Job], *, least: int, most: float) -> list[tuple[Job, float]]:
        """Every job, on its tail if it has one, and the seconds that this took.

        Args:
            jobs: what is to be trained.
            least: steps of a phase from which it is worth it.
            most: bytes that the features of all of them may take.
        """
        taken = []
        for job in jobs:
            started = time.perf_counter()
            found = self._on_tail(job, most) if _can_gain(job, least) else None
            if found is not None:
                most -= sum(s.x.numel() * s.x.element_size() for s in found.node.data.values())
            taken.append((found or job, time.perf_counter() - started))
        return taken

    def _on_tail(self, job: Job, most: float) -> Job | None:
        model, phase = job.node.model, job.phase
        found = self._cut(model, phase.parts)
        if found is None:
            return None
        found.tail.precision = model.precision
        names = {phase.split, phase.stop.split if phase.stop is not None else phase.split}
        splits: dict[str, Split] = {}
        for name in sorted(names & set(job.node.data)):
            whole = job.node.data[name]
            x = found.features(whole.x, most / len(names))
            if x is None:
                return None
            splits[name] = Split(x, whole.y)
        data = Data(may_miss_classes=True, **splits)
        return replace(job, node=replace(job.node, model=found.tail, data=data))

    def _cut(self, model: Model, parts: tuple[str, ...]) -> Cut | None:
        key = id(model.net), parts, tuple(model.parts.items())
        if key not in self._cuts:
            found = cut(model, parts)
            self._cuts[key] = model.net, found
            if found is not None:
                self._made.add(id(found.tail))
        return self._cuts[key][1]


def _can_gain(job: Job, least: int) -> bool:
    """Whether parts rest, the loss sees only outputs, and every sample is wanted once or more."""
    phase = job.phase
    if not phase.parts or type(phase.objective) not in _OF_OUTPUTS:
        return False
    course = Course(job.node, phase, len(job.node.data[phase.split]), job.path, pairs=False)
    return (course.steps or 0) >= max(2, least, len(course.sizes))

"""Nodes whose networks cannot be stacked, side by side on a GPU: a lane for each.

A lane is a network with its optimiser in memory that stays, so that its step can be a CUDA graph: a
node's tensors are copied in, trained and copied back. The steps of all lanes are one graph with a
branch for each; where a lane has no full batch, the others go on alone. What BatchNorm keeps is
kept, which a stack cannot do. On a CPU the steps are the same, without graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from polyfed.random import ambient
from polyfed.train.course import Course
from polyfed.train.loop import Fitted, _batches, _rest_batchnorm, mean_of, training_split
from polyfed.train.stepper import undisturbed
from polyfed.train.track import Job

_MOST_STEPS = 1 << 14
_WARM = 3  # real steps before a graph is captured
_WORTH_IT = 4  # full batches of a job


def can_take(job: Job) -> bool:
    """Whether a job fits a lane: epochs of a plain loss, and some full batches."""
    phase, length = job.phase, len(training_split(job.node, job.phase))
    steps = (phase.epochs or 0) * (length // phase.batch_size(length))
    is_plain = phase.stop is None and phase.keep is None and not phase.walk
    acts = any(hasattr(phase.objective, name) for name in ("update", "after_step"))
    return is_plain and not acts and length > 1 and _WORTH_IT <= steps < _MOST_STEPS


def lane_key(job: Job, net: Hashable) -> Hashable:
    """Equal for jobs that can use the same lane; `net` is the structure of the network."""
    phase, split = job.phase, training_split(job.node, job.phase)
    y = None if split.y is None else (split.y.shape[1:], split.y.dtype)
    size = phase.batch_size(len(split))
    own = (job.node.model.precision, phase.objective, phase.parts, phase.optimiser)
    return net, *own, size, split.x.shape[1:], split.x.dtype, split.x.device, y


class Lanes:
    """Lanes for jobs with the same key.

    Args:
        jobs: some of them.
        count: how many lanes.
        graph: whether steps become CUDA graphs.
    """

    def __init__(self, jobs: Sequence[Job], count: int, *, graph: bool) -> None:
        self.graph = graph
        self.lanes = [_Lane(job, capturable=graph) for job in jobs[:count]]
        self.together: torch.cuda.CUDAGraph | None = None

    def fit(self, jobs: Sequence[Job]) -> list[Fitted]:
        """Train every job to its end, as many at a time as there are lanes."""
        done: list[Fitted] = []
        for first in range(0, len(jobs), len(self.lanes)):
            done += self._fit(jobs[first : first + len(self.lanes)])
        return done

    def _fit(self, jobs: Sequence[Job]) -> list[Fitted]:
        names = [job.node.name for job in jobs]
        path = ("lanes", *names, "noise", *jobs[0].path)
        busy = self.lanes[: len(jobs)]
        with ambient(jobs[0].node.seed, *path, device=busy[0].x.device):
            for lane, job in zip(busy, jobs, strict=True):
                lane.begin(job)
            left = [lane for lane in busy if lane.next_batch()]
            while left:
                self._step([lane for lane in left if lane.is_full])
                for lane in left:
                    if not lane.is_full:
                        lane.step_short()
                left = [lane for lane in left if lane.next_batch()]
        return [lane.end() for lane in busy]

    def _step(self, full: Sequence[_Lane]) -> None:
        """A step of these lanes, whose batches are in their places."""
        ready = self.graph and all(lane.warmth >= _WARM for lane in full)
        if ready and 1 < len(full) == len(self.lanes):
            if self.together is None:
                self.together = _captured(full)
            self.together.replay()
            return
        for lane in full:
            lane.step_full(graph=ready)


class _Lane:
    """One network, its optimiser and its batch, in memory that stays."""

    def __init__(self, job: Job, *, capturable: bool) -> None:
        split = training_split(job.node, job.phase)
        device, size = split.x.device, job.phase.batch_size(len(split))
        self.model = job.node.model.copy()
        self.objective: Any = job.phase.objective
        self.moving = ExitStack()  # for as long as the lane lives
        self.parameters = self.moving.enter_context(self.model.moving(*job.phase.parts))
        self.optimiser = job.phase.optimiser.build(self.parameters, capturable=capturable)
        self.x = split.x[:size].clone()
        self.y = None if split.y is None else split.y[:size].clone()
        self.losses = torch.zeros(_MOST_STEPS, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.warmth = 0
        self.alone: torch.cuda.CUDAGraph | None = None

    def begin(self, job: Job) -> None:
        """A node moves in; its optimiser is new."""
        self.job, self.split = job, training_split(job.node, job.phase)
        torch._foreach_copy_(self._tensors(), _tensors_of(job))
        for state in self.optimiser.state.values():
            for t in state.values():
                if isinstance(t, Tensor):
                    t.zero_()
        self.at.zero_()
        pairs = _rest_batchnorm(self.model.net, len(self.split))
        self.course = Course(job.node, job.phase, len(self.split), job.path, pairs=pairs)
        self.sizes = list[int]()
        self.num_epochs = 0
        self.batches = self._all_batches()

    def _all_batches(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for order, sizes in self.course:
            self.sizes, self.num_epochs = sizes, self.num_epochs + 1
            yield from _batches(self.split, order.to(self.x.device), sizes)

    def next_batch(self) -> bool:
        """Fetch a batch, a full one to its place; False if there is none left."""
        found = next(self.batches, None)
        if found is None:
            return False
        self.batch = found
        x, y = found
        self.is_full = len(x) == len(self.x)
        if self.is_full:
            self.x.copy_(x)
            if self.y is not None and y is not None:
                self.y.copy_(y)
        return True

    def step_full(self, *, graph: bool) -> None:
        """A step on the batch that is in its place."""
        self.warmth += 1
        if not graph:
            self.step(self.x, self.y)
            return
        if self.alone is None:
            self.alone = _captured([self])
        self.alone.replay()

    def step_short(self) -> None:
        """A step on a batch of another size."""
        self.step(*self.batch)

    def step(self, x: Tensor, y: Tensor | None) -> None:
        """One step; its loss goes to where the counter on the device points."""
        loss = self.objective(self.model, x, y)
        gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimiser.step()
        self.losses.index_copy_(0, self.at, loss.detach().to(self.losses.dtype)[None])
        self.at += 1

    def end(self) -> Fitted:
        """The node moves out."""
        torch._foreach_copy_(_tensors_of(self.job), self._tensors())
        steps = self.course.steps or 0
        last = self.losses[:steps][-len(self.sizes) :] if self.sizes else self.losses[:0]
        loss = mean_of(list(last.unbind()), self.sizes)
        return Fitted(self.job.phase.label, loss, self.num_epochs, steps)

    def _tensors(self) -> list[Tensor]:
        return [t.detach() for t in chain(self.model.net.parameters(), self.model.net.buffers())]


def _tensors_of(job: Job) -> list[Tensor]:
    net = job.node.model.net
    return [t.detach() for t in chain(net.parameters(), net.buffers())]


def _captured(lanes: Sequence[_Lane]) -> torch.cuda.CUDAGraph:
    """A step of every lane, each on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream() for _ in lanes]
    with undisturbed(), torch.cuda.graph(graph):
        trunk = torch.cuda.current_stream()
        for lane, stream in zip(lanes, streams, strict=True):
            stream.wait_stream(trunk)
            with torch.cuda.stream(stream):
                lane.step(lane.x, lane.y)
        for stream in streams:
            trunk.wait_stream(stream)
    return graph

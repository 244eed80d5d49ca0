"""Networks that are not stacked, side by side on a GPU: a lane for each.

A lane is a network with its optimiser in memory that stays, so that its step can be a CUDA graph: a
node's tensors are copied in, trained and copied back. Shuffled data are gathered there, too, and a
step takes the batch to which a counter on the device points. The steps of all lanes are one graph
with a branch for each; where a lane has no full batch, the others go on without it, by a graph of
these, if that is often wanted, or each by one of its own.
What BatchNorm keeps is kept, which a stack cannot do, and convolutions remain what they are, which
a stack makes one in groups. Without graphs the steps are the same.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyfed.core.phase import Rule
from polyfed.errors import first_line
from polyfed.random import ambient
from polyfed.train.course import Course
from polyfed.train.evaluate import mean_loss
from polyfed.train.loop import (
    _GATHER_BYTES,
    Fitted,
    Watch,
    _names_of,
    _rest_batchnorm,
    mean_of,
    training_split,
)
from polyfed.train.stepper import undisturbed
from polyfed.train.track import Job

if TYPE_CHECKING:
    from polyfed.train.narrow import NarrowAdam

_MOST_STEPS = 1 << 14  # of a phase: so many losses can be noted
_WARM = 3  # real steps of a lane before a graph is captured
_WORTH_IT = 20  # steps of a job: a capture takes about as long
_WORTH_IT_ONCE = 100  # if its objective is like no other's: nobody will use that lane again


def can_take(job: Job) -> bool:
    """Whether a job fits a lane: enough steps of a plain loss."""
    phase, length = job.phase, len(training_split(job.node, job.phase))
    acts = any(hasattr(phase.objective, name) for name in ("update", "after_step"))
    if acts or length < 2:
        return False
    steps = Course(job.node, phase, length, job.path, pairs=True).steps or 0
    is_like_others = type(phase.objective).__eq__ is not object.__eq__
    return (_WORTH_IT if is_like_others else _WORTH_IT_ONCE) <= steps <= _MOST_STEPS


def lane_key(job: Job, net: Hashable) -> Hashable:
    """Equal for jobs that can use the same lane; `net` is the structure of the network."""
    phase, split = job.phase, training_split(job.node, job.phase)
    optimiser = replace(phase.optimiser, lr=1.0)  # a lane's rate can be set
    y = None if split.y is None else (split.y.shape[1:], split.y.dtype)
    x = phase.batch_size(len(split)), split.x.shape[1:], split.x.dtype, split.x.device
    model = *job.node.model.parts.items(), job.node.model.precision
    return net, model, phase.objective, phase.parts, optimiser, phase.keep, x, y


class Lanes:
    """Lanes for jobs with the same key.

    Args:
        jobs: some of them.
        count: how many lanes.
        graph: whether steps become CUDA graphs.

    Attributes:
        refusal: why steps could not become graphs; empty if nothing was in the way.
    """

    def __init__(self, jobs: Sequence[Job], count: int, *, graph: bool) -> None:
        self.graph, self.refusal = graph, ""
        self.lanes = [_Lane(job, number, graph) for number, job in enumerate(jobs[:count])]
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._wanted = Counter[tuple[int, ...]]()

    def fit(self, jobs: Sequence[Job]) -> list[Fitted]:
        """Train every job to its end, the longest first; in a lane that is free the next begins."""
        names = [job.node.name for job in jobs]
        who = ("lanes", *names) if len(jobs) > 1 else ("node", *names)  # one: the loop's chance
        lengths = [len(training_split(job.node, job.phase)) for job in jobs]
        waiting = iter(sorted(range(len(jobs)), key=lambda i: -lengths[i]))
        done: dict[int, Fitted] = {}
        device = self.lanes[0].x.device
        with ambient(jobs[0].node.seed, *who, "noise", *jobs[0].path, device=device):
            busy = dict(zip(self.lanes, waiting, strict=False))
            for lane, i in busy.items():
                lane.begin(jobs[i])
            while busy:
                self._step([lane for lane in busy if lane.is_full])
                for lane, i in list(busy.items()):
                    if not lane.is_full:
                        lane.step(*lane.batch)
                    if lane.next_batch():
                        continue
                    done[i] = lane.end()
                    following = next(waiting, None)
                    if following is None:
                        del busy[lane]
                    else:
                        busy[lane] = following
                        lane.begin(jobs[following])
        return [done[i] for i in range(len(jobs))]

    def _step(self, full: Sequence[_Lane]) -> None:
        """A step of these lanes on the batches to which their counters point."""
        graph = self._graph_of(full) if len(full) > 1 else None
        if graph is not None:
            graph.replay()
            return
        for lane in full:
            graph = self._graph_of([lane])
            if graph is not None:
                graph.replay()
            else:
                lane.step_next()
                lane.warmth += 1

    def _graph_of(self, group: Sequence[_Lane]) -> torch.cuda.CUDAGraph | None:
        """The step of these lanes, if it is a graph, or can become one now."""
        key = tuple(lane.number for lane in group)
        if key not in self._graphs and self.graph and self._is_worth_it(group, key):
            try:
                known = next(iter(self._graphs.values()), None)
                self._graphs[key] = _captured(group, None if known is None else known.pool())
            except RuntimeError as error:  # then all go on without; nothing was done meanwhile
                self.graph, self.refusal = False, first_line(error)
                self._graphs.clear()
        return self._graphs.get(key)

    def _is_worth_it(self, group: Sequence[_Lane], key: tuple[int, ...]) -> bool:
        """Of one lane or of all at once, of some when they have often been the ones."""
        if any(lane.warmth < _WARM for lane in group):
            return False
        self._wanted[key] += 1
        return len(group) in (1, len(self.lanes)) or self._wanted[key] > _WORTH_IT


class _Lane:
    """One network, its optimiser and the next batches, in memory that stays."""

    def __init__(self, job: Job, number: int, capturable: bool) -> None:
        split, phase = training_split(job.node, job.phase), job.phase
        self.number, self.warmth = number, 0
        self.size = phase.batch_size(len(split))
        self.model = job.node.model.copy()
        if self.model.precision == "bfloat16" or split.x.is_cuda:  # as GPUs like filters
            self.model.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.objective: Any = phase.objective
        self.parameters = self.model.move(*phase.parts)
        self.narrow = _narrow(job, self.parameters) if capturable else None
        self.kept = dict[str, Tensor]()
        if self.narrow is None:
            self.optimiser = phase.optimiser.build(self.parameters, capturable=capturable)
            if capturable:  # a number would become part of the graph
                for group in self.optimiser.param_groups:
                    group["lr"] = torch.tensor(phase.optimiser.lr, device=split.x.device)
            self.kept = self._states()
        batch = self.size * split.x[:1].numel() * split.x.element_size()
        self.most = max(1, min(_GATHER_BYTES // batch, -(-len(split) // self.size)))
        rows = self.most * self.size + 1  # the last sample may join the batch before it
        self.x = split.x.new_empty(rows, *split.x.shape[1:])
        self.y = None if split.y is None else split.y.new_empty(rows, *split.y.shape[1:])
        self.within = torch.arange(self.size, device=split.x.device)
        self.place = torch.zeros_like(self.within)
        self.losses = torch.zeros(_MOST_STEPS, device=split.x.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=split.x.device)

    def _states(self) -> dict[str, Tensor]:
        """What the optimiser keeps, made by a step; `begin` overwrites whatever that has done."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimiser.step()
        return {
            f"{name}/{entry}": t
            for name, p in zip(_names_of(self.model, self.parameters), self.parameters, strict=True)
            for entry, t in self.optimiser.state[p].items()
            if isinstance(t, Tensor)
        }

    def begin(self, job: Job) -> None:
        """A node moves in, with what it kept of its optimiser, else a new one: zeros."""
        job.shown()
        self.job, self.split = job, training_split(job.node, job.phase)
        torch._foreach_copy_(_tensors(self.model.net), _tensors(job.node.model.net))
        if self.kept:
            torch._foreach_zero_(list(self.kept.values()))
        kept = {} if job.phase.keep is None else job.node.recall(f"optimiser {job.phase.keep}")
        known = [name for name in self.kept if name in kept]
        if known:
            torch._foreach_copy_([self.kept[n] for n in known], [kept[n] for n in known])
        if self.narrow is not None:
            self.narrow.begin(job.phase.optimiser.lr)
        else:
            _set_rate(self.optimiser, job.phase.optimiser.lr)
        self.at.zero_()
        pairs = _rest_batchnorm(self.model.net, len(self.split))
        self.course = Course(job.node, job.phase, len(self.split), job.path, pairs=pairs)
        self.watch = Watch.of(job.node, job.phase)
        self.sizes, self.num_epochs, self.num_steps = list[int](), 0, 0
        self.batches = self._all_batches()
        self.next_batch()

    def _all_batches(self) -> Iterator[slice]:
        """Where they lie, each when the step before it has been made."""
        for order, sizes in self.course:
            self.sizes, self.num_epochs = sizes, self.num_epochs + 1
            order, start = order.to(self.x.device), 0
            for first in range(0, len(sizes), self.most):
                ends = list(accumulate(sizes[first : first + self.most]))
                self._gather(order[start : start + ends[-1]])
                start += ends[-1]
                yield from map(slice, [0, *ends], ends)
            self.num_steps += len(sizes)
            if self.watch is not None and self._is_over(self.watch):
                break

    def _gather(self, index: Tensor) -> None:
        torch.index_select(self.split.x, 0, index, out=self.x[: len(index)])
        if self.y is not None and self.split.y is not None:
            torch.index_select(self.split.y, 0, index, out=self.y[: len(index)])
        self.place.copy_(self.within)

    def _is_over(self, watch: Watch) -> bool:
        loss = mean_loss(self.model, watch.held_out, watch.objective)
        return watch.is_over(loss, lambda: self.model.state(*self.job.phase.parts))

    def next_batch(self) -> bool:
        """Go on to the next batch; False if there is none left."""
        found = next(self.batches, None)
        if found is None:
            return False
        self.is_full = found.stop - found.start == self.size
        if not self.is_full:
            self.batch = self.x[found], None if self.y is None else self.y[found]
        return True

    def step_next(self) -> None:
        """A step on the full batch to which the counter points."""
        y = None if self.y is None else self.y.index_select(0, self.place)
        self.step(self.x.index_select(0, self.place), y)
        self.place += self.size

    def step(self, x: Tensor, y: Tensor | None) -> None:
        """One step; its loss goes to where the counter on the device points."""
        if self.narrow is not None:
            loss = self.narrow.step(self.model, x, y)
        else:
            loss = self.objective(self.model, x, y)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = _strided(gradient, parameter)
            self.optimiser.step()
        self.losses.index_copy_(0, self.at, loss.detach().to(self.losses.dtype)[None])
        self.at += 1

    def end(self) -> Fitted:
        """The node moves out."""
        if self.watch is not None:
            self.model.load(self.watch.state)
        torch._foreach_copy_(_tensors(self.job.node.model.net), _tensors(self.model.net))
        node, phase, steps = self.job.node, self.job.phase, self.num_steps
        if phase.keep is not None:
            plain = torch.contiguous_format
            kept = {name: t.clone(memory_format=plain) for name, t in self.kept.items()}
            node.remember(f"optimiser {phase.keep}", kept)
        loss = mean_of(self.losses[steps - len(self.sizes) : steps], self.sizes)
        fitted = Fitted(phase.label, loss, self.num_epochs, steps)
        del self.job, self.split, self.course, self.batches, self.watch
        return fitted


def _tensors(net: nn.Module) -> list[Tensor]:
    """All parameters and buffers, also buffers that are not stored."""
    return [t.detach() for t in chain(net.parameters(), net.buffers())]


def _strided(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A gradient in the layout of its parameter, as fused optimisers need it."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _set_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _narrow(job: Job, parameters: Sequence[Tensor]) -> NarrowAdam | None:
    """Adam in one pass, for a phase in bfloat16 with an Adam of its own, if there is a kernel."""
    chosen, objective = job.phase.optimiser, job.phase.objective
    if chosen.name != "adam" or chosen.weight_decay or job.phase.keep is not None:
        return None
    if job.node.model.precision == "float32" or any(p.dtype != torch.float32 for p in parameters):
        return None
    if isinstance(objective, Rule) or find_spec("triton") is None:
        return None
    from polyfed.train.narrow import NarrowAdam

    try:
        return NarrowAdam(parameters, objective, _MOST_STEPS)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        warnings.warn(f"Adam takes several passes here ({first_line(error)}).", stacklevel=2)
        return None


@lru_cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Always the same for lanes of this number: libraries keep work space for every stream."""
    return torch.cuda.Stream(device)


def _captured(lanes: Sequence[_Lane], pool: Any) -> torch.cuda.CUDAGraph:
    """A step of every lane, each on a stream of its own; `pool` is the memory of other graphs.

    They can share it: they run one after the other, and what they leave lies elsewhere.
    """
    device = lanes[0].x.device
    graph, chance = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(device)
    streams = [_stream(device, lane.number) for lane in lanes]
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),  # put back even if it fails
            undisturbed(),
            torch.cuda.graph(graph, pool=pool),
        ):
            trunk = torch.cuda.current_stream(device)
            for lane, stream in zip(lanes, streams, strict=True):
                stream.wait_stream(trunk)
                with torch.cuda.stream(stream):
                    lane.step_next()
            for stream in streams:
                trunk.wait_stream(stream)
    except RuntimeError:  # the generator would go on believing that it is in the capture
        index = torch.cuda.current_device() if device.index is None else device.index
        own = torch.cuda.default_generators[index]
        own.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
        torch.cuda.set_rng_state(chance, device)
        raise
    return graph

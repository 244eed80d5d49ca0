"""Many nodes as one computation: equal networks, stacked along a new first dimension.

    theta (rows, ...), x (rows, batch, ...)  ->  vmap of the objective  ->  losses (rows,)
    the gradient of their sum is every row's own gradient; one optimiser steps all rows

All rows step together, so their optimisers agree on the number of steps. A node that is done is
copied out at that moment, and what its row does afterwards is of no account; when half of the rows
are done, the others move to a smaller stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polyfed.core.model import evaluating
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser
from polyfed.random import ambient
from polyfed.train.deferred import DeferredStepper, FusedStepper, can_defer, can_fuse
from polyfed.train.evaluate import rows_per_batch
from polyfed.train.loop import Fitted, training_split
from polyfed.train.stepper import Loss, StackedLayers, Stepper
from polyfed.train.track import Job, Pool, Tensors, Track

_KEPT = (1, 6)  # stacks kept for later phases, on a CPU and on a GPU; there more if they are small
_SMALL = 1 / 8  # as long as this part of its memory is not full


Kept = dict[tuple[Hashable, ...], "Cohort"]


def fit_cohort(
    jobs: Sequence[Job],
    *,
    graph: bool = True,
    kept: Kept | None = None,
    kind: Hashable = None,
    share: float = 1.0,
) -> list[Fitted]:
    """Train nodes with equal networks through equal phases, as one computation.

    Args:
        jobs: what `train.together` found to be alike; optimiser settings may differ.
        graph: use CUDA graphs where there is a GPU.
        kept: stacks of earlier phases, to be used again; grows.
        kind: equal for jobs whose networks and phases are alike; then, if no more stacks can be
            kept, one of other nodes is lent to these.
        share: of a GPU's memory, where others use it, too.

    Raises:
        CannotStackError: before anything has changed.
    """
    kept, key = {} if kept is None else kept, _stack_key(jobs, kind)
    first = jobs[0]
    device = training_split(first.node, first.phase).x.device
    cohort = kept.pop(key, None)
    if cohort is None and kind is not None and _is_full(kept, device, share):
        other = next((k for k in kept if k[1:] == key[1:]), None)
        cohort = None if other is None else kept.pop(other).lend(jobs)
    template = first.node.model if cohort is None else cohort.loss.model
    path = ("cohort", *(job.node.name for job in jobs), "noise", *first.path)
    noise = ambient(first.node.seed, *path, device=device)
    with noise, template.moving(*first.phase.parts) as parameters:
        if cohort is None:
            cohort = Cohort(jobs, parameters, graph=graph and device.type == "cuda")
        cohort.begin(jobs)
        fitted = cohort.run()
    if cohort.is_whole:
        kept[key] = cohort
        while _is_full(kept, device, share, 1):
            del kept[next(iter(kept))]
    return fitted


def _is_full(kept: Kept, device: torch.device, share: float, beyond: int = 0) -> bool:
    """Whether there are as many stacks as should be kept, or so many beyond."""
    if len(kept) < _KEPT[device.type == "cuda"] + beyond:
        return False
    if device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.memory_allocated(device) > total * share * _SMALL


def _stack_key(jobs: Sequence[Job], kind: Hashable) -> tuple[Hashable, ...]:
    """Equal for jobs that can use the same stack again; but for the first, for jobs like them."""
    phase = jobs[0].phase
    nodes: Hashable = tuple(id(j.node.model.net) for j in jobs)
    rows = tuple((j.phase.optimiser, j.phase.batch) for j in jobs)
    alike: Hashable = phase.objective, phase.parts, phase.split, phase.target, phase.keep
    return nodes, kind, rows, alike


def score_cohort(nodes: Sequence[Node], split: str) -> list[float]:
    """Accuracy of nodes with equal networks on their own splits, as one computation."""
    model, net = nodes[0].model, nodes[0].model.net
    tensors = _stacked([_tensors(node) for node in nodes])
    pool = Pool([node.data[split] for node in nodes])
    right = torch.zeros(len(nodes), device=pool.x.device)

    def forward(own: Tensors, x: Tensor) -> Tensor:
        with StackedLayers():
            return model.compute(lambda x: functional_call(net, own, (x,)), x)

    with evaluating(net):
        for index, weight in pool.sweep(rows_per_batch(pool.x)):
            x, y = pool.take(index)
            scores = vmap(forward, randomness="different")(tensors, x)
            hit = scores.argmax(-1).eq(y if y is not None else -1).float()
            right += (hit * weight).sum(1)
    counts = torch.tensor(pool.lengths, dtype=torch.float64)
    return [float(share) for share in (right.cpu().double() / counts).tolist()]


class Cohort:
    """The stack and the tracks of its rows."""

    def __init__(
        self, jobs: Sequence[Job], parameters: Sequence[nn.Parameter], *, graph: bool
    ) -> None:
        self.phase, self.graph = jobs[0].phase, graph
        self.loss = Loss(jobs[0])
        own = {id(p): name for name, p in self.loss.net.named_parameters()}
        self.names = [own[id(p)] for p in parameters]
        owned = [_tensors(job.node) for job in jobs]
        stacked = _stacked(owned)
        self.pairs = {  # of each tensor: its rows in the stack, and the nodes' own
            name: (list(t.unbind(0)), [own[name] for own in owned]) for name, t in stacked.items()
        }
        self.moving = {name: stacked.pop(name).requires_grad_() for name in self.names}
        self.resting = stacked
        self.settings = [job.phase.optimiser for job in jobs]
        self.has_stepped, self.is_whole, self.is_lent = False, True, False
        self.everyone: list[Track] = []
        self.stepper: Stepper | None = None
        self.optimisers: _Optimisers | None = None

    def lend(self, jobs: Sequence[Job]) -> Cohort:
        """Serve other nodes with networks like these."""
        owned = [_tensors(job.node) for job in jobs]
        self.pairs = {
            name: (rows, [own[name] for own in owned]) for name, (rows, _) in self.pairs.items()
        }
        self.is_lent = True
        return self

    def begin(self, jobs: Sequence[Job]) -> None:
        """A new phase of the same nodes: their tensors and tracks, optimisers new or kept."""
        self.everyone = [Track(job) for job in jobs]
        self.rows = list(self.everyone)
        self.weighted = len({t.course.cuts for t in self.rows}) > 1
        if self.optimisers is None:
            self.optimisers = _Optimisers(self)
        else:
            if not self.optimisers.begin(self):
                self.stepper = None  # its graph steps by other tensors
            with torch.no_grad():
                for name, stacked in {**self.moving, **self.resting}.items():
                    torch.stack(self.pairs[name][1], out=stacked)
        if self.stepper is not None and not self.stepper.begin(self.rows):
            self.stepper = None

    def run(self) -> list[Fitted]:
        """Train every row to the end of its track, then write the rows back."""
        self._let_go([track for track in self.rows if track.left == 0])
        while not all(track.is_done for track in self.rows):
            self.stepper = self.stepper or self._new_stepper()
            while not self._is_sparse():
                self.stepper.advance(min(t.left for t in self.rows if not t.is_done))
                ended = [t for t in self.rows if not t.is_done and t.left == 0]
                self._judge([t for t in ended if t.watch is not None])
                self._let_go(ended)
            if not all(track.is_done for track in self.rows):
                self._shrink()
        return [track.fitted() for track in self.everyone]

    def _new_stepper(self) -> Stepper:
        if not can_defer(self):
            return Stepper(self)
        return FusedStepper(self) if can_fuse(self) else DeferredStepper(self)

    def _rows_of(self, tracks: Sequence[Track]) -> list[int]:
        row = {id(track): i for i, track in enumerate(self.rows)}
        return [row[id(track)] for track in tracks]

    def _is_sparse(self) -> bool:
        return 2 * sum(not track.is_done for track in self.rows) <= len(self.rows)

    def _judge(self, tracks: Sequence[Track]) -> None:
        """Early stopping of the rows whose epoch has ended."""
        if not tracks:
            return
        index = torch.tensor(self._rows_of(tracks))
        watches = [t.watch for t in tracks if t.watch is not None]
        pool = Pool([watch.held_out for watch in watches])
        index = index.to(pool.x.device)
        moving = {n: t.detach()[index] for n, t in self.moving.items()}
        resting = {n: t[index] for n, t in self.resting.items()}
        total = torch.zeros(len(tracks), device=pool.x.device)
        with evaluating(self.loss.net):
            for rows, weight in pool.sweep(rows_per_batch(pool.x)):
                x, y = pool.take(rows)
                total += self.loss.of_rows({**moving, **resting}, x, y, weight)
        counts = torch.tensor(pool.lengths, dtype=torch.float64)
        for i, loss in enumerate((total.cpu().double() / counts).tolist()):
            tracks[i].judge(loss, {n: t[i].clone() for n, t in moving.items()})

    def _let_go(self, ended: Sequence[Track]) -> None:
        """Copy out the rows that have come to the end of their tracks."""
        done = [track for track in ended if track.ends()]
        if not done:
            return
        rows = self._rows_of(done)
        with torch.no_grad():
            for name in self.names:
                stacked, owned = self.pairs[name]
                if len(done) == len(stacked) and not any(track.best for track in done):
                    torch._foreach_copy_(owned, stacked)
                    continue
                sources = [
                    track.best[name] if track.best else stacked[row]
                    for track, row in zip(done, rows, strict=True)
                ]
                torch._foreach_copy_([owned[row] for row in rows], sources)
        if self.phase.keep is not None and self.optimisers is not None:
            for track, row in zip(done, rows, strict=True):
                node = track.job.node
                node.remember(f"optimiser {self.phase.keep}", self.optimisers.state_of(row))

    def _shrink(self) -> None:
        """Leave the rows behind that are done."""
        left = [i for i, track in enumerate(self.rows) if not track.is_done]
        index = torch.tensor(left, dtype=torch.int64)
        self.is_whole, self.stepper = False, None
        self.rows = [self.rows[i] for i in left]
        for tensors in (self.moving, self.resting):
            for name, t in tensors.items():
                fewer = t.detach()[index.to(t.device)]
                owned = self.pairs[name][1]
                self.pairs[name] = list(fewer.unbind(0)), [owned[i] for i in left]
                tensors[name] = fewer.requires_grad_(tensors is self.moving)
        if self.optimisers is not None:
            self.optimisers.shrink(left)
            self.optimisers.point_at(self.moving)


class _Optimisers:
    """One optimiser for each stretch of rows with the same settings."""

    def __init__(self, cohort: Cohort) -> None:
        self.names = cohort.names
        self.capturable = cohort.graph
        runs = [(key, len(list(group))) for key, group in itertools.groupby(cohort.settings)]
        ends = list(itertools.accumulate(length for _, length in runs))
        self.stretches = [
            (key, end - length, end) for (key, length), end in zip(runs, ends, strict=True)
        ]
        self.states = [self._kept(cohort, first, last) for _, first, last in self.stretches]
        self.point_at(cohort.moving)

    def point_at(self, moving: Tensors) -> None:
        """Make the optimisers over these tensors, with the states there are."""
        self.built: list[tuple[torch.optim.Optimizer, list[Tensor], int, int]] = []
        for (settings, first, last), state in zip(self.stretches, self.states, strict=True):
            slices = [moving[name].detach()[first:last] for name in self.names]
            optimiser = settings.build(slices, capturable=self.capturable)
            for name, part in zip(self.names, slices, strict=True):
                if name in state:
                    optimiser.state[part] = state[name]
            self.built.append((optimiser, slices, first, last))

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of every row; what has no gradient stays."""
        for optimiser, slices, first, last in self.built:
            for part, gradient in zip(slices, gradients, strict=True):
                if gradient is None:
                    continue
                own = gradient[first:last]
                part.grad = own if own.stride() == part.stride() else own.contiguous()
            optimiser.step()

    def begin(self, cohort: Cohort) -> bool:
        """Take what the nodes kept, else zeros, in place; False if new tensors had to be made."""
        self.states = [self._kept(cohort, first, last) for _, first, last in self.stretches]
        in_place = True
        for (optimiser, slices, *_), kept in zip(self.built, self.states, strict=True):
            for name, part in zip(self.names, slices, strict=True):
                for entry, t in optimiser.state[part].items():
                    if isinstance(t, Tensor):
                        t.zero_() if name not in kept else t.copy_(kept[name][entry])
                in_place &= bool(optimiser.state[part]) or name not in kept
        if not in_place:
            self.point_at(cohort.moving)
        return in_place

    def state_of(self, row: int) -> Tensors:
        """What is kept of one row: `parameter/entry`."""
        kept: Tensors = {}
        for optimiser, slices, first, last in self.built:
            if first <= row < last:
                for name, part in zip(self.names, slices, strict=True):
                    for entry, t in optimiser.state[part].items():
                        if isinstance(t, Tensor):
                            own = t[row - first] if t.dim() else t
                            kept[f"{name}/{entry}"] = own.clone()
        return kept

    def shrink(self, left: Sequence[int]) -> None:
        """Keep these rows only; `point_at` must follow."""
        stretches, states, start = list[tuple[Optimiser, int, int]](), list[Any](), 0
        for (settings, first, last), (optimiser, slices, _, _) in zip(
            self.stretches, self.built, strict=True
        ):
            own = [row - first for row in left if first <= row < last]
            if own:
                stretches.append((settings, start, start + len(own)))
                start += len(own)
                states.append(
                    {
                        name: {
                            entry: t[own] if isinstance(t, Tensor) and t.dim() else t
                            for entry, t in optimiser.state[part].items()
                        }
                        for name, part in zip(self.names, slices, strict=True)
                        if optimiser.state[part]
                    }
                )
        self.stretches, self.states = stretches, states

    def _kept(self, cohort: Cohort, first: int, last: int) -> dict[str, Tensors]:
        """What the nodes of these rows kept from an earlier phase."""
        if cohort.phase.keep is None:
            return {}
        group = f"optimiser {cohort.phase.keep}"
        kept = [track.job.node.recall(group) for track in cohort.rows[first:last]]
        state: dict[str, Tensors] = {}
        for path in kept[0]:
            name, _, entry = path.rpartition("/")
            t = kept[0][path] if entry == "step" else torch.stack([own[path] for own in kept])
            state.setdefault(name, {})[entry] = t.clone()
        return state


def _tensors(node: Node) -> Tensors:
    """All parameters and buffers of a node, also buffers that are not stored."""
    net = node.model.net
    return dict((*net.named_parameters(), *net.named_buffers()))


@torch.no_grad()
def _stacked(owned: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([own[name] for own in owned]) for name in owned[0]}

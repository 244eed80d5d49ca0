"""Many nodes as one computation: equal networks, stacked along a new first dimension.

    theta (rows, ...), x (rows, batch, ...)  ->  vmap of the objective  ->  losses (rows,)
    the gradient of their sum is every row's own gradient; one optimiser steps all rows

All rows step together, and what BatchNorm keeps of them moves with their steps. A node that is done
is copied out at that moment, and what its row does afterwards is of no account. Rows at the end of
the stack that are done are left out of its steps, so the longest should come first; where others
are and they are half of all, the rest moves to a smaller stack.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.model import evaluating
from polyfed.core.node import Node
from polyfed.random import ambient
from polyfed.train.columns import laid_out
from polyfed.train.deferred import DeferredStepper, FusedStepper, can_defer, can_fuse
from polyfed.train.evaluate import rows_per_batch
from polyfed.train.loop import Fitted, training_split
from polyfed.train.optimisers import Optimisers
from polyfed.train.stepper import Loss, StackedLayers, Stepper
from polyfed.train.track import Job, Pool, Tensors, Track
from polyfed.train.unseen import Lines, can_leave_out, decay, put_back, seeing_lines, seen

_KEPT = (1, 6)  # stacks kept for later phases, on a CPU and on a GPU; there more if they are small
_WORTH_A_CAPTURE = 1 << 13  # steps of rows that are done already: then a smaller stack is made
_SMALL = 1 / 8  # as long as this part of its memory is not full, and as much of it is free

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
    cohort, is_lent = kept.pop(key, None), False
    if cohort is None and kind is not None and _is_full(kept, device, share):
        other = next((k for k in kept if k[1:] == key[1:]), None)
        cohort, is_lent = (None, False) if other is None else (kept.pop(other), True)
    if cohort is not None and not can_leave_out(jobs, cohort.lines):
        cohort = None
    elif cohort is not None and is_lent:
        cohort.lend(jobs)
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
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - own
    return own > total * share * _SMALL or free < total * _SMALL


def _stack_key(jobs: Sequence[Job], kind: Hashable) -> tuple[Hashable, ...]:
    """Equal for jobs that can use the same stack again; but for the first, for jobs like them.

    Learning rates may be others.
    """
    phase = jobs[0].phase
    nodes: Hashable = tuple(id(j.node.model.net) for j in jobs)
    rows = tuple((replace(j.phase.optimiser, lr=1.0), j.phase.batch) for j in jobs)
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
        self.counted = _statistics(self.loss.net)
        self.loss.counts = [n for n in self.counted if n.endswith("num_batches_tracked")]
        lines = {n: own for n, own in seeing_lines(jobs[0]).items() if n in self.names}
        self.lines = self.loss.lines = lines if can_leave_out(jobs, lines) else {}
        owned = [_tensors(job.node) for job in jobs]
        stacked = {name: laid_out(t) for name, t in _stacked(owned, self.lines).items()}
        self.pairs = {  # of each tensor: its rows in the stack, and the nodes' own
            name: (list(t.unbind(0)), [own[name] for own in owned]) for name, t in stacked.items()
        }
        self.moving = {name: stacked.pop(name).requires_grad_() for name in self.names}
        self.resting = stacked
        self._first: dict[int, tuple[Tensors, Tensors]] = {}
        self.has_stepped, self.is_whole, self.is_lent = False, True, False
        self.everyone: list[Track] = []
        self.stepper: Stepper | None = None
        self.optimisers: Optimisers | None = None

    def lend(self, jobs: Sequence[Job]) -> None:
        """Serve other nodes with networks like these."""
        owned = [_tensors(job.node) for job in jobs]
        self.pairs = {
            name: (rows, [own[name] for own in owned]) for name, (rows, _) in self.pairs.items()
        }
        self.is_lent = True

    def begin(self, jobs: Sequence[Job]) -> None:
        """A new phase of the same nodes: their tensors and tracks, optimisers new or kept."""
        self.everyone = [Track(job) for job in jobs]
        self.rows = list(self.everyone)
        self.settings = [job.phase.optimiser for job in jobs]
        self.weighted = len({t.course.cuts for t in self.rows}) > 1
        if self.optimisers is None:
            self.optimisers = Optimisers(self)
        else:
            if not self.optimisers.begin(self):
                self.stepper = None  # its graph steps by other tensors
            with torch.no_grad():
                for name, stacked in {**self.moving, **self.resting}.items():
                    own = [seen(t, self.lines.get(name)) for t in self.pairs[name][1]]
                    torch.stack(own, out=stacked)
        if self.stepper is not None and not self.stepper.begin(self.rows):
            self.stepper = None

    def run(self) -> list[Fitted]:
        """Train every row to the end of its track, then write the rows back."""
        self._let_go([track for track in self.rows if track.left == 0])
        while going := [i for i, track in enumerate(self.rows) if not track.is_done]:
            self.stepper = self.stepper or self._new_stepper()
            self.stepper.leave_out(going[-1] + 1)
            tracks = [self.rows[i] for i in going]
            if self._is_sparse(tracks, self.stepper.count):
                self._shrink()
                continue
            self.stepper.advance(min(track.left for track in tracks))
            ended = [track for track in tracks if track.left == 0]
            self._judge([track for track in ended if track.watch is not None])
            self._let_go(ended)
        return [track.fitted() for track in self.everyone]

    def first(self, count: int) -> tuple[Tensors, Tensors]:
        """The first rows of what moves, and of what rests."""
        if count == len(self.rows):
            return self.moving, self.resting
        if count not in self._first:
            moving = {n: t.detach()[:count].requires_grad_() for n, t in self.moving.items()}
            self._first[count] = moving, {n: t[:count] for n, t in self.resting.items()}
        return self._first[count]

    def _new_stepper(self) -> Stepper:
        if not can_defer(self):
            return Stepper(self)
        return FusedStepper(self) if can_fuse(self) else DeferredStepper(self)

    def _rows_of(self, tracks: Sequence[Track]) -> list[int]:
        row = {id(track): i for i, track in enumerate(self.rows)}
        return [row[id(track)] for track in tracks]

    def _is_sparse(self, going: Sequence[Track], count: int) -> bool:
        """Whether so few of the rows that are computed go on that the others are left behind."""
        wasted = (count - len(going)) * max(track.steps_left for track in going)
        return 2 * len(going) <= count and (not self.graph or wasted >= _WORTH_A_CAPTURE)

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
            for name in [*self.names, *self.counted]:
                stacked, whole = self.pairs[name]
                owned = [seen(t, self.lines.get(name)) for t in whole]
                if len(done) == len(stacked) and not any(track.best for track in done):
                    torch._foreach_copy_(owned, stacked)
                    continue
                sources = [
                    track.best.get(name, stacked[row])
                    for track, row in zip(done, rows, strict=True)
                ]
                torch._foreach_copy_([owned[row] for row in rows], sources)
        for track, row in zip(done, rows, strict=True):
            node = track.job.node
            named = dict(node.model.net.named_parameters()) if self.lines else {}
            for name, lines in self.lines.items():
                decay(named[name], lines, track.job.phase.optimiser, track.steps_done)
            if self.phase.keep is not None and self.optimisers is not None:
                kept = self.optimisers.state_of(row)
                for path in kept if self.lines else ():
                    name = path.rpartition("/")[0]
                    if name in self.lines:
                        kept[path] = put_back(kept[path], self.lines[name], named[name])
                node.remember(f"optimiser {self.phase.keep}", kept)

    def _shrink(self) -> None:
        """Leave the rows behind that are done."""
        left = [i for i, track in enumerate(self.rows) if not track.is_done]
        index = torch.tensor(left, dtype=torch.int64)
        self.is_whole, self.stepper = False, None
        self.rows = [self.rows[i] for i in left]
        self._first.clear()
        for tensors in (self.moving, self.resting):
            for name, t in tensors.items():
                fewer = laid_out(t.detach()[index.to(t.device)])
                owned = self.pairs[name][1]
                self.pairs[name] = list(fewer.unbind(0)), [owned[i] for i in left]
                tensors[name] = fewer.requires_grad_(tensors is self.moving)
        if self.optimisers is not None:
            self.optimisers.shrink(left, self.moving)


def _statistics(net: nn.Module) -> list[str]:
    """Names of what BatchNorm keeps, where it moves."""
    return [
        f"{name}.{buffer}" if name else buffer
        for name, module in net.named_modules()
        if isinstance(module, _BatchNorm) and module.training
        for buffer, _ in module.named_buffers()
    ]


def _tensors(node: Node) -> Tensors:
    """All parameters and buffers of a node, also buffers that are not stored."""
    net = node.model.net
    return dict((*net.named_parameters(), *net.named_buffers()))


@torch.no_grad()
def _stacked(owned: Sequence[Tensors], lines: Mapping[str, Lines] | None = None) -> Tensors:
    lines = lines or {}
    return {
        name: torch.stack([seen(own[name], lines.get(name)) for own in owned]) for name in owned[0]
    }

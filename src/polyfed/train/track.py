"""What each row of a cohort has of its own: a track through its phase, and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.data import Split
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.train.course import Course
from polyfed.train.loop import Fitted, Watch, moves_batchnorm, training_split

Tensors = dict[str, Tensor]
Places = NDArray[np.int64]
Inside = NDArray[np.float32]

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Job:
    """One node through one phase; `path` names its random streams, `shown` tells of its start."""

    node: Node
    phase: Phase
    path: tuple[str | int, ...]
    shown: Callable[[], None] = field(default=lambda: None, compare=False)


class Track:
    """One node's way through its phase."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.split = training_split(job.node, job.phase)
        num_examples = self.split.x.shape[0]
        pairs = moves_batchnorm(job.node.model, job.phase.parts)
        self.course = Course(job.node, job.phase, num_examples, job.path, pairs=pairs)
        self.watch = Watch.of(job.node, job.phase)
        self.steps_left = self.course.steps or 0
        self.best: Tensors = {}
        self.is_done = self._is_over = False
        self._epochs = iter(self.course)
        self._order, self._sizes = _NOTHING, list[int]()
        self._begun = 0  # batches of this epoch
        self.steps_done = self._num_epochs = self._taken = self._epoch_start = 0
        self._losses: list[tuple[int, Losses, int]] = []
        if self.watch is not None and self.steps_left:
            self._next_epoch()

    @property
    def left(self) -> int:
        """Steps to the end of the track, or of an epoch that is judged."""
        return self.steps_left if self.watch is None else len(self._sizes) - self._begun

    def widths(self, count: int) -> list[int]:
        """The sizes of the next batches."""
        if self._begun == len(self._sizes):
            self._next_epoch()
        ahead = self._sizes[self._begun : self._begun + count]
        while len(ahead) < count:
            ahead += self.course.sizes[: count - len(ahead)]
        return ahead

    def take(self, count: int, places: Places, inside: Inside | None = None) -> None:
        """Write the samples of the next batches, each from the left of a row.

        Args:
            count: batches.
            places: where to, (count, width).
            inside: becomes 1 where there is a sample, (count, width).
        """
        at = 0
        while at < count:
            if self._begun == len(self._sizes):
                self._next_epoch()
            sizes, begun, order = self._sizes, self._begun, self._order
            size, last = sizes[0], sizes[-1]  # all but the last are equal
            end = min(len(sizes), begun + count - at)
            whole = end - begun - (last != size and end == len(sizes))
            rest = (begun + whole) * size
            places[at : at + whole, :size] = order[begun * size : rest].reshape(whole, size)
            if inside is not None:
                inside[at : at + whole, :size] = 1
            if begun + whole < end:
                places[at + whole, :last] = order[rest : rest + last]
                if inside is not None:
                    inside[at + whole, :last] = 1
            self._taken += end - begun
            self._begun, at = end, at + end - begun

    def add(self, losses: Losses, row: int) -> None:
        """What the steps that were taken came to, in this row."""
        kept = [each for each in self._losses if each[0] + each[1].count > self._epoch_start]
        self._losses = [*kept, (self.steps_done, losses, row)]
        self.steps_done += losses.count
        self.steps_left -= losses.count

    def judge(self, loss: float, state: Tensors) -> None:
        """The end of an epoch: its held-out loss, and where the row stands."""
        if self.watch is not None:
            self._is_over = self.watch.is_over(loss, lambda: state)
            self.best = self.watch.state

    def ends(self) -> bool:
        """Whether the track ends here: then it is done; else its next epoch begins."""
        self.is_done = self._is_over or self.steps_left == 0
        if self.is_done and self.watch is None:
            next(self._epochs, None)  # a walk notes where it stops
        elif not self.is_done:
            self._next_epoch()
        return self.is_done

    def fitted(self) -> Fitted:
        """What the phase came to."""
        values = [
            each.values[row, max(0, self._epoch_start - at) :] for at, each, row in self._losses
        ]
        mean = math.nan
        if values:
            sizes, total = _weights(len(self._sizes), self._sizes[0], self._sizes[-1])
            losses = values[0] if len(values) == 1 else np.concatenate(values)
            mean = float(losses @ sizes / total)
        return Fitted(self.job.phase.label, mean, self._num_epochs, self.steps_done)

    def _next_epoch(self) -> None:
        order, self._sizes = next(self._epochs)
        self._order, self._begun, self._epoch_start = order.numpy(), 0, self._taken
        self._num_epochs += 1


@lru_cache(maxsize=1024)
def _weights(count: int, size: int, last: int) -> tuple[NDArray[np.float64], float]:
    """The sizes of an epoch's batches, all but the last equal, and their sum."""
    sizes = np.full(count, float(size))
    sizes[-1] = last
    return sizes, float(sizes.sum())


class Losses:
    """The losses of some steps of all rows; they leave the device when they are asked for."""

    def __init__(self, losses: Tensor) -> None:
        self.count = losses.shape[1]
        self._losses = losses

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """As numbers: (rows, steps)."""
        values: NDArray[np.float64] = self._losses.double().cpu().numpy()
        return values


class Pool:
    """The data of all rows: what rows share is kept once.

    Args:
        splits: of every row.
        own: keep a copy even of what all rows share, so that it can be refilled.
    """

    def __init__(self, splits: Sequence[Split], *, own: bool = False) -> None:
        self.lengths = [len(split) for split in splits]
        self._x, self._y = _Joined([split.x for split in splits], own), None
        targets = _targets(splits)
        if targets:
            self._y = _Joined(targets, own)
        self.x = self._x.all
        self.y = None if self._y is None else self._y.all

    def refill(self, splits: Sequence[Split]) -> bool:
        """Take other data, in place; False if it cannot be done: then use this pool no more."""
        targets = _targets(splits)
        if (self._y is None) != (not targets):
            return False
        self.lengths = [len(split) for split in splits]
        is_done = self._x.refill([split.x for split in splits])
        return is_done and (self._y is None or self._y.refill(targets))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """The samples of these places in the own data of the first rows: (rows, batch, ...)."""
        x = self.x.index_select(0, (index + self._x.at[: len(index)]).flatten())
        x = x.view(*index.shape, *self.x.shape[1:])
        if self.y is None or self._y is None:
            return x, None
        y = self.y.index_select(0, (index + self._y.at[: len(index)]).flatten())
        return x, y.view(*index.shape, *self.y.shape[1:])

    def sweep(self, num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All places in pieces, and 1 where a row has that many samples, else 0."""
        step = max(1, num_rows // len(self.lengths))
        lengths = torch.tensor(self.lengths, device=self.x.device)[:, None]
        for first in range(0, max(self.lengths), step):
            last = min(first + step, max(self.lengths))
            places = torch.arange(first, last, device=self.x.device)
            inside = places < lengths
            yield places * inside, inside.float()


class _Joined:
    """Tensors of rows one after the other, each once, and where each row's begins, as a column."""

    def __init__(self, tensors: Sequence[Tensor], own: bool) -> None:
        unique, at = _unique(tensors)
        self._tensors, self._is_own = tensors, own or len(unique) > 1
        self.all = torch.cat(unique) if self._is_own else unique[0]
        self.at = at.to(self.all.device)

    def refill(self, tensors: Sequence[Tensor]) -> bool:
        """Others, in place, if they fit."""
        if all(new is old for new, old in zip(tensors, self._tensors, strict=True)):
            return True
        unique, at = _unique(tensors)
        total = sum(map(len, unique))
        alike = all(t.shape[1:] == self.all.shape[1:] and t.dtype == self.all.dtype for t in unique)
        if not self._is_own or not alike or total > len(self.all):
            return False
        torch.cat(unique, out=self.all[:total])
        self.at.copy_(at)
        self._tensors = tensors
        return True


def _unique(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Every tensor once, and where those of the rows begin, as a column."""
    starts: dict[int, int] = {}
    unique: list[Tensor] = []
    total = 0
    for t in tensors:
        if id(t) not in starts:
            starts[id(t)] = total
            unique.append(t)
            total += len(t)
    return unique, torch.tensor([starts[id(t)] for t in tensors])[:, None]


def _targets(splits: Sequence[Split]) -> list[Tensor]:
    return [split.y for split in splits if split.y is not None]

"""The batches of one node through one phase: which samples, in which order, epoch by epoch.

The loop of one node and the stack of many follow the same course, so they train the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.random import stream

_WALK = "walk"


class Course:
    """The epochs of a phase; each is an order of samples and the sizes it is cut into.

    Attributes:
        sizes: batch sizes of a whole epoch; all but the last are equal.
        steps: how many batches the course has in all, if no stopping rule ends it.
    """

    def __init__(
        self,
        node: Node,
        phase: Phase,
        num_examples: int,
        path: tuple[str | int, ...],
        *,
        pairs: bool,
    ) -> None:
        self.node, self.phase, self.num_examples, self.path = node, phase, num_examples, path
        size = phase.batch_size(num_examples)
        self.sizes = _epoch(num_examples, size, pairs, phase.drop_last)
        self.steps = phase.steps if phase.epochs is None else phase.epochs * len(self.sizes)

    @property
    def cuts(self) -> tuple[int, ...]:
        """What decides the size of every batch: equal cuts, equal sizes at every step."""
        start = self._start() if self.phase.walk else (0, 0)
        return start[1], len(self.sizes), self.sizes[0], self.sizes[-1]

    @property
    def widest(self) -> int:
        """The size of the largest batch."""
        return max(self.sizes[0], self.sizes[-1])

    def __iter__(self) -> Iterator[tuple[Tensor, list[int]]]:
        """For each epoch: its samples in order, and the sizes of its batches."""
        return self._walk() if self.phase.walk else self._epochs()

    def _epochs(self) -> Iterator[tuple[Tensor, list[int]]]:
        order = self.node.stream("batches", *self.path)
        left = self.steps or 0
        while left > 0:
            sizes = self.sizes if left >= len(self.sizes) else self.sizes[:left]
            yield self._order(order), sizes
            left -= len(sizes)

    def _order(self, generator: torch.Generator) -> Tensor:
        if not self.phase.shuffle:
            return torch.arange(self.num_examples)
        return torch.randperm(self.num_examples, generator=generator)

    def _walk(self) -> Iterator[tuple[Tensor, list[int]]]:
        """Go on where the last walk over this split stopped; the node remembers where."""
        epoch, first = self._start()
        left = self.steps or 0
        while left > 0:
            own = self.node.seed, self.node.name, self.phase.split, epoch, self.num_examples
            order = _walk_order(*own) if self.phase.shuffle else torch.arange(self.num_examples)
            sizes = self.sizes[first : first + left]
            yield order[first * self.sizes[0] :], sizes
            left -= len(sizes)
            first += len(sizes)
            if first >= len(self.sizes):
                epoch, first = epoch + 1, 0
        self.node.memory[self._key] = torch.tensor([epoch, first])

    @property
    def _key(self) -> str:
        return f"{_WALK}/{self.phase.split}"

    def _start(self) -> tuple[int, int]:
        """The epoch and the batch where a walk goes on."""
        kept = self.node.memory.get(self._key)
        epoch, first = (0, 0) if kept is None else map(int, kept.tolist())
        return (epoch, first) if first < len(self.sizes) else (epoch + 1, 0)


@lru_cache(maxsize=4096)
def _walk_order(seed: int, node: str, split: str, epoch: int, num_examples: int) -> Tensor:
    order = stream(seed, "node", node, "batches", _WALK, split, epoch)
    return torch.randperm(num_examples, generator=order)


@lru_cache(maxsize=1024)
def _epoch(num_examples: int, size: int, pairs: bool, drop_last: bool) -> list[int]:
    """Batch sizes of an epoch; thousands of nodes hold the same list, which nobody changes."""
    sizes = batch_sizes(num_examples, size, pairs=pairs)
    return sizes[:-1] if drop_last and sizes[-1] < sizes[0] else sizes


def batch_sizes(num_examples: int, size: int, *, pairs: bool = False) -> list[int]:
    """Cut an epoch into batches; with `pairs`, a last batch of one joins the one before it.

    >>> batch_sizes(7, 3), batch_sizes(7, 3, pairs=True)
    ([3, 3, 1], [3, 4])
    """
    full, rest = divmod(num_examples, size)
    sizes = [size] * full + ([rest] if rest else [])
    if pairs and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    return sizes

r"""Binary vectors to complete: the task of the associative memory, from an integer k.

    b      = 3 m (k mod s)
    cue    = ones at b, ..., b + m - 1                            shown in training and in tests
    rest   = ones at b + m, ..., b + 2m - 1                       shown in training, then guessed
             or, on a modified node where k mod s = 0, at b + 2m, ..., b + 3m - 1
    noise  = flip the bits (k div s + i (n div z)) mod n, i < z         of all that is shown
    recalled if |c and a| >= |c xor a|                     c = cue and rest, a = what came back

Partial averaging paper, section V.5. Training: k = 0, ..., 8; test: k = 1000, ..., 1099.
Symbols: n = length, m = ones, s = period, z = noise.
Deviations from the paper: its m = 8, n = 50, s = 3 need 3 m s = 72 places, so m is 4 (8 ones in a
complete vector); `wrap` takes places mod n, and then m = 8 can be had. Unstated there: c is free of
noise, and the one vector in three that a modified node completes otherwise is that of k mod s = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError
from polyfed.models.associative import AssociativeMemory
from polyfed.random import ambient
from polyfed.tasks.task import Task, node_names
from polyfed.train import outputs

TRAIN = range(9)
TEST = range(1000, 1100)

Index = Int64[Tensor, " k"]
Vectors = Float[Tensor, "k n"]


@dataclass(frozen=True, kw_only=True)
class BinaryVectors:
    """The generator: a row for each k.

    Attributes:
        length: bits in a vector, n.
        ones: ones in a cue, and as many to guess, m.
        period: number of different vectors, s.
        noise: bits flipped in each vector, z.
        wrap: take places beyond the length from the beginning again.

    >>> BinaryVectors(length=9, ones=1, period=3, noise=0).complete(torch.tensor([1])).tolist()
    [[0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    """

    length: int = 50
    ones: int = 4
    period: int = 3
    noise: int = 2
    wrap: bool = False

    def __post_init__(self) -> None:
        check.at_least(self, "period", 1)
        check.at_least(self, "length", 3)
        check.between(self, "ones", 1, self.length // 3)
        check.between(self, "noise", 0, self.length)
        places = 3 * self.ones * self.period
        if places > self.length and not self.wrap:
            raise ConfigError(
                f"{self.period} vectors with {self.ones} ones to show and {self.ones} to guess "
                f"need 3 * {self.ones} * {self.period} = {places} places, but there are "
                f"{self.length}. Use fewer ones, or wrap=True."
            )

    def cue(self, k: Index) -> Vectors:
        """What a test shows, without noise."""
        return self._ones(k, torch.zeros_like(k))

    def complete(self, k: Index, *, modified: bool = False) -> Vectors:
        """The cue and the rest, without noise."""
        third = 1 + (k % self.period == 0).long() if modified else torch.ones_like(k)
        return self.cue(k) + self._ones(k, third)

    def flipped(self, vectors: Vectors, k: Index) -> Vectors:
        """The vectors with their noise."""
        apart = torch.arange(self.noise, device=k.device) * (self.length // max(1, self.noise))
        places = (k[:, None] // self.period + apart) % self.length
        return (vectors - torch.zeros_like(vectors).scatter(1, places, 1.0)).abs()

    def _ones(self, k: Index, third: Index) -> Vectors:
        """Ones in the given third of the places that belong to k."""
        start = self.ones * (3 * (k % self.period) + third)
        places = (start[:, None] + torch.arange(self.ones, device=k.device)) % self.length
        return torch.zeros(len(k), self.length, device=k.device).scatter(1, places, 1.0)


def is_recalled(actual: Vectors, target: Vectors) -> Bool[Tensor, " k"]:
    """Whether at least as many ones agree as bits differ.

    >>> is_recalled(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    tensor([True])
    """
    return (actual * target).sum(1) >= (actual != target).sum(1)


def recalled(model: Model, x: Vectors, target: Vectors) -> float:
    """Share of the vectors that the network completes well enough."""
    return float(is_recalled(outputs(model, x), target).double().mean())


def score(model: Model, split: Split) -> float:
    """`recalled` on a split whose labels are the complete vectors."""
    if split.y is None:
        raise DataError("recall needs the complete vectors as labels, but this split has none.")
    return recalled(model, split.x, split.y)


@dataclass(frozen=True, kw_only=True)
class Associative(Task):
    """Fifteen memories of the same three vectors; two of them complete one vector otherwise.

    Attributes:
        num_nodes: number of nodes.
        modified: how many of them, the last ones, are modified.
        ones: ones in a cue, and as many to guess.
        flips: bits flipped in each vector.
        wrap: take places beyond the 50 bits from the beginning again, as more than 5 ones need.
        cells: hidden neurons of a network.
    """

    name: ClassVar[str] = "associative"
    title: ClassVar[str] = "binary vectors to complete: fifteen associative memories, two differ"

    num_nodes: int = 15
    modified: int = 2
    ones: int = 4
    flips: int = 2
    wrap: bool = False
    cells: int = 400

    def __post_init__(self) -> None:
        check.at_least(self, "num_nodes", 1)
        check.between(self, "modified", 0, self.num_nodes)
        check.at_least(self, "cells", 1)
        self._vectors()

    def nodes(self, seed: int) -> list[Node]:
        """The federation of a seed; only the initial weights depend on it."""
        ordinary, modified = self._data(modified=False), self._data(modified=True)
        first = self.num_nodes - self.modified
        return [
            Node(name, ordinary if k < first else modified, self._memory(seed, name), score=score)
            for k, name in enumerate(node_names(self.num_nodes))
        ]

    def _vectors(self) -> BinaryVectors:
        return BinaryVectors(ones=self.ones, noise=self.flips, wrap=self.wrap)

    def _data(self, *, modified: bool) -> Data:
        vectors = self._vectors()
        complete = partial(vectors.complete, modified=modified)
        train, test = torch.tensor(TRAIN), torch.tensor(TEST)
        return Data(
            train=vectors.flipped(complete(train), train),
            test=(vectors.flipped(vectors.cue(test), test), complete(test)),
        )

    def _memory(self, seed: int, node: str) -> Model:
        owner = (node,) if self.init == "own" else ()
        with ambient(seed, "init", *owner):
            net = AssociativeMemory(self._vectors().length, self.cells)
        return Model.split(net, hidden="hidden", visible="visible")

"""Digits that some nodes call by other names: related tasks that differ in a known way.

    same       everybody calls a digit what it is
    swap       the first `permuted` nodes exchange 8 and 9
    cycle:R    they move the last R digits round: 10-R -> ... -> 9 -> 10-R; cycle:0 is same
    s3         all permutations of 7, 8 and 9: node k has number k mod 6
    v3e        four nodes: the third exchanges 8 and 9, the fourth also 6 and 7

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section V.3. Node k trains on the k-th stretch
of the training images, in their order; all are tested on the same images, each by its own names.
So the seed decides the initial weights and the order of training, and not the data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError
from polyfed.random import stream
from polyfed.tasks import files
from polyfed.tasks.partition import LabelPermutation
from polyfed.tasks.perceptrons import Perceptrons
from polyfed.tasks.task import data_folder

CLASSES = tuple("0123456789")
_NOBODY = LabelPermutation(())
_FORM = "Use same, swap, cycle:4 (or another number up to 10), s3 or v3e."

Images = tuple[Tensor, Tensor, Tensor, Tensor]  # to train on, their labels, to test on, theirs


def renaming(kind: str, nodes: int, permuted: int) -> LabelPermutation:
    """Who calls the digits by which names.

    >>> renaming("cycle:3", 5, 1).permutations
    ((0, 1, 2, 3, 4, 5, 6, 8, 9, 7),)
    """
    word, _, number = kind.partition(":")
    if kind == "s3":
        every = [(*range(7), *last) for last in permutations((7, 8, 9))]
        return LabelPermutation(tuple(every[k % len(every)] for k in range(nodes)))
    if kind == "v3e":
        plain, swapped = tuple(range(10)), (*range(8), 9, 8)
        return LabelPermutation((plain, plain, swapped, (*range(6), 7, 6, 9, 8)))
    if kind == "swap" or (word == "cycle" and number.isdecimal() and int(number) <= 10):
        length = int(number or 2)
        if length == 1:
            raise ConfigError("kind 'cycle:1' moves one digit round. A cycle has none, or two.")
        around = tuple(range(10 - length, 10))
        return LabelPermutation.cycle(around, permuted) if around and permuted else _NOBODY
    if kind == "same":
        return _NOBODY
    raise ConfigError(f"kind '{kind}' is not understood. {_FORM}")


@dataclass(frozen=True, kw_only=True)
class Permuted(Perceptrons):
    """What the tasks with permuted digits have in common.

    Attributes:
        kind: how digits are renamed: same, swap, cycle:4, s3 or v3e.
        permuted: how many nodes rename them by swap and cycle, the first ones.
    """

    kind: str = "swap"
    permuted: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(self, "permuted", 0, self.num_nodes)
        renames = len(self._renaming().permutations)
        if renames > self.num_nodes:
            raise ConfigError(f"kind '{self.kind}' is for {renames} nodes, got {self.num_nodes}.")

    @abstractmethod
    def source(self) -> tuple[Callable[[Path], Images], Path]:
        """How to read all images, and where they are."""

    def nodes(self, seed: int) -> list[Node]:
        """The federation of a seed."""
        sizes = self.num_nodes, self.train, self.test
        return self.federation(seed, _dealt(*self.source(), *sizes, self._renaming()), CLASSES)

    def _renaming(self) -> LabelPermutation:
        return renaming(self.kind, self.num_nodes, self.permuted)


@dataclass(frozen=True, kw_only=True)
class MnistPermuted(Permuted):
    """MNIST, with the networks and by default the sizes of the paper's section V.3.

    Of the starts that were tried (docs/methods/partial_averaging.md), most of the paper's orderings
    hold with this one: one network for all, from four times Xavier's interval, as Glorot and Bengio
    (2010) have it for logistic units.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
    """

    name: ClassVar[str] = "mnist-permuted"
    title: ClassVar[str] = "MNIST; some nodes permute the labels, as in partial averaging"
    needs_data: ClassVar[bool] = True
    training: ClassVar[Mapping[str, Any]] = {
        "rounds": 30,
        "block": 500,
        "scheme": "784-250-80-10",
        "own_start": False,
    }

    data: Path | None = None
    num_nodes: int = 16
    train: int = 3500
    test: int = 1000
    weights: str = "xavier:4"
    permuted: int = 7

    def source(self) -> tuple[Callable[[Path], Images], Path]:
        """MNIST's idx files."""
        return _mnist, data_folder(self.data, self.name)


@dataclass(frozen=True, kw_only=True)
class DigitsPermuted(Permuted):
    """The embedded digits, 8 x 8: a small copy of the above, in seconds."""

    name: ClassVar[str] = "digits-permuted"
    title: ClassVar[str] = "embedded 8x8 digits; some nodes permute the labels"
    training: ClassVar[Mapping[str, Any]] = {"rounds": 30, "block": 100, "lr": 1.0, "scheme": "80%"}

    num_nodes: int = 4
    train: int = 100
    test: int = 500
    hidden: str = "40=20"
    permuted: int = 2

    def source(self) -> tuple[Callable[[Path], Images], Path]:
        """The digits of scikit-learn."""
        return _digits, Path()


@lru_cache(maxsize=4)  # runs that differ in their seeds only hold the same tensors
def _dealt(
    read: Callable[[Path], Images],
    folder: Path,
    nodes: int,
    train: int,
    test: int,
    names: LabelPermutation,
) -> tuple[Data, ...]:
    x, y, x_test, y_test = read(folder)
    if nodes * train > len(y) or test > len(y_test):
        raise DataError(
            f"{nodes} nodes with train={train} and test={test} need {nodes * train} and {test} "
            f"images; there are {len(y)} to train on and {len(y_test)} to test on. Fix: fewer."
        )
    shared = x_test[:test]
    dealt = []
    for k in range(nodes):
        own = slice(k * train, (k + 1) * train)
        tested = shared, names.relabel(k, y_test[:test])
        dealt.append(Data(train=(x[own], names.relabel(k, y[own])), test=tested))
    return tuple(dealt)


@lru_cache(maxsize=1)  # every federation of them has slices of these
def _mnist(folder: Path) -> Images:
    images = files.mnist(folder)
    train, test = files.official_split(images)
    x = images.x.float() / 255
    return x[train], images.y[train], x[test], images.y[test]


def _digits(_: Path) -> Images:
    """Two thirds to train on, the rest to test on, in a random order that never changes."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(loaded.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=stream(0, "digits", "permuted"))
    train, test = order.split([1200, len(order) - 1200])
    return x[train], y[train], x[test], y[test]

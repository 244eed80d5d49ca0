"""Many tasks on the same inputs: each node learns one yes-or-no attribute of the images.

`AttributeTask` is what such tasks have in common; `Attributes` is the embedded one, on the digits
of `tasks/embedded.py`. Eight of its attributes say something about the digit, four about its ink:
the sum of it, its spread across and down, and how the two go together,

    spread across = sum ink (c - mean c)^2,    slant = sum ink (c - mean c)(r - mean r)         (1)

with ink as shares that sum to 1, r and c = row and column. An image has one of these four if it is
above the median of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.models.cnn import conv_net
from polyfed.random import stream
from polyfed.tasks.embedded import moved_digits
from polyfed.tasks.split import stratified
from polyfed.tasks.task import Task, shortened

DIGITS_WITH: Mapping[str, tuple[int, ...]] = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "high": (5, 6, 7, 8, 9),
    "loop": (0, 6, 8, 9),
    "threefold": (0, 3, 6, 9),
    "square": (0, 1, 4, 9),
    "power-of-two": (1, 2, 4, 8),
    "straight": (1, 4, 7),
}
OF_THE_INK = ("heavy", "wide", "tall", "slanted")
NAMES = (*DIGITS_WITH, *OF_THE_INK)

_FRACTIONS = {"train": 0.25, "val_es": 0.125, "val_rb": 0.125, "test": 0.5}
_QUICK_NODES = 4
_ALL: Mapping[str, Any] = {"rounds": 5, "batch": 0.1, "lr": 3e-3, "local_epochs": 5}
_ALONE = {**_ALL, "init_epochs": 10}
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fedavg-trunk": {**_ALONE, "finetune_epochs": 1},
    "local": _ALONE,
    "joint": {**_ALONE, "batch": 0.03},  # its data are those of all nodes
}
_QUICK = {"rounds": 2, "init_epochs": 1, "local_epochs": 1}

Attribute = Int64[Tensor, "n attributes"]


@dataclass(frozen=True, kw_only=True)
class AttributeTask(Task):
    """One attribute a node.

    Attributes:
        apart: deal the images out, so that each node has its own; else all nodes have all of them.
            All nodes have all test images in both cases.
    """

    apart: bool = False

    def assemble(
        self,
        seed: int,
        names: Sequence[str],
        splits: Mapping[str, tuple[Tensor, Attribute]],
        make: Callable[[], nn.Module],
    ) -> list[Node]:
        """A node for each attribute, from the images of each split and all their attributes.

        Args:
            seed: of the federation.
            names: of the attributes, which are the nodes' names too.
            splits: for each split images, and a column of labels for each attribute.
            make: makes the network of a node.
        """
        held: list[dict[str, Any]] = [{} for _ in names]
        for split, (x, labels) in splits.items():
            order = torch.randperm(len(x), generator=stream(seed, "split", self.name, split))
            shares = order.tensor_split(len(names))
            for k, own in enumerate(held):
                y = labels[:, k].contiguous()
                dealt = self.apart and split != "test"
                own[split] = (x[shares[k]], y[shares[k]]) if dealt else (x, y)
        return [
            Node(
                name,
                Data(may_miss_classes=True, **own),
                self.network(seed, name, make),
                (f"not {name}", name),
            )
            for name, own in zip(names, held, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Attributes(AttributeTask):
    """Twelve attributes of the embedded digits.

    Attributes:
        representation: width of the trunk's output.
    """

    name: ClassVar[str] = "attributes"
    title: ClassVar[str] = "embedded digits: twelve nodes, one yes-or-no attribute each"

    representation: int = 32

    def __post_init__(self) -> None:
        check.positive(self, "representation")

    def nodes(self, seed: int) -> list[Node]:
        """The nodes even, prime, and so on."""
        x, digit = moved_digits()
        labels = attributes_of(x, digit)
        names = NAMES[:_QUICK_NODES] if self.quick else NAMES
        cut = stratified(digit, _FRACTIONS, stream(seed, "split", self.name))
        depth, height, width = x.shape[1:]
        splits = {split: (x[index], labels[index]) for split, index in cut.items()}
        make = partial(
            conv_net,
            (depth, height, width),
            2,
            blocks=2,
            channels=12,
            representation=self.representation,
            relu=True,
        )
        return self.assemble(seed, names, splits, make)

    def recipe(self, method: str) -> Mapping[str, Any]:
        """Settings that suit small images."""
        chosen = _RECIPES.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen


def attributes_of(x: Float[Tensor, "n 1 h w"], digit: Int64[Tensor, " n"]) -> Attribute:
    """All attributes of images, in the order of `NAMES`."""
    of_digits = [torch.isin(digit, torch.tensor(some)) for some in DIGITS_WITH.values()]
    of_ink = [value > value.median() for value in _ink(x)]
    return torch.stack([*of_digits, *of_ink], dim=1).long()


def _ink(x: Float[Tensor, "n 1 h w"]) -> list[Tensor]:
    """Sum of the ink, spread across, spread down, and slant by Eq. (1)."""
    ink = (x[:, 0] + 1).double()
    total = ink.sum((1, 2))
    share = ink / total[:, None, None]
    row, column = (torch.arange(n, dtype=torch.float64) for n in ink.shape[1:])
    down = row - (share.sum(2) @ row)[:, None]
    across = column - (share.sum(1) @ column)[:, None]
    wide = (share.sum(1) * across**2).sum(1)
    tall = (share.sum(2) * down**2).sum(1)
    slant = (share * down[:, :, None] * across[:, None, :]).sum((1, 2))
    return [total, wide, tall, slant]

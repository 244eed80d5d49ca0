"""Handwriting in which every node has a hand of its own: in the place of FEMNIST by writer.

    mnist-writers   a node is a writer of MNIST, one of those with the most digits
    letters-hands   EMNIST's letters, whose writers are not known: equal random shares, each turned
                    and slanted in a way of its node's own

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section V.2, has FEMNIST with 62, 47 and 10
classes: digits stand in for the last, letters (26 classes) for the others. As there, writers with
the most samples come first, all have equally many, and each one's samples are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import DataError
from polyfed.random import stream
from polyfed.tasks import files, more_files
from polyfed.tasks.files import Images
from polyfed.tasks.perceptrons import Perceptrons
from polyfed.tasks.task import data_folder

Pixels = Float[Tensor, "n 1 row column"]


@dataclass(frozen=True, kw_only=True)
class Hands(Perceptrons):
    """What the two have in common; networks start as those of `mnist-permuted`, of the same paper.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
    """

    needs_data: ClassVar[bool] = True

    data: Path | None = None
    num_nodes: int = 16
    weights: str = "xavier:4"

    def cut(self, x: Pixels, y: Tensor) -> Data:
        """The first samples to train on, the next to test on."""
        first, last = self.train, self.train + self.test
        return Data(train=(x[:first], y[:first]), test=(x[first:last], y[first:last]))


@dataclass(frozen=True, kw_only=True)
class MnistWriters(Hands):
    """One writer a node; `writers.npz` must lie beside MNIST's files."""

    name: ClassVar[str] = "mnist-writers"
    title: ClassVar[str] = "MNIST by writer, one a node: in the place of FEMNIST's digits"
    training: ClassVar[Mapping[str, Any]] = {
        "rounds": 200,
        "block": 50,
        "scheme": "784-250-80-10",
        "own_start": False,
    }

    train: int = 100
    test: int = 30

    def nodes(self, seed: int) -> list[Node]:
        """The writers with the most digits; the seed shuffles what each has."""
        images = _read(files.mnist, data_folder(self.data, self.name))
        if images.writers is None:
            raise DataError(
                "task mnist-writers must know who wrote each digit. Fix: put writers.npz beside "
                "MNIST's files."
            )
        counts = images.writers[images.writers >= 0].bincount()
        chosen = counts.argsort(descending=True, stable=True)[: self.num_nodes]
        fewest = int(counts[chosen].min()) if len(chosen) == self.num_nodes else 0
        if fewest < self.train + self.test:
            raise DataError(
                f"train={self.train} and test={self.test} for {self.num_nodes} writers, but the "
                f"last of them has {fewest} digits. Fix: fewer nodes or digits."
            )
        dealt = []
        for writer in chosen.tolist():
            own = (images.writers == writer).nonzero().flatten()
            own = own[torch.randperm(len(own), generator=stream(seed, "writer", writer))]
            dealt.append(self.cut(images.x[own].float() / 255, images.y[own]))
        return self.federation(seed, dealt, images.classes)


@dataclass(frozen=True, kw_only=True)
class LettersHands(Hands):
    """Letters, in a made-up hand for every node.

    Attributes:
        turn: degrees by which a node turns its letters, at most.
        slant: how far a node slants them, at most: sideways for each unit of height.
    """

    name: ClassVar[str] = "letters-hands"
    title: ClassVar[str] = "EMNIST letters in made-up hands: in the place of FEMNIST's letters"
    training: ClassVar[Mapping[str, Any]] = {
        "rounds": 200,
        "block": 180,
        "scheme": "784-250-80-26",
        "own_start": False,
    }

    train: int = 360
    test: int = 60
    turn: float = 15.0
    slant: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(self, "turn", 0, 180)
        check.at_least(self, "slant", 0)

    def nodes(self, seed: int) -> list[Node]:
        """Equal random shares of the letters, each in its node's hand."""
        images = _read(more_files.letters, data_folder(self.data, self.name))
        each = self.train + self.test
        if self.num_nodes * each > len(images.y):
            raise DataError(
                f"train={self.train} and test={self.test} for {self.num_nodes} nodes need "
                f"{self.num_nodes * each} letters, there are {len(images.y)}. Fix: fewer."
            )
        order = torch.randperm(len(images.y), generator=stream(seed, "letters"))
        dealt = []
        for k, own in enumerate(order[: self.num_nodes * each].split(each)):
            angle, slant = 2 * torch.rand(2, generator=stream(seed, "hand", k)) - 1
            turned = turned_by(
                images.x[own].float() / 255,
                math.radians(self.turn) * float(angle),
                self.slant * float(slant),
            )
            dealt.append(self.cut(turned, images.y[own]))
        return self.federation(seed, dealt, images.classes)


def turned_by(x: Pixels, angle: float, slant: float) -> Pixels:
    """Images turned about their middle, then slanted sideways; what comes in from outside is 0.

    Args:
        x: images.
        angle: in radians; positive turns the way clocks do.
        slant: sideways shift to the right for each unit above the middle.
    """
    c, s = math.cos(angle), math.sin(angle)
    # Where each pixel comes from: slant back, then turn back.
    back = torch.tensor([[c, s], [-s, c]]) @ torch.tensor([[1.0, slant], [0.0, 1.0]])
    affine = torch.cat([back, torch.zeros(2, 1)], 1).to(x).expand(len(x), 2, 3)
    grid = functional.affine_grid(affine, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


@lru_cache(maxsize=1)
def _read(read: Callable[[Path], Images], folder: Path) -> Images:
    return read(folder)

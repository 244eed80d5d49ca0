"""Tables as federations: mine fields, hospitals, sensor nodes; a node is a party that exists.

Each node prepares its own table, with what its own train rows say: a missing value becomes their
median, and each feature is shifted and scaled to their mean and standard deviation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.errors import DataError
from polyfed.models.mlp import mlp, sigmoid_mlp
from polyfed.random import stream
from polyfed.tasks import tables
from polyfed.tasks.split import stratified
from polyfed.tasks.tables import Table, fill_missing, standardise
from polyfed.tasks.task import Task, data_folder, shortened
from polyfed.train.evaluate import auc

_FRACTIONS = {"train": 0.5, "val_es": 0.125, "val_rb": 0.125, "test": 0.25}
_ALL: Mapping[str, Any] = {"rounds": 10, "batch": 16, "lr": 1e-3, "local_epochs": 2}
_ALONE = {**_ALL, "init_epochs": 5}
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": _ALL,
    "fedavg-trunk": {**_ALONE, "finetune_epochs": 1},
    "local": _ALONE,
    "joint": _ALONE,
}
_QUICK = {"rounds": 2, "init_epochs": 1}


@dataclass(frozen=True, kw_only=True)
class TableTask(Task):
    """What the three have in common.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
    """

    needs_data: ClassVar[bool] = True
    classes: ClassVar[tuple[str, str]]

    data: Path | None = None

    @abstractmethod
    def read(self, folder: Path) -> list[Table]:
        """The published tables."""

    @abstractmethod
    def make_network(self, features: int) -> nn.Module:
        """The network of a node."""

    def score(self) -> Callable[[Model, Split], float] | None:
        """How well a model does, if not by accuracy."""
        return None

    def splits(self, table: Table, generator: torch.Generator) -> dict[str, Any]:
        """The splits of a node: half to train, a quarter to test, each class cut alike."""
        index = stratified(table.y, _FRACTIONS, generator)
        filled = fill_missing(table.x, table.x[index["train"]])
        x = standardise(filled, filled[index["train"]])
        return {name: (x[i], table.y[i]) for name, i in index.items()}

    def nodes(self, seed: int) -> list[Node]:
        """The parties; the seed decides how each splits its table."""
        nodes = []
        for table in self.read(data_folder(self.data, self.name)):
            pairs = self.splits(table, stream(seed, "split", self.name, table.name))
            make = partial(self.make_network, table.x.shape[1])
            data = Data(may_miss_classes=True, **pairs)
            model = self.network(seed, table.name, make)
            nodes.append(Node(table.name, data, model, self.classes, score=self.score()))
        return nodes

    def recipe(self, method: str) -> Mapping[str, Any]:
        """Settings that suit a few hundred rows."""
        chosen = _RECIPES.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen


@dataclass(frozen=True, kw_only=True)
class _OneLayer(TableTask):
    """A task with a small perceptron.

    Attributes:
        hidden: width of the hidden layer, which is the representation; 0 is a linear model.
    """

    hidden: int = 16

    def __post_init__(self) -> None:
        check.at_least(self, "hidden", 0)

    def make_network(self, features: int) -> nn.Module:
        """A perceptron with one hidden layer, or none."""
        return mlp(features, [self.hidden] if self.hidden else [], 2)


@dataclass(frozen=True, kw_only=True)
class Landmine(_OneLayer):
    """Is there a mine? 29 fields, some with foliage and some bare; 6 % of the objects are mines.

    Attributes:
        measure: accuracy, or the area under the ROC curve: who never says mine is right in
            94 % of all cases, and has an area of one half.
    """

    name: ClassVar[str] = "landmine"
    title: ClassVar[str] = "landmine detection: 29 mine fields, one yes-or-no task each"
    classes: ClassVar[tuple[str, str]] = ("clutter", "mine")

    measure: Literal["accuracy", "auc"] = "accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "measure", ("accuracy", "auc"))

    def read(self, folder: Path) -> list[Table]:
        """The mine fields."""
        return tables.landmine(folder)

    def score(self) -> Callable[[Model, Split], float] | None:
        """The area, if so wished."""
        return auc if self.measure == "auc" else None


@dataclass(frozen=True, kw_only=True)
class Heart(_OneLayer):
    """Is the heart diseased? Four hospitals that measure different things of different patients."""

    name: ClassVar[str] = "heart"
    title: ClassVar[str] = "UCI heart disease: four hospitals, healthy or ill"
    classes: ClassVar[tuple[str, str]] = ("healthy", "ill")

    def read(self, folder: Path) -> list[Table]:
        """The hospitals."""
        return tables.heart(folder)


@dataclass(frozen=True, kw_only=True)
class Vehicle(TableTask):
    """Which of two vehicles passes? Sensor nodes with enough samples, each at its own place.

    Features come standardised for each node. The network is 100=50=20=k of the partial averaging
    paper, section V.4: with one output, sigmoids throughout and labels 0.0 and 1.0, as there; with
    two, ReLU and classes. The paper has 16 nodes with 200 test samples.

    Attributes:
        train: samples to train on; nodes with no more than that are left out.
        test: samples to test on, at most.
        outputs: 1 for a sigmoid, 2 for classes.
    """

    name: ClassVar[str] = "vehicle"
    title: ClassVar[str] = "vehicle sensor network: which of two vehicles passes"
    classes: ClassVar[tuple[str, str]] = ("-1", "+1")

    train: int = 50
    test: int = 200
    outputs: int = 2

    def __post_init__(self) -> None:
        check.at_least(self, "train", 1)
        check.at_least(self, "test", 1)
        check.one_of(self, "outputs", (1, 2))

    def read(self, folder: Path) -> list[Table]:
        """The sensor nodes that have enough samples."""
        found = tables.vehicle(folder)
        large = [table for table in found if len(table.y) > self.train]
        if not large:
            most = max(len(table.y) for table in found)
            raise DataError(
                f"no sensor node has more than train={self.train} samples; the largest has {most}. "
                f"Fix: train of at most {most - 1}."
            )
        return large

    def splits(self, table: Table, generator: torch.Generator) -> dict[str, Any]:
        """The splits of a node: train and test, drawn at random."""
        order = torch.randperm(len(table.y), generator=generator)
        y = table.y if self.outputs == 2 else table.y.float()
        index = {"train": order[: self.train], "test": order[self.train :][: self.test]}
        return {name: (table.x[i], y[i]) for name, i in index.items()}

    def make_network(self, features: int) -> nn.Module:
        """A perceptron with 50 and 20 hidden neurons."""
        if self.outputs == 2:
            return mlp(features, [50, 20], 2)
        return sigmoid_mlp(features, 50, 20, 1)

"""CIFAR-100 and the letters of EMNIST as federations, from their publishers' files.

Loop Improvement's Table 1 has CIFAR-100 with
the 4-layer CNN and ResNet-18: 10 nodes with 10 classes each, or 20 nodes by Dirichlet 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from polyfed.models.cnn import conv_net
from polyfed.models.mlp import mlp
from polyfed.models.named import NetworkName
from polyfed.tasks import more_files
from polyfed.tasks.files import Images
from polyfed.tasks.images import ImageTask, Recipe

_ALL: Recipe = {"rounds": 10, "batch": 32, "lr": 1e-3, "local_epochs": 1}
_RECIPES: Mapping[str, Recipe] = {
    "fedlinked": {**_ALL, "init_epochs": 5, "distil_epochs": 2, "finetune_epochs": 1},
    "fedavg-trunk": {**_ALL, "init_epochs": 5, "finetune_epochs": 1},
    "local": {**_ALL, "init_epochs": 5},
    "joint": {**_ALL, "init_epochs": 5},
    "fedavg": _ALL,
}


@dataclass(frozen=True, kw_only=True)
class Cifar100(ImageTask):
    """Images of a hundred classes, 32 x 32, in colour."""

    name: ClassVar[str] = "cifar100"
    title: ClassVar[str] = "CIFAR-100 by any partition"
    recipes: ClassVar[Mapping[str, Recipe]] = _RECIPES

    partition: str = "dirichlet:0.1"
    num_nodes: int = 20
    heads: Literal["own", "all"] = "all"
    model: Literal["own"] | NetworkName = "cnn"

    def read(self, folder: Path) -> Images:
        """CIFAR-100, binary version."""
        return more_files.cifar100(folder)

    def own_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """FedLinked's network, as for CIFAR-10."""
        return conv_net(image, classes, representation=256, relu=self.relu)


@dataclass(frozen=True, kw_only=True)
class Letters(ImageTask):
    """Handwritten letters, 28 x 28; the task's own network is a perceptron 784-300-100."""

    name: ClassVar[str] = "letters"
    title: ClassVar[str] = "EMNIST letters by any partition"
    recipes: ClassVar[Mapping[str, Recipe]] = _RECIPES

    partition: str = "dirichlet:0.1"
    num_nodes: int = 20
    heads: Literal["own", "all"] = "all"

    def read(self, folder: Path) -> Images:
        """The letters, upright."""
        return more_files.letters(folder)

    def own_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """A perceptron."""
        return mlp(image[0] * image[1] * image[2], [300, 100], classes, relu_trunk=self.relu)

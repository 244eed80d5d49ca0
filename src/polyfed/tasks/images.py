"""CIFAR-10, SVHN and MNIST as federations, from their publishers' files.

CIFAR-10 and SVHN are split as FedLinked splits them (Kadar 2021, section 4.1), unless another
partition is asked for; networks and hyper-parameters are those of its Table 4.4.
Pixels are scaled to [-1, 1].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.models.cnn import conv_net
from polyfed.models.mlp import mlp
from polyfed.models.named import NETWORKS, TINY, NetworkName
from polyfed.random import stream
from polyfed.tasks import files
from polyfed.tasks.deal import deal
from polyfed.tasks.files import Images
from polyfed.tasks.partition import parse
from polyfed.tasks.split import fedlinked_split
from polyfed.tasks.task import Task, data_folder, node_names, part_of, shortened

FEDLINKED = "fedlinked"
_QUICK_SHARE = 12
_QUICK = {
    "rounds": 2,
    "batch": 32,
    "lr": 1e-3,
    "init_epochs": 3,
    "distil_epochs": 2,
    "finetune_epochs": 1,
    "local_epochs": 2,
}

Recipe = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """What the three sets have in common.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
        partition: fedlinked, iid, dirichlet:0.1, pathological:2, classes:0,1/1,2, writer,
            permute:8,9@7.
        num_nodes: number of nodes, where the partition leaves it open.
        public: share of all images set aside without labels, where the partition is not fedlinked.
        public_share: share of the public images that is used.
        label_public: nodes also train on the public images of their own classes, with labels.
        validation: share of a node's images for validation, where the partition is not fedlinked;
            a quarter is for the test.
        heads: an output for every class (whole networks can be averaged) or for own classes.
        relu: a ReLU after the representation of the task's own network.
        model: the task's own network, or another by name.
    """

    needs_data: ClassVar[bool] = True
    groups: ClassVar[tuple[tuple[int, ...], ...]] = ()
    recipes: ClassVar[Mapping[str, Recipe]] = {}

    data: Path | None = None
    partition: str = FEDLINKED
    num_nodes: int = 3
    public: float = 0.1
    public_share: float = 1.0
    label_public: bool = False
    validation: float = 0.1
    heads: Literal["own", "all"] = "own"
    relu: bool = False
    model: Literal["own"] | NetworkName = "own"

    def __post_init__(self) -> None:
        check.at_least(self, "num_nodes", 1)
        check.between(self, "public", 0, 0.9)
        check.between(self, "public_share", 0, 1)
        check.between(self, "validation", 0, 0.5)
        if self.partition != FEDLINKED:
            parse(self.partition)
        elif not self.groups:
            raise ConfigError(
                f"partition {FEDLINKED} names no classes of {self.name}. "
                "Use dirichlet:0.1, pathological:2, classes:0,1/1,2, or iid."
            )
        if self.relu and self.model != "own":
            raise ConfigError(f"relu=True: model {self.model} is as its paper has it.")

    @abstractmethod
    def read(self, folder: Path) -> Images:
        """The published images."""

    @abstractmethod
    def own_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """The network that the task has unless another is named."""

    def make_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """The network of a node; by name and quick, a narrow one."""
        if self.model == "own":
            return self.own_network(image, classes)
        return NETWORKS[self.model](image, classes, **({"width": TINY} if self.quick else {}))

    def nodes(self, seed: int) -> list[Node]:
        """The federation of a seed."""
        images = _cached(self.read, data_folder(self.data, self.name))
        generator = stream(seed, "split", self.name)
        if self.partition == FEDLINKED:
            split = fedlinked_split(images.y, self.groups, generator, totals=images.totals)
            return self._assemble(seed, images, split.nodes, split.public)
        return self._partitioned(seed, images, generator)

    def shortfall(self) -> str:
        """How many of the published images are in the folder, if not all."""
        images = _cached(self.read, data_folder(self.data, self.name))
        is_pool = images.totals is not None and self.partition != FEDLINKED
        whole = sum(images.totals or ()) if is_pool else images.whole
        return part_of(len(images.y), whole, "images")

    def recipe(self, method: str) -> Recipe:
        """Settings that suit the images; for CIFAR-10 and SVHN those of FedLinked's Table 4.4."""
        chosen = self.recipes.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen

    def _partitioned(self, seed: int, images: Images, generator: torch.Generator) -> list[Node]:
        rule = parse(self.partition)
        order = torch.randperm(len(images.y), generator=generator)
        aside = round(self.public * len(order))
        public, rest = order[:aside], order[aside:].sort().values
        writers = None if images.writers is None else images.writers[rest]
        dealt = deal(
            images.y[rest],
            rule,
            self.num_nodes,
            generator,
            validation=self.validation,
            writers=writers,
        )
        splits = [{name: rest[index] for name, index in node.items()} for node in dealt]
        return self._assemble(seed, images, splits, public, rule.relabel, may_miss=True)

    def _assemble(
        self,
        seed: int,
        images: Images,
        splits: Sequence[Mapping[str, Tensor]],
        public: Tensor,
        relabel: Callable[[int, Tensor], Tensor] = lambda k, y: y,
        *,
        may_miss: bool = False,
    ) -> list[Node]:
        used = public[: round(self.public_share * len(public))]
        common = self._pixels(images, used) if len(used) else None
        names = node_names(len(splits))
        nodes = []
        for k, (name, given) in enumerate(zip(names, splits, strict=True)):
            split = {**given, "train": self._with_public(images, given["train"], public)}
            labels = {n: relabel(k, images.y[self._fewer(i)]) for n, i in split.items()}
            held = torch.cat([*labels.values()]).unique()
            own = held if self.heads == "own" else torch.arange(len(images.classes))
            pairs = {
                n: (self._pixels(images, i), torch.searchsorted(own, labels[n]))
                for n, i in split.items()
            }
            classes = tuple(images.classes[c] for c in own.tolist())
            depth, height, width = images.x.shape[1:]
            make = partial(self.make_network, (depth, height, width), len(classes))
            data = Data(may_miss_classes=may_miss or self.quick, public=common, **pairs)
            nodes.append(Node(name, data, self.network(seed, name, make), classes))
        return nodes

    def _with_public(self, images: Images, train: Tensor, public: Tensor) -> Tensor:
        """The training images and, if wanted, the public ones of their classes."""
        if not self.label_public:
            return train
        return torch.cat([train, public[torch.isin(images.y[public], images.y[train])]])

    def _pixels(self, images: Images, index: Tensor) -> Tensor:
        return images.x[self._fewer(index)].float() / 127.5 - 1

    def _fewer(self, index: Tensor) -> Tensor:
        return index[::_QUICK_SHARE] if self.quick else index


@dataclass(frozen=True, kw_only=True)
class _ConvTask(ImageTask):
    """A task with FedLinked's network.

    Attributes:
        blocks: convolution blocks of the task's own network (FedLinked's b).
        channels: channels of its first block (c).
        representation: width of what its trunk puts out (r).
        dropout: after every block (p).
        last_dropout: before the output layer (p_l).
        mirror: the task's own network mirrors images, left to right, at random while it trains.
    """

    blocks: int = 3
    channels: int = 64
    representation: int = 256
    dropout: float = 0.36
    last_dropout: float = 0.79
    mirror: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mirror and self.model != "own":
            raise ConfigError(f"mirror=True: model {self.model} is as its paper has it.")

    def own_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """FedLinked's: 2,194,240 parameters in the trunk for CIFAR-10, 203,280 for SVHN."""
        return conv_net(
            image,
            classes,
            blocks=self.blocks,
            channels=min(16, self.channels) if self.quick else self.channels,
            representation=self.representation,
            dropout=self.dropout,
            last_dropout=min(0.2, self.last_dropout) if self.quick else self.last_dropout,
            relu=self.relu,
            mirror=self.mirror,
        )


_CIFAR10_RECIPES: Mapping[str, Recipe] = {
    "fedlinked": {
        "rounds": 7,
        "lr": 2e-4,
        "batch": 0.02,
        "eta": 2.97,
        "init_epochs": 19,
        "distil_epochs": 18,
        "finetune_epochs": 13,
        "local_epochs": 17,
    },
    "fedavg-trunk": {
        "rounds": 9,
        "lr": 4e-4,
        "batch": 0.03,
        "init_epochs": 16,
        "finetune_epochs": 8,
        "local_epochs": 13,
    },
    "local": {"rounds": 10, "lr": 2e-4, "batch": 0.03, "init_epochs": 24, "local_epochs": 20},
    "joint": {"rounds": 10, "lr": 2e-4, "batch": 0.01, "init_epochs": 24, "local_epochs": 20},
    "fedavg": {"rounds": 9, "lr": 4e-4, "batch": 0.03, "local_epochs": 13},
}


@dataclass(frozen=True, kw_only=True)
class Cifar10(_ConvTask):
    """Images of ten classes, 32 x 32, in colour; two nodes with animals, one with vehicles."""

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "CIFAR-10 as FedLinked splits it, or by any partition"
    groups: ClassVar[tuple[tuple[int, ...], ...]] = ((3, 4, 5, 7), (3, 4, 6), (0, 1, 8, 9))
    recipes: ClassVar[Mapping[str, Recipe]] = _CIFAR10_RECIPES

    def read(self, folder: Path) -> Images:
        """CIFAR-10, binary or python version."""
        return files.cifar10(folder)


_SVHN_RECIPES: Mapping[str, Recipe] = {
    "fedlinked": {
        "rounds": 11,
        "lr": 3e-3,
        "batch": 0.11,
        "patience": 30,  # an epoch is ten steps: with 5, pre-training may stop on its first plateau
        "eta": 2.22,
        "init_epochs": 30,
        "distil_epochs": 48,
        "finetune_epochs": 15,
        "local_epochs": 18,
    },
    "fedavg-trunk": {
        "rounds": 10,
        "lr": 4e-4,
        "batch": 0.01,
        "init_epochs": 16,
        "finetune_epochs": 20,
        "local_epochs": 20,
    },
    "local": {"rounds": 10, "lr": 4e-4, "batch": 0.01, "init_epochs": 15, "local_epochs": 14},
    "joint": {"rounds": 10, "lr": 4e-4, "batch": 0.003, "init_epochs": 15, "local_epochs": 14},
    "fedavg": {"rounds": 10, "lr": 4e-4, "batch": 0.01, "local_epochs": 20},
}


@dataclass(frozen=True, kw_only=True)
class Svhn(_ConvTask):
    """House numbers, 32 x 32, in colour; four digits a node."""

    name: ClassVar[str] = "svhn"
    title: ClassVar[str] = "Street View House Numbers as FedLinked splits it, or by any partition"
    groups: ClassVar[tuple[tuple[int, ...], ...]] = ((0, 5, 6, 9), (0, 3, 6, 8), (1, 2, 4, 7))
    recipes: ClassVar[Mapping[str, Recipe]] = _SVHN_RECIPES

    channels: int = 16
    representation: int = 128
    dropout: float = 0.24
    last_dropout: float = 0.35

    def read(self, folder: Path) -> Images:
        """SVHN's cropped digits, or the pool FedLinked draws from."""
        return files.svhn(folder)


_MNIST_ALL: Recipe = {"rounds": 10, "batch": 32, "lr": 1e-3, "local_epochs": 1}
_MNIST_RECIPES: Mapping[str, Recipe] = {
    "fedlinked": {
        **_MNIST_ALL,
        "init_epochs": 5,
        "distil_epochs": 2,
        "finetune_epochs": 1,
    },
    "fedavg-trunk": {**_MNIST_ALL, "init_epochs": 5, "finetune_epochs": 1},
    "local": {**_MNIST_ALL, "init_epochs": 5},
    "joint": {**_MNIST_ALL, "init_epochs": 5},
    "fedavg": _MNIST_ALL,
}


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageTask):
    """Handwritten digits, 28 x 28; the task's own network is a perceptron 784-512."""

    name: ClassVar[str] = "mnist"
    title: ClassVar[str] = "MNIST by any partition"
    groups: ClassVar[tuple[tuple[int, ...], ...]] = ((0, 5, 6, 9), (0, 3, 6, 8), (1, 2, 4, 7))
    recipes: ClassVar[Mapping[str, Recipe]] = _MNIST_RECIPES

    partition: str = "dirichlet:0.1"
    num_nodes: int = 20
    heads: Literal["own", "all"] = "all"

    def read(self, folder: Path) -> Images:
        """MNIST's idx files."""
        return files.mnist(folder)

    def own_network(self, image: tuple[int, int, int], classes: int) -> nn.Module:
        """A perceptron."""
        return mlp(image[0] * image[1] * image[2], [512], classes, relu_trunk=self.relu)


@lru_cache(maxsize=1)
def _cached(read: Callable[[Path], Images], folder: Path) -> Images:
    return read(folder)

"""Federations of different encoders: images dealt out evenly, a network of another kind each.

    digits-encoders    scikit-learn's digits, 10 x 10: three small encoders, 400 images each, 300
                       public, 297 to test; a minute to train
    cifar10-encoders   CIFAR-10 as in FedFoA's Tables 1 and 2: ResNet-18, VGG-9, AlexNet and
    cifar100-encoders  ResNet-34 with 12,500 images each, the official 10,000 to test; with equal
                       networks, as in its Table 3: --encoders resnet18 --nodes 5

Liu et al., FedFoA, section 4.1 (its number of nodes with equal networks is not stated; 5 is
EasyFL's). All nodes are tested on the same images. Labels are there for supervised methods and for
the evaluation of the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.models.encoders import SMALL_ENCODERS
from polyfed.models.named import NETWORKS, TINY
from polyfed.random import stream
from polyfed.tasks import files, more_files
from polyfed.tasks.embedded import CLASSES, UNLABELLED, moved_digits
from polyfed.tasks.files import Images, official_split
from polyfed.tasks.task import Task, data_folder, node_names, part_of, shortened
from polyfed.train.kinds import with_hub

Recipe = Mapping[str, Any]
_QUICK = {"rounds": 2, "warm_up": 1, "local_epochs": 1, "distil_steps": 5}
_QUICK_SHARE = 100


@dataclass(frozen=True)
class Pools:
    """Images from -1 to 1, their labels, and which of them to learn from or to test on."""

    x: Tensor
    y: Tensor
    learn: Tensor
    test: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EncodersTask(Task):
    """What they have in common.

    Attributes:
        encoders: kinds of networks, with commas between them; nodes take them in turn.
        num_nodes: number of nodes.
        public: images set aside without labels, that all nodes hold; quick, half of them at most.
        probe: the labelled images that features are evaluated by: a node's own, those that any
            node trains on, or all, with those that are set aside.
        hub: a hub that holds them too, with a network of each kind, for the feddf methods.
    """

    kinds: ClassVar[Mapping[Any, Callable[..., nn.Module]]]
    recipes: ClassVar[Mapping[str, Recipe]] = {}

    encoders: str
    num_nodes: int
    public: int = 0
    probe: Literal["own", "trained", "all"] = "own"
    hub: bool = False

    def __post_init__(self) -> None:
        check.at_least(self, "num_nodes", 1)
        check.at_least(self, "public", 0)
        check.one_of(self, "probe", ("own", "trained", "all"))
        for kind in self.encoders.split(","):
            if kind not in self.kinds:
                raise UnknownNameError("encoder", kind, self.kinds)

    @abstractmethod
    def pools(self) -> Pools:
        """The images."""

    def nodes(self, seed: int) -> list[Node]:
        """M0-..., M1-... and so on, named after their encoders."""
        pools = self.pools()
        x, y = pools.x, pools.y
        order = pools.learn[torch.randperm(len(pools.learn), generator=stream(seed, self.name))]
        aside = min(self.public, len(order) // 2) if self.quick else self.public
        if len(order) - aside < self.num_nodes:
            raise ConfigError(
                f"public={self.public} leaves {max(0, len(order) - aside)} of {len(order)} "
                f"images for {self.num_nodes} nodes. Set fewer aside."
            )
        public, rest = order[:aside], order[aside:]
        size = len(rest) // self.num_nodes
        common: Any = {"test": (x[pools.test], y[pools.test])}
        common |= {"public": x[public]} if self.public else {}
        seen = {"trained": rest, "all": order}.get(self.probe)
        common |= {} if seen is None else {"probe": (x[seen], y[seen])}
        kinds = list(islice(cycle(self.encoders.split(",")), self.num_nodes))
        nodes = []
        for k, (name, kind) in enumerate(zip(node_names(self.num_nodes), kinds, strict=True)):
            own = rest[k * size : (k + 1) * size]
            depth, height, width = x.shape[1:]
            make = partial(self._make, kind, (depth, height, width), len(pools.classes))
            data = Data(train=(x[own], y[own]), may_miss_classes=True, **common)
            model = self.network(seed, name, make)
            nodes.append(Node(f"{name}-{kind}", data, model, pools.classes))
        return with_hub(nodes) if self.hub else nodes

    def recipe(self, method: str) -> Recipe:
        """Settings that suit the images."""
        chosen = self.recipes.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen

    def _make(self, kind: str, image: tuple[int, int, int], classes: int) -> nn.Module:
        return self.kinds[kind](image, classes)


_LABELLED: Recipe = {"rounds": 5, "batch": 64, "lr": 2e-3}


@dataclass(frozen=True, kw_only=True)
class DigitsEncoders(EncodersTask):
    """The embedded digits, with three small encoders."""

    name: ClassVar[str] = "digits-encoders"
    title: ClassVar[str] = "embedded digits without labels: three different small encoders"
    kinds: ClassVar[Mapping[Any, Callable[..., nn.Module]]] = SMALL_ENCODERS
    recipes: ClassVar[Mapping[str, Recipe]] = {
        **dict.fromkeys(("byol", "fedbyol", "fedu", "fedema"), UNLABELLED),
        "fedfoa": {**UNLABELLED, "warm_up": 2, "lam": 1e-3},
        "fedmd-ssl": {**UNLABELLED, "public_batch": 64},
        "feddf-ssl": {**UNLABELLED, "public_batch": 64, "distil_steps": 50},
        "local": {**_LABELLED, "init_epochs": 10, "local_epochs": 2},
        "fedmd": {**_LABELLED, "init_epochs": 10, "revisit_epochs": 2, "public_batch": 64},
        "ds-fl": {**_LABELLED, "local_epochs": 2, "distil_epochs": 2, "public_batch": 64},
        "feddf": {**_LABELLED, "local_epochs": 2, "distil_steps": 50, "public_batch": 64},
    }

    encoders: str = "conv,mlp,residual"
    num_nodes: int = 3
    public: int = 300

    def pools(self) -> Pools:
        """1,500 digits to learn from, and 297 to test on."""
        x, y = moved_digits()
        index = torch.randperm(len(y), generator=stream(0, self.name, "test"))
        return Pools(x, y, index[297:], index[:297], CLASSES)


# VGG-9 and AlexNet have no BatchNorm: with a single linear layer for a projector BYOL collapses.
_PUBLISHED_ALL: Recipe = {"rounds": 100, "local_epochs": 5, "projector_hidden": 4096}


@dataclass(frozen=True, kw_only=True)
class PublishedEncoders(EncodersTask):
    """Published images of 32 x 32 pixels, with the four networks of FedFoA's paper.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
    """

    needs_data: ClassVar[bool] = True
    kinds: ClassVar[Mapping[Any, Callable[..., nn.Module]]] = NETWORKS
    recipes: ClassVar[Mapping[str, Recipe]] = {
        **dict.fromkeys(("byol", "fedbyol", "fedu", "fedema", "fedmd-ssl"), _PUBLISHED_ALL),
        "fedfoa": {**_PUBLISHED_ALL, "warm_up": 5},
        "feddf-ssl": {**_PUBLISHED_ALL, "distil_steps": 1000},
    }

    data: Path | None = None
    encoders: str = "resnet18,vgg9,alexnet,resnet34"
    num_nodes: int = 4

    @abstractmethod
    def read(self, folder: Path) -> Images:
        """The published images."""

    def pools(self) -> Pools:
        """The official train and test images."""
        return _pools(self.read, data_folder(self.data, self.name), self.quick)

    def shortfall(self) -> str:
        """How many of the published images are in the folder, if not all."""
        images = self.read(data_folder(self.data, self.name))
        return part_of(len(images.y), images.whole, "images")

    def _make(self, kind: str, image: tuple[int, int, int], classes: int) -> nn.Module:
        return self.kinds[kind](image, classes, **({"width": TINY} if self.quick else {}))


@dataclass(frozen=True, kw_only=True)
class Cifar10Encoders(PublishedEncoders):
    """CIFAR-10."""

    name: ClassVar[str] = "cifar10-encoders"
    title: ClassVar[str] = "CIFAR-10 without labels: ResNet-18, VGG-9, AlexNet, ResNet-34"

    def read(self, folder: Path) -> Images:
        """CIFAR-10, binary or python version."""
        return files.cifar10(folder)


@dataclass(frozen=True, kw_only=True)
class Cifar100Encoders(PublishedEncoders):
    """CIFAR-100."""

    name: ClassVar[str] = "cifar100-encoders"
    title: ClassVar[str] = "CIFAR-100 without labels: ResNet-18, VGG-9, AlexNet, ResNet-34"

    def read(self, folder: Path) -> Images:
        """CIFAR-100, binary version."""
        return more_files.cifar100(folder)


@lru_cache(maxsize=1)
def _pools(read: Callable[[Path], Images], folder: Path, quick: bool) -> Pools:
    images = read(folder)
    learn, test = official_split(images)
    if quick:
        learn, test = learn[::_QUICK_SHARE], test[::_QUICK_SHARE]
    kept = torch.cat([learn, test])
    x, y = images.x[kept].float() / 127.5 - 1, images.y[kept]
    order = torch.arange(len(kept))
    return Pools(x, y, order[: len(learn)], order[len(learn) :], images.classes)

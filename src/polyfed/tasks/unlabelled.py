"""Federations of unlabelled sets: nodes know class proportions, a hub has a few labels.

    nodes   unlabelled sets with known class proportions (tasks/surrogate_sets.py), and a test share
            with equally many images of every class
    hub     labelled images, and a validation split by which the best network is kept

    digits-sets   scikit-learn's digits: 1,100 images in sets, up to 100 labelled, 200 to validate,
                  397 to test; seconds to train
    mnist-sets    MNIST as in Alzahrani 2024, Table 1: 36,000 in sets, up to 12,000 labelled, 12,000
                  to validate, the official 10,000 to test

With `labels` above 0 the nodes know labels instead, of that share of the same images, and there is
no hub: what FedAvg reaches with labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.models.cnn import conv_net
from polyfed.models.digit_model import digit_model
from polyfed.random import stream
from polyfed.tasks import files
from polyfed.tasks.embedded import CLASSES, moved_digits
from polyfed.tasks.surrogate_sets import Sets, SurrogateSets, uniform_shares
from polyfed.tasks.task import Task, data_folder, node_names, shortened
from polyfed.train.surrogate import attach_sets

HUB = "hub"
_AT_HUB = ("fedul-m1", "fedul-m2", "fedul-mgda")
_ON_SETS = ("fedul", *_AT_HUB, "fedllp", "fedpl")
_QUICK = {"rounds": 2, "local_epochs": 1}

Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class Pools:
    """All images, and which of them may be learned from (in the order of the seed) or tested on."""

    x: Tensor
    y: Tensor
    learn: Tensor
    test: Tensor


@dataclass(frozen=True, kw_only=True)
class SetsTask(Task):
    """What both have in common.

    Attributes:
        num_nodes: number of nodes, without the hub.
        sets: unlabelled sets of each node.
        iid: nodes hold all classes alike, or each has mostly two of them.
        overlap: an image may be in several sets of its node.
        pi_noise: error of the known proportions, as of a survey of 1 / pi_noise^2 images a set.
        hub_labels: labelled images at the hub.
        labels: share of their images whose labels the nodes know, for fedavg; then there are
            neither sets nor a hub.
    """

    in_sets: ClassVar[int]  # images
    validation: ClassVar[int]
    most_labels: ClassVar[int]

    num_nodes: int = 5
    sets: int = 10
    iid: bool = True
    overlap: bool = True
    pi_noise: float = 0.0
    hub_labels: int
    labels: float = 0.0

    def __post_init__(self) -> None:
        self._dealer()
        check.between(self, "hub_labels", 0, self.most_labels)
        check.between(self, "labels", 0, 1)

    @abstractmethod
    def pools(self, seed: int) -> Pools:
        """The images."""

    @abstractmethod
    def make_network(self) -> nn.Module:
        """The network of everybody."""

    def nodes(self, seed: int) -> list[Node]:
        """M0, M1, ... and the hub."""
        pools = self.pools(seed)
        x, y = pools.x, pools.y
        in_sets, held_out, labelled = self._cut(pools.learn)
        dealt = self._dealer().deal(y[in_sets], seed, len(CLASSES))
        tests = uniform_shares(y[pools.test], self.num_nodes, stream(seed, "sets", "test"))
        made = []
        for name, own, test in zip(node_names(self.num_nodes), dealt, tests, strict=True):
            index = in_sets[self._known(own, seed, name) if self.labels else own.index]
            train = (x[index], y[index]) if self.labels else x[index]
            tested = x[pools.test[test]], y[pools.test[test]]
            made.append(self._node(seed, name, Data(train=train, test=tested)))
            if not self.labels:
                attach_sets(made[-1], own.sets, own.Pi)
        if not self.labels:
            pairs: Any = {"train": (x[labelled], y[labelled]), "val_rb": (x[held_out], y[held_out])}
            made.append(self._node(seed, HUB, Data(may_miss_classes=True, **pairs)))
        return made

    def _cut(self, learn: Tensor) -> list[Tensor]:
        """Images in sets, to validate, and labelled; fewer labels change nothing else."""
        share = len(learn) / (self.in_sets + self.validation + self.most_labels)
        sizes = [int(share * n) for n in (self.in_sets, self.validation, self.hub_labels)]
        return list(learn[: sum(sizes)].split(sizes))

    def _node(self, seed: int, name: str, data: Data) -> Node:
        return Node(name, data, self.network(seed, name, self.make_network), CLASSES)

    def _known(self, own: Sets, seed: int, name: str) -> Tensor:
        """The images whose labels a node knows, each once."""
        held: Tensor = own.index.unique()
        order = torch.randperm(len(held), generator=stream(seed, "sets", "known", name))
        return held[order[: max(1, round(self.labels * len(held)))]]

    def _dealer(self) -> SurrogateSets:
        return SurrogateSets(
            nodes=self.num_nodes,
            sets=self.sets,
            iid=self.iid,
            overlap=self.overlap,
            noise=self.pi_noise,
        )


# ---- digits --------------------------------------------------------------------------------------

_DIGITS: Recipe = {"rounds": 30, "batch": 32, "lr": 3e-3}


@dataclass(frozen=True, kw_only=True)
class DigitsSets(SetsTask):
    """Embedded digits in unlabelled sets."""

    name: ClassVar[str] = "digits-sets"
    title: ClassVar[str] = "embedded 8x8 digits in unlabelled sets, a few labels at a hub"
    in_sets: ClassVar[int] = 1100
    validation: ClassVar[int] = 200
    most_labels: ClassVar[int] = 100

    hub_labels: int = 100

    def pools(self, seed: int) -> Pools:
        """All 1,797, shuffled."""
        x, y = moved_digits()
        order = torch.randperm(len(y), generator=stream(seed, "sets", "pools"))
        cut = self.in_sets + self.validation + self.most_labels
        return Pools(x, y, order[:cut], order[cut:])

    def make_network(self) -> nn.Module:
        """Two convolutions: a small DigitModel, the paper's network, without BatchNorm."""
        trunk = nn.Sequential(
            *_convolution(1, 16), *_convolution(16, 32), nn.Flatten(), nn.Linear(128, 64), nn.ReLU()
        )
        return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(64, len(CLASSES))))

    def recipe(self, method: str) -> Recipe:
        """Settings that suit a thousand small images."""
        on_sets = {**_DIGITS, "local_epochs": 2}
        recipes: dict[str, Recipe] = dict.fromkeys(_ON_SETS, on_sets)
        recipes |= {name: {**on_sets, "hub_epochs": 2} for name in _AT_HUB}
        recipes |= {"hub-only": {**_DIGITS, "hub_epochs": 5}}
        recipes |= {"fedavg": {**on_sets, "weighting": "uniform"}}
        chosen = recipes.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen


def _convolution(depth: int, following: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(depth, following, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)


# ---- MNIST ---------------------------------------------------------------------------------------

_MEAN, _SD = 0.1307, 0.3081  # of MNIST's pixels, as the paper takes them
_L1 = {10: 1e-5, 20: 5e-6, 40: 2e-6}  # by the number of sets
_QUICK_SHARE = 12


@dataclass(frozen=True, kw_only=True)
class MnistSets(SetsTask):
    """MNIST in unlabelled sets.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
        net: the paper's DigitModel, or a small one: two blocks of FedLinked's network.
    """

    name: ClassVar[str] = "mnist-sets"
    title: ClassVar[str] = "MNIST in unlabelled sets, labels at a hub, as Alzahrani 2024"
    needs_data: ClassVar[bool] = True
    in_sets: ClassVar[int] = 36_000
    validation: ClassVar[int] = 12_000
    most_labels: ClassVar[int] = 12_000

    hub_labels: int = 12_000
    data: Path | None = None
    net: Literal["digit", "cnn"] = "digit"

    def pools(self, seed: int) -> Pools:
        """The official train images, shuffled, and the official test images."""
        images = _mnist(data_folder(self.data, self.name))
        learn, test = files.official_split(images)
        learn = learn[torch.randperm(len(learn), generator=stream(seed, "sets", "pools"))]
        if self.quick:
            learn, test = learn[::_QUICK_SHARE], test[::_QUICK_SHARE]
        kept = torch.cat([learn, test])
        x, order = (images.x[kept].float() / 255 - _MEAN) / _SD, torch.arange(len(kept))
        return Pools(x, images.y[kept], order[: len(learn)], order[len(learn) :])

    def make_network(self) -> nn.Module:
        """DigitModel on the grey image in three equal channels, or the small network."""
        if self.net == "cnn":
            return conv_net((1, 28, 28), len(CLASSES), blocks=2, channels=16, representation=128)
        made = digit_model((3, 28, 28), len(CLASSES), width=8 if self.quick else 64)
        return nn.Sequential(OrderedDict(grey=Repeated(3), **dict(made.named_children())))

    def recipe(self, method: str) -> Recipe:
        """The paper's settings for DigitModel; the small network learns faster."""
        fast = self.net == "cnn" or self.quick
        common = {"rounds": 20 if fast else 100, "batch": 100, "lr": 1e-3 if fast else 1e-4}
        turned = {**common, "rotate": 20.0, "fill": -_MEAN / _SD}
        on_sets = {**turned, "local_epochs": 1, "l1": _L1.get(self.sets, 1e-5)}
        recipes: dict[str, Recipe] = dict.fromkeys(_ON_SETS, on_sets)
        recipes |= {"hub-only": turned, "fedavg": {**common, "weighting": "uniform"}}
        chosen = recipes.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen


class Repeated(nn.Module):
    """A grey image as so many equal channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """The image, `channels` times."""
        return x.expand(-1, self.channels, -1, -1)


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> files.Images:
    return files.mnist(folder)

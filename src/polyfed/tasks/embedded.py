"""Digits: the embedded federation, from scikit-learn's 1,797 images of 8 x 8 pixels.

    three nodes with five digits each, some of them shared; a few labelled images per digit;
    half of all images public and without labels; seconds to train

Every image is moved at random by up to one pixel on a canvas of 10 x 10. Unmoved, the digits are so
easy that sharing gains nothing: raw pixels tell them apart.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (test part).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.node import Node
from polyfed.models.cnn import conv_net
from polyfed.random import stream
from polyfed.tasks.partition import by_value
from polyfed.tasks.task import Task, node_names, shortened

GROUPS = ((0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (6, 7, 8, 9, 0))
CLASSES = tuple("0123456789")
_SIDE = 10  # pixels of the canvas on which the 8 x 8 images move
_VALIDATION = 5  # images per digit in each of the two validation splits

_ALL: Mapping[str, Any] = {"rounds": 5, "batch": 0.2, "lr": 3e-3, "local_epochs": 10}
_ALONE = {**_ALL, "init_epochs": 60, "patience": 10}
UNLABELLED: Mapping[str, Any] = {  # for methods that teach themselves
    "rounds": 10,
    "batch": 64,
    "lr": 2e-3,
    "optimiser": "adam",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "local_epochs": 8,
    "projection": 32,
    "predictor_hidden": 64,
    "target_momentum": 0.95,
    "crop": 0.6,
    "flip": 0.0,
    "jitter": 0.5,
    "neighbours": 20,
}
# The networks here have no BatchNorm, which BYOL needs: the projector has it. 75 images a node.
_SELF_TAUGHT = {
    **UNLABELLED,
    "batch": 25,
    "projection": 16,
    "projector_hidden": 64,
    "neighbours": 5,
}
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fedlinked": {**_ALONE, "distil_epochs": 10, "finetune_epochs": 5},
    "fedavg-trunk": {**_ALONE, "finetune_epochs": 5},
    "local": _ALONE,
    "joint": _ALONE,
    "fedavg": _ALL,
    "fedper": _ALL,
    "lg-fedavg": _ALL,
    "fedala": _ALL,
    "fedbabu": _ALL,
    "ccvr": {**_ALL, "rounds": 6},
    "li": {
        "rounds": 30,
        "batch": 0.2,
        "lr": 3e-3,
        "head_epochs": 2,
        "trunk_epochs": 2,
        "decay_every": 0,
    },
    "cwt": {"rounds": 30, "batch": 0.2, "lr": 1e-3, "local_epochs": 4},
    "fedrep": {"rounds": 5, "batch": 0.2, "lr": 3e-3, "head_epochs": 10, "trunk_epochs": 10},
    "ds-fl": {**_ALL, "distil_epochs": 5, "public_batch": 64},
    "fedmd": {
        "rounds": 5,
        "batch": 0.2,
        "lr": 3e-3,
        "init_epochs": 60,
        "patience": 10,
        "revisit_epochs": 10,
        "public_batch": 64,
    },
    **dict.fromkeys(("byol", "fedbyol", "fedu", "fedema"), _SELF_TAUGHT),
    "fedfoa": {**_SELF_TAUGHT, "warm_up": 2, "lam": 1e-3},
    "fedmd-ssl": {**_SELF_TAUGHT, "public_batch": 64},
}
_QUICK = {
    "rounds": 2,
    "warm_up": 1,
    "init_epochs": 2,
    "distil_epochs": 2,
    "local_epochs": 2,
    "revisit_epochs": 2,
}


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Three nodes with overlapping digits, few labels, and a public set.

    Attributes:
        labels: labelled training images per digit and node.
        heads: an output for every digit (whole networks can be averaged) or for own digits only.
        representation: width of the trunk's output.
    """

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "embedded 8x8 digits: three nodes, overlapping classes, few labels"

    labels: int = 15
    heads: Literal["own", "all"] = "all"
    representation: int = 32

    def __post_init__(self) -> None:
        check.at_least(self, "labels", 1)
        check.positive(self, "representation")

    def nodes(self, seed: int) -> list[Node]:
        """M0, M1 and M2."""
        x, y = moved_digits()
        holders = {c: [k for k, group in enumerate(GROUPS) if c in group] for c in range(10)}
        held: list[dict[str, list[Tensor]]] = [{} for _ in GROUPS]
        public = []
        for c, index in by_value(y, stream(seed, "digits")).items():
            half = len(index) // 2
            public.append(index[:half])
            for k, share in zip(
                holders[c], index[half:].tensor_split(len(holders[c])), strict=True
            ):
                for name, part in self._cut(share).items():
                    held[k].setdefault(name, []).append(part)
        order = torch.cat(public)
        order = order[torch.randperm(len(order), generator=stream(seed, "digits", "public"))]
        common = x[order]
        names = node_names(len(GROUPS))
        return [self._node(seed, names[k], k, held[k], common) for k in range(len(GROUPS))]

    def recipe(self, method: str) -> Mapping[str, Any]:
        """Settings that suit a few hundred small images."""
        chosen = _RECIPES.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen

    def _cut(self, share: Tensor) -> dict[str, Tensor]:
        sizes = [self.labels, _VALIDATION, _VALIDATION]
        if len(share) <= sum(sizes):
            check.between(self, "labels", 1, len(share) - 2 * _VALIDATION - 1)
        parts = share.split([*sizes, len(share) - sum(sizes)])
        return dict(zip(("train", "val_es", "val_rb", "test"), parts, strict=True))

    def _node(
        self, seed: int, name: str, k: int, held: Mapping[str, list[Tensor]], public: Tensor
    ) -> Node:
        x, y = moved_digits()
        own = torch.tensor(sorted(GROUPS[k]))
        label = y if self.heads == "all" else torch.searchsorted(own, y)
        splits: dict[str, Any] = {
            n: Split(x[torch.cat(i)], label[torch.cat(i)]) for n, i in held.items()
        }
        data = Data(**splits, public=public)
        classes = CLASSES if self.heads == "all" else tuple(CLASSES[c] for c in own.tolist())
        make = partial(
            conv_net,
            (1, _SIDE, _SIDE),
            len(classes),
            blocks=2,
            channels=12,
            representation=self.representation,
            dropout=0.1,
            last_dropout=0.3,
        )
        return Node(name, data, self.network(seed, name, make), classes)


@cache
def moved_digits() -> tuple[Tensor, Tensor]:
    """The digits, moved about on a larger canvas, and which digits they are."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32) / 8 - 1
    canvas = torch.full((len(images), 1, _SIDE, _SIDE), -1.0)
    corner = torch.randint(_SIDE - 7, (len(images), 2), generator=stream(0, "digits", "moved"))
    for i, (row, column) in enumerate(corner.tolist()):
        canvas[i, 0, row : row + 8, column : column + 8] = images[i]
    return canvas, torch.tensor(loaded.target, dtype=torch.int64)

"""Digits: the embedded federation, from scikit-learn's 1,797 images of 8 x 8 pixels.

    three nodes, five digits each, two shared with each neighbour; a few labelled images per digit;
    half of all images public and without labels; seconds to train

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
from polyfed.models.mlp import mlp
from polyfed.random import stream
from polyfed.tasks.partition import by_value
from polyfed.tasks.task import Task, node_names

GROUPS = ((0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (6, 7, 8, 9, 0))
CLASSES = tuple("0123456789")
_VALIDATION = 5  # images per digit in each of the two validation splits

_FEDLINKED = {
    "rounds": 10,
    "batch": 16,
    "lr": 2e-3,
    "eta": 1.0,
    "init_epochs": 30,
    "distil_epochs": 10,
    "finetune_epochs": 10,
    "local_epochs": 10,
}
_AVERAGED = {
    "rounds": 10,
    "batch": 16,
    "lr": 2e-3,
    "init_epochs": 30,
    "local_epochs": 10,
}
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fedlinked": _FEDLINKED,
    "fedavg-trunk": _AVERAGED | {"finetune_epochs": 10},
    "local": _AVERAGED,
    "joint": _AVERAGED,
    "fedavg": {"rounds": 10, "batch": 16, "lr": 2e-3, "local_epochs": 10},
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

    labels: int = 8
    heads: Literal["own", "all"] = "all"
    representation: int = 32

    def __post_init__(self) -> None:
        check.at_least(self, "labels", 1)
        check.positive(self, "representation")

    def nodes(self, seed: int) -> list[Node]:
        """M0, M1 and M2."""
        x, y = _images()
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
        return {**chosen, "rounds": 2, "init_epochs": 2} if self.quick and chosen else chosen

    def _cut(self, share: Tensor) -> dict[str, Tensor]:
        sizes = [self.labels, _VALIDATION, _VALIDATION]
        if len(share) <= sum(sizes):
            check.between(self, "labels", 1, len(share) - 2 * _VALIDATION - 1)
        parts = share.split([*sizes, len(share) - sum(sizes)])
        return dict(zip(("train", "val_es", "val_rb", "test"), parts, strict=True))

    def _node(
        self, seed: int, name: str, k: int, held: Mapping[str, list[Tensor]], public: Tensor
    ) -> Node:
        x, y = _images()
        own = torch.tensor(sorted(GROUPS[k]))
        label = y if self.heads == "all" else torch.searchsorted(own, y)
        splits: dict[str, Any] = {
            n: Split(x[torch.cat(i)], label[torch.cat(i)]) for n, i in held.items()
        }
        data = Data(**splits, public=public)
        classes = CLASSES if self.heads == "all" else tuple(CLASSES[c] for c in own.tolist())
        make = partial(mlp, 64, [64, self.representation], len(classes), relu_trunk=False)
        return Node(name, data, self.network(seed, name, make), classes)


@cache
def _images() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 8 - 1
    return x, torch.tensor(loaded.target, dtype=torch.int64)

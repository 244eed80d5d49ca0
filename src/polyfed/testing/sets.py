"""A tiny federation whose nodes know sets instead of labels, with a hub that has labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyfed.core.data import Data, Split
from polyfed.core.node import Node
from polyfed.testing.federations import CLASSES, tiny
from polyfed.train.surrogate import attach_sets

_NAMES = ("east", "north", "west")  # the hub is neither the first nor the last of all names
_SETS = 4


def tiny_sets(seed: int = 0) -> list[Node]:
    """The hub, and the three nodes of `tiny` with their samples in four unlabelled sets each.

    >>> [(node.name, len(node.data["train"])) for node in tiny_sets()]
    [('hub', 27), ('east', 25), ('north', 18), ('west', 33)]
    """
    nodes = tiny(seed)
    return [_hub(nodes), *map(_unlabelled, nodes, _NAMES)]


def _hub(nodes: Sequence[Node]) -> Node:
    """With the labelled validation samples of all."""
    train, val_rb = (_joined([n.data[name] for n in nodes]) for name in ("val_es", "val_rb"))
    return Node("hub", Data(train=train, val_rb=val_rb), nodes[0].model.copy(), CLASSES)


def _joined(splits: Sequence[Split]) -> Split:
    return Split(torch.cat([s.x for s in splits]), torch.cat([_labels(s) for s in splits]))


def _unlabelled(node: Node, name: str) -> Node:
    """Three samples of five are in the set of their class, the others in any of the four."""
    train = node.data["train"]
    y, i = _labels(train), torch.arange(len(train))
    sets = torch.where(i % 5 < 3, y, i // 2 % _SETS)
    counts = torch.zeros(_SETS, len(CLASSES))
    counts.index_put_((sets, y), torch.ones(len(y)), accumulate=True)
    data = Data(train=train.x, test=node.data["test"], public=node.data["public"])
    made = Node(name, data, node.model.copy(), CLASSES)
    attach_sets(made, sets, counts / counts.sum(1, keepdim=True))
    return made


def _labels(split: Split) -> Tensor:
    return torch.as_tensor(split.y)

"""Tiny federations for tests: every feature that a method can trip over, in milliseconds.

Three nodes with equal networks (BatchNorm and dropout in the trunk) and equal class lists, unequal
amounts of data, one of them leaving a last batch of one; all splits, and a public one in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.random import ambient, stream

INPUTS, REPRESENTATION, CLASSES = 6, 5, ("a", "b", "c")
_TRAIN, _HELD_OUT, _PUBLIC = {"M0": 25, "M1": 18, "M2": 33}, 9, 20


def tiny(seed: int = 0) -> list[Node]:
    """Three nodes with a few dozen samples each, and common initial weights.

    >>> [len(node.data["train"]) for node in tiny()]
    [25, 18, 33]
    """
    public = torch.randn(_PUBLIC, INPUTS, generator=stream(seed, "tiny", "public"))
    with ambient(seed, "tiny", "init"):
        net = tiny_net()
    return [
        Node(name, _data(seed, name, count, public), _model(net), CLASSES)
        for name, count in _TRAIN.items()
    ]


def tiny_net() -> nn.Module:
    """A trunk with BatchNorm and dropout, and a linear head."""
    trunk = nn.Sequential(
        nn.Linear(INPUTS, 8, bias=False),  # its gradient would be rounding, and Adam scales that
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(8, REPRESENTATION),
    )
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(REPRESENTATION, len(CLASSES))))


def one_sample(nodes: Sequence[Node]) -> list[Node]:
    """The same federation, but its first node has a single training sample."""
    first = nodes[0]
    train = first.data["train"]
    return [_with(first, train=_rows(train, torch.arange(1))), *nodes[1:]]


def one_class(nodes: Sequence[Node]) -> list[Node]:
    """The same federation, but its first node has samples of one class only."""
    first = nodes[0]
    y = first.data["train"].y
    if y is None or y.dim() != 1 or y.is_floating_point():
        return list(nodes)
    kept = {
        name: _rows(split, (split.y == y[0]).nonzero().squeeze(1))
        for name, split in first.data.items()
        if split.y is not None and split.y.shape[1:] == y.shape[1:]
    }
    return [_with(first, **kept), *nodes[1:]]


def stackable(node: Node) -> Node:
    """The same node without what keeps its network from a stack, or makes a stack random.

    BatchNorm does nothing any more, and dropout drops nothing.
    """
    model = node.model.copy()
    for module in list(model.net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(module, name, nn.Identity())
            elif isinstance(child, _DropoutNd):
                child.p = 0.0
    return replace(node, model=Model(model.net, model.parts))


def _data(seed: int, name: str, count: int, public: Tensor) -> Data:
    generator = stream(seed, "tiny", name)
    centres = 1.5 * torch.randn(len(CLASSES), INPUTS, generator=generator)

    def split(size: int) -> Split:
        y = torch.arange(size) % len(CLASSES)
        return Split(centres[y] + torch.randn(size, INPUTS, generator=generator), y)

    return Data(
        train=split(count),
        val_es=split(_HELD_OUT),
        val_rb=split(_HELD_OUT),
        test=split(_HELD_OUT),
        public=public,
    )


def _model(net: nn.Module) -> Model:
    return Model.split(net, trunk="trunk", head="head").copy()


def _with(node: Node, **splits: Split) -> Node:
    return replace(node, data=Data(may_miss_classes=True, **(dict(node.data) | splits)))


def _rows(split: Split, index: Tensor) -> Split:
    return Split(split.x[index], None if split.y is None else split.y[index])

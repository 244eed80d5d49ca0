"""Kinds of networks: a hub that has one of each, to work with what nodes of that kind send.

Networks are of a kind if their parameters and buffers have the same names, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node

HUB, PUBLIC = "hub", "public"


def with_hub(nodes: Sequence[Node]) -> list[Node]:
    """The same nodes, and a hub with their public inputs and a network of each of their kinds."""
    first: list[Node] = []
    for node in nodes:
        if all(node.model.spec() != known.model.spec() for known in first):
            first.append(node)
    net = nn.ModuleDict({f"kind{i}": node.model.copy().net for i, node in enumerate(first)})
    model = Model.split(net, **{name: name for name in net})
    public: Any = {PUBLIC: nodes[0].data[PUBLIC]} if PUBLIC in nodes[0].data else {}
    return [*nodes, Node(HUB, Data(**public), model, nodes[0].classes)]

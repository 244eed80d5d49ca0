"""A head that is one linear layer: what CCVR retrains and MOCHA relates."""

from __future__ import annotations

from polyfed.core.node import Node
from polyfed.errors import ModelError
from polyfed.methods._averaging import TRUNK
from polyfed.train.agree import parts_beside


def linear_head(node: Node) -> tuple[str, ...]:
    """Names of the head's weight and, if it has one, its bias; raise unless that is all."""
    heads = parts_beside(node, TRUNK)
    width = node.model.output_size(node.data["train"].x[:1], TRUNK)
    shapes = {name: spec.shape for name, spec in node.model.spec(*heads).items()}
    names = sorted(shapes, key=lambda name: -len(shapes[name]))
    outputs = shapes[names[0]][:1] if names else ()
    if [shapes[name] for name in names] not in ([(*outputs, width)], [(*outputs, width), outputs]):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(
            f"the head of node {node.name} ({', '.join(heads)}) must be one linear layer on the "
            f"{width} outputs of the trunk, but holds {listed or 'nothing'}. Leave only the last "
            "layer out of the trunk: Model.split(net, trunk=..., head='fc')."
        )
    return tuple(names)

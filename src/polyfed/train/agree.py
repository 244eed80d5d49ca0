"""Whether nodes can average: the parts they share have the same names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.node import Node
from polyfed.errors import ModelError, UnknownNameError


def parts_beside(node: Node, part: str) -> tuple[str, ...]:
    """The parts of a node's network besides `part`; there must be one, and `part` itself."""
    others = tuple(other for other in node.model.parts if other != part)
    if part not in node.model.parts:
        raise UnknownNameError(f"part of node {node.name}", part, node.model.parts)
    if not others:
        raise ModelError(
            f"the network of node {node.name} is all '{part}'. Name its last layers as a part of "
            f"their own: Model.split(net, {part}=..., head='fc')."
        )
    return others


def check_same_parts(nodes: Sequence[Node], *parts: str) -> None:
    """Raise ModelError, naming the first tensor that differs, unless these parts are alike."""
    first = nodes[0]
    wanted = first.model.spec(*parts)
    what = f"part '{', '.join(parts)}'" if parts else "network"
    for node in nodes[1:]:
        got = node.model.spec(*parts)
        for name in [*wanted, *(n for n in got if n not in wanted)]:
            if wanted.get(name) != got.get(name):
                raise ModelError(
                    f"the {what} of node {node.name} differs from that of {first.name}: '{name}' "
                    f"is {got.get(name, 'missing')} there and {wanted.get(name, 'missing')} here. "
                    "Averaging needs equal shapes; fedlinked does not."
                )

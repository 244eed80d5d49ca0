"""A network as a chain of layers of cells, read from the names and shapes of its tensors.

A tensor with two or four axes (Linear, Conv2d) begins a layer whose cells are its neurons or
channels, and reads the layer before. A vector (bias, BatchNorm's affine and statistics) has a
number for every cell of its layer. A scalar (BatchNorm's counter) belongs to no cell. The order is
that of the state dict, which must be the order in which data passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import Tensor

from polyfed.core.message import TensorSpec
from polyfed.errors import ModelError
from polyfed.maths.scheme import Sizes, counts

Net = str | Mapping[str, Tensor | TensorSpec]
Role = tuple[int, str, int]


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Attributes:
        name: its own, on its node.
        shape: its own, on its node; () belongs to no cell.
        layer: of its cells, of its out cells if it reads; 0 is the input layer.
        reads: whether its second axis is the layer before.
        positions: how many numbers it has for each cell, or pair of cells.
        role: layer, last part of the name, how many of these came before: the same on all nodes.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    reads: bool
    positions: tuple[int, ...]
    role: Role

    @property
    def each(self) -> int:
        """Numbers for each cell, or pair of cells."""
        return prod(self.positions)


@dataclass(frozen=True)
class Chain:
    """Cells in every layer, and the tensors in order."""

    widths: Sizes
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return "=".join(map(str, self.widths))


def read(node: str, net: Net) -> Chain:
    """The layers of a network, from the names and shapes of its tensors."""
    shapes = _shapes(node, net)
    first = next((s for s in shapes.values() if len(s) in (2, 4)), None)
    if first is None:
        raise ModelError(f"the network of {node} has no Linear or Conv2d layer to cut into slices.")
    widths, entries, seen, flattens = [first[1]], [], dict[tuple[int, str], int](), False
    for name, shape in shapes.items():
        reads = len(shape) in (2, 4)
        each = _positions_of(shape, widths[-1], flattens)
        if each is None:
            raise ModelError(
                f"'{name}' of node {node} has shape {list(shape)}, which does not follow a layer "
                f"of {widths[-1]} cells. Slices need Linear and Conv2d layers that form a chain in "
                "the order of their definition: no branches, no groups of channels."
            )
        if reads:
            widths.append(shape[0])
            flattens = len(shape) == 4
        layer, leaf = len(widths) - 1, name.rpartition(".")[2]
        seen[layer, leaf] = seen.get((layer, leaf), -1) + 1
        role = (layer, leaf, seen[layer, leaf])
        entries.append(Entry(name, shape, layer, reads, each, role))
    return Chain(tuple(widths), tuple(entries))


def _shapes(node: str, net: Net) -> dict[str, tuple[int, ...]]:
    if not isinstance(net, str):
        return {name: tuple(tensor.shape) for name, tensor in net.items()}
    widths = counts(net, "=", f"the network of {node}")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (before, width) in enumerate(pairwise(widths), 1):
        shapes |= {f"{layer}.weight": (width, before), f"{layer}.bias": (width,)}
    return shapes


def _positions_of(shape: tuple[int, ...], width: int, flattens: bool) -> tuple[int, ...] | None:
    """How many numbers a tensor has for each cell, or pair of cells; None if it does not fit.

    A convolution has a kernel of them. What follows a convolution may be flattened: then every
    channel is several numbers in a row.
    """
    if not shape:
        return ()
    if len(shape) == 4:
        return shape[2:] if shape[1] == width else None
    if len(shape) > 2 or not width or shape[-1] % width:
        return None
    each = shape[-1] // width
    return (each,) if each == 1 or flattens else None

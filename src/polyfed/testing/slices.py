"""Partial averaging as its paper prints it: dictionaries of neurons, loops, no index arithmetic.

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, Algorithms 1 and 2, one neuron and one model
at a time. What the paper leaves to "index-offset values" is a dictionary: a neuron's key is its
part, its model and its rank in that model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Cell = tuple[str, int]  # model and rank; a local slice has a model of its own
Part = Sequence[Cell]


@dataclass
class Neuron:
    """Activation parameters q, and input weights w: those of each input, one or a kernel."""

    q: list[float] = field(default_factory=list)
    w: dict[Cell, list[float]] = field(default_factory=dict)


Network = dict[tuple[int, Cell], Neuron]


def literal_average(
    states: Mapping[str, Mapping[str, Tensor]],
    cells: Mapping[str, Sequence[Part]],
    depends: Mapping[str, Collection[str]],
    *,
    cross: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """Lines 5 and 6 of Algorithm 1; with `cross` lines 5 to 8 of Algorithm 2.

    Args:
        states: each node's tensors in float64, layer after layer.
        cells: model and rank of each neuron or channel, for every layer of every node.
        depends: all models that a model depends on; of a local one too.
        cross: average between models that do not depend on each other as well.
    """
    N = {p: _neurons(states[p], cells[p]) for p in states}
    M = list(dict.fromkeys(cell[0] for p in N for _, cell in N[p]))
    for m in M:
        _average_model([N[p] for p in N if _implements(N[p], m)], m, depends.get(m, ()))
    for m1 in M if cross else ():
        for m2 in M:
            if m1 != m2:
                both = [N[p] for p in N if _implements(N[p], m1) and _implements(N[p], m2)]
                _average_cross_models(both, m1, m2)
    return {p: _tensors(N[p], states[p], cells[p]) for p in states}


def _average_model(P: Sequence[Network], m: str, deps: Collection[str]) -> None:
    """Algorithm 1, lines 7 to 13."""
    for i, k in list(P[0]):
        if k[0] == m:
            _average([N[i, k].q for N in P])  # line 10
            _average_restricted([N[i, k].w for N in P], {m, *deps})  # line 11
        elif k[0] in deps:
            _average_restricted([N[i, k].w for N in P], {m})  # line 13


def _average_cross_models(P: Sequence[Network], m1: str, m2: str) -> None:
    """Algorithm 2, lines 9 to 14."""
    for i, k in list(P[0]) if P else ():
        if k[0] == m1:
            _average_restricted([N[i, k].w for N in P], {m2})  # line 12
        elif k[0] == m2:
            _average_restricted([N[i, k].w for N in P], {m1})  # line 14


def _average(vectors: Sequence[list[float]]) -> None:
    for coordinate in range(len(vectors[0])):
        total = 0.0
        for vector in vectors:
            total += vector[coordinate]
        for vector in vectors:
            vector[coordinate] = total / len(vectors)


def _average_restricted(weights: Sequence[dict[Cell, list[float]]], models: set[str]) -> None:
    for j in weights[0]:
        if j[0] in models:
            _average([w[j] for w in weights])


def _implements(N: Network, m: str) -> bool:
    return any(cell[0] == m for _, cell in N)


# ---- to neurons and back -----------------------------------------------------------------------


def _neurons(state: Mapping[str, Tensor], parts: Sequence[Part]) -> Network:
    N: Network = {(i, cell): Neuron() for i, part in enumerate(parts) for cell in part}
    for i, tensor in _by_layer(state.values()):
        rows = tensor.reshape(len(parts[i]), -1)
        for k, row in zip(parts[i], rows, strict=True):
            if tensor.dim() == 1:
                N[i, k].q += row.tolist()
            else:
                inputs = row.reshape(len(parts[i - 1]), -1).tolist()
                N[i, k].w = dict(zip(parts[i - 1], inputs, strict=True))
    return N


def _tensors(N: Network, state: Mapping[str, Tensor], parts: Sequence[Part]) -> dict[str, Tensor]:
    written = dict(state)
    names = [name for name, tensor in state.items() if tensor.dim()]
    for name, (i, tensor) in zip(names, _by_layer(state.values()), strict=True):
        rows = []
        for k in parts[i]:
            if tensor.dim() == 1:
                each = tensor.numel() // len(parts[i])
                rows.append(N[i, k].q[:each])
                del N[i, k].q[:each]
            else:
                rows.append([x for j in parts[i - 1] for x in N[i, k].w[j]])
        written[name] = torch.tensor(rows, dtype=tensor.dtype).reshape(tensor.shape)
    return written


def _by_layer(tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """Each tensor with its layer; a weight begins a new one. Scalars (counters) are left out."""
    found, layer = [], 0
    for tensor in tensors:
        layer += tensor.dim() > 1
        if tensor.dim():
            found.append((layer, tensor))
    return found

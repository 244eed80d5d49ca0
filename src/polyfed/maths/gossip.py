r"""Gossip: nodes meet in pairs and take the mean of the two, until all have the mean of all.

    x_i, x_j <- (x_i + x_j) / 2                       for each pair of a cycle            (1)
    E[variance after a cycle] = rho * variance before it                                 (2)
    rho = 1 / (2 sqrt(e)) = 0.303   every node in turn picks a random other: sequential
    rho = 1 / 2                     one random perfect matching

Jelasity, Montresor, Babaoglu. ACM TOCS 23(3), 2005: push-pull averaging; rho = E[2^-phi], where phi
is how often a node takes part in a cycle: 1 + Poisson(1) in turn, 1 in a matching.
Limits: two nodes agree after one exchange. Eq. (1) keeps the sum, so the mean of all.
Deviations from the paper: none. The rates hold where everybody may meet everybody; on a sparse
graph gossip is slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

SEQUENTIAL = 0.5 / math.sqrt(math.e)
MATCHING = 0.5

T = TypeVar("T")
Pair = tuple[int, int]
Graph = Mapping[int, Sequence[int]]  # each node's neighbours, both ways


def matching(
    nodes: Sequence[int], chance: torch.Generator, graph: Graph | None = None
) -> list[Pair]:
    """Random pairs, as many as fit: nobody is in two, and no two that are left over are linked.

    Args:
        nodes: who may meet.
        chance: the only source of randomness.
        graph: who is linked with whom; everybody with everybody if there is none.
    """
    if graph is None:
        order = _shuffled(nodes, chance)
        return [_pair(a, b) for a, b in zip(order[::2], order[1::2], strict=False)]
    links = sorted({_pair(a, b) for a in nodes for b in graph[a]})
    taken: set[int] = set()
    pairs = []
    for a, b in _shuffled(links, chance):
        if not {a, b} & taken:
            taken |= {a, b}
            pairs.append((a, b))
    return pairs


def sequential(
    nodes: Sequence[int], chance: torch.Generator, graph: Graph | None = None
) -> list[Pair]:
    """Every node, in random order, with one of its neighbours: pairs one after the other.

    Args:
        nodes: who may meet.
        chance: the only source of randomness.
        graph: who is linked with whom; everybody with everybody if there is none.
    """
    pairs = []
    for node in _shuffled(nodes, chance):
        others = [n for n in nodes if n != node] if graph is None else graph[node]
        if others:
            pick = int(torch.randint(len(others), (), generator=chance))
            pairs.append(_pair(node, others[pick]))
    return pairs


def layered(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that come one after the other, in as few steps as can be: nobody meets two in a step.

    >>> layered([(0, 1), (2, 3), (1, 2), (4, 5)])
    [[(0, 1), (2, 3), (4, 5)], [(1, 2)]]
    """
    steps: list[list[Pair]] = []
    busy: dict[int, int] = {}
    for a, b in pairs:
        at = max(busy.get(a, 0), busy.get(b, 0))
        if at == len(steps):
            steps.append([])
        steps[at].append((a, b))
        busy[a] = busy[b] = at + 1
    return steps


def averaged(x: Float[Tensor, "nodes ..."], pairs: Iterable[Pair]) -> Float[Tensor, "nodes ..."]:
    """Apply Eq. (1) to pairs, one after the other.

    >>> averaged(torch.tensor([0.0, 4.0, 6.0]), [(0, 1), (1, 2)])
    tensor([2., 4., 4.])
    """
    x = x.clone()
    for a, b in pairs:
        x[a] = x[b] = (x[a] + x[b]) / 2
    return x


def cycles_for(error: float, rho: float = MATCHING) -> int:
    """Cycles until the standard deviation is this share of what it was, by Eq. (2).

    >>> cycles_for(1e-3), cycles_for(1e-3, SEQUENTIAL)
    (20, 12)
    """
    return max(0, math.ceil(2 * math.log(error) / math.log(rho)))


def reached(graph: Graph, start: int) -> Set[int]:
    """The nodes that a word can reach from one of them.

    >>> sorted(reached({0: [1], 1: [0], 2: []}, 0))
    [0, 1]
    """
    found, todo = {start}, [start]
    while todo:
        new = set(graph[todo.pop()]) - found
        found |= new
        todo += new
    return found


def _shuffled(items: Sequence[T], chance: torch.Generator) -> list[T]:
    return [items[i] for i in torch.randperm(len(items), generator=chance).tolist()]


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)

"""A ring's order by utility: each node hears from one that counts much for it.

A topology knows no accuracies, so the order comes from a run before: FedLinked measures how much
each node counts for each other one, `polyfed show RUN` prints the order, and a ring takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from polyfed.core.node import Name

_ALL = 7  # nodes up to which all orders are tried


def order_by_utility(nodes: Sequence[Name], rows: Sequence[Sequence[float]]) -> tuple[Name, ...]:
    """The closed order in which nodes count most for those they hand on to.

    The best of all orders for few nodes; else nodes are inserted one by one where they gain most,
    which is not always the best.

    Args:
        nodes: their names.
        rows: utilities: row is the receiver, column the source.

    >>> rows = [[0, 1, 9, 1], [1, 0, 1, 9], [9, 1, 0, 1], [1, 9, 1, 0]]
    >>> order_by_utility("ABCD", rows)
    ('A', 'B', 'D', 'C')
    """
    first, *rest = range(len(nodes))
    if len(nodes) <= _ALL:
        tours = ((first, *others) for others in permutations(rest))
        tour = max(tours, key=lambda tour: worth(tour, rows))
    else:
        tour = (first,)
        for node in rest:
            grown = [(*tour[:i], node, *tour[i:]) for i in range(1, len(tour) + 1)]
            tour = max(grown, key=lambda tour: worth(tour, rows))
    return tuple(nodes[i] for i in tour)


def worth(tour: Sequence[int], rows: Sequence[Sequence[float]]) -> float:
    """How much all count for those they hand on to, along a closed tour."""
    return sum(rows[to][source] for source, to in zip(tour, (*tour[1:], tour[0]), strict=True))

from itertools import permutations

import pytest
import torch

from polyfed.random import stream
from polyfed.topologies.tour import order_by_utility, worth


def utilities(n: int, seed: int) -> list[list[float]]:
    rows = torch.rand(n, n, generator=stream(seed, "test"))
    return rows.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_few_nodes_have_the_best_of_all_orders(seed: int) -> None:
    rows = utilities(5, seed)
    order = [int(name) for name in order_by_utility("01234", rows)]
    assert worth(order, rows) == max(worth(tour, rows) for tour in permutations(range(5)))


def test_a_row_is_the_receiver() -> None:
    """0 hands on to 1, 1 to 2 and 2 to 0: each counts for the next, and not the other way round."""
    rows = [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert order_by_utility("ABC", rows) == ("A", "B", "C")
    assert order_by_utility("ABC", list(zip(*rows, strict=True))) == ("A", "C", "B")


def test_groups_are_neighbours() -> None:
    """Two groups that hide among twelve names end up side by side: only two links join them."""
    group = [i % 2 for i in range(12)]
    rows = [[1.0 if a == b else 0.1 for b in group] for a in group]
    order = [int(name, 16) for name in order_by_utility("0123456789ab", rows)]
    assert sorted(order) == list(range(12))
    links = zip(order, (*order[1:], order[0]), strict=True)
    assert sum(group[a] != group[b] for a, b in links) == 2


@pytest.mark.parametrize("n", [8, 20])
def test_many_nodes_do_better_than_the_order_of_their_names(n: int) -> None:
    for seed in range(5):
        rows = utilities(n, seed)
        order = [int(name) for name in order_by_utility([str(i) for i in range(n)], rows)]
        assert sorted(order) == list(range(n))
        assert worth(order, rows) > worth(range(n), rows) + 1


def test_one_node() -> None:
    assert order_by_utility("A", [[0.0]]) == ("A",)

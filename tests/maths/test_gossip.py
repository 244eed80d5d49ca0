"""Gossip: its rates against theory, and pairs that are what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.maths import gossip
from polyfed.random import stream

SIZES = st.integers(0, 12)
SEEDS = st.integers(0, 1000)


def some_graph(n: int, seed: int) -> dict[int, list[int]]:
    """Links at random, each with chance 1/3."""
    chance = torch.rand(n, n, generator=stream(seed, "graph"))
    linked = [(a, b) for a, b in combinations(range(n), 2) if chance[a, b] < 1 / 3]
    return {i: sorted({a + b - i for a, b in linked if i in (a, b)}) for i in range(n)}


@given(SIZES, SEEDS)
def test_a_matching_of_everybody_is_perfect(n: int, seed: int) -> None:
    pairs = gossip.matching(range(n), stream(seed, "m"))
    met = [i for pair in pairs for i in pair]
    assert len(set(met)) == len(met) == n - n % 2
    assert all(a < b for a, b in pairs)


@given(SIZES, SEEDS)
def test_a_matching_in_a_graph_is_along_links_and_maximal(n: int, seed: int) -> None:
    graph = some_graph(n, seed)
    pairs = gossip.matching(range(n), stream(seed, "m"), graph)
    met = [i for pair in pairs for i in pair]
    assert len(set(met)) == len(met)
    assert all(b in graph[a] for a, b in pairs)
    alone = set(range(n)) - set(met)
    assert not any(b in graph[a] for a, b in combinations(alone, 2))


@given(SIZES, SEEDS, st.booleans())
def test_in_turn_everybody_picks_a_neighbour(n: int, seed: int, sparse: bool) -> None:
    graph = some_graph(n, seed) if sparse else None
    pairs = gossip.sequential(range(n), stream(seed, "s"), graph)
    linked = graph or {i: [j for j in range(n) if j != i] for i in range(n)}
    assert all(b in linked[a] for a, b in pairs)
    assert len(pairs) == sum(bool(others) for others in linked.values())
    assert {i for pair in pairs for i in pair} == {i for i, others in linked.items() if others}


def test_pairs_are_random() -> None:
    """Every partner of node 0 is drawn, about equally often: 700 draws of 7."""
    for draw in (gossip.matching, gossip.sequential):
        partner = [
            a + b
            for t in range(700)
            for a, b in draw(range(8), stream(0, t))[: 4 if draw is gossip.matching else 8]
            if 0 in (a, b)
        ]
        counts = torch.tensor(partner).bincount(minlength=8)[1:]
        assert counts.min() > 0.6 * len(partner) / 7


@given(SIZES, SEEDS)
def test_layers_are_the_same_pairs_one_after_the_other(n: int, seed: int) -> None:
    pairs = gossip.sequential(range(n), stream(seed, "s"))
    steps = gossip.layered(pairs)
    assert sorted(p for step in steps for p in step) == sorted(pairs)
    for step in steps:
        met = [i for pair in step for i in pair]
        assert len(set(met)) == len(met)
    x = torch.randn(n, 2, dtype=torch.float64, generator=stream(seed, "x"))
    in_steps = gossip.averaged(x, [pair for step in steps for pair in step])
    assert torch.equal(in_steps, gossip.averaged(x, pairs))


def literal_cycle(x: list[float], order: list[int], picks: list[int]) -> list[float]:
    """Jelasity et al., Figure 1, push-pull: node by node, both ends take the mean."""
    for i, j in zip(order, picks, strict=True):
        both = (x[i] + x[j]) / 2
        x[i] = both
        x[j] = both
    return x


def test_averaging_is_push_pull() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 9.0])
    wanted = literal_cycle(x.tolist(), [2, 0, 3], [3, 1, 0])
    assert gossip.averaged(x, [(2, 3), (0, 1), (0, 3)]).tolist() == wanted
    assert x.tolist() == [1.0, 2.0, 4.0, 9.0]


@pytest.mark.parametrize(
    ("draw", "rho", "cycles"),
    [(gossip.sequential, gossip.SEQUENTIAL, 6), (gossip.matching, gossip.MATCHING, 10)],
)
def test_the_variance_shrinks_at_the_rate_of_theory(
    draw: Callable[..., list[gossip.Pair]], rho: float, cycles: int
) -> None:
    """0.303 and 0.5 a cycle, measured over 400 values on 500 nodes; the mean stays."""
    n = 500
    x = torch.randn(n, 400, dtype=torch.float64, generator=stream(1, draw.__name__))
    mean, factors = x.mean(0), []
    for cycle in range(cycles):
        before = x.var(0).mean()
        x = gossip.averaged(x, draw(range(n), stream(0, draw.__name__, cycle)))
        factors.append(float(x.var(0).mean() / before))
        torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)
    measured = math.exp(sum(map(math.log, factors)) / cycles)
    assert measured == pytest.approx(rho, abs=0.01)


def test_the_rates() -> None:
    assert pytest.approx(0.30327, abs=1e-5) == gossip.SEQUENTIAL
    assert gossip.MATCHING == 0.5


def test_cycles_for() -> None:
    """SPEC 2.4: ceil(log(1/eps^2) / log(1/rho))."""
    for error in (0.5, 0.1, 1e-3):
        for rho in (gossip.SEQUENTIAL, gossip.MATCHING):
            c = gossip.cycles_for(error, rho)
            assert rho**c <= error**2 * (1 + 1e-9)
            assert rho ** (c - 1) > error**2
    assert gossip.cycles_for(1.0) == 0


def test_who_is_reached() -> None:
    graph = {0: [1], 1: [0, 2], 2: [1], 3: [4], 4: [3]}
    assert gossip.reached(graph, 2) == {0, 1, 2}
    assert gossip.reached(graph, 3) == {3, 4}

"""Groups by similarity: against scikit-learn's average linkage and silhouette."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score

from polyfed.maths.grouping import grouped, merged, silhouette, similarity
from polyfed.random import stream

SEEDS = st.integers(0, 10_000)
SIZES = st.integers(3, 9)


def some(n: int, seed: int, d: int = 6) -> torch.Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=stream(seed, "some"))


def labels(groups: list[list[int]], n: int) -> list[int]:
    return [next(g for g, group in enumerate(groups) if i in group) for i in range(n)]


def same_partition(a: list[int], b: list[int]) -> bool:
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


@given(SIZES, SEEDS)
def test_similarity_is_the_cosine_of_what_sets_apart(n: int, seed: int) -> None:
    z = some(n, seed)
    s = similarity(z)
    mean = z.mean(0)
    for i in range(n):
        for j in range(n):
            a, b = z[i] - mean, z[j] - mean
            assert float(s[i, j]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-9)
    torch.testing.assert_close(similarity(z + 5), s)  # where all began drops out


@given(SIZES, SEEDS)
def test_partitions_are_those_of_average_linkage(n: int, seed: int) -> None:
    s = similarity(some(n, seed))
    distance = (1 - s).clamp(min=0).fill_diagonal_(0).numpy()
    found = merged(s)
    assert [len(groups) for groups in found] == list(range(n, 0, -1))
    for groups in found[1:-1]:
        theirs = AgglomerativeClustering(len(groups), metric="precomputed", linkage="average")
        wanted = theirs.fit_predict(distance).tolist()
        assert same_partition(labels(groups, n), wanted)


@given(SIZES, SEEDS)
def test_the_silhouette_is_rousseeuws(n: int, seed: int) -> None:
    s = similarity(some(n, seed))
    distance = (1 - s).clamp(min=0).fill_diagonal_(0).numpy()
    for groups in merged(s)[1:-1]:
        wanted = silhouette_score(distance, labels(groups, n), metric="precomputed")
        assert silhouette(s, groups) == pytest.approx(wanted, abs=1e-9)


@given(st.integers(2, 4), SEEDS)
def test_groups_that_are_far_apart_are_found(count: int, seed: int) -> None:
    """Node i belongs to group i mod count; noise is a tenth of the distance."""
    n = 3 * count
    centres = torch.eye(count, 20, dtype=torch.float64)
    z = centres[torch.arange(n) % count] + 0.02 * some(n, seed, 20)
    wanted = [[i for i in range(n) if i % count == g] for g in range(count)]
    assert grouped(similarity(z)) == wanted
    assert grouped(similarity(z.float()), count) == wanted


def test_how_many_there_are_can_be_said() -> None:
    s = similarity(some(7, 0))
    assert [len(grouped(s, count)) for count in (1, 2, 5, 7, 99)] == [1, 2, 5, 7, 7]


@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_are_one_group(n: int) -> None:
    assert grouped(similarity(some(n, 0))) == [list(range(n))]


def test_nodes_that_are_the_same_are_one_group() -> None:
    assert grouped(similarity(torch.ones(4, 3))) == [[0, 1, 2, 3]]


def test_groups_that_are_a_little_nearer_are_groups() -> None:
    """a = 0.7 and b = 1 everywhere: Eq. (3) is 0.3, and anything above 0 will do."""
    s = torch.block_diag(*[torch.tensor([[1.0, 0.3], [0.3, 1.0]])] * 2)
    assert silhouette(s, [[0, 1], [2, 3]]) == pytest.approx(0.3)
    assert grouped(s) == [[0, 1], [2, 3]]

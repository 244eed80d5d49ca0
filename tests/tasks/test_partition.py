import dataclasses
import heapq
import math
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.random import stream
from polyfed.tasks import partition
from polyfed.tasks.partition import (
    IID,
    ByClasses,
    ByWriter,
    Dirichlet,
    LabelPermutation,
    Partition,
    Pathological,
    by_value,
    parse,
)

SEEDS = st.integers(0, 2**31)


def labels(n: int, classes: int, seed: int) -> Tensor:
    """Every class occurs; the rest is chance."""
    g = stream(seed, "labels")
    rest = torch.randint(classes, (n - classes,), generator=g)
    y = torch.cat([torch.arange(classes), rest])
    return y[torch.randperm(n, generator=g)]


def table(y: Tensor, parts: list[Tensor], classes: int) -> Tensor:
    return torch.stack([torch.bincount(y[part], minlength=classes) for part in parts])


def check_disjoint(parts: list[Tensor]) -> Tensor:
    together = torch.cat(parts)
    assert len(together) == len(set(together.tolist()))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    return together.sort().values


ANY = [
    IID(),
    Dirichlet(0.3, min_size=2),
    Pathological(2),
    ByClasses(((0, 1), (1, 2), (2, 3, 4))),
    ByWriter(),
    LabelPermutation.cycle((0, 2), nodes=2),
]


@pytest.mark.parametrize("rule", ANY, ids=lambda rule: type(rule).__name__)
@given(seed=SEEDS)
def test_parts_are_disjoint_and_a_function_of_the_generator(rule: Partition, seed: int) -> None:
    y, writers = labels(200, 5, seed), torch.arange(200) % 11
    first = rule.assign(y, 3, stream(seed), writers=writers)
    torch.rand(3)  # the ambient generator has no say
    again = rule.assign(y, 3, stream(seed), writers=writers)
    other = rule.assign(y, 3, stream(seed, "other"), writers=writers)
    check_disjoint(first)
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("rule", ANY, ids=lambda rule: type(rule).__name__)
def test_a_partition_is_a_frozen_value(rule: Partition) -> None:
    assert dataclasses.replace(rule) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.alpha = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ANY[:-1], ids=lambda rule: type(rule).__name__)
def test_labels_keep_their_names(rule: Partition) -> None:
    y = torch.arange(5)
    assert torch.equal(rule.relabel(0, y), y)


@pytest.mark.parametrize("rule", ANY, ids=lambda rule: type(rule).__name__)
def test_too_few_samples_or_nodes(rule: Partition) -> None:
    with pytest.raises(DataError, match="2 samples cannot be dealt to 3 nodes"):
        rule.assign(torch.tensor([0, 1]), 3, stream(0))
    with pytest.raises(ConfigError, match="at least 1 node, got nodes=0"):
        rule.assign(torch.tensor([0, 1]), 0, stream(0))


@given(n=st.integers(1, 60), seed=SEEDS)
def test_by_value_lists_every_index_under_its_value(n: int, seed: int) -> None:
    y = torch.randint(-1, 4, (n,), generator=stream(seed))
    held = by_value(y, stream(seed, "shuffle"))
    assert list(held) == sorted(set(y.tolist()))
    assert all(sorted(i.tolist()) == (y == c).nonzero()[:, 0].tolist() for c, i in held.items())


# ---- iid -----------------------------------------------------------------------------------------


@given(n=st.integers(1, 200), nodes=st.integers(1, 20), seed=SEEDS)
def test_iid_is_everything_in_equal_parts(n: int, nodes: int, seed: int) -> None:
    assume(n >= nodes)
    parts = IID().assign(torch.zeros(n, dtype=torch.int64), nodes, stream(seed))
    assert check_disjoint(parts).tolist() == list(range(n))
    assert {len(p) for p in parts} <= {n // nodes, math.ceil(n / nodes)}


# ---- dirichlet -----------------------------------------------------------------------------------


@given(
    alpha=st.floats(0.05, 100.0),
    nodes=st.integers(1, 8),
    classes=st.integers(1, 6),
    min_size=st.integers(1, 10),
    seed=SEEDS,
)
def test_dirichlet_is_everything_and_nobody_gets_less_than_min_size(
    alpha: float, nodes: int, classes: int, min_size: int, seed: int
) -> None:
    y = labels(400, classes, seed)
    try:
        parts = Dirichlet(alpha, min_size).assign(y, nodes, stream(seed))
    except DataError as error:
        assert "a larger alpha" in str(error)  # noqa: PT017  (a rare draw that cannot be had)
        assume(False)
    assert check_disjoint(parts).tolist() == list(range(400))
    assert min(map(len, parts)) >= min_size


@given(alpha=st.floats(0.01, 10.0), nodes=st.integers(2, 8), seed=SEEDS)
def test_dirichlet_gives_nothing_more_to_a_node_with_its_share(
    alpha: float, nodes: int, seed: int
) -> None:
    totals = [50, 70, 30, 90]
    counts = partition._dirichlet_counts(totals, nodes, alpha, np.random.default_rng(seed))
    assert counts.sum(1).tolist() == totals
    before = counts.cumsum(0) - counts
    assert not counts[before >= sum(totals) / nodes].any()


def _literal_counts(
    totals: list[int], nodes: int, alpha: float, rng: np.random.Generator
) -> list[list[int]]:
    """The loop of FedLab and PFLlib, written out: draw for all, zero the full ones, renormalise."""
    sizes, table = [0] * nodes, []
    for total in totals:
        p = rng.dirichlet([alpha] * nodes)
        p = np.array([pj * (size < sum(totals) / nodes) for pj, size in zip(p, sizes, strict=True)])
        p = p / p.sum()
        ends = [0, *(np.cumsum(p) * total).astype(int)[:-1].tolist(), total]
        table.append([b - a for a, b in pairwise(ends)])
        sizes = [size + n for size, n in zip(sizes, table[-1], strict=True)]
    return table


def test_dirichlet_has_the_distribution_of_the_literal_loop() -> None:
    """Mean and spread of every cell over many draws, within four standard errors."""
    totals, nodes, alpha, draws = [60, 90, 50], 4, 0.5, 4000
    a, b = np.random.default_rng(1), np.random.default_rng(2)
    fast = np.array(
        [partition._dirichlet_counts(totals, nodes, alpha, a) for _ in range(draws)], float
    )
    slow = np.array([_literal_counts(totals, nodes, alpha, b) for _ in range(draws)], float)
    for power in (1, 2):
        x, y = (fast / 90) ** power, (slow / 90) ** power
        error = np.sqrt((x.var(0) + y.var(0)) / draws)
        assert (
            abs(x.mean(0) - y.mean(0)) < 4 * error + 0.012
        ).all()  # 0.012: one sample of rounding


def test_dirichlet_with_a_large_alpha_is_nearly_iid() -> None:
    y = torch.arange(10).repeat_interleave(1000)
    counts = table(y, Dirichlet(1e6).assign(y, 5, stream(0)), 10)
    # Everybody passes the equal share only with the last class.
    assert (counts[:, :9] - 200).abs().max() <= 2
    assert counts.sum().item() == 10_000


def test_dirichlet_with_a_small_alpha_gives_a_class_to_one_node() -> None:
    y = torch.arange(10).repeat_interleave(1000)
    counts = table(y, Dirichlet(0.01).assign(y, 5, stream(0)), 10)
    largest_share = counts.max(0).values / 1000
    assert largest_share.mean() > 0.9


@given(seed=SEEDS)
def test_dirichlet_concentrates_as_alpha_falls(seed: int) -> None:
    y = torch.arange(10).repeat_interleave(200)
    concentration = [
        (table(y, Dirichlet(alpha, 1).assign(y, 4, stream(seed)), 10) / 200).square().sum().item()
        for alpha in (0.05, 100.0)
    ]
    assert concentration[0] > concentration[1]


def test_dirichlet_that_cannot_be_is_refused_at_once() -> None:
    y = torch.zeros(50, dtype=torch.int64)
    with pytest.raises(
        DataError, match=r"6 x 10 = 60 samples, there are 50.*min_size of at most 8"
    ):
        Dirichlet(1.0).assign(y, 6, stream(0))


def test_dirichlet_gives_up() -> None:
    """Two classes, each nearly whole at one node: the third node never gets its 30."""
    y = torch.arange(2).repeat_interleave(50)
    with pytest.raises(DataError, match=r"none of 10000 draws.*Fix: a larger alpha, fewer nodes"):
        Dirichlet(1e-4, min_size=30).assign(y, 3, stream(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_dirichlet_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"Dirichlet\.alpha must be > 0"):
        Dirichlet(alpha)


def test_dirichlet_min_size_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"Dirichlet\.min_size must be >= 1, got 0"):
        Dirichlet(1.0, 0)


# ---- pathological --------------------------------------------------------------------------------


@given(each=st.integers(1, 6), nodes=st.integers(1, 15), classes=st.integers(1, 9), seed=SEEDS)
def test_pathological_deals_classes_evenly(each: int, nodes: int, classes: int, seed: int) -> None:
    assume(each <= classes)
    y = torch.arange(classes).repeat_interleave(30) + 3  # labels need not begin at 0
    parts = Pathological(each).assign(y, nodes, stream(seed))
    together = check_disjoint(parts)
    counts = table(y, parts, classes + 3)[:, 3:]
    assert ((counts > 0).sum(1) == each).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    assert len(together) == 30 * min(classes, nodes * each)
    for c in range(classes):
        held = counts[:, c][counts[:, c] > 0].tolist()
        assert not held or max(held) - min(held) <= 1


def test_pathological_can_be_a_disjoint_split_of_the_classes() -> None:
    y = torch.arange(10).repeat_interleave(7)
    counts = table(y, Pathological(2).assign(y, 5, stream(0)), 10)
    assert sorted(counts.max(0).values.tolist()) == [7] * 10
    assert (counts.count_nonzero(0) == 1).all()


def test_pathological_pairs_are_not_always_the_same() -> None:
    y = torch.arange(10).repeat_interleave(30)
    counts = table(y, Pathological(2).assign(y, 20, stream(0)), 10)
    assert len({tuple(row.nonzero()[:, 0].tolist()) for row in counts}) > 10


def test_pathological_impossible() -> None:
    y = torch.arange(3).repeat_interleave(5)
    with pytest.raises(DataError, match=r"the labels have 3 classes. Fix: at most 3"):
        Pathological(4).assign(y, 2, stream(0))
    with pytest.raises(DataError, match="class 0 has 5 samples for the 6 nodes"):
        Pathological(3).assign(y, 6, stream(0))
    with pytest.raises(ConfigError, match="classes_per_node must be >= 1"):
        Pathological(0)


# ---- by classes ----------------------------------------------------------------------------------


@given(
    groups=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5),
    seed=SEEDS,
)
def test_by_classes_gives_exactly_the_classes_named(groups: list[set[int]], seed: int) -> None:
    y = labels(300, 6, seed)
    rule = ByClasses(tuple(tuple(sorted(group)) for group in groups))
    assume(int(torch.bincount(y).min()) >= len(groups))
    parts = rule.assign(y, len(groups), stream(seed))
    counts = table(y, parts, 6)
    assert [set(row.nonzero()[:, 0].tolist()) for row in counts] == groups
    used = torch.tensor(sorted(set().union(*groups)))
    assert len(check_disjoint(parts)) == int(torch.isin(y, used).sum())
    for c in used.tolist():
        held = counts[:, c][counts[:, c] > 0]
        assert held.max() - held.min() <= 1


def test_by_classes_impossible() -> None:
    y = torch.arange(3).repeat_interleave(5)
    with pytest.raises(ConfigError, match="classes of 2 nodes, there are 3"):
        ByClasses(((0,), (1,))).assign(y, 3, stream(0))
    with pytest.raises(DataError, match=r"class 7 has 0 samples.*there are classes \[0, 1, 2\]"):
        ByClasses(((0,), (7,))).assign(y, 2, stream(0))


@pytest.mark.parametrize("groups", [(), ((),), ((1, 1),), ((0,), (-1, 2))])
def test_by_classes_is_checked(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match=r"ByClasses\.groups"):
        ByClasses(groups)


# ---- by writer -----------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 12), min_size=4, max_size=30), seed=SEEDS)
def test_by_writer_keeps_writers_whole_and_balances(sizes: list[int], seed: int) -> None:
    writers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    writers = torch.cat([writers, torch.tensor([-1, -1])])
    y = torch.zeros(len(writers), dtype=torch.int64)
    parts = ByWriter().assign(y, 4, stream(seed), writers=writers)
    assert check_disjoint(parts).tolist() == list(range(sum(sizes)))  # the unknown two are left out
    owners = [set(writers[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(sizes)
    # Each writer went to the smallest node, so no two differ by more than the largest writer.
    held = sorted(map(len, parts))
    assert held[-1] - held[0] <= max(sizes)
    assert held == sorted(_literal_longest_first(sizes, 4))


def _literal_longest_first(sizes: list[int], nodes: int) -> list[int]:
    held = [0] * nodes
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(held, held[0] + size)
    return held


def test_by_writer_impossible() -> None:
    y = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(DataError, match=r"writers.npz"):
        ByWriter().assign(y, 2, stream(0))
    with pytest.raises(DataError, match="2 writers cannot be dealt whole to 3 nodes"):
        ByWriter().assign(y, 3, stream(0), writers=torch.tensor([0, 0, 1, 1, -1, -1]))
    # Under the type checker of the tests the shapes are refused even earlier.
    with pytest.raises((DataError, TypeError)):
        ByWriter().assign(y, 2, stream(0), writers=torch.tensor([0, 1]))


# ---- permuted labels -----------------------------------------------------------------------------


def test_seven_of_sixteen_nodes_swap_8_and_9() -> None:
    rule = LabelPermutation.cycle((8, 9), nodes=7)
    y = torch.arange(12)
    swapped = [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 10, 11]
    assert [rule.relabel(node, y).tolist() == swapped for node in range(16)] == [
        node < 7 for node in range(16)
    ]
    assert rule.relabel(9, y).tolist() == y.tolist()
    assert rule.relabel(0, y[:3]).tolist() == [0, 1, 2]
    assert rule.relabel(0, y[:0]).tolist() == []
    assert y.tolist() == list(range(12))


def test_a_cycle_of_three_goes_round() -> None:
    rule = LabelPermutation.cycle((1, 3, 0), nodes=1)
    assert rule.relabel(0, torch.tensor([0, 1, 2, 3])).tolist() == [1, 3, 2, 0]


@given(names=st.permutations(range(5)), seed=SEEDS)
def test_a_permutation_can_be_undone(names: list[int], seed: int) -> None:
    back = [names.index(i) for i in range(5)]
    rule = LabelPermutation((tuple(names), tuple(back)))
    y = labels(50, 7, seed)
    assert torch.equal(rule.relabel(1, rule.relabel(0, y)), y)


def test_permuted_samples_are_dealt_as_iid() -> None:
    y = labels(100, 10, 0)
    rule = LabelPermutation.cycle((8, 9), nodes=2)
    pairs = zip(rule.assign(y, 4, stream(0)), IID().assign(y, 4, stream(0)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_permutations_impossible() -> None:
    y = labels(100, 5, 0)
    with pytest.raises(ConfigError, match="classes of 7 nodes, there are 3"):
        LabelPermutation.cycle((0, 1), nodes=7).assign(y, 3, stream(0))
    with pytest.raises(DataError, match="renames class 9, the highest label is 4"):
        LabelPermutation.cycle((8, 9), nodes=1).assign(y, 3, stream(0))
    with pytest.raises(ConfigError, match=r"permutations\[1\] must hold each of 0 to 2 once"):
        LabelPermutation(((0, 1), (0, 2, 2)))
    with pytest.raises(ConfigError, match="at least 1 node"):
        LabelPermutation.cycle((0, 1), nodes=0)
    for swap in [(1,), (1, 1), (-1, 2), ()]:
        with pytest.raises(ConfigError, match="two or more different classes"):
            LabelPermutation.cycle(swap, nodes=1)


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("iid", IID()),
        (" iid ", IID()),
        ("dirichlet:0.1", Dirichlet(0.1)),
        ("dirichlet:1,5", Dirichlet(1.0, 5)),
        ("pathological:2", Pathological(2)),
        ("classes:0,1,2/2,3,4", ByClasses(((0, 1, 2), (2, 3, 4)))),
        ("classes:7", ByClasses(((7,),))),
        ("writer", ByWriter()),
        ("permute:8,9@7", LabelPermutation.cycle((8, 9), nodes=7)),
    ],
)
def test_parse(text: str, rule: Partition) -> None:
    assert parse(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        *("iid:3", "writer:", "dirichlet", "dirichlet:", "dirichlet:x", "dirichlet:1,", "classes"),
        *(
            "pathological",
            "pathological:2.5",
            "classes:",
            "classes:0,/1",
            "permute:8,9",
            "permute:",
        ),
        *("permute:8,9@", "permute:8@x"),
    ],
)
def test_parse_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood.*Expected: "):
        parse(text)


@pytest.mark.parametrize("text", ["dirichlet:0", "pathological:0", "classes:1,1", "permute:8@2"])
def test_parse_passes_on_what_the_partition_says(text: str) -> None:
    with pytest.raises(ConfigError, match="must "):
        parse(text)


@pytest.mark.parametrize("text", ["dirichlett:0.1", "", ":", "IID"])
def test_parse_unknown_name(text: str) -> None:
    with pytest.raises(UnknownNameError, match="There are: classes, dirichlet, iid, pathological"):
        parse(text)


@given(st.text(alphabet="idrchletpamuws:,/@.0123456789-e ", max_size=16))
def test_parse_raises_nothing_else(text: str) -> None:
    with suppress(ConfigError):
        parse(text)

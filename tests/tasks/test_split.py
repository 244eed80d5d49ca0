import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import ConfigError, DataError
from polyfed.random import stream
from polyfed.tasks import files
from polyfed.tasks.partition import IID
from polyfed.tasks.split import (
    SPLITS,
    FedLinkedSplit,
    _largest_remainder,
    fedlinked_split,
    split_counts,
    stratified,
)

CIFAR10 = ((3, 4, 5, 7), (3, 4, 6), (0, 1, 8, 9))
SVHN = ((0, 5, 6, 9), (0, 3, 6, 8), (1, 2, 4, 7))
SVHN_TOTALS = (6692, 18960, 14734, 11379, 9981, 9266, 7704, 7614, 6705, 6254)

# Table 4.1: train, val_es, val_rb, test of M0, M1, M2; public.
TABLE = {
    "cifar10": ([(4374, 600, 486, 540), (3280, 450, 365, 405), (4374, 600, 486, 540)], 5500),
    "svhn": ([(5450, 748, 606, 673), (5918, 812, 658, 731), (9346, 1283, 1039, 1154)], 9474),
}
SEEDS = st.integers(0, 2**31)


def sizes(split: FedLinkedSplit) -> tuple[list[tuple[int, ...]], int]:
    columns = ("train", "val_es", "val_rb", "test")
    return [tuple(len(node[c]) for c in columns) for node in split.nodes], len(split.public)


def every_index(split: FedLinkedSplit) -> Tensor:
    return torch.cat([split.public, *(part for node in split.nodes for part in node.values())])


def check_fedlinked(split: FedLinkedSplit, y: Tensor, groups: tuple[tuple[int, ...], ...]) -> None:
    together = every_index(split)
    assert len(together) == len(set(together.tolist()))
    for node, group in zip(split.nodes, groups, strict=True):
        assert tuple(node) == SPLITS
        assert all(set(y[part].tolist()) == set(group) for part in node.values())


def test_table_4_1_cifar10() -> None:
    y = torch.arange(10).repeat(6000)
    split = fedlinked_split(y, CIFAR10, stream(0))
    assert sizes(split) == TABLE["cifar10"]
    check_fedlinked(split, y, CIFAR10)
    bird = 2
    assert bird not in y[every_index(split)].tolist()
    assert set(y[split.public].tolist()) == set(range(10)) - {bird}


def test_table_4_1_svhn() -> None:
    y = torch.repeat_interleave(torch.arange(10), torch.tensor(SVHN_TOTALS))
    split = fedlinked_split(y, SVHN, stream(0))
    assert sizes(split) == TABLE["svhn"]
    check_fedlinked(split, y, SVHN)


def test_table_4_1_svhn_from_a_pool_that_has_only_what_is_needed() -> None:
    holders = torch.tensor([sum(c in group for group in SVHN) for c in range(10)])
    need = holders * (torch.tensor(SVHN_TOTALS) // 3)
    y = torch.repeat_interleave(torch.arange(10), need)
    split = fedlinked_split(y, SVHN, stream(0), totals=SVHN_TOTALS)
    assert sizes(split) == TABLE["svhn"]
    check_fedlinked(split, y, SVHN)
    assert sorted(every_index(split).tolist()) == list(range(37_892))


@given(n=st.integers(0, 10**6))
def test_split_counts_round_as_scikit_learn_does(n: int) -> None:
    """train_test_split takes ceil(fraction * n) for the part it splits off."""
    counts = split_counts(n)
    assert sum(counts.values()) == n
    for name, fraction in (("public", 0.25), ("val_es", 0.1), ("test", 0.1), ("val_rb", 0.1)):
        assert counts[name] == math.ceil(round(fraction * n, 6))
        n -= counts[name]


@given(seed=SEEDS)
def test_fedlinked_split_is_a_function_of_the_generator(seed: int) -> None:
    y = torch.arange(4).repeat(300)
    groups = ((0, 1), (1, 2))
    a, b, c = (fedlinked_split(y, groups, stream(s)) for s in (seed, seed, seed + 1))
    check_fedlinked(a, y, groups)
    assert torch.equal(every_index(a), every_index(b))
    assert not torch.equal(every_index(a), every_index(c))


def test_a_shared_class_is_dealt_in_equal_shares() -> None:
    """Four nodes, 1001 samples: floor(1001 / 4) = 250 each, whoever holds the class."""
    y = torch.zeros(1001, dtype=torch.int64)
    split = fedlinked_split(y, ((0,), (0,), (0,), (0,)), stream(0))
    assert [sum(map(len, node.values())) for node in split.nodes] == [250 - 63] * 4
    assert len(split.public) == 4 * 63


def test_the_order_of_public_samples_says_nothing_of_their_owner() -> None:
    """M2's classes are nobody else's: their mean place is the middle, for every seed tried."""
    y = torch.arange(10).repeat(6000)
    for seed in range(5):
        public = fedlinked_split(y, CIFAR10, stream(seed)).public
        place = torch.isin(y[public], torch.tensor(CIFAR10[2])).nonzero().double().mean()
        error = 5500 / math.sqrt(12 * 2000)
        assert abs(place - 2750) < 4 * error


def test_fedlinked_split_impossible() -> None:
    y = torch.arange(3).repeat(40)
    with pytest.raises(DataError, match="class 9 has 0 samples, 1 nodes need 1 each"):
        fedlinked_split(y, ((0,), (9,)), stream(0))
    with pytest.raises(DataError, match="class 0 has 40 samples, 2 nodes need 50 each"):
        fedlinked_split(y, ((0,), (0, 1)), stream(0), totals=(100, 40, 40))
    with pytest.raises(ConfigError, match="class 2 has no total"):
        fedlinked_split(y, ((0,), (2,)), stream(0), totals=(40, 40))
    with pytest.raises(ConfigError, match="at least one class"):
        fedlinked_split(y, ((0,), ()), stream(0))


def test_a_class_missing_from_a_split_is_an_error() -> None:
    y = torch.cat([torch.zeros(600, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    with pytest.raises(DataError, match=r"node 0: split \w+ \(\d+ samples\) has none of class 1"):
        fedlinked_split(y, ((0, 1), (0,), (0,)), stream(0))


# ---- stratified ----------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=SEEDS,
)
def test_stratified_splits_every_class(counts: list[int], weights: list[int], seed: int) -> None:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=stream(seed, "y"))]
    fractions = {f"s{i}": w / sum(weights) for i, w in enumerate(weights)}
    split = stratified(y, fractions, stream(seed))
    assert list(split) == list(fractions)
    assert torch.cat(list(split.values())).sort().values.tolist() == list(range(len(y)))
    for (name, part), weight in zip(split.items(), weights, strict=True):
        held = torch.bincount(y[part], minlength=len(counts)).tolist()
        for n, got in zip(counts, held, strict=True):
            floor = n * weight // sum(weights)
            assert got in (floor, floor + 1), name
            assert got >= 1 or n * weight < sum(weights)


@given(n=st.integers(0, 500), weights=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_largest_remainder_is_the_closest_rounding(n: int, weights: list[int]) -> None:
    """No sample moved from one split to another brings the sizes closer to n f."""
    total = sum(weights)
    got = _largest_remainder(n, [w / total for w in weights])
    assert sum(got) == n
    exact = [n * w for w in weights]  # in units of 1 / total
    for i, _ in enumerate(got):
        for j, _ in enumerate(got):
            gain = (got[i] * total - exact[i]) - (got[j] * total - exact[j])
            assert i == j or got[i] == 0 or gain <= total


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("change", [np.asarray, torch.Tensor.int, lambda y: y.to(torch.uint8)])
def test_labels_to_deal_by_may_be_any_whole_numbers(change: Callable[[Tensor], Tensor]) -> None:
    y, fractions = torch.arange(20) % 4, {"train": 0.5, "test": 0.5}
    found = stratified(change(y), fractions, stream(0))
    wanted = stratified(y, fractions, stream(0))
    assert all(torch.equal(found[name], wanted[name]) for name in fractions)
    dealt, same = (IID().assign(each, 2, stream(0)) for each in (change(y), y))
    assert all(map(torch.equal, dealt, same))


@pytest.mark.parametrize("change", [torch.Tensor.float, lambda y: y[:, None]])
def test_other_labels_to_deal_by_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    y = change(torch.arange(20) % 4)
    with pytest.raises(DataError, match=r"labels to deal by must be whole numbers.*Fix: y.long"):
        stratified(y, {"train": 0.5, "test": 0.5}, stream(0))
    with pytest.raises(DataError, match=r"labels to deal by must be whole numbers"):
        IID().assign(y, 2, stream(0))


def test_stratified_is_a_function_of_the_generator() -> None:
    y = torch.arange(3).repeat(30)
    fractions = {"train": 0.8, "test": 0.2}
    a, b, c = (stratified(y, fractions, stream(s))["test"] for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.bincount(y[a]).tolist() == [6, 6, 6]


@pytest.mark.parametrize("fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}])
def test_stratified_fractions_are_checked(fractions: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="fractions must be > 0 and sum to 1"):
        stratified(torch.arange(3), fractions, stream(0))


# ---- the real thing ------------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_table_4_1_real(name: str) -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: it names a folder with CIFAR-10 and SVHN")
    try:
        images = getattr(files, name)(Path(os.environ["POLYFED_DATA"]))
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    groups = CIFAR10 if name == "cifar10" else SVHN
    for seed in range(3):
        split = fedlinked_split(images.y, groups, stream(seed), totals=images.totals)
        assert sizes(split) == TABLE[name]
        check_fedlinked(split, images.y, groups)

r"""Splits of a node's samples: FedLinked's, to the sample, and a stratified one for everybody else.

FedLinked, for K nodes and class totals n_c:

    every node gets floor(n_c / K) samples of each class c and keeps those of its own classes
    of its n samples:   public += ceil(n / 4);          r1 = the rest
                        val_es = ceil(r1 / 10);         r2 = the rest
                        test   = ceil(r2 / 10);         r3 = the rest
                        val_rb = ceil(r3 / 10);         train = the rest

Kadar 2021, section 4.1: reproduces all 26 numbers of Table 4.1. val_es stops training early, val_rb
decides on rollback. The public samples of all nodes are shuffled together, so that their order says
nothing about whose they were. Deviations from the paper: none (it prints the table, not the rule).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polyfed.errors import ConfigError, DataError
from polyfed.tasks.labels import Labels, whole_labels
from polyfed.tasks.partition import by_value

SPLITS = ("train", "val_es", "test", "val_rb")


def split_counts(n: int) -> dict[str, int]:
    """How FedLinked cuts up the n samples of one node.

    >>> split_counts(8000)
    {'public': 2000, 'val_es': 600, 'test': 540, 'val_rb': 486, 'train': 4374}
    """
    counts = {}
    for name, part in (("public", 4), ("val_es", 10), ("test", 10), ("val_rb", 10)):
        counts[name] = -(-n // part)
        n -= counts[name]
    return counts | {"train": n}


@dataclass(frozen=True, eq=False)
class FedLinkedSplit:
    """Indices: for each node train, val_es, test and val_rb; for all together the public ones."""

    nodes: tuple[dict[str, Tensor], ...]
    public: Tensor


def fedlinked_split(
    y: Labels,
    groups: Sequence[Sequence[int]],
    generator: torch.Generator,
    *,
    totals: Sequence[int] | None = None,
) -> FedLinkedSplit:
    """Split as FedLinked does.

    Args:
        y: Labels of the whole set (official train and test merged), or of a pool drawn from it.
        groups: The classes of each node.
        generator: The only source of chance.
        totals: Class totals of the whole set, where `y` is a pool.

    Returns:
        Disjoint indices. Classes that no node names are not used, also not as public samples.
    """
    pools = _pools(y, groups, generator, totals)
    nodes, public = [], []
    for node, pool in enumerate(pools):
        counts = split_counts(len(pool))
        order = pool[torch.randperm(len(pool), generator=generator)]
        cut = dict(zip(counts, _cut(order, counts.values()), strict=True))
        public.append(cut.pop("public"))
        nodes.append({name: cut[name] for name in SPLITS})
        _check_classes(y, node, groups[node], nodes[-1])
    together = torch.cat(public)
    return FedLinkedSplit(
        tuple(nodes), together[torch.randperm(len(together), generator=generator)]
    )


def _cut(order: Tensor, sizes: Iterable[int]) -> Sequence[Tensor]:
    """Consecutive pieces of these sizes, which sum to the whole."""
    return order.tensor_split(list(accumulate(sizes))[:-1])


def _pools(
    y: Labels,
    groups: Sequence[Sequence[int]],
    generator: torch.Generator,
    totals: Sequence[int] | None,
) -> list[Tensor]:
    """For each node floor(n_c / K) samples of each of its classes."""
    members = by_value(y, generator)
    held: list[list[Tensor]] = [[] for _ in groups]
    for c in sorted({c for group in groups for c in group}):
        order = members.get(c, y.new_empty(0))
        share = _total(c, len(order), totals) // len(groups)
        holders = [node for node, group in enumerate(groups) if c in group]
        _check_share(c, len(order), share, len(holders))
        for rank, node in enumerate(holders):
            held[node].append(order[rank * share : (rank + 1) * share])
    if not all(held):
        raise ConfigError(f"each node needs at least one class, got {tuple(map(tuple, groups))}.")
    return [torch.cat(parts) for parts in held]


def _total(c: int, there: int, totals: Sequence[int] | None) -> int:
    if totals is None:
        return there
    if not 0 <= c < len(totals):
        raise ConfigError(f"class {c} has no total: totals are given for {len(totals)} classes.")
    return totals[c]


def _check_share(c: int, there: int, share: int, holders: int) -> None:
    if share == 0 or there < share * holders:
        raise DataError(
            f"class {c} has {there} samples, {holders} nodes need {max(share, 1)} each. "
            "Fix: more samples of the class, or other classes for the nodes."
        )


def _check_classes(
    y: Labels, node: int, classes: Sequence[int], splits: Mapping[str, Tensor]
) -> None:
    for name, index in splits.items():
        missing = sorted(set(classes) - set(y[index].tolist()))
        if missing:
            raise DataError(
                f"node {node}: split {name} ({len(index)} samples) has none of class {missing[0]}. "
                "Fix: more samples; or another seed; or stratified(), which keeps every class."
            )


def stratified(
    y: Tensor, fractions: Mapping[str, float], generator: torch.Generator
) -> dict[str, Tensor]:
    """Split every class separately in the given fractions, by largest remainders.

    A class of at least 1 / f samples is present in a split of fraction f. Of a class with n samples
    a split gets floor(n f) or one more.

    Args:
        y: Labels.
        fractions: Name and fraction of each split; they sum to 1.
        generator: The only source of chance.

    Returns:
        For each name sorted indices; together they are everything.
    """
    _check_fractions(fractions)
    y = whole_labels(y)
    held: dict[str, list[Tensor]] = {name: [y.new_empty(0)] for name in fractions}
    for order in by_value(y, generator).values():
        sizes = _largest_remainder(len(order), list(fractions.values()))
        for name, part in zip(fractions, _cut(order, sizes), strict=True):
            held[name].append(part)
    return {name: torch.cat(parts).sort().values for name, parts in held.items()}


def _largest_remainder(n: int, fractions: Sequence[float]) -> list[int]:
    """Whole numbers that sum to n, each floor(n f) or one more; ties to the earlier.

    >>> _largest_remainder(10, [0.75, 0.125, 0.125])
    [8, 1, 1]
    """
    sizes = [math.floor(n * f + 1e-9) for f in fractions]
    order = sorted(range(len(sizes)), key=lambda i: round(sizes[i] - n * fractions[i], 9))
    for i in order[: n - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _check_fractions(fractions: Mapping[str, float]) -> None:
    total = math.fsum(fractions.values())
    if not all(f > 0 for f in fractions.values()) or abs(total - 1) > 1e-9:
        raise ConfigError(
            f"fractions must be > 0 and sum to 1, got {dict(fractions)}, which sum to {total:g}."
        )

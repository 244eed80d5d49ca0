"""From a partition to the splits of each node."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.tasks.labels import Labels
from polyfed.tasks.partition import Partition
from polyfed.tasks.split import stratified


def shares(validation: float) -> dict[str, float]:
    """A quarter to test, `validation` in two halves to stop and to roll back, the rest to train.

    With 0 it is the split of personalised federated learning: three quarters and one.

    >>> shares(0.1), shares(0)
    ({'train': 0.65, 'val_es': 0.05, 'val_rb': 0.05, 'test': 0.25}, {'train': 0.75, 'test': 0.25})
    """
    halves = {"val_es": validation / 2, "val_rb": validation / 2} if validation else {}
    return {"train": 0.75 - validation, **halves, "test": 0.25}


def deal(
    y: Labels,
    rule: Partition,
    nodes: int,
    generator: torch.Generator,
    *,
    validation: float,
    writers: Labels | None = None,
) -> list[dict[str, Tensor]]:
    """For each node the indices of its splits, each class cut in the same `shares`.

    Args:
        y: label of each sample.
        rule: who holds which samples.
        nodes: how many nodes there are.
        generator: the only source of chance.
        validation: share of a node's samples for validation.
        writers: who wrote each sample, for the rule that asks.
    """
    parts = rule.assign(y, nodes, generator, writers=writers)
    cuts = (stratified(y[part], shares(validation), generator) for part in parts)
    return [
        {name: part[index] for name, index in cut.items()}
        for part, cut in zip(parts, cuts, strict=True)
    ]

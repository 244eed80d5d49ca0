"""The federation that a search sees: validation data stands in the place of test data.

Whatever an engine then calls test accuracy is validation accuracy, of everything it evaluates and
in every round; the test data are not there, so no search can be steered by them. All runs of a
search hold the same data (those of the study's seed): were they cut anew with every seed, one run
would validate by what is another's test data. Runs differ in their first weights and in every
random stream of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from polyfed.core.data import Data, Split
from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.random import stream
from polyfed.tasks import Task

VALIDATION = ("val_es", "val_rb")
_HUB = "hub"


def judged(task: Task, seed: int, run_seed: int, hold_out: float = 0.0) -> list[Node]:
    """The nodes of one run of a search.

    Args:
        task: the federation.
        seed: of the study: it decides who holds what.
        run_seed: of the run: it decides the first weights.
        hold_out: share of each node's training data to judge by; 0 takes its validation splits.
    """
    nodes = task.nodes(seed)
    common = _validation(next((n for n in nodes if n.name == _HUB), Node(_HUB)))
    found = [_judged(node, seed, hold_out, common) for node in nodes]
    if not any("test" in node.data for node in found):
        raise ConfigError(
            f"task {task.name} gives no node validation data, and its test data must not steer a "
            "search. Hold some training data out: --hold-out 0.2 (in Python: hold_out=0.2)."
        )
    return found if run_seed == seed else _restarted(found, task.nodes(run_seed))


def _judged(node: Node, seed: int, hold_out: float, common: Split | None) -> Node:
    splits = {name: split for name, split in node.data.items() if name != "test"}
    if hold_out:
        splits |= _held_out(node, seed, hold_out) if "train" in splits else {}
    elif node.name != _HUB:
        found = _validation(node) or common
        splits |= {"test": found} if found else {}
    return replace(node, data=Data(may_miss_classes=True, **splits))


def _validation(node: Node) -> Split | None:
    """All labelled validation data of a node."""
    held = [node.data[name] for name in VALIDATION if name in node.data]
    labels = [split.y for split in held if split.y is not None]
    if not labels or len(labels) < len(held):
        return None
    return Split(torch.cat([split.x for split in held]), torch.cat(labels))


def _held_out(node: Node, seed: int, share: float) -> dict[str, Split]:
    train = node.data["train"]
    if train.y is None or any(len(t) == len(train) for t in node.memory.values() if t.dim()):
        raise ConfigError(
            f"hold_out={share:g}: the training data of node {node.name} cannot be held out, they "
            "have no labels or the method keeps something about each of them."
        )
    count = round(share * len(train))
    if not 0 < count < len(train):
        raise ConfigError(f"hold_out={share:g} leaves node {node.name} nothing on one side.")
    order = torch.randperm(len(train), generator=stream(seed, "hold out", node.name))
    judge, learn = order[:count], order[count:]
    return {
        "train": Split(train.x[learn], train.y[learn]),
        "test": Split(train.x[judge], train.y[judge]),
    }


def _restarted(nodes: Sequence[Node], others: Sequence[Node]) -> list[Node]:
    """The same nodes with the first weights of another seed, where the networks are the same."""
    fresh = {node.name: node.model for node in others}
    return [
        replace(node, model=fresh[node.name])
        if node.name in fresh and fresh[node.name].spec() == node.model.spec()
        else node
        for node in nodes
    ]

"""Rollback: keep the parameters of the best round, and load them after the last.

Rounds are judged by accuracy, or by the node's own score, on a second validation split, `val_rb`;
of equal rounds the later one wins. A node without that split keeps its last round.
"""

from __future__ import annotations

import torch

from polyfed.core.node import Node
from polyfed.train.evaluate import judged

SPLIT = "val_rb"
_BEST, _SNAPSHOT = "rollback_best", "rollback"


def keep_best(node: Node) -> None:
    """At the end of a round: snapshot the model if it is at least as good as any before."""
    if SPLIT not in node.data:
        return
    now = judged(node, SPLIT)
    node.notes[f"{SPLIT}_accuracy"] = now
    if _BEST not in node.memory or now >= float(node.memory[_BEST]):
        node.memory[_BEST] = torch.tensor(now, dtype=torch.float64)
        node.remember(_SNAPSHOT, node.model.state())


def roll_back(node: Node) -> None:
    """After the last round: load the best snapshot, if one was kept."""
    node.model.load(node.recall(_SNAPSHOT))

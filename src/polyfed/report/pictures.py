"""Pictures of a federation that was made again: who holds what, who shares which slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.node import Node
from polyfed.methods._partial import PartialModels
from polyfed.report.again import Again
from polyfed.report.network import network_svg
from polyfed.tasks import picture
from polyfed.train.surrogate import SETS, set_proportions

MOST_NODES = 200  # in a picture of who holds what


def labels_of(nodes: Sequence[Node], split: str = "train") -> tuple[dict[str, Tensor], list[str]]:
    """Labels of every node that has some, as columns of the classes of all nodes.

    Args:
        nodes: with the names of their classes.
        split: whose labels.
    """
    classes = list(dict.fromkeys(name for node in nodes for name in node.classes))
    labels = {}
    for node in nodes:
        y = node.data[split].y if split in node.data else None
        if y is not None and y.dim() == 1 and not y.is_floating_point() and node.classes:
            columns = torch.tensor([classes.index(name) for name in node.classes])
            labels[node.name] = columns[y.cpu()]
    return labels, classes


def holdings(again: Again) -> dict[str, Any]:
    """Samples by node and class: of training; of the tests, where training has no labels."""
    for split, said in (("train", "Training samples"), ("test", "No labels to train on; tests")):
        labels, classes = labels_of(again.nodes, split)
        counts = {n: picture.holdings({n: y}, len(classes))[0] for n, y in labels.items()}
        counts |= _by_sets(again.nodes, classes) if split == "train" else {}
        if counts:
            shown = {n.name: counts[n.name] for n in again.nodes if n.name in counts}
            names = list(shown)[:MOST_NODES]
            table = torch.stack([shown[name] for name in names])
            svg = picture.as_svg(table, names, classes, f"{said} by node and class")
            return {"svg": svg, "said": _left_out(len(shown), len(labels))}
    return {"svg": "", "said": "No node of this task has classes to count."}


def _by_sets(nodes: Sequence[Node], classes: Sequence[str]) -> dict[str, Tensor]:
    """Samples of every class in the sets of nodes that know no labels, by their proportions."""
    found = {}
    for node in nodes:
        if SETS in node.memory and node.classes:
            sizes = torch.bincount(node.memory[SETS]).double()
            counts = (sizes @ set_proportions(node.model).double()).round().long()
            columns = torch.tensor([classes.index(name) for name in node.classes])
            found[node.name] = torch.zeros(len(classes), dtype=torch.int64).index_add(
                0, columns, counts
            )
    return found


def _left_out(nodes: int, labelled: int) -> str:
    more = f"{nodes - MOST_NODES} more nodes are not drawn. " if nodes > MOST_NODES else ""
    sets = "Nodes without labels: by the known class proportions of their sets."
    return (more + (sets if nodes > labelled else "")).strip()


def network(again: Again) -> str:
    """The networks cut into slices, coloured by partial model; nothing for other methods."""
    if not isinstance(again.method, PartialModels):
        return ""
    return network_svg(again.method.slices(again.parties))

"""The gate before round 0: everything about a federation that can be known before training."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.train import outputs

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_federation(nodes: Sequence[Node]) -> None:
    """Raise, naming the node and the cause, unless every node can train and be evaluated."""
    if not nodes:
        raise ConfigError("a federation needs at least one node, got none.")
    names = [node.name for node in nodes]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"node name {name!r}: use letters, digits, '.', '_' and '-' only.")
        if names.count(name) > 1:
            raise ConfigError(f"two nodes are called {name}. Names must be unique.")
    for node in nodes:
        _check_node(node)


def _check_node(node: Node) -> None:
    if "train" not in node.data:
        raise DataError(f"node {node.name} has no split 'train'. Its splits: {_listed(node.data)}.")
    width = _output_width(node)
    for name, split in node.data.items():
        y = split.y
        if y is None and name in ("test", "val_rb"):
            raise DataError(f"node {node.name}, split '{name}' has no labels: accuracy needs them.")
        if y is None or y.dim() != 1 or y.is_floating_point():
            continue
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= width:
            raise DataError(
                f"node {node.name}, split '{name}': labels run from {low} to {high}, but the "
                f"network has {width} outputs (labels 0 to {width - 1}). Relabel the data, or "
                "widen the head."
            )
    node.data.check(node.name)


def _output_width(node: Node) -> int:
    """Outputs for a training sample; splits of another shape or dtype must pass too."""
    samples = {"train": node.data["train"].x[:1]} | {n: s.x[:1] for n, s in node.data.items()}
    widths: dict[tuple[torch.Size, torch.dtype], int] = {}
    for name, x in samples.items():
        if (x.shape, x.dtype) in widths:
            continue
        try:
            widths[x.shape, x.dtype] = outputs(node.model, x).shape[-1]
        except Exception as error:  # whatever a person's own network raises
            raise ModelError(
                f"the network of node {node.name} does not take its data, of shape "
                f"{list(x.shape[1:])} a sample in split '{name}': {error}"
            ) from error
    return next(iter(widths.values()))


def _listed(data: Data) -> str:
    return ", ".join(data) or "none"

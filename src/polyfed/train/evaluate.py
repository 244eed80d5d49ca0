"""Evaluation in large batches: eval mode, no gradients, one number off the device at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyfed.core.data import Split
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Node
from polyfed.core.phase import Objective
from polyfed.errors import DataError
from polyfed.maths.ranking import area_under_roc
from polyfed.train.layout import channels_last, is_faster

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 256


def rows_per_batch(x: Tensor, limit: int = _BATCH_BYTES) -> int:
    """Rows of `x` that make a large batch within the memory limit."""
    row = max(1, x[:1].numel() * x.element_size())
    return max(_BATCH_ROWS, limit // row)


def _laid_out(model: Model, x: Tensor) -> AbstractContextManager[None]:
    return channels_last(model, model.precision == "float32" and is_faster(x))


def outputs(model: Model, x: Tensor, part: str | None = None) -> Tensor:
    """The network's output, or that of one part, for all of `x`."""
    with evaluating(model.net), _laid_out(model, x):
        chunks = x.split(rows_per_batch(x))
        return torch.cat([model(c) if part is None else model.output(c, part) for c in chunks])


def accuracy(model: Model, split: Split) -> float:
    """Share of the split that the network labels correctly; one output says 1 from 0.5 on."""
    if split.y is None:
        raise DataError("accuracy needs labels, but this split has none.")
    out = outputs(model, split.x)
    predicted = out[:, 0] >= 0.5 if out.shape[1:] == (1,) else out.argmax(-1)
    return float((predicted == split.y).double().mean())


def auc(model: Model, split: Split) -> float:
    """Area under the ROC curve of two outputs: how well they rank class 1 above class 0."""
    if split.y is None or len(split.y.unique()) < 2:
        raise DataError("an area under the ROC curve needs labels of both classes in a split.")
    out = outputs(model, split.x)
    return area_under_roc(out[:, 1] - out[:, 0], split.y == 1)


def judged(node: Node, split: str) -> float:
    """How well a node does on a split of its data: its score, or accuracy."""
    return (accuracy if node.score is None else node.score)(node.model, node.data[split])


def mean_loss(model: Model, split: Split, objective: Objective) -> float:
    """Mean of the objective over the split."""
    rows = rows_per_batch(split.x)
    xs = split.x.split(rows)
    ys = [None] * len(xs) if split.y is None else split.y.split(rows)
    total = torch.zeros((), device=split.x.device)
    with evaluating(model.net), _laid_out(model, split.x):
        for x, y in zip(xs, ys, strict=True):
            total += objective(model, x, y) * len(x)
    return float(total) / len(split)

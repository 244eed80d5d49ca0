"""The training loop of one node: the floor is a bare PyTorch loop over the same steps.

Each epoch gathers its shuffled data once and cuts views of it; losses stay on the device until the
phase ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.data import Split
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Phase
from polyfed.errors import DataError, UnknownNameError
from polyfed.random import ambient
from polyfed.train.evaluate import mean_loss

_GATHER_BYTES = 64 << 20


@dataclass(frozen=True)
class Fitted:
    """What a phase came to."""

    label: str
    loss: float  # mean over the last epoch
    epochs: int
    steps: int


def fit(node: Node, phase: Phase, *path: str | int) -> Fitted:
    """Train one node through one phase; `path` names its random streams."""
    split = _training_split(node, phase)
    order = node.stream("batches", *path)
    device = split.x.device
    noise = ambient(node.seed, "node", node.name, "noise", *path, device=device)
    with noise, node.model.moving(*phase.parts) as parameters:
        pairs = _rest_batchnorm(node.model.net, len(split))
        sizes = batch_sizes(len(split), phase.batch_size(len(split)), pairs=pairs)
        optimiser = phase.optimiser.build(parameters)
        watch = _Watch.of(node, phase)
        losses: list[Tensor] = []
        epochs = steps = 0
        while _remaining(phase, epochs, steps):
            losses.clear()
            shuffled = torch.randperm(len(split), generator=order).to(device)
            for x, y in _batches(split, shuffled, sizes):
                loss = phase.objective(node.model, x, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.detach())
                steps += 1
                if steps == phase.steps:
                    break
            epochs += 1
            if watch is not None and watch.is_over():
                break
        if watch is not None:
            watch.restore()
    return Fitted(phase.label, _mean(losses, sizes), epochs, steps)


def batch_sizes(num_examples: int, size: int, *, pairs: bool = False) -> list[int]:
    """Cut an epoch into batches; with `pairs`, a last batch of one joins the one before it.

    >>> batch_sizes(7, 3), batch_sizes(7, 3, pairs=True)
    ([3, 3, 1], [3, 4])
    """
    full, rest = divmod(num_examples, size)
    sizes = [size] * full + ([rest] if rest else [])
    if pairs and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    return sizes


def _training_split(node: Node, phase: Phase) -> Split:
    split = node.data[phase.split]
    if phase.target is None:
        return split
    if phase.target not in node.memory:
        raise UnknownNameError(f"memory of node {node.name}", phase.target, node.memory)
    target = node.memory[phase.target]
    if len(target) != len(split):
        raise DataError(
            f"node {node.name}: {len(target)} targets for the {len(split)} samples "
            f"of split '{phase.split}'."
        )
    return Split(split.x, target)


def _remaining(phase: Phase, epochs: int, steps: int) -> bool:
    return epochs < phase.epochs if phase.epochs is not None else steps < (phase.steps or 0)


def _batches(
    split: Split, order: Tensor, sizes: list[int]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Views into gathered chunks of whole batches."""
    row = max(1, split.x[:1].numel() * split.x.element_size())
    per_chunk = max(1, _GATHER_BYTES // (row * sizes[0]))
    start = 0
    for first in range(0, len(sizes), per_chunk):
        chunk = sizes[first : first + per_chunk]
        index = order[start : start + sum(chunk)]
        start += sum(chunk)
        xs = split.x[index].split(chunk)
        if split.y is None:
            yield from ((x, None) for x in xs)
        else:
            yield from zip(xs, split.y[index].split(chunk), strict=True)


def _rest_batchnorm(net: nn.Module, num_examples: int) -> bool:
    """Whether batches of one must be avoided; BatchNorm of a single sample is put at rest."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]
    if num_examples == 1:
        for norm in norms:
            norm.eval()
    return bool(norms)


def _mean(losses: list[Tensor], sizes: list[int]) -> float:
    if not losses:
        return math.nan
    weights = torch.tensor(sizes[: len(losses)], dtype=torch.float64)
    values = torch.stack(losses).double().cpu()
    return float((values * weights).sum() / weights.sum())


class _Watch:
    """Early stopping: remembers the best epoch of the moving parts."""

    def __init__(self, node: Node, phase: Phase, stop: EarlyStop) -> None:
        self.node, self.phase, self.stop = node, phase, stop
        self.best, self.state, self.since = math.inf, dict[str, Tensor](), 0

    @classmethod
    def of(cls, node: Node, phase: Phase) -> _Watch | None:
        if phase.stop is None or phase.stop.split not in node.data:
            return None
        return cls(node, phase, phase.stop)

    def is_over(self) -> bool:
        """Judge the epoch that has just ended."""
        held_out = self.node.data[self.stop.split]
        loss = mean_loss(self.node.model, held_out, self.phase.objective)
        if loss < self.best:
            self.best, self.since = loss, 0
            self.state = self.node.model.state(*self.phase.parts)
        else:
            self.since += 1
        return self.since >= self.stop.patience

    def restore(self) -> None:
        self.node.model.load(self.state)

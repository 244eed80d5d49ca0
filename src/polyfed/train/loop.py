"""The training loop of one node: the floor is a bare PyTorch loop over the same steps.

Each epoch gathers its shuffled data once and cuts views of it; losses stay on the device until the
phase ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.data import Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Objective, Phase, Rule
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.random import ambient
from polyfed.train.by_sample import BySample, can_write_out
from polyfed.train.course import Course
from polyfed.train.evaluate import mean_loss
from polyfed.train.layout import channels_last, is_faster

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
    split = training_split(node, phase)
    device = split.x.device
    noise = ambient(node.seed, "node", node.name, "noise", *path, device=device)
    last = node.model.precision == "bfloat16" or is_faster(split.x)
    laid_out, moving = channels_last(node.model, last), node.model.moving(*phase.parts)
    with noise, laid_out, moving as parameters:
        pairs = _rest_batchnorm(node.model.net, len(split))
        course = Course(node, phase, len(split), path, pairs=pairs)
        train, keep = _trainer(node, phase, split, parameters)
        watch = Watch.of(node, phase)
        losses: Sequence[Tensor] | Tensor = []
        sizes: list[int] = []
        epochs = steps = 0
        for order, sizes in course:
            losses = train(order.to(device), sizes)
            epochs, steps = epochs + 1, steps + len(sizes)
            if watch is not None:
                loss = mean_loss(node.model, watch.held_out, watch.objective)
                if watch.is_over(loss, lambda: node.model.state(*phase.parts)):
                    break
        if watch is not None:
            node.model.load(watch.state)
        keep()
    return Fitted(phase.label, mean_of(losses, sizes), epochs, steps)


def training_split(node: Node, phase: Phase) -> Split:
    """The inputs of a phase and what takes the labels' place."""
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


def _trainer(
    node: Node, phase: Phase, split: Split, parameters: list[nn.Parameter]
) -> tuple[Callable[[Tensor, list[int]], Sequence[Tensor] | Tensor], Callable[[], None]]:
    """What an epoch does to the model, and what to do when the phase is over."""
    if split.y is not None and can_write_out(node.model, phase, split):
        steps, labels = BySample(node.model.net, phase), split.y

        def by_sample(order: Tensor, sizes: list[int]) -> Tensor:
            return steps.train(split.x, labels, order[: len(sizes)])

        return by_sample, lambda: None
    step, keep = _stepper(node, phase, parameters)

    def by_batch(order: Tensor, sizes: list[int]) -> list[Tensor]:
        return [step(x, y) for x, y in _batches(split, order, sizes)]

    return by_batch, keep


def _stepper(
    node: Node, phase: Phase, parameters: list[nn.Parameter]
) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Callable[[], None]]:
    """What one batch does to the model, and what to do when the phase is over."""
    model, objective = node.model, phase.objective
    if isinstance(objective, Rule):

        def learn(x: Tensor, y: Tensor | None) -> Tensor:
            with torch.no_grad():
                return objective.update(model, x, y)

        return learn, lambda: None
    optimiser = phase.optimiser.build(parameters)
    if phase.keep is not None:
        load_kept(node, phase.keep, optimiser, _names_of(model, parameters))
    after = getattr(objective, "after_step", None)

    def step(x: Tensor, y: Tensor | None) -> Tensor:
        loss = objective(model, x, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if after is not None:
            after(model)
        return loss.detach()

    def keep() -> None:
        optimiser.zero_grad()  # gradients of thousands of nodes are not worth their memory
        if phase.keep is not None:
            store_kept(node, phase.keep, optimiser, _names_of(model, parameters))

    return step, keep


def load_kept(
    node: Node, group: str, optimiser: torch.optim.Optimizer, names: Sequence[str]
) -> None:
    """Give an optimiser what a node kept of an earlier one."""
    kept = node.recall(f"optimiser {group}")
    for parameter, name in zip(optimiser.param_groups[0]["params"], names, strict=True):
        own = {n.rpartition("/")[2]: t for n, t in kept.items() if n.rpartition("/")[0] == name}
        if own:
            optimiser.state[parameter] = {
                n: t.float().clone() if n == "step" else torch.empty_like(parameter).copy_(t)
                for n, t in own.items()
            }


def store_kept(
    node: Node, group: str, optimiser: torch.optim.Optimizer, names: Sequence[str]
) -> None:
    """Keep an optimiser's state in the node's memory."""
    node.remember(
        f"optimiser {group}",
        {
            f"{name}/{n}": t.contiguous()
            for parameter, name in zip(optimiser.param_groups[0]["params"], names, strict=True)
            for n, t in optimiser.state[parameter].items()
            if isinstance(t, Tensor)
        },
    )


def _names_of(model: Model, parameters: list[nn.Parameter]) -> list[str]:
    names = {id(p): name for name, p in model.net.named_parameters()}
    return [names[id(p)] for p in parameters]


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


def moves_batchnorm(model: Model, parts: tuple[str, ...]) -> bool:
    """Whether BatchNorm keeps statistics while these parts train."""
    moving = parts or tuple(model.parts)
    modules = dict(model.net.named_modules())
    inside = (modules[name] for part in moving for name in model.parts[part] if name in modules)
    return any(isinstance(m, _BatchNorm) for module in inside for m in module.modules())


def _rest_batchnorm(net: nn.Module, num_examples: int) -> bool:
    """Whether batches of one must be avoided; BatchNorm of a single sample is put at rest."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]
    if num_examples == 1:
        for norm in norms:
            norm.eval()
    return bool(norms)


def mean_of(losses: Sequence[Tensor] | Tensor, sizes: Sequence[int]) -> float:
    """Mean of the losses of batches of these sizes; NaN if there is none."""
    if not len(losses):
        return math.nan
    weights = torch.tensor(sizes[: len(losses)], dtype=torch.float64)
    values = (losses if isinstance(losses, Tensor) else torch.stack(list(losses))).double().cpu()
    return float((values * weights).sum() / weights.sum())


class Watch:
    """Early stopping: remembers the best epoch of the moving parts."""

    def __init__(self, node: Node, phase: Phase, stop: EarlyStop, objective: Objective) -> None:
        self.node, self.phase, self.stop, self.objective = node, phase, stop, objective
        self.best, self.state, self.since = math.inf, dict[str, Tensor](), 0

    @classmethod
    def of(cls, node: Node, phase: Phase) -> Watch | None:
        """The watch over a phase; none if it has no stopping rule or the node no such split."""
        if phase.stop is None or phase.stop.split not in node.data:
            return None
        if isinstance(phase.objective, Rule):
            raise ConfigError(f"phase '{phase.label}': a rule has no loss to stop early by.")
        return cls(node, phase, phase.stop, phase.objective)

    @property
    def held_out(self) -> Split:
        """What epochs are judged on."""
        return self.node.data[self.stop.split]

    def is_over(self, loss: float, state: Callable[[], dict[str, Tensor]]) -> bool:
        """Judge an epoch by its held-out loss; `state` copies the moving parts."""
        if loss < self.best:
            self.best, self.since, self.state = loss, 0, state()
        else:
            self.since += 1
        return self.since >= self.stop.patience

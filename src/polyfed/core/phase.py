"""Phase: one stretch of local training, as data.

An engine that sees equal phases of equally shaped nodes may train them as one computation; an
engine with one node runs the same list. So a phase says *what* to train, never *how*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.model import Model
from polyfed.errors import ConfigError, DataError

OptimiserName = Literal["sgd", "adam", "adamw"]


@runtime_checkable
class Objective(Protocol):
    """A scalar loss of a batch: the mean over its samples.

    It may have two more methods. `losses(model, x, y)` gives the loss of each sample, of which the
    objective is the mean: then nodes whose batches differ in size can be trained as one.
    `after_step(model)` is called after every optimiser step.
    """

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The loss of `model` on inputs `x` with targets `y`."""
        ...


@runtime_checkable
class Rule(Protocol):
    """A way to learn that is not gradient descent, in an objective's place."""

    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Change the model for one batch; a figure to record, the smaller the better."""
        ...


@dataclass(frozen=True)
class PerSample:
    """An objective that is the mean of `losses`."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """One loss per sample."""
        raise NotImplementedError

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The mean of the samples' losses."""
        return self.losses(model, x, y).mean()


@dataclass(frozen=True)
class CrossEntropy(PerSample):
    """Classification: cross-entropy of the network's output against class labels."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Cross-entropy of each sample."""
        return functional.cross_entropy(model(x), self._labels(y), reduction="none")

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The mean, in one kernel."""
        return functional.cross_entropy(model(x), self._labels(y))

    def _labels(self, y: Tensor | None) -> Tensor:
        if y is None:
            raise ConfigError("cross_entropy needs labels, but this split has none.")
        are_shares = y.dim() > 1 and y.shape[1] > 1
        if y.dim() < 3 and (y.is_floating_point() != are_shares or y.shape[1:] == (1,)):
            raise DataError(
                "cross_entropy takes whole class numbers, one a sample, or a share for every "
                f"class, got labels of shape {list(y.shape)} and {y.dtype}. Fix: y.long() for "
                "numbers, y.squeeze(1) for a column, y.argmax(1) for one-hot."
            )
        return y


cross_entropy = CrossEntropy()


@dataclass(frozen=True)
class SquaredError(PerSample):
    """Half the squared distance between the network's output and one-hot labels, or targets."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """1/2 sum (output - target)^2 of each sample."""
        return self._squares(model, x, y).flatten(1).sum(1) / 2

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Their mean; in one sum, as steps of one sample are short."""
        return self._squares(model, x, y).sum() / (2 * len(x))

    def _squares(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        if y is None:
            raise ConfigError("SquaredError needs labels or targets, but this split has none.")
        out = model(x)
        target = y.view_as(out) if y.is_floating_point() else functional.one_hot(y, out.shape[-1])
        return (out - target).square()


@dataclass(frozen=True)
class MatchOutput(PerSample):
    """Distillation: mean squared distance between a part's output and given targets."""

    part: str
    weight: float = 1.0

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The weighted mean of (output - target)^2 over dimensions, of each sample."""
        squares = functional.mse_loss(*self._pair(model, x, y), reduction="none")
        return self.weight * squares.flatten(1).mean(1)

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The weighted mean of (output - target)^2, over batch and dimensions."""
        return self.weight * functional.mse_loss(*self._pair(model, x, y))

    def _pair(self, model: Model, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        if y is None:
            raise ConfigError("MatchOutput needs targets: set Phase.target.")
        return model.output(x, self.part), y


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """Which optimiser, with which settings."""

    NAMES: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adamw")

    name: OptimiserName | Literal["boxed-sgd"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.one_of(self, "name", self.NAMES)
        check.positive(self, "lr")
        check.between(self, "momentum", 0, 1)
        check.at_least(self, "weight_decay", 0)
        if self.momentum and self.name != "sgd":
            raise ConfigError(
                f"momentum={self.momentum} is for sgd, but the optimiser is {self.name}."
            )

    def build(
        self, parameters: Sequence[Tensor], *, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """A fresh optimiser over these parameters, in its fused form where the device has one.

        Args:
            parameters: what it moves.
            capturable: whether its steps go into a CUDA graph.
        """
        fused = _has_fused(parameters)
        if self.name == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                fused=fused,
            )
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(
            parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            fused=fused,
            capturable=capturable,
        )


@dataclass(frozen=True, kw_only=True)
class Boxed(Optimiser):
    """Plain SGD on weights that stay within [0, 1]: what leaves is put back to the edge."""

    NAMES: ClassVar[tuple[str, ...]] = ("boxed-sgd",)

    name: OptimiserName | Literal["boxed-sgd"] = "boxed-sgd"

    def build(
        self, parameters: Sequence[Tensor], *, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """A fresh optimiser over these parameters."""
        decay = self.weight_decay
        return _BoxedSGD(parameters, self.lr, weight_decay=decay, fused=_has_fused(parameters))


class _BoxedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_clamp_min_(group["params"], 0.0)
            torch._foreach_clamp_max_(group["params"], 1.0)
        return loss


def _has_fused(parameters: Sequence[Tensor]) -> bool | None:
    return all(p.device.type in ("cpu", "cuda") for p in parameters) or None


@dataclass(frozen=True)
class EarlyStop:
    """Stop when the objective on `split` has not improved for `patience` epochs; restore the best.

    A node without that split trains to the end.
    """

    split: str = "val_es"
    patience: int = 5


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of local training.

    Attributes:
        label: what to call it in metrics and progress.
        objective: the loss, or a rule that changes the model itself.
        parts: the parts that move; the others stay, bit for bit. Empty means all.
        split: the data it trains on.
        target: name of a tensor in the node's memory that takes the labels' place.
        epochs: passes over the split, or
        steps: optimiser steps, whichever is given.
        batch: samples in a batch, or, below 1, the share of the split.
        drop_last: leave a last batch out that is smaller than the others.
        optimiser: made afresh for the phase, unless
        keep: names what stays of it at the node, for the next phase that keeps the same.
        walk: go on through the data where the last walk stopped, instead of shuffling anew.
        shuffle: a new order for every pass; else the split's own.
        stop: the stopping rule.
    """

    label: str
    objective: Objective | Rule
    parts: tuple[str, ...] = ()
    split: str = "train"
    target: str | None = None
    epochs: int | None = None
    steps: int | None = None
    batch: float = 32
    drop_last: bool = False
    optimiser: Optimiser = Optimiser()
    keep: str | None = None
    walk: bool = False
    shuffle: bool = True
    stop: EarlyStop | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, str):
            raise ConfigError(f"phase '{self.label}': write parts=('{self.parts}',), a tuple.")
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"phase '{self.label}': give either epochs or steps.")
        if self.walk and (self.steps is None or self.stop is not None):
            raise ConfigError(f"phase '{self.label}': a walk takes steps and no stopping rule.")

    def batch_size(self, num_examples: int) -> int:
        """Samples in a batch: max(1, round(ratio * n)) for a share, else the number itself."""
        size = round(self.batch * num_examples) if self.batch < 1 else int(self.batch)
        return max(1, min(size, num_examples))

"""Training on unlabelled sets: what a node knows about them, and the objectives that use it.

The set of each sample takes the labels' place: `node.memory["sets"]`, by `Phase.target`; the split
`train` itself has no labels. The proportions, and Theorem 1's T, are buffers of the network that
are not persistent. So they go where the network goes (copies, devices), one equal objective serves
nodes with different sets, whose networks can be stacked with their buffers, and yet they are in no
state dict: they are never averaged, sent or written to a checkpoint. The network's output remains
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed import check
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Objective, PerSample
from polyfed.errors import ConfigError, DataError
from polyfed.maths.surrogate import (
    Identifiability,
    Kind,
    identifiable,
    log_transition,
    proportion_loss,
    surrogate_losses,
)

SETS = "sets"
_PROPORTIONS, _TRANSITION = "set_proportions", "set_transition"
_TOLERANCE = 1e-3  # of the sum of a set's proportions: they may be rounded

Losses = Callable[[Model, Tensor, Tensor | None], Tensor]
Numbers = Tensor | npt.NDArray[Any] | Sequence[Any]


def attach_sets(node: Node, sets: Numbers, Pi: Numbers, prior: Numbers | None = None) -> None:
    """Tell a node which set each of its training samples is in, and the sets' class proportions.

    Args:
        node: With a network and a split `train`; both stay, and the node remembers the rest.
        sets: Number of the set of each sample, from 0.
        Pi: Class proportions of each set, (sets, classes); they may be rounded to three digits.
        prior: Class prior under which the classifier is wanted, up to a factor; None is uniform.
    """
    Pi = checked_proportions(Pi, f"node {node.name}")
    if node.classes and len(node.classes) != Pi.shape[1]:
        raise DataError(
            f"node {node.name}: proportions of {Pi.shape[1]} classes, but it names "
            f"{len(node.classes)}: {', '.join(node.classes)}. Give a column for each."
        )
    number = _checked_sets(node, torch.as_tensor(sets), len(Pi))
    pi = None if prior is None else _checked_prior(node.name, Pi, torch.as_tensor(prior))
    T = log_transition(Pi, torch.bincount(number), pi)
    like = next(node.model.net.parameters())
    node.model.net.register_buffer(_PROPORTIONS, Pi.to(like), persistent=False)
    node.model.net.register_buffer(_TRANSITION, T.to(like), persistent=False)
    node.memory[SETS] = number.to(like.device)


def set_proportions(model: Model) -> Float[Tensor, "M K"]:
    """The proportions of a network's sets, as `attach_sets` left them."""
    return _buffer(model, _PROPORTIONS)


def examine(nodes: Sequence[Node]) -> Identifiability:
    """Whether the sets of these nodes determine the classifier."""
    return identifiable([set_proportions(node.model) for node in nodes])


# ---- objectives ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SurrogateLoss(PerSample):
    """FedUL: how badly the set of a sample is predicted, through Theorem 1.

    Attributes:
        loss: the likelihood of the set, or the double softmax of the authors' code.
    """

    loss: Kind = "proper"

    def __post_init__(self) -> None:
        check.one_of(self, "loss", ("proper", "reference"))

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """-log q of each sample's set."""
        return surrogate_losses(model(x), _sets(y), _buffer(model, _TRANSITION), self.loss)


@dataclass(frozen=True)
class ProportionLoss:
    """FedLLP: divergence of the mean prediction over a set from its proportions.

    It has no loss per sample: those of a set depend on each other.
    """

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The proportion loss of the batch."""
        return proportion_loss(model(x), _sets(y), set_proportions(model))


@dataclass(frozen=True)
class L1Penalty:
    """An objective and the sum of all parameters' absolute values.

    Attributes:
        objective: the loss.
        weight: of the sum.
    """

    objective: Objective
    weight: float

    def __post_init__(self) -> None:
        check.at_least(self, "weight", 0)

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The objective and the penalty."""
        return self.objective(model, x, y) + self._penalty(model)

    @property
    def losses(self) -> Losses:
        """One loss per sample; missing, as an attribute, where the objective has none."""
        inner: Losses = self.objective.losses  # type: ignore[attr-defined]
        return lambda model, x, y: inner(model, x, y) + self._penalty(model)

    def _penalty(self, model: Model) -> Tensor:
        parameters = list(model.net.parameters())
        if not torch._C._are_functorch_transforms_active():  # in no stack
            total: Tensor = _AbsoluteSum.apply(*parameters)  # type: ignore[no-untyped-call]
            return self.weight * total
        return self.weight * torch.stack([torch.linalg.vector_norm(p, 1) for p in parameters]).sum()


class _AbsoluteSum(torch.autograd.Function):
    """The sum of all tensors' absolute values, on a GPU in a few kernels for all of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack(torch._foreach_norm(tensors, 1)).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        signs = torch._foreach_sign(ctx.saved_tensors)
        torch._foreach_mul_(signs, gradients[0])
        return tuple(signs)


def _buffer(model: Model, name: str) -> Tensor:
    try:
        return model.net.get_buffer(name)
    except AttributeError as error:
        raise ConfigError(
            "this network's node knows no sets. Use a task with unlabelled sets, or tell it: "
            "polyfed.train.surrogate.attach_sets(node, sets, proportions)."
        ) from error


def _sets(y: Tensor | None) -> Tensor:
    if y is None:
        raise ConfigError(f"this objective needs the set of each sample: Phase(target={SETS!r}).")
    return y


# ---- what cannot be right ------------------------------------------------------------------------


def checked_proportions(Pi: Numbers, where: str) -> Float[Tensor, "M K"]:
    """The proportions in float64, each row divided by its sum, which must be about 1.

    Args:
        Pi: What a person gave: a row for each set, a column for each class.
        where: Whose sets they are, for the error.
    """
    exact = torch.as_tensor(Pi).detach().cpu().double()
    if exact.dim() != 2 or not exact.numel():
        raise DataError(
            f"{where}: proportions of shape {list(exact.shape)}, expected one row for each set and "
            "one column for each class."
        )
    for m, row in enumerate(exact):
        if not bool((torch.isfinite(row) & (row >= 0)).all()):
            raise DataError(f"{where}, set {m}: proportions must be >= 0, got {_short(row)}.")
        if abs(float(row.sum()) - 1) > _TOLERANCE:
            raise DataError(
                f"{where}, set {m}: its proportions sum to {float(row.sum()):.6g}, expected 1 "
                f"(within {_TOLERANCE:g}): {_short(row)}. Counts? Divide them by their sum."
            )
    return exact / exact.sum(1, keepdim=True)


def _checked_sets(node: Node, sets: Tensor, M: int) -> Int64[Tensor, " n"]:
    there = len(node.data["train"])
    if sets.shape != (there,):
        raise DataError(
            f"node {node.name}: sets of shape {list(sets.shape)} for the {there} samples of split "
            "'train', expected one number for each."
        )
    number = sets.cpu().long()
    low, high = int(number.min()), int(number.max())
    if low < 0 or high >= M or not torch.equal(number.to(sets), sets):
        raise DataError(
            f"node {node.name}: sets must be whole numbers from 0 to {M - 1}, as there are "
            f"proportions of {M}; got {low} to {high}."
        )
    empty = (torch.bincount(number, minlength=M) == 0).nonzero().flatten().tolist()
    if empty:
        raise DataError(
            f"node {node.name}: no sample in set {', '.join(map(str, empty))}. Leave its row out, "
            "and number the sets without gaps."
        )
    return number


def _checked_prior(name: str, Pi: Tensor, prior: Tensor) -> Float[Tensor, " K"]:
    exact = prior.detach().cpu().double()
    if exact.shape != Pi.shape[1:]:
        raise DataError(
            f"node {name}: a prior of shape {list(exact.shape)} for {Pi.shape[1]} classes."
        )
    if not bool((torch.isfinite(exact) & (exact >= 0)).all()) or not bool(exact.any()):
        raise DataError(f"node {name}: a prior must be >= 0 and not all 0, got {_short(exact)}.")
    wrong = ((exact == 0) & (Pi > 0).any(0)).nonzero().flatten().tolist()
    if wrong:
        raise DataError(
            f"node {name}: class {', '.join(map(str, wrong))} has prior 0 but occurs in the sets. "
            "Give it a prior above 0, or drop its samples."
        )
    return exact


def _short(row: Tensor) -> str:
    return ", ".join(f"{v:.4g}" for v in row.tolist())

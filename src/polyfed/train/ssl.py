r"""Self-supervision as objectives of a phase: two views of a batch, and no label.

    BYOL      l = mean d(p1, t2) + d(p2, t1),  d(a, b) = 2 - 2 cos(a, b)                      (1)
              theta_t <- momentum theta_t + (1 - momentum) theta        after every step      (2)
    SimSiam   l = -mean (cos(p1, z2) + cos(p2, z1)) / 2,   z without gradient                 (3)
    SimCLR    l = -mean_i log (e_i,j(i) / sum_{k != i} e_ik),  e_ik = exp(cos(z_i, z_k) / tau)  (4)

Grill et al., NeurIPS 2020, arXiv:2006.07733; Chen and He, CVPR 2021, arXiv:2011.10566; Chen et al.,
ICML 2020, arXiv:2002.05709.
Symbols: z = projector(trunk(view)), p = predictor(z), t = target(view) without gradient; theta,
theta_t = parameters of trunk and projector, and of the target; i = any of the 2m projections of
both views, j(i) = the other view of its sample; tau = temperature.
Limits: equal predictions and targets give 0 in (1) and -1 in (3); momentum = 1 keeps the target.
Deviations from the papers: the momentum is constant, where BYOL's rises to 1.

The network is a `polyfed.models.siamese.Siamese` or any other with children of those names. Each
view is a forward pass of its own, so BatchNorm sees one view at a time. Train with all parts
moving: the target follows by (2), and its BatchNorm statistics by its own forward passes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn

from polyfed import check
from polyfed.core.model import Model
from polyfed.errors import DataError, ModelError
from polyfed.maths.correlation import triangular

Views = Callable[[Tensor], Tensor]
Early = Callable[[Tensor], None]
_COLLAPSED = 0.2  # of the standard deviation that features spread in all directions have


def _nothing(projections: Tensor) -> None:
    """Nobody wants them early."""


@dataclass(frozen=True)
class Seen:
    """What an objective made of a batch: its loss, and the projections of both views."""

    loss: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True, kw_only=True)
class SelfSupervised(ABC):
    """An objective on two views of the inputs.

    Attributes:
        views: makes one random view of a batch; it is called twice.
    """

    views: Views

    @abstractmethod
    def see(self, model: Model, x: Tensor, early: Early = _nothing) -> Seen:
        """Loss and projections, for objectives that add a term of their own.

        Args:
            model: the network.
            x: the batch.
            early: is given the projections of the first view, before all else is computed.
        """

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The loss; labels are not looked at."""
        return self.see(model, x).loss

    def after_step(self, model: Model) -> None:
        """What follows an optimiser step."""
        return


@dataclass(frozen=True, kw_only=True)
class BYOL(SelfSupervised):
    """Predict what a slowly moving copy of the network makes of the other view.

    Attributes:
        momentum: share of the target that stays at every step.
    """

    momentum: float = 0.99

    def __post_init__(self) -> None:
        check.between(self, "momentum", 0, 1)

    def see(self, model: Model, x: Tensor, early: Early = _nothing) -> Seen:
        """Eq. (1)."""
        *online, target = _children(model, "trunk", "projector", "predictor", "target")
        a, b = self.views(x), self.views(x)
        za, pa = _predicted(model, a, *online)
        early(za)
        zb, pb = _predicted(model, b, *online)
        with torch.no_grad():
            ta, tb = (model.compute(target, view) for view in (a, b))
        loss = 4 - 2 * _cosine(pa, tb) - 2 * _cosine(pb, ta)
        return Seen(loss, za, zb)

    def after_step(self, model: Model) -> None:
        """Eq. (2)."""
        trunk, projector, target = _children(model, "trunk", "projector", "target")
        online = [*trunk.parameters(), *projector.parameters()]
        get_ema_multi_avg_fn(self.momentum)(list(target.parameters()), online, None)


@dataclass(frozen=True, kw_only=True)
class SimSiam(SelfSupervised):
    """Predict the other view's projection."""

    def see(self, model: Model, x: Tensor, early: Early = _nothing) -> Seen:
        """Eq. (3)."""
        online = _children(model, "trunk", "projector", "predictor")
        a, b = self.views(x), self.views(x)
        za, pa = _predicted(model, a, *online)
        early(za)
        zb, pb = _predicted(model, b, *online)
        there, back = _cosine(pa, zb.detach()), _cosine(pb, za.detach())
        return Seen(-(there + back) / 2, za, zb)


@dataclass(frozen=True, kw_only=True)
class SimCLR(SelfSupervised):
    """Tell the other view of a sample from all views of others.

    Attributes:
        temperature: the smaller, the more the nearest others count.
    """

    temperature: float = 0.5

    def __post_init__(self) -> None:
        check.positive(self, "temperature")

    def see(self, model: Model, x: Tensor, early: Early = _nothing) -> Seen:
        """Eq. (4)."""
        trunk, projector = _children(model, "trunk", "projector")
        a, b = self.views(x), self.views(x)
        za = model.compute(lambda v: projector(trunk(v)), a)
        early(za)
        zb = model.compute(lambda v: projector(trunk(v)), b)
        return Seen(nt_xent(za, zb, self.temperature), za, zb)


def nt_xent(
    first: Float[Tensor, "m n"], second: Float[Tensor, "m n"], temperature: float
) -> Float[Tensor, ""]:
    """Eq. (4), of the projections of two views."""
    m = len(first)
    z = functional.normalize(torch.cat([first, second]), dim=1)
    scores = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(2 * m, device=z.device).roll(m)
    return functional.cross_entropy(scores, partner)


@torch.no_grad()
def collapse_report(features: Float[Tensor, "m n"]) -> dict[str, Any]:
    """Whether projections tell samples apart: figures for a node's notes.

    Returns:
        `feature_std`: mean standard deviation of a feature, of samples scaled to length one;
        `full_std`: 1 / sqrt(n), which features spread evenly in all directions have;
        `trace`: of the triangle R per sample, FedFoA's measure of independence (None if m < n);
        `collapsed`: whether the first is less than a fifth of the second.
    """
    m, n = features.shape
    if m < 2:
        raise DataError(f"{m} sample cannot show a collapse: give features of two or more.")
    std = float(functional.normalize(features, dim=1).std(dim=0).mean())
    full = 1 / math.sqrt(n)
    trace = float(triangular(features, per_sample=True).trace()) if m >= n else None
    collapsed = not std >= _COLLAPSED * full  # also true of NaN
    return {"feature_std": std, "full_std": full, "trace": trace, "collapsed": collapsed}


def _children(model: Model, *names: str) -> list[nn.Module]:
    """These children of the network; ModelError if one is missing."""
    have = dict(model.net.named_children())
    missing = [name for name in names if name not in have]
    if missing:
        raise ModelError(
            f"the network has no '{missing[0]}': self-supervision needs children "
            f"{', '.join(names)}, got {', '.join(have) or 'none'}. Wrap the trunk: "
            "polyfed.models.siamese."
        )
    return [have[name] for name in names]


def _predicted(
    model: Model, view: Tensor, trunk: nn.Module, projector: nn.Module, predictor: nn.Module
) -> tuple[Tensor, Tensor]:
    """Projection and prediction of a view: one pass, whose precision does not change on the way."""
    projections = []

    def online(view: Tensor) -> Tensor:
        projections.append(projector(trunk(view)))
        prediction: Tensor = predictor(projections[0])
        return prediction

    prediction = model.compute(online, view)
    return projections[0].to(prediction), prediction


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Mean cosine between the rows of a and b."""
    return functional.cosine_similarity(a, b, dim=1).mean()

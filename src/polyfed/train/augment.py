"""Augmentation of whole batches on their device: random rotations.

    x'(p) = x(R_a p),  a ~ U(-limit, limit) for each image, R_a a rotation about its centre    (1)

Pixels are taken from their nearest neighbour, as the code of FedUL does (Lu et al., ICLR 2022:
+-20 degrees); what comes from outside is `fill`. The angles are drawn from torch's own generator of
the device, which the training loop points at a stream named for the node and the tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.model import Model
from polyfed.core.phase import Objective

Images = Float[Tensor, "n c h w"]
Losses = Callable[[Model, Tensor, Tensor | None], Tensor]


def rotate(
    x: Images,
    degrees: Float[Tensor, " n"],
    *,
    fill: float = 0.0,
    mode: Literal["nearest", "bilinear"] = "nearest",
) -> Images:
    """Turn each image about its centre, counter-clockwise.

    Args:
        x: The images.
        degrees: How far, for each.
        fill: The value outside an image.
        mode: How a pixel is read between pixels.
    """
    height, width = x.shape[2:]
    angle = degrees.to(x.dtype).deg2rad()[:, None, None]
    across = torch.arange(width, device=x.device, dtype=x.dtype) - (width - 1) / 2
    down = torch.arange(height, device=x.device, dtype=x.dtype)[:, None] - (height - 1) / 2
    source_across = angle.cos() * across - angle.sin() * down
    source_down = angle.sin() * across + angle.cos() * down
    grid = torch.stack([source_across * (2 / width), source_down * (2 / height)], -1)
    return functional.grid_sample(x - fill, grid, mode=mode, align_corners=False) + fill


def rotate_randomly(x: Images, limit: float, *, fill: float = 0.0) -> Images:
    """Apply Eq. (1).

    Args:
        x: The images.
        limit: Largest angle, in degrees, either way.
        fill: The value outside an image.
    """
    turn = torch.rand(len(x), device=x.device, dtype=x.dtype)
    return rotate(x, limit * (2 * turn - 1), fill=fill)


@dataclass(frozen=True)
class Rotated:
    """An objective on randomly rotated images; in eval mode, as for early stopping, on plain ones.

    Attributes:
        objective: the loss.
        limit: largest angle in degrees, either way.
        fill: the value outside an image: that of its background.
    """

    objective: Objective
    limit: float = 20.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        check.between(self, "limit", 0, 180)

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The objective on the rotated batch."""
        return self.objective(model, self._seen(model, x), y)

    @property
    def losses(self) -> Losses:
        """One loss per sample; missing, as an attribute, where the objective has none."""
        inner: Losses = self.objective.losses  # type: ignore[attr-defined]
        return lambda model, x, y: inner(model, self._seen(model, x), y)

    def _seen(self, model: Model, x: Tensor) -> Tensor:
        if not model.net.training:
            return x
        return rotate_randomly(x, self.limit, fill=self.fill)

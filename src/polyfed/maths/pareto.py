r"""Two objectives at once: the common descent direction of least norm.

    d = a g1 + (1 - a) g2                                                                   (1)
    a = argmin_{0 <= a <= 1} |d|^2 = clip(<g2 - g1, g2> / |g1 - g2|^2, 0, 1)

Desideri, Comptes Rendus Mathematique 350, 2012 (MGDA), for two objectives.
Symbols: g1, g2 = gradients of the two objectives, or anything to step against.
Limits: <d, g1> >= |d|^2 and <d, g2> >= |d|^2: a small step against d lowers both, or d = 0 and the
point is Pareto stationary. <g1, g2> >= |g1|^2: d = g1. Opposed gradients: d = 0.
Deviations from the paper: equal gradients, where any a will do, give a = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def pareto_step(
    g1: Sequence[Tensor], g2: Sequence[Tensor]
) -> tuple[list[Tensor], Float[Tensor, ""]]:
    """The direction d and its a, Eq. (1), of two gradients given as lists of tensors.

    >>> d, a = pareto_step([torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])])
    >>> d[0].tolist(), float(a)
    ([0.5, 0.5], 0.5)
    """
    gaps = [y - x for x, y in zip(g1, g2, strict=True)]
    square = _inner(gaps, gaps)
    a = torch.where(square > 0, _inner(gaps, g2) / square, 1.0).clamp(0, 1)
    return [torch.lerp(y, x, a.to(x)) for x, y in zip(g1, g2, strict=True)], a


def _inner(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    return torch.stack([(u * v).sum() for u, v in zip(x, y, strict=True)]).sum()

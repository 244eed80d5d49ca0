r"""Fewer bits for a tensor: one byte a number with one scale, or half precision.

    s = max |x| / 127,    q = round(x / s),    x ~ s q                                 (1)
    |x - s q| <= s / 2                                                                 (2)

With error feedback what is lost is added to the next tensor before that is quantised, so that sums
over time are kept: sum_t s_t q_t = sum_t x_t - e_T, with e_T bounded by Eq. (2).
Seide, Fu, Droppo, Li, Yu. Interspeech 2014 (error feedback, there with one bit).
Symbols: q = whole numbers from -127 to 127, s = scale of the tensor, e_T = the error kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 127
_HALF = torch.finfo(torch.float16).max


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Eq. (1): q and s. A tensor of zeros has scale 0, one that is not finite no finite one.

    >>> quantise(torch.tensor([-2.54, 0.0, 1.27]))
    (tensor([-127,    0,   64], dtype=torch.int8), tensor(0.0200))
    """
    scale = x.abs().max() / _MOST
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (x / divisor).nan_to_num(0, 0, 0).round().clamp(-_MOST, _MOST)
    return q.to(torch.int8), scale


def restore(q: Tensor, scale: Tensor) -> Tensor:
    """Multiply s and q, in the precision of the scale."""
    return q.to(scale.dtype) * scale


def halve(x: Tensor) -> Tensor:
    """The tensor in half precision; what is finite stays finite."""
    return torch.where(x.isfinite(), x.clamp(-_HALF, _HALF), x).to(torch.float16)

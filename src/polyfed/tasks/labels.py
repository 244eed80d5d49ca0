"""Labels to deal samples by: class numbers, one a sample."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.errors import DataError

Labels = Int64[Tensor, " n"]


def whole_labels(y: Tensor) -> Labels:
    """Class numbers of any integer dtype, from arrays too; anything else is refused.

    >>> whole_labels(torch.tensor([1, 0], dtype=torch.uint8))
    tensor([1, 0])
    """
    y = torch.as_tensor(y)
    if y.dim() != 1 or y.is_floating_point():
        raise DataError(
            f"labels to deal by must be whole numbers, one a sample, got {y.dtype} of shape "
            f"{list(y.shape)}. Fix: y.long() for numbers, y.argmax(1) for one-hot."
        )
    return y.long()

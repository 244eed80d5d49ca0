"""Filters with their channels last, for as long as a phase or an evaluation takes.

In bfloat16 every step would copy them otherwise. On a CPU convolutions of float32 are faster with
them: steps take 0.67 to 1.01 of the time, evaluations 0.61 to 0.87 (`benchmarks/layout.py`). Images
of fewer pixels than `_LEAST` keep the usual layout: their steps are short, and runs their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polyfed.core.model import Model

_LEAST = 256  # pixels


def is_faster(x: Tensor) -> bool:
    """Whether networks that are given such inputs are faster with their channels last."""
    is_image = x.dim() == 4 and x.shape[2] * x.shape[3] >= _LEAST
    return is_image and x.dtype == torch.float32 and x.device.type == "cpu"


@contextmanager
def channels_last(model: Model, wanted: bool) -> Iterator[None]:
    """Lay filters out so, if that is wanted; afterwards they are where they were before."""
    kept = [(p, p.data) for p in model.net.parameters() if wanted and p.dim() == 4]
    for p, own in kept:  # `contiguous` would leave filters of one channel, which are both, as usual
        p.data = torch.empty_like(own, memory_format=torch.channels_last).copy_(own)
    try:
        yield
    finally:
        for p, own in kept:
            p.data = own.copy_(p.data)

r"""Weighted means of named tensors: how parameters meet.

    mean = sum_k w_k * theta_k / sum_k w_k                                             (1)

McMahan et al., AISTATS 2017 (FedAvg), Algorithm 1, with w_k = n_k.
Floating tensors are summed in the order given, so equal order means equal bits. Integer buffers
(BatchNorm's batch counter) are averaged in float64 and rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Apply Eq. (1) to every name.

    >>> weighted_mean([{"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}], [2, 1])
    {'w': tensor(2.)}
    """
    total = float(sum(weights))
    return {
        name: _mean([state[name] for state in states], [w / total for w in weights])
        for name in states[0]
    }


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if tensors[0].is_floating_point():
        mean = tensors[0] * shares[0]
        for tensor, share in zip(tensors[1:], shares[1:], strict=True):
            mean.add_(tensor, alpha=share)
        return mean
    exact = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        exact.add_(tensor.double(), alpha=share)
    return exact.round().to(tensors[0].dtype)

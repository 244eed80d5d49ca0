"""The papers' pseudo-code, written out slowly and obviously: what the fast code must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def literal_link(
    Z: Sequence[Float[Tensor, "N r"]],
    *,
    transform: bool = True,
    eta: float = 1.0,
    normalise: Literal["receiver", "all"] = "receiver",
    normalise_rows: bool = False,
) -> tuple[Float[Tensor, "K N r"], Float[Tensor, "K K"]]:
    """FedLinked, Algorithm 3, lines 7 to 15, one ordered pair at a time.

    The numerators of A weigh the sum of line 15: their common factor cancels in the quotient, so
    every pair is visited once and nothing is kept but the sums.

    Returns:
        The regularisers f*_j, and the utilities with row = receiver, column = source.
    """
    K = len(Z)
    alpha = [z / z.norm(dim=1, keepdim=True) for z in Z] if normalise_rows else list(Z)
    G = alpha[0].new_zeros(K, K)
    F = alpha[0].new_zeros(K, *alpha[0].shape)
    for j in range(K):
        for k in range(K):
            if j == k:
                continue
            transformed = alpha[k]
            if transform:
                R = alpha[k].T @ alpha[j]  # line 8
                U, _, Vh = torch.linalg.svd(R)  # line 9
                B = Vh.T @ U.T  # line 10
                transformed = alpha[k] @ B.T  # line 11
            G[j, k] = (alpha[j] * transformed).sum()  # line 12, numerator
            F[j] += G[j, k] * transformed  # line 15, numerator
        weight = G[j].abs().sum()
        F[j] = F[j] / weight if weight > 0 else Z[j]  # line 15
    norm = G.norm(dim=1, keepdim=True) if normalise == "receiver" else G.norm()  # line 12
    A = torch.where(norm > 0, eta * G / norm, 0.0)
    return F, A

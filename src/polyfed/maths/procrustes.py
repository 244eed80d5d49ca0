r"""FedLinked's hub step: rotate every node's representations onto every other's, then average.

    R_kj  = sum_x a_k(x) a_j(x)^T = Z_k^T Z_j = U S V^T                                     (3.13)
    B_kj  = V U^T,   Z'_kj = Z_k B_kj^T                                               (3.12, 3.13)
    G_kj  = sum_x <a_j(x), B_kj a_k(x)> = trace(B_kj R_kj) = trace(S)
    A_jk  = eta G_kj / sqrt(sum_{u != j} G_uj^2)                                            (3.14)
    F_j   = sum_{k != j} A_jk Z'_kj / (sum_{k != j} |A_jk| + tiny)            (Algorithm 3, line 15)

Kadar 2021, FedLinked, section 3.4 and Algorithm 3, lines 7 to 15.
Symbols: Z_k = representations node k sent, N public examples by r numbers, rows a_k(x); B_kj =
rotation from k's space to j's; A = utilities, row = receiver j, column = source k, zero diagonal;
F_j = regulariser returned to j; Q_kj = B_kj^T = U V^T, the orthogonal polar factor of R_kj.
Limits: two nodes: F_0 = Z'_10 whatever A. Equal nodes, or nodes equal up to a rotation: F_j = Z_j.
No other node, or all utilities of j zero: F_j = Z_j, no pull. eta never changes F.
Deviations from the paper: the norm of A is taken per receiver and equals eta, as the printed tables
5.1 and 5.2 have it and not as (3.14) has it (`normalise="all"` takes it over all pairs u != v; F is
the same). Absolute values in the denominator matter only without `transform`, where utilities may
be negative. Where R_kj has no full rank B_kj is one of many; B_jk = B_kj^T always.

Cost: K (K - 1) / 2 cross products and decompositions, where the literal loop takes twice as many,
and K (K - 1) products for F. Memory besides Z and F: one r x r matrix per pair of nodes.
Rounding: R is summed in Z's type and decomposed in float64. For float32 that leaves F about 1e-4
from exact where R's condition number is 1e8 or more; a loop all in float32 is far worse there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

_BATCH_NUMBERS = 2**20  # decompose this many numbers at a time: 16 pairs at r = 256
_LEAST = 1e-10  # least share of a matrix's norm that a singular value may have for Newton-Schulz
_MOST_SCALE = 1.6  # of a step: a singular value of 1 is not thrown back below 0.35
_ROUNDING = 4096  # times the machine epsilon: how orthogonal a product of matrices can be
_TINY = torch.finfo(torch.float64).tiny

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Linked:
    """What the hub step returns: each receiver's regulariser, and the utilities behind it."""

    regularisers: Float[Tensor, "K N r"]
    utilities: Float[Tensor, "K K"]


@torch.no_grad()
def link(
    Z: Sequence[Float[Tensor, "N r"]],
    *,
    transform: bool = True,
    eta: float = 1.0,
    normalise: Literal["receiver", "all"] = "receiver",
    normalise_rows: bool = False,
) -> Linked:
    """Lines 7 to 15 of Algorithm 3.

    Args:
        Z: Each node's representations of the same public examples, in the same order.
        transform: Rotate each source into the receiver's space; otherwise B is the identity.
        eta: Euclidean norm of each receiver's utilities, or of all of them.
        normalise: Over which utilities the norm is taken.
        normalise_rows: Scale every representation to length one first, so that nodes with large
            representations do not outweigh others; regularisers then have about length one too.
    """
    unit = [torch.nn.functional.normalize(z, dim=1) for z in Z] if normalise_rows else Z
    pairs = [(k, j) for j in range(len(Z)) for k in range(j)]
    Q = _cross_products(unit, pairs) if transform else None
    G = _align(Q) if Q is not None else _inner_products(unit, pairs)
    A = _utilities(_symmetric(G, pairs, len(Z)), eta, normalise)
    F = _combine(unit, pairs, Q, A)
    for j in (A == 0).all(dim=1).nonzero().flatten().tolist():
        F[j] = Z[j]
    return Linked(F, A.to(F))


@torch.no_grad()
def rotation(source: Float[Tensor, "N r"], target: Float[Tensor, "N r"]) -> Float[Tensor, "r r"]:
    """B_kj of Eq. (3.12), from source k to target j: columns a' = B a, rows Z' = Z B^T."""
    Q = polar((source.T @ target)[None])[0]
    B: Tensor = Q.T
    return B


def random_rotation(
    r: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "r r"]:
    """A random orthogonal matrix, uniform (Haar): Q of a Gaussian's QR with positive diagonal."""
    gaussian = torch.randn(r, r, generator=generator, device=generator.device, dtype=torch.float64)
    Q, T = torch.linalg.qr(gaussian)
    positive: Tensor = Q * torch.where(T.diagonal() < 0, -1.0, 1.0)
    return positive.to(dtype)


def _cross_products(Z: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """R_kj of each pair k < j; the others are transposes."""
    R = Z[0].new_empty(len(pairs), Z[0].shape[1], Z[0].shape[1])
    for p, (k, j) in enumerate(pairs):
        torch.mm(Z[k].T, Z[j], out=R[p])
    return R


def _align(R: Tensor) -> Tensor:
    """G_kj = trace(B_kj R_kj) of each pair; overwrites R_kj with Q_kj = B_kj^T."""
    G = R.new_empty(len(R))
    size = max(1, _BATCH_NUMBERS // R[0].numel()) if len(R) else 1
    for start in range(0, len(R), size):
        batch = slice(start, start + size)
        Q = polar(R[batch])
        G[batch] = (Q * R[batch]).sum(dim=(-2, -1))
        R[batch] = Q
    return G


def _inner_products(Z: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """G_kj with B = I: sum_x <a_j(x), a_k(x)> of each pair."""
    return torch.stack([(Z[k] * Z[j]).sum() for k, j in pairs]) if pairs else Z[0].new_empty(0)


def _symmetric(G: Tensor, pairs: Pairs, K: int) -> Tensor:
    """The K x K matrix of G_kj = G_jk with zero diagonal, in float64 on the CPU."""
    full = torch.zeros(K, K, dtype=torch.float64)
    for (k, j), value in zip(pairs, G.tolist(), strict=True):
        full[k, j] = full[j, k] = value
    return full


def _utilities(G: Tensor, eta: float, normalise: Literal["receiver", "all"]) -> Tensor:
    """Eq. (3.14) with the norm over each receiver's row, or over all ordered pairs."""
    norm: Tensor = G.norm(dim=1, keepdim=True) if normalise == "receiver" else G.norm()
    return eta * G / norm.clamp_min(_TINY)


def _combine(Z: Sequence[Tensor], pairs: Pairs, Q: Tensor | None, A: Tensor) -> Tensor:
    """Line 15: the weighted means, without ever holding the Z'_kj."""
    F = Z[0].new_zeros(len(Z), *Z[0].shape)
    W = (A / (A.abs().sum(dim=1, keepdim=True) + _TINY)).tolist()
    for p, (k, j) in enumerate(pairs):
        if Q is None:
            F[j].add_(Z[k], alpha=W[j][k])
            F[k].add_(Z[j], alpha=W[k][j])
        else:
            F[j].addmm_(Z[k], Q[p], alpha=W[j][k])
            F[k].addmm_(Z[j], Q[p].T, alpha=W[k][j])
    return F


def polar(
    R: Float[Tensor, "K r r"], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "K r r"]:
    """U V^T of each matrix of a batch, by whichever way is faster on its device.

    Args:
        R: Matrices; the results have their type.
        dtype: What is computed with. Trained networks give condition numbers of 1e7 and more.

    >>> polar(torch.tensor([[[0.0, -2.0], [3.0, 0.0]]]))
    tensor([[[ 0., -1.],
             [ 1.,  0.]]])
    """
    X = R.to(dtype)
    return (_polar_by_products(X) if R.is_cuda else _polar_by_svd(X)).to(R)


def _polar_by_svd(R: Tensor) -> Tensor:
    """As Eq. (3.12) says."""
    U, _, Vh = torch.linalg.svd(R.cpu())
    Q: Tensor = U @ Vh
    return Q.to(R)


def _polar_by_products(R: Tensor) -> Tensor:
    """Newton-Schulz, X <- X (3 I - X^T X) / 2, X scaled before; SVD where it has not converged."""
    X: Tensor = R / torch.linalg.matrix_norm(R)[:, None, None]
    for a in _scales():
        X = torch.baddbmm(X, X, X.mT @ X, beta=1.5 * a, alpha=-0.5 * a**3)
    error = X.mT @ X - torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    near = _ROUNDING * torch.finfo(X.dtype).eps
    failed = ~(error.abs().amax(dim=(-2, -1)) < near)  # also true of NaN
    X[failed] = _polar_by_svd(R[failed])
    return X


@cache
def _scales() -> tuple[float, ...]:
    """What X is scaled by in each step: singular values from `least` to 1 come to 1 soonest."""
    least, found = _LEAST, []
    while least < 1 - 1e-9:
        a = min(math.sqrt(3 / (1 + least + least**2)), _MOST_SCALE)
        least = min(1.5 * x - 0.5 * x**3 for x in (a * least, a))
        found.append(a)
    return (*found, 1.0, 1.0)

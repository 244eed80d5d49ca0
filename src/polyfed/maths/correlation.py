r"""FedFoA's mutual understanding: how well a batch of features is explained by a peer's triangle.

    Z = Q_z R_z,   Q_z^T Q_z = I,  R_z upper triangular, diag(R_z) > 0                        (4)
    Q*_j = argmin_{Q^T Q = I} ||Z - Q R_j||_F = V U^T,   R_j Z^T = U S V^T                 (5, 6)
    l_j  = ||Z - Q*_j R_j||_F                                                                 (7)
    l    = sum_j l_j  over the peers with tr(R_j) > tr(R_z)             (Algorithm 1, 16 to 23)

Liu et al., Feature Correlation-guided Knowledge Transfer for Federated Self-supervised Learning.
Symbols: Z = projections of a batch, m samples by n numbers; R_z = its own triangle; R_j = a peer's,
the mean over the batches of its last round (12); bank = the R_j of J peers.

What is computed: n x n algebra only. With P_j the polar factor of R_z R_j^T, Q*_j = Q_z P_j and

    l_j = ||R_z - P_j R_j||_F = sqrt(||Z||^2 + ||R_j||^2 - 2 ||R_z R_j^T||_*)

which is the Bures-Wasserstein distance between Z^T Z and R_j^T R_j. The gradient with Q*_j held
fixed, (Z - Q*_j R_j) / l_j, is exact, because Q*_j is a minimiser: nothing is differentiated but
the product Q_z^T Z = R_z, with Q_z held fixed.
Limits: Z = O R_j with orthonormal columns in O gives 0. No peer, or none with a larger trace: 0.
Deviations from the paper: its norm ||.||_2 is Frobenius', as its proof has it; diag(R) > 0 is
imposed, without which traces and means of R have no meaning. The square root is taken of
l_j^2 + (32 eps ||Z||)^2, eps the dtype's: below that l_j is rounding, and so is its direction.
`per_sample` divides Z by sqrt(m), so that batches of different sizes can be compared.
Where R_z R_j^T has no full rank P_j is one of many; l_j is the same for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyfed.errors import ConfigError, MessageError
from polyfed.maths.procrustes import polar

_ROUNDING = 32.0
_SAFE = 1e-5  # of the norm of R_z: a smaller diagonal is not told from rounding by Z^T Z


@dataclass(frozen=True)
class Understanding:
    """A batch seen through its peers' triangles.

    Attributes:
        loss: l, with gradient.
        R: the batch's own triangle R_z, without gradient.
        heard: which peers have a larger trace than R_z.
    """

    loss: Float[Tensor, ""]
    R: Float[Tensor, "n n"]
    heard: Bool[Tensor, " J"]


def triangular(Z: Float[Tensor, "m n"], *, per_sample: bool = False) -> Float[Tensor, "n n"]:
    """R_z of Eq. (4), without gradient; a Z in half precision gives a float32 R_z.

    >>> triangular(torch.tensor([[-3.0], [4.0]]))
    tensor([[5.]])
    """
    return _factors(_prepared(Z, per_sample))[1]


def understand(
    Z: Float[Tensor, "m n"], bank: Float[Tensor, "J n n"], *, per_sample: bool = False
) -> Understanding:
    """The term that Algorithm 1, lines 16 to 23, adds to the loss of a batch (before lambda).

    Args:
        Z: Projections of the batch.
        bank: Each peer's R_j, without the node's own; there may be none.
        per_sample: Divide Z by sqrt(m); the R_j must have been made that way too.
    """
    with torch.autocast(Z.device.type, enabled=False):
        Z = _prepared(Z, per_sample)
        bank = bank.to(Z)
        Q, R = _factors(Z)
        heard = _traces(bank) > _traces(R)
        return Understanding(_distances(Z, Q, R, bank[heard]).sum(), R, heard)


def distances(
    Z: Float[Tensor, "m n"], bank: Float[Tensor, "J n n"], *, per_sample: bool = False
) -> Float[Tensor, " J"]:
    """l_j of Eq. (7) for every peer, whatever its trace, with gradient."""
    with torch.autocast(Z.device.type, enabled=False):
        Z = _prepared(Z, per_sample)
        return _distances(Z, *_factors(Z), bank.to(Z))


def pack_triangle(R: Float[Tensor, "*J n n"]) -> Float[Tensor, "*J k"]:
    """The n (n + 1) / 2 numbers on and above the diagonal, row by row: what travels.

    >>> pack_triangle(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([1., 2., 3.])
    """
    row, column = torch.triu_indices(R.shape[-1], R.shape[-1], device=R.device)
    return R[..., row, column]


def unpack_triangle(packed: Float[Tensor, "*J k"]) -> Float[Tensor, "*J n n"]:
    """The upper triangular matrices that `pack_triangle` packed."""
    k = packed.shape[-1]
    n = (math.isqrt(8 * k + 1) - 1) // 2
    if n * (n + 1) // 2 != k:
        raise MessageError(f"{k} numbers are no triangle: expected n (n + 1) / 2 of them.")
    row, column = torch.triu_indices(n, n, device=packed.device)
    R = packed.new_zeros(*packed.shape[:-1], n, n)
    R[..., row, column] = packed
    return R


def check_triangle(R: Float[Tensor, "n n"], source: str) -> None:
    """Raise MessageError unless `source` sent an upper triangle with no negative diagonal."""
    if R.tril(-1).any():
        raise MessageError(
            f"node {source} sent a matrix with numbers below its diagonal, expected the upper "
            "triangular R of a QR decomposition: see polyfed.maths.correlation.triangular."
        )
    least = float(R.diagonal().min())
    if not least >= 0:
        raise MessageError(
            f"node {source} sent a triangle with {least:g} on its diagonal, expected no number "
            "below 0: see polyfed.maths.correlation.triangular."
        )


def _prepared(Z: Tensor, per_sample: bool) -> Tensor:
    """Z scaled if asked for, in a precision that can be decomposed."""
    m, n = Z.shape
    if m < n:
        raise ConfigError(
            f"a batch of {m} is smaller than the projection size {n}, so its R is not square. "
            f"Use batches of at least {n} samples, or a narrower projection."
        )
    Z = Z.float() if Z.element_size() < 4 else Z
    return Z / math.sqrt(m) if per_sample else Z


@torch.no_grad()
def _factors(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Q_z and R_z of Eq. (4), by whichever way is faster on the device."""
    return _factors_by_products(Z) if Z.is_cuda else _factors_by_qr(Z)


def _factors_by_qr(Z: Tensor) -> tuple[Tensor, Tensor]:
    Q, R = torch.linalg.qr(Z)
    sign = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R)
    return Q * sign, R * sign[:, None]


def _factors_by_products(Z: Tensor) -> tuple[Tensor, Tensor]:
    """R_z = chol(Z^T Z)^T in float64; by QR where features have nearly no full rank."""
    D = Z.double()
    R, failed = torch.linalg.cholesky_ex(D.mT @ D, upper=True)
    is_safe = (failed == 0) & (R.diagonal().min() > _SAFE * R.norm())
    if not is_safe:
        return _factors_by_qr(Z)
    Q = torch.linalg.solve_triangular(R, D, upper=True, left=False)
    return Q.to(Z), R.to(Z)


def _distances(Z: Tensor, Q: Tensor, R: Tensor, bank: Tensor) -> Tensor:
    """||Q_z^T Z - P_j R_j||_F: its value is that of R_z, its gradient that of Z."""
    M = torch.nan_to_num(R @ bank.mT)  # of NaN there is no factor: let the residual say so
    P = polar(M, dtype=M.dtype)  # R is no more precise than that
    residual: Tensor = Q.mT @ Z - P @ bank
    eps, tiny = torch.finfo(R.dtype).eps, torch.finfo(R.dtype).tiny
    floor = (_ROUNDING * eps * R.norm()).square() + tiny
    squares: Tensor = residual.square().sum(dim=(-2, -1)) + floor
    return squares.sqrt()


def _traces(R: Tensor) -> Tensor:
    return R.diagonal(dim1=-2, dim2=-1).sum(dim=-1)

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

On a CPU R_z is that of a QR decomposition and P_j that of an SVD. On a GPU, where each of these is
slow, both are products in float64: R_z = chol(Z^T Z)^T, and with M = R_z R_j^T, whose inverse two
triangles give,

    X_0     = c M + M^-T,   c = ||M^-1||_F / ||M||_F                              (Newton's step)
    X_{k+1} = a_k X_k (3 I - a_k^2 X_k^T X_k) / 2  ->  P_j                        (Newton-Schulz)

All of them have the singular vectors of M. Those values of M that are s become c s + 1 / s, which
is 2 sqrt(c) at least: so how many steps it takes, and the best a_k, are known before the first, to
the host that has looked at c. `Begun` lets others use the GPU meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyfed.errors import ConfigError, MessageError
from polyfed.maths.procrustes import polar

_ROUNDING = 32.0
_SAFE = 1e-5  # of the norm of R_z: a smaller diagonal is not told from rounding by Z^T Z
_LEAST = 1e-6  # singular value of X_0, of its norm: below, M^-1 is not exact enough in float64


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


@dataclass(frozen=True, eq=False)
class Bank:
    """Peers' triangles; what does not depend on the batch is computed once, when it is needed.

    Attributes:
        R: each peer's R_j, without the node's own; there may be none.
    """

    R: Float[Tensor, "J n n"]

    def like(self, Z: Tensor) -> Bank:
        """In Z's precision and on its device."""
        R = self.R.to(Z)
        return self if R is self.R else Bank(R)

    @cached_property
    def traces(self) -> Float[Tensor, " J"]:
        """tr(R_j)."""
        return _traces(self.R)

    @cached_property
    def exact(self) -> Float[Tensor, "J n n"]:
        """R_j in float64."""
        return self.R.double()

    @cached_property
    def inverse(self) -> Float[Tensor, "J n n"]:
        """R_j^-1 in float64; not finite where there is none."""
        return _inverse(self.exact)


class _Match(NamedTuple):
    """A batch's factors and norm, which peers it hears, and those peers' P_j and R_j."""

    Q: Tensor
    R: Tensor
    norm: Tensor | float
    heard: Tensor
    P: Tensor
    peers: Tensor


def triangular(Z: Float[Tensor, "m n"], *, per_sample: bool = False) -> Float[Tensor, "n n"]:
    """R_z of Eq. (4), without gradient; a Z in half precision gives a float32 R_z.

    >>> triangular(torch.tensor([[-3.0], [4.0]]))
    tensor([[5.]])
    """
    Z = _prepared(Z.detach(), per_sample)
    if _prefers_products(Z):
        R, doubts = _cholesky(Z.double())
        if _is_safe(*doubts.tolist()):
            return R.to(Z)
    return _factors_by_qr(Z)[1]


def understand(
    Z: Float[Tensor, "m n"], bank: Bank | Float[Tensor, "J n n"], *, per_sample: bool = False
) -> Understanding:
    """The term that Algorithm 1, lines 16 to 23, adds to the loss of a batch (before lambda).

    Args:
        Z: Projections of the batch.
        bank: Each peer's R_j; as a `Bank` where many batches meet the same peers.
        per_sample: Divide Z by sqrt(m); the R_j must have been made that way too.
    """
    return Begun(Z, bank, per_sample=per_sample).end()


class Begun:
    """`understand` in two parts, so that a GPU has other work while the host looks at the first.

    What is asked of the GPU between the two keeps it busy when the second is prepared.
    """

    def __init__(
        self,
        Z: Float[Tensor, "m n"],
        bank: Bank | Float[Tensor, "J n n"],
        *,
        per_sample: bool = False,
        gated: bool = True,
    ) -> None:
        with torch.autocast(Z.device.type, enabled=False):
            self._Z = _prepared(Z, per_sample)
            self._steps = _matched(self._Z.detach(), _as_bank(bank).like(self._Z), gated=gated)
            next(self._steps)

    def end(self) -> Understanding:
        """What it comes to; once."""
        with torch.autocast(self._Z.device.type, enabled=False):
            match = self._match()
            return Understanding(_distances(self._Z, match).sum(), match.R, match.heard)

    def distances(self) -> Float[Tensor, " J"]:
        """The same, peer by peer; once."""
        with torch.autocast(self._Z.device.type, enabled=False):
            return _distances(self._Z, self._match())

    def _match(self) -> _Match:
        try:
            next(self._steps)
        except StopIteration as end:
            match: _Match = end.value
            return match
        raise RuntimeError("a match has two parts.")


def distances(
    Z: Float[Tensor, "m n"], bank: Bank | Float[Tensor, "J n n"], *, per_sample: bool = False
) -> Float[Tensor, " J"]:
    """l_j of Eq. (7) for every peer, whatever its trace, with gradient."""
    return Begun(Z, bank, per_sample=per_sample, gated=False).distances()


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


def _as_bank(bank: Bank | Tensor) -> Bank:
    return bank if isinstance(bank, Bank) else Bank(bank)


def _prefers_products(Z: Tensor) -> bool:
    """Whether decompositions are slow where Z is."""
    return Z.is_cuda


@torch.no_grad()
def _matched(Z: Tensor, bank: Bank, *, gated: bool) -> Generator[None, None, _Match]:
    """Q_z and R_z, the peers that are heard (all, unless gated), and their P_j; in two parts."""
    if not _prefers_products(Z):
        yield
        return _by_decompositions(Z, bank, gated)
    D = Z.double()
    exact, doubts = _cholesky(D)
    R = exact.to(Z)
    inverse = _inverse(exact)
    X, least = _newton_step(exact, inverse, bank)
    heard = _heard(R, bank, gated)
    answer = _Answer(torch.cat([doubts, heard.to(least), least]))
    yield
    failed, smallest, norm, *known = answer.read()  # now all that is left to do is known
    if not _is_safe(failed, smallest, norm):
        return _by_decompositions(Z, bank, gated)
    J = len(heard)
    chosen = [j for j in range(J) if known[j]]
    peers = bank.R
    if len(chosen) < J:
        index = torch.tensor(chosen, dtype=torch.int64, device=Z.device)
        X, peers = X[index], peers[index]
    bounds = [known[J + j] for j in chosen]
    if all(bound > _LEAST for bound in bounds):  # not so if one is NaN
        eps = torch.finfo(Z.dtype).eps
        P = _newton_schulz(X, min(bounds, default=1.0), eps).to(Z)
    else:
        P = _polar(R, peers)
    return _Match((D @ inverse).to(Z), R, norm, heard, P, peers)


class _Answer:
    """Numbers on their way to the host, who waits for them, and not for what it asked since."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """All of them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


def _by_decompositions(Z: Tensor, bank: Bank, gated: bool) -> _Match:
    Q, R = _factors_by_qr(Z)
    heard = _heard(R, bank, gated)
    peers = bank.R[heard]
    return _Match(Q, R, R.norm(), heard, _polar(R, peers), peers)


def _factors_by_qr(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Q_z and R_z of Eq. (4)."""
    Q, R = torch.linalg.qr(Z)
    sign = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R)
    return Q * sign, R * sign[:, None]


def _cholesky(D: Tensor) -> tuple[Tensor, Tensor]:
    """R_z of a D in float64, and what `_is_safe` must know of it."""
    R, failed = torch.linalg.cholesky_ex(D.mT @ D, upper=True)
    return R, torch.stack([failed.to(R), R.diagonal().min(), R.norm()])


def _is_safe(failed: float, smallest: float, norm: float) -> bool:
    """Whether features have full rank, with some distance; else R_z must be that of a QR."""
    return failed == 0 and smallest > _SAFE * norm


def _heard(R: Tensor, bank: Bank, gated: bool) -> Tensor:
    """The peers with a larger trace; all, unless gated."""
    return bank.traces > _traces(R) if gated else torch.ones_like(bank.traces, dtype=torch.bool)


def _inverse(R: Tensor) -> Tensor:
    """Of upper triangles."""
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    found: Tensor = torch.linalg.solve_triangular(R, eye.expand_as(R), upper=True)
    return found


def _polar(R: Tensor, peers: Tensor) -> Tensor:
    """P_j by an SVD, or what is as good."""
    M = torch.nan_to_num(R @ peers.mT)  # of NaN there is no factor: let the residual say so
    return polar(M, dtype=M.dtype)  # R is no more precise than that


def _newton_step(R: Tensor, inverse: Tensor, bank: Bank) -> tuple[Tensor, Tensor]:
    """X_0 of every peer, of norm 1, and a bound of its singular values from below."""
    M, N = R @ bank.exact.mT, inverse.mT @ bank.inverse  # N = M^-T
    c = torch.linalg.matrix_norm(N) / torch.linalg.matrix_norm(M)
    X = torch.addcmul(N, M, c[:, None, None])
    size = torch.linalg.matrix_norm(X)
    return X / size[:, None, None], 2 * c.sqrt() / size


def _newton_schulz(X: Tensor, least: float, eps: float) -> Tensor:
    """The polar factors of matrices with singular values from `least` to 1, to within `eps`."""
    while 1 - least > eps:
        a = math.sqrt(3 / (1 + least + least**2))  # takes `least` and 1 to the same value
        X = torch.baddbmm(X, X, torch.bmm(X.mT, X), beta=1.5 * a, alpha=-0.5 * a**3)
        least = a * least * (3 - (a * least) ** 2) / 2
    return X


def _distances(Z: Tensor, match: _Match) -> Tensor:
    """||Q_z^T Z - P_j R_j||_F: its value is that of R_z, its gradient that of Z."""
    residual: Tensor = match.Q.mT @ Z - torch.bmm(match.P, match.peers)
    eps, tiny = torch.finfo(Z.dtype).eps, torch.finfo(Z.dtype).tiny
    floor = (_ROUNDING * eps * match.norm) ** 2 + tiny
    squares: Tensor = residual.square().sum(dim=(-2, -1)) + floor
    return squares.sqrt()


def _traces(R: Tensor) -> Tensor:
    return R.diagonal(dim1=-2, dim2=-1).sum(dim=-1)

"""FedFoA's term as a GPU computes it, on the CPU: products alone, against decompositions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.maths import correlation, procrustes
from polyfed.maths.correlation import Bank, Begun, distances, triangular, understand
from polyfed.maths.procrustes import random_rotation
from polyfed.random import stream

F32, F64 = torch.float32, torch.float64


def features(m: int, n: int, *, seed: int = 0, weakest: float = 0.1) -> Tensor:
    """Features whose directions differ in strength, down to `weakest`, along no axis."""
    draw = torch.randn(m, n, generator=stream(seed, "features", m, n), dtype=F64) / math.sqrt(m)
    turn = random_rotation(n, stream(seed, "turn"), dtype=F64)
    return draw * torch.logspace(0, math.log10(weakest), n, dtype=F64) @ turn


def bank_of(*scales: float, m: int = 30, n: int = 6, weakest: float = 0.1) -> Tensor:
    return torch.stack(
        [c * triangular(features(m, n, seed=9 + j, weakest=weakest)) for j, c in enumerate(scales)]
    )


def literal(Z: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Eqs. (6) and (7), m x n and in float64, and the gradient with Q* held fixed."""
    Z, R = Z.detach().double(), R.double()
    U, _, Vh = torch.linalg.svd(R @ Z.T, full_matrices=False)
    residual = Z - Vh.T @ U.T @ R
    return residual.norm(), residual / residual.norm()


def gradient(loss: Tensor, Z: Tensor) -> Tensor:
    return torch.autograd.grad(loss, Z)[0]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "_prefers_products", lambda Z: True)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a decomposition was needed after all."""
    counts: Counter[str] = Counter()

    def counted(name: str, way: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return way(*args, **options)

        return called

    for name in ("polar", "_factors_by_qr"):
        monkeypatch.setattr(correlation, name, counted(name, getattr(correlation, name)))
    return counts


class Operators(TorchDispatchMode):
    """Counts what PyTorch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# --- the same as printed --------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(6, 6), (30, 6), (9, 1), (90, 24)])
def test_distances_are_those_of_the_paper(m: int, n: int, decomposed: Counter[str]) -> None:
    Z, bank = features(m, n).requires_grad_(), bank_of(0.3, 1.0, 2.5, m=m + 3, n=n)
    decomposed.clear()
    for j, R in enumerate(bank):
        distance, (wanted, push) = distances(Z, bank)[j], literal(Z, R)
        torch.testing.assert_close(distance, wanted, rtol=1e-10, atol=0)
        torch.testing.assert_close(gradient(distance, Z), push, rtol=1e-8, atol=1e-10)
    assert not decomposed


@pytest.mark.parametrize(
    "scales", [(0.2, 0.5), (0.2, 3.0, 0.5, 4.0), (2.0, 3.0), (0.0, 2.0), (0.0,), ()]
)
def test_only_larger_traces_are_heard(scales: tuple[float, ...], decomposed: Counter[str]) -> None:
    """A triangle of zeros, which stands for nobody, has no inverse and disturbs nobody."""
    Z = features(30, 6).requires_grad_()
    bank = bank_of(*scales) if scales else torch.empty(0, 6, 6, dtype=F64)
    decomposed.clear()
    got = understand(Z, bank)
    assert got.heard.tolist() == [c > 1 for c in scales]
    wanted = [literal(Z, R) for R, c in zip(bank, scales, strict=True) if c > 1]
    torch.testing.assert_close(got.loss.item(), math.fsum(float(w) for w, _ in wanted))
    push = sum((p for _, p in wanted), torch.zeros_like(Z))
    torch.testing.assert_close(gradient(got.loss, Z), push, rtol=1e-8, atol=1e-10)
    assert not decomposed


@pytest.mark.parametrize("weakest", [1e-1, 1e-2, 1e-3, 3e-5])
def test_float32_is_near_however_unlike_the_directions(
    weakest: float, decomposed: Counter[str]
) -> None:
    """Of R_z R_j^T, singular values differ by up to 1e10: more than float32 can tell apart."""
    Z = features(100, 40, weakest=weakest).float().requires_grad_()
    bank = bank_of(2.0, 3.0, m=100, n=40, weakest=weakest).float()
    decomposed.clear()
    wanted = [literal(Z, R) for R in bank]
    got = distances(Z, bank)
    assert got.dtype == F32
    torch.testing.assert_close(got.double(), torch.stack([w for w, _ in wanted]), rtol=1e-6, atol=0)
    push = sum(p for _, p in wanted)
    assert (gradient(got.sum(), Z) - push).norm() < 3e-6 * push.norm()
    assert not decomposed


# --- where products do not do ---------------------------------------------------------------------


@pytest.mark.parametrize("weak", [1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_triangles_are_those_of_qr(dtype: torch.dtype, weak: float) -> None:
    """Near the loss of rank they are a QR decomposition's."""
    Z = (features(30, 6) * torch.tensor([1, 1, weak, 1, 1, 1], dtype=F64)).to(dtype)
    (Q, R), got = correlation._factors_by_qr(Z), triangular(Z)
    assert got.dtype == dtype
    assert torch.equal(got, R) == (weak < 1e-5)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == F32 else {}
    torch.testing.assert_close(got, R, **close)
    match = Begun(Z, Bank(bank_of(2.0).to(dtype)))._match()
    assert match.Q.dtype == match.R.dtype == match.P.dtype == dtype
    assert torch.equal(match.R, got)
    torch.testing.assert_close(match.Q, Q, **close)


@pytest.mark.parametrize("polar_by_products", [False, True])
@pytest.mark.parametrize("whose", ["own", "peer"])
def test_features_without_full_rank(
    whose: str,
    polar_by_products: bool,
    monkeypatch: pytest.MonkeyPatch,
    decomposed: Counter[str],
) -> None:
    """A dead unit and a copied one: finite, and the same value as m x n."""
    if polar_by_products:
        way = procrustes._polar_by_products
        monkeypatch.setattr(
            correlation, "polar", lambda M, dtype: decomposed.update(polar=1) or way(M)
        )
    poor, rich = features(30, 6), features(30, 6, seed=1)
    poor[:, 2], poor[:, 4] = 0, poor[:, 1]
    Z, of = (poor, rich) if whose == "own" else (rich, poor)
    bank = 4 * triangular(of)[None]
    decomposed.clear()
    got = understand(Z.requires_grad_(), bank)
    torch.testing.assert_close(got.R.T @ got.R, (Z.T @ Z).detach())
    torch.testing.assert_close(got.loss, literal(Z, bank[0])[0])
    assert torch.isfinite(gradient(got.loss, Z)).all()
    assert decomposed == {"polar": 1} | ({"_factors_by_qr": 1} if whose == "own" else {})


def test_a_cholesky_that_failed_is_not_trusted() -> None:
    """What cuSOLVER leaves behind then may look well."""
    assert correlation._is_safe(0.0, 1.0, 2.0)
    assert not correlation._is_safe(4.0, 1.0, 2.0)
    assert not correlation._is_safe(0.0, math.nan, math.nan)


def test_nan_is_passed_on() -> None:
    Z = features(30, 6)
    Z[3, 2] = torch.nan
    assert distances(Z, bank_of(2.0, 3.0)).isnan().all()


# --- how much it takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.9, 0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("eps", [1e-7, 1e-14])
def test_so_many_steps_as_the_least_singular_value_needs(least: float, eps: float) -> None:
    values = torch.logspace(math.log10(least), 0, 12, dtype=F64)
    left, right = (random_rotation(12, stream(0, name), dtype=F64) for name in "lr")
    with Operators() as asked:
        got = correlation._newton_schulz((left * values @ right)[None], least, eps)[0]
    assert (torch.linalg.svdvals(got) - 1).abs().max() < max(2 * eps, 1e-13)
    torch.testing.assert_close(got, left @ right, rtol=0, atol=1e-9 + 10 * eps)
    per_step = math.log(3 * math.sqrt(3) / 2)  # a small value grows by this factor in a step
    assert asked.counts["bmm"] <= math.log(1 / least) / per_step + 6


def test_a_newton_step_bounds_what_follows() -> None:
    Z, bank = features(60, 12, weakest=1e-3), Bank(bank_of(1.0, 2.0, n=12, weakest=1e-2))
    R = triangular(Z)
    X, least = correlation._newton_step(R, torch.linalg.inv(R), bank)
    values = torch.linalg.svdvals(X)
    torch.testing.assert_close(values.norm(dim=1), torch.ones(2, dtype=F64))
    assert (values[:, -1] >= least * (1 - 1e-9)).all()
    assert (values[:, -1] < 3 * least).all()  # and no bound could be much better
    torch.testing.assert_close(procrustes.polar(X), procrustes.polar(R @ bank.R.mT))
    before = torch.linalg.cond(R @ bank.R.mT)
    assert (1 / least < 4 * before.sqrt()).all()


def test_few_operators_and_none_that_waits() -> None:
    """Of the peers, all that can be known before the batch is computed once."""
    Z = features(100, 40, weakest=1e-4).float().requires_grad_()
    bank = Bank(bank_of(2.0, 3.0, 4.0, m=100, n=40, weakest=1e-4).float())
    asked = []
    for _ in range(2):
        with Operators() as operators:
            understand(Z, bank)
        asked.append(operators.counts)
    assert [counts["linalg_solve_triangular"] for counts in asked] == [2, 1]
    assert asked[1]["bmm"] + asked[1]["baddbmm"] + asked[1]["mm"] <= 38
    assert asked[1].total() <= 120
    waiting = ("_local_scalar_dense", "nonzero", "index", "index_put_", "_linalg_svd", "linalg_qr")
    assert not {name for name in waiting if asked[1][name]}


def test_the_first_part_asks_for_all_that_the_second_must_know() -> None:
    """The second part begins with products of what is there: no decomposition, no solution."""
    Z, bank = features(30, 6).requires_grad_(), Bank(bank_of(2.0, 0.5, 3.0))
    with Operators() as first:
        begun = Begun(Z, bank)
    assert first.counts["linalg_cholesky_ex"] == 1
    assert first.counts["linalg_solve_triangular"] == 2
    with Operators() as second:
        got = begun.end()
    assert not {name for name in second.counts if "linalg_" in name}
    assert (first.counts["cat"], second.counts["cat"]) == (1, 0)  # what the host looks at
    wanted = understand(Z, bank)
    assert torch.equal(got.loss, wanted.loss)
    assert torch.equal(gradient(got.loss, Z), gradient(wanted.loss, Z))


def test_a_bank_may_have_another_precision() -> None:
    Z, bank = features(30, 6), bank_of(2.0, 0.5)
    assert Bank(bank).like(Z).R is bank
    got = understand(Z.float(), Bank(bank))
    assert got.loss.dtype == F32
    torch.testing.assert_close(got.loss.double(), understand(Z, bank).loss, rtol=1e-5, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("peers", [1, 3, 31])
def test_on_cuda(peers: int) -> None:
    Z = features(500, 256, weakest=1e-3).float().cuda().requires_grad_()
    scales = [2.0 + j for j in range(peers)]
    bank = bank_of(*scales, m=500, n=256, weakest=1e-3).float()
    wanted = [literal(Z.cpu(), R) for R in bank]
    got = understand(Z, Bank(bank.cuda()))
    total = float(sum(w for w, _ in wanted))
    assert float(got.loss.detach()) == pytest.approx(total, rel=1e-6)
    push = sum(p for _, p in wanted)
    assert (gradient(got.loss, Z).cpu() - push).norm() < 1e-5 * push.norm()

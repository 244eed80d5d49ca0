"""FedFoA's term against the paper's m x n decomposition, closed forms and SPEC's invariants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import ConfigError, MessageError
from polyfed.maths.correlation import (
    check_triangle,
    distances,
    pack_triangle,
    triangular,
    understand,
    unpack_triangle,
)
from polyfed.maths.procrustes import random_rotation
from polyfed.random import stream

F64 = torch.float64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "draw", *shape), dtype=F64).to(dtype)


def features(m: int, n: int, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Correlated features: each number depends on the others, and their sizes differ."""
    return scale * draw(m, n, seed=seed) @ draw(n, n, seed=seed + 1000) / math.sqrt(n)


def bank_of(*scales: float, m: int = 30, n: int = 6, seed: int = 50) -> Tensor:
    return torch.stack(
        [triangular(features(m, n, seed=seed + j, scale=c)) for j, c in enumerate(scales)]
    )


def orthonormal(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(draw(m, n, seed=seed + 7)).Q


def literal_basis(Z: Tensor, R: Tensor) -> Tensor:
    """Eq. (6), m x n: Q* = V U^T from the SVD of R Z^T = U S V^T."""
    U, _, Vh = torch.linalg.svd(R @ Z.T, full_matrices=False)
    return Vh.T @ U.T


def literal_triangle(Z: Tensor) -> Tensor:
    """Eq. (4) by Gram-Schmidt, column by column."""
    R, Q = Z.new_zeros(Z.shape[1], Z.shape[1]), torch.zeros_like(Z)
    for column in range(Z.shape[1]):
        rest = Z[:, column].clone()
        for earlier in range(column):
            R[earlier, column] = Q[:, earlier] @ rest
            rest = rest - R[earlier, column] * Q[:, earlier]
        R[column, column] = rest.norm()
        Q[:, column] = rest / rest.norm()
    return R


def literal_loss(Z: Tensor, bank: Tensor) -> Tensor:
    """Algorithm 1, lines 15 to 23, with lambda = 1 and nothing held fixed."""
    own, loss = literal_triangle(Z.detach()), Z.new_zeros(())
    for R in bank:
        if torch.trace(R) > torch.trace(own):
            loss = loss + torch.linalg.matrix_norm(Z - literal_basis(Z, R) @ R)
    return loss


def root(A: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(A)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T


def bures_wasserstein(A: Tensor, B: Tensor) -> Tensor:
    """sqrt(tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2), of two covariance-like matrices."""
    cross = root(root(A) @ B @ root(A))
    return (torch.trace(A) + torch.trace(B) - 2 * torch.trace(cross)).sqrt()


def gradient(loss: Tensor, Z: Tensor) -> Tensor:
    return torch.autograd.grad(loss, Z)[0]


# --- the triangle: invariants 4, 5 and 10 -------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(6, 6), (30, 6), (9, 1), (500, 40)])
def test_triangle_is_the_cholesky_factor_and_gram_schmidts(m: int, n: int) -> None:
    Z = features(m, n)
    R = triangular(Z)
    torch.testing.assert_close(R, torch.linalg.cholesky(Z.T @ Z).T, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(R, literal_triangle(Z), rtol=1e-8, atol=1e-10)
    assert (R.diagonal() > 0).all()
    assert torch.equal(R, R.triu())


@given(seed=st.integers(0, 1000))
def test_triangle_ignores_the_order_of_samples_and_left_rotations(seed: int) -> None:
    Z = features(20, 5, seed=seed)
    order = torch.randperm(20, generator=stream(seed, "order"))
    turn = random_rotation(20, stream(seed, "turn"), dtype=F64)
    torch.testing.assert_close(triangular(Z[order]), triangular(Z))
    torch.testing.assert_close(triangular(turn @ Z), triangular(Z))


def test_triangle_knows_the_order_of_features() -> None:
    """It is no invariant of the feature axes: they are fixed coordinates."""
    Z = features(20, 5)
    assert (triangular(Z.flip(1)) - triangular(Z)).abs().max() > 0.1


def test_per_sample_divides_by_the_root_of_the_batch() -> None:
    """The same samples twice have sqrt(2) times the triangle, and the same one per sample."""
    Z = features(20, 5)
    twice = torch.cat([Z, Z])
    torch.testing.assert_close(triangular(twice), math.sqrt(2) * triangular(Z))
    torch.testing.assert_close(triangular(Z, per_sample=True), triangular(Z) / math.sqrt(20))
    bank = bank_of(2.0, 3.0, n=5)
    for measure in (distances, lambda *a, **k: understand(*a, **k).loss):
        torch.testing.assert_close(
            measure(twice, bank, per_sample=True), measure(Z / math.sqrt(20), bank)
        )


def test_a_batch_smaller_than_the_projection_is_an_error() -> None:
    message = "a batch of 4 is smaller than the projection size 6"
    with pytest.raises(ConfigError, match=message):
        triangular(features(4, 6))
    for measure in (understand, distances):
        with pytest.raises(ConfigError, match=message):
            measure(features(4, 6), bank_of(1.0))


def test_a_mean_of_triangles_is_a_triangle_but_not_that_of_the_pooled_batch() -> None:
    """SPEC 3.4c."""
    batches = [features(20, 5, seed=s) for s in range(3)]
    mean = torch.stack([triangular(Z) for Z in batches]).mean(dim=0)
    check_triangle(mean, "M0")
    assert (mean - triangular(torch.cat(batches)) / math.sqrt(3)).abs().max() > 1e-3


# --- the distance: invariants 1, 2, 3, 6 and 10 --------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(6, 6), (30, 6), (9, 1), (90, 24)])
def test_four_forms_of_the_distance_agree(m: int, n: int) -> None:
    """n x n, m x n as printed, closed form with the nuclear norm, and Bures-Wasserstein."""
    Z, bank = features(m, n), bank_of(0.3, 1.0, 2.5, m=m + 3, n=n)
    got = distances(Z, bank)
    for distance, R in zip(got, bank, strict=True):
        printed = torch.linalg.matrix_norm(Z - literal_basis(Z, R) @ R)
        nuclear = torch.linalg.svdvals(R @ triangular(Z).T).sum()
        closed = (Z.square().sum() + R.square().sum() - 2 * nuclear).sqrt()
        torch.testing.assert_close(distance, printed, rtol=1e-11, atol=0)
        torch.testing.assert_close(distance, closed, rtol=1e-9, atol=0)
        torch.testing.assert_close(distance, bures_wasserstein(Z.T @ Z, R.T @ R), rtol=1e-6, atol=0)


def test_distance_by_hand() -> None:
    """One number a sample: Z has norm 5, R = (2): the distance is 3 and Z is pulled towards 0."""
    Z = torch.tensor([[3.0], [0.0], [-4.0]], dtype=F64, requires_grad=True)
    got = distances(Z, torch.tensor([[[2.0]]], dtype=F64))
    torch.testing.assert_close(got, torch.tensor([3.0], dtype=F64))
    torch.testing.assert_close(gradient(got.sum(), Z), Z.detach() / 5)


@given(seed=st.integers(0, 500))
def test_the_gradient_is_exact(seed: int) -> None:
    """Against autograd through the SVD, and against (Z - Q* R) / l."""
    Z, bank = features(20, 5, seed=seed).requires_grad_(), bank_of(1.5, n=5, seed=seed)
    got = gradient(distances(Z, bank).sum(), Z)
    Q = literal_basis(Z, bank[0])
    printed = torch.linalg.matrix_norm(Z - Q @ bank[0])
    with torch.no_grad():
        formula = (Z - Q @ bank[0]) / printed
    torch.testing.assert_close(got, gradient(printed, Z), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(got, formula, rtol=1e-9, atol=1e-11)


def test_the_gradient_passes_finite_differences() -> None:
    Z, bank = features(9, 3).requires_grad_(), bank_of(0.5, 1.0, 4.0, n=3)
    assert torch.autograd.gradcheck(lambda Z: distances(Z, bank), (Z,))


@given(seed=st.integers(0, 1000))
def test_no_other_orthonormal_basis_is_nearer(seed: int) -> None:
    Z, bank = features(20, 5, seed=seed), bank_of(1.2, n=5, seed=seed)
    other = orthonormal(20, 5, seed)
    assert distances(Z, bank)[0] <= torch.linalg.matrix_norm(Z - other @ bank[0])


@given(seed=st.integers(0, 1000))
def test_the_distance_ignores_the_order_of_samples_and_left_rotations(seed: int) -> None:
    Z, bank = features(20, 5, seed=seed), bank_of(0.7, 2.0, n=5)
    order = torch.randperm(20, generator=stream(seed, "order"))
    turn = random_rotation(20, stream(seed, "turn"), dtype=F64)
    torch.testing.assert_close(distances(Z[order], bank), distances(Z, bank))
    torch.testing.assert_close(distances(turn @ Z, bank), distances(Z, bank))


@given(c=st.floats(1e-3, 1e3), seed=st.integers(0, 100))
def test_scaling_everything_scales_everything(c: float, seed: int) -> None:
    Z, bank = features(20, 5, seed=seed), bank_of(2.0, 3.0, n=5, seed=seed)
    torch.testing.assert_close(triangular(c * Z), c * triangular(Z))
    plain, scaled = understand(Z, bank), understand(c * Z, c * bank)
    torch.testing.assert_close(scaled.loss, c * plain.loss)
    assert torch.equal(scaled.heard, plain.heard)


def test_peers_do_not_influence_each_other() -> None:
    Z, bank = features(30, 6), bank_of(0.5, 1.0, 2.0, 3.0)
    alone = torch.cat([distances(Z, R[None]) for R in bank])
    torch.testing.assert_close(distances(Z, bank), alone, rtol=1e-12, atol=0)


# --- near zero ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "level"), [(F64, 1e-13), (torch.float32, 1e-4)])
def test_nothing_is_left_where_a_peer_is_understood(dtype: torch.dtype, level: float) -> None:
    """Z = O R: zero but for rounding, and no push in a direction that is rounding."""
    bank = bank_of(1.0).to(dtype)
    Z = (orthonormal(30, 6).to(dtype) @ bank[0]).requires_grad_()
    loss = distances(Z, bank).sum()
    assert loss < level * bank.norm()
    assert gradient(loss, Z).norm() < 0.2  # elsewhere it is 1


@pytest.mark.parametrize("share", [1e-1, 1e-2, 1e-3])
def test_small_distances_are_right_in_float32(share: float) -> None:
    """The closed form would lose them: 1 - 1e-6 is all that float32 has of their squares."""
    exact_bank = bank_of(1.0)
    Z = orthonormal(30, 6) @ exact_bank[0] + share * features(30, 6, seed=3)
    exact = distances(Z, exact_bank)
    torch.testing.assert_close(
        distances(Z.float(), exact_bank.float()).double(), exact, rtol=2e-3, atol=0
    )


def test_all_zero_is_at_rest() -> None:
    Z = torch.zeros(8, 3, requires_grad=True)
    loss = distances(Z, torch.zeros(2, 3, 3)).sum()
    assert loss < 1e-15
    assert torch.equal(gradient(loss, Z), torch.zeros(8, 3))


# --- the gate: invariant 7 ------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [(0.2, 0.5), (0.2, 3.0, 0.5, 4.0), (2.0, 3.0)])
def test_the_term_is_algorithm_1_written_out(scales: tuple[float, ...]) -> None:
    Z, bank = features(30, 6).requires_grad_(), bank_of(*scales)
    got = understand(Z, bank)
    assert got.heard.tolist() == [c > 1 for c in scales]
    torch.testing.assert_close(got.R, literal_triangle(Z.detach()))
    expected = literal_loss(Z, bank)
    torch.testing.assert_close(got.loss, expected, rtol=1e-11, atol=0)
    if any(got.heard):
        torch.testing.assert_close(gradient(got.loss, Z), gradient(expected, Z))


@pytest.mark.parametrize("bank", [bank_of(0.1, 0.5), torch.empty(0, 6, 6, dtype=F64)])
def test_nobody_worth_hearing_adds_nothing(bank: Tensor) -> None:
    Z = features(30, 6).requires_grad_()
    got = understand(Z, bank)
    assert got.loss == 0
    assert not got.heard.any()
    assert torch.equal(gradient(got.loss, Z), torch.zeros_like(Z))
    assert distances(Z, bank).shape == (len(bank),)


def test_an_equal_trace_is_not_larger() -> None:
    Z, equal = 2 * torch.eye(4, 3), 2 * torch.eye(3)
    assert understand(Z, torch.stack([equal, 1.001 * equal])).heard.tolist() == [False, True]


# --- precision, devices, bad numbers --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_near(dtype: torch.dtype) -> None:
    """Half precision is computed in float32: exact for the numbers as they came."""
    rounded, bank = features(90, 24).to(dtype), bank_of(2.0, 0.5, 3.0, n=24)
    Z = rounded.clone().requires_grad_()
    got, exact = understand(Z, bank.float()), understand(rounded.double(), bank)
    assert got.R.dtype == got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.R.double(), exact.R, rtol=1e-4, atol=1e-5)
    assert gradient(got.loss, Z).dtype == dtype


def test_autocast_does_not_lower_the_precision() -> None:
    Z, bank = features(90, 24).float(), bank_of(2.0, 3.0, n=24).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = understand(Z, bank).loss, distances(Z, bank)
    assert torch.equal(cast[0], understand(Z, bank).loss)
    assert torch.equal(cast[1], distances(Z, bank))


def test_features_without_full_rank() -> None:
    """A dead unit and a copied one: finite, and the same value as m x n."""
    Z, bank = features(30, 6), bank_of(2.0)
    Z[:, 2], Z[:, 4] = 0, Z[:, 1]
    Z.requires_grad_()
    got = understand(Z, bank)
    torch.testing.assert_close(got.R.T @ got.R, (Z.T @ Z).detach())
    torch.testing.assert_close(
        got.loss, torch.linalg.matrix_norm(Z - literal_basis(Z, bank[0]) @ bank[0])
    )
    assert torch.isfinite(gradient(got.loss, Z)).all()


def test_nan_is_passed_on() -> None:
    """Training that diverged is reported by the engine, from a loss that is NaN."""
    Z = features(30, 6)
    Z[3, 2] = torch.nan
    assert distances(Z, bank_of(2.0, 3.0)).isnan().all()


# --- what travels: invariant 11 -------------------------------------------------------------------


@pytest.mark.parametrize(("n", "numbers"), [(1, 1), (2, 3), (6, 21), (256, 32_896)])
def test_a_message_is_the_triangle_and_nothing_else(n: int, numbers: int) -> None:
    """131 584 bytes at n = 256."""
    R = draw(n, n).float().triu()
    packed = pack_triangle(R)
    assert packed.shape == (numbers,)
    assert packed.dtype == torch.float32
    assert torch.equal(unpack_triangle(packed), R)


def test_triangles_are_packed_in_batches_too() -> None:
    bank = bank_of(1.0, 2.0, 3.0)
    assert torch.equal(pack_triangle(bank)[1], pack_triangle(bank[1]))
    assert torch.equal(unpack_triangle(pack_triangle(bank)), bank)
    assert unpack_triangle(pack_triangle(bank[:0])).shape == (0, 6, 6)


@pytest.mark.parametrize("k", [2, 20, 22])
def test_a_message_of_another_length_is_refused(k: int) -> None:
    with pytest.raises(MessageError, match=f"{k} numbers are no triangle"):
        unpack_triangle(torch.zeros(k))


def test_a_matrix_that_no_decomposition_gives_is_refused() -> None:
    R = bank_of(1.0)[0]
    check_triangle(R, "M1")
    check_triangle(torch.zeros(3, 3), "M1")
    with pytest.raises(MessageError, match="node M1 sent a matrix with numbers below its diagonal"):
        check_triangle(R + torch.eye(6).roll(1, 0).tril(), "M1")
    R[2, 2] = -0.5
    with pytest.raises(MessageError, match=r"node M1 sent a triangle with -0\.5 on its diagonal"):
        check_triangle(R, "M1")
    R[2, 2] = torch.nan
    with pytest.raises(MessageError, match="nan on its diagonal"):
        check_triangle(R, "M1")

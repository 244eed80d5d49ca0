"""FedLinked's hub step against the paper's loop, closed forms and the paper's own tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.maths import procrustes
from polyfed.maths.procrustes import link, random_rotation, rotation
from polyfed.random import stream
from polyfed.testing.oracles import literal_link

F64 = torch.float64
OPTIONS = [
    {},
    {"transform": False},
    {"eta": 2.97, "normalise": "all"},
    {"transform": False, "eta": 0.5, "normalise": "all", "normalise_rows": True},
    {"normalise_rows": True, "eta": 2.22},
]
# Tables 5.1 and 5.2: row = receiver, column = source.
PRINTED = {
    "cifar10": (2.97, [[0, 2.4278, 1.7167], [2.3064, 0, 1.8767], [1.9505, 2.2444, 0]]),
    "svhn": (2.22, [[0, 1.8632, 1.2092], [1.8075, 0, 1.2910], [1.4937, 1.6439, 0]]),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "draw", *shape), dtype=dtype)


def representations(
    K: int, N: int, r: int, *, seed: int = 0, decay: float = 0.0, dtype: torch.dtype = F64
) -> list[Tensor]:
    """K nodes that see the same latent structure, each in its own coordinates and scale.

    Singular values fall by `decay` orders of magnitude.
    """
    common, spectrum = draw(N, r, seed=seed), torch.logspace(0, -decay, r, dtype=F64)
    nodes = []
    for k in range(K):
        mixed = common + (0.2 + 0.3 * k) * draw(N, r, seed=1000 * (k + 1) + seed)
        turned = (mixed * spectrum) @ random_rotation(r, stream(seed, "turn", k), dtype=F64)
        nodes.append((1.0 + 0.5 * k) * turned.to(dtype))
    return nodes


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected number."""
    return float((got.to(F64) - expected.to(F64)).abs().max() / expected.abs().max())


def nuclear_norm(R: Tensor) -> Tensor:
    return torch.linalg.svdvals(R).sum()


# --- the literal algorithm -------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("K", "N", "r"), [(2, 40, 8), (3, 30, 5), (5, 60, 16), (4, 9, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-4)])
def test_equals_algorithm_3_written_out(
    options: dict, K: int, N: int, r: int, dtype: torch.dtype, tolerance: float
) -> None:
    Z = representations(K, N, r, dtype=dtype)
    F, A = literal_link([z.to(F64) for z in Z], **options)
    linked = link(Z, **options)
    assert linked.regularisers.dtype == linked.utilities.dtype == dtype
    assert relative(linked.regularisers, F) < tolerance
    assert relative(linked.utilities, A) < tolerance


@pytest.mark.parametrize("decay", [2.0, 3.0, 4.0, 5.0])
@pytest.mark.parametrize("r", [32, 128])
def test_equals_algorithm_3_when_ill_conditioned(decay: float, r: int) -> None:
    """Five orders in Z are ten in R: float32 rounds the last three away, in the literal more."""
    Z = representations(3, 6 * r, r, decay=decay)
    assert relative(link(Z).regularisers, literal_link(Z)[0]) < 1e-10
    single = [z.float() for z in Z]
    exact, _ = literal_link([z.double() for z in single])
    error = relative(link(single).regularisers, exact)
    assert error < (1e-4 if decay <= 3 else 3e-4)
    assert error <= max(1e-5, relative(literal_link(single)[0], exact))


@pytest.mark.parametrize("decay", [0.0, 2.0, 4.0])
def test_decomposition_by_products_equals_svd(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way CUDA takes, checked on the CPU: only the matrix of zeros falls back."""
    Z = representations(2, 200, 32, decay=decay)
    R = torch.stack([Z[0].T @ Z[1], Z[1].T @ Z[0], Z[0].T @ Z[1] * 0])
    by_svd, fallen = procrustes._polar_by_svd, []
    expected = by_svd(R)
    monkeypatch.setattr(
        procrustes, "_polar_by_svd", lambda R: (fallen.append(len(R)), by_svd(R))[1]
    )
    got = procrustes._polar_by_products(R)
    assert fallen == [1]
    assert relative(Z[0] @ got[0], Z[0] @ expected[0]) < 1e-10
    assert relative(Z[1] @ got[1], Z[1] @ expected[1]) < 1e-10
    assert torch.equal(got[2], expected[2])
    rough = procrustes._polar_by_products(R.float())  # in float32 it converges, too
    assert fallen == [1, 1]
    assert rough.dtype == procrustes.polar(R.float()).dtype == torch.float32
    assert relative(rough[0].T @ rough[0], torch.eye(32)) < 1e-5


def test_batches_of_pairs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    Z = representations(5, 40, 6)
    whole = link(Z)
    monkeypatch.setattr(procrustes, "_BATCH_NUMBERS", 3 * 6 * 6)
    assert relative(link(Z).regularisers, whole.regularisers) < 1e-13


# --- oracle 1: a known rotation is found ------------------------------------------------------


@pytest.mark.parametrize("r", [1, 2, 7, 32])
def test_finds_the_rotation_between_rotated_nodes(r: int) -> None:
    """Z_j = Z_k Q^T, that is a_j = Q a_k, gives B_kj = Q and F_j = Z_j."""
    Q = random_rotation(r, stream(0, "Q"), dtype=F64)
    source = draw(80, r)
    target = source @ Q.T
    torch.testing.assert_close(rotation(source, target), Q, rtol=0, atol=1e-12)
    torch.testing.assert_close(link([source, target]).regularisers[1], target)
    torch.testing.assert_close(link([source, target]).regularisers[0], source)


def test_rotation_by_hand() -> None:
    """A quarter turn takes e1 to e2 and e2 to -e1: B = [[0, -1], [1, 0]]."""
    source, target = torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(rotation(source, target), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))


# --- oracles 2 and 4: utilities ---------------------------------------------------------------


def test_numerators_are_symmetric_nuclear_norms() -> None:
    """With normalise="all" and eta = the norm of all G, the utilities are G itself."""
    Z = representations(4, 50, 6)
    expected = torch.tensor(
        [[float(nuclear_norm(a.T @ b)) if a is not b else 0.0 for a in Z] for b in Z], dtype=F64
    )
    G = link(Z, normalise="all", eta=float(expected.norm())).utilities
    torch.testing.assert_close(G, expected, rtol=1e-12, atol=0)
    assert torch.equal(G, G.T)


def test_utilities_by_hand() -> None:
    """One number per example: G_kj = |<Z_k, Z_j>|; row 0 of A is eta (3, 4) / 5."""
    Z = [torch.tensor([[1.0], [0.0]]), torch.tensor([[-3.0], [0.0]]), torch.tensor([[4.0], [1.0]])]
    linked = link(Z, eta=10.0)
    expected = torch.tensor([[0.0, 6.0, 8.0], [10 * 3 / 153**0.5, 0.0, 10 * 12 / 153**0.5]])
    torch.testing.assert_close(linked.utilities[:2], expected)
    # F_0 = (3 * -Z_1 + 4 * Z_2) / 7
    torch.testing.assert_close(linked.regularisers[0], torch.tensor([[25 / 7], [4 / 7]]))


@pytest.mark.parametrize("transform", [True, False])
def test_norms_of_the_utilities(transform: bool) -> None:
    Z = representations(4, 50, 6)
    receiver = link(Z, eta=2.97, transform=transform).utilities
    torch.testing.assert_close(receiver.norm(dim=1), torch.full((4,), 2.97, dtype=F64))
    everything = link(Z, eta=2.97, normalise="all", transform=transform).utilities
    torch.testing.assert_close(everything.norm(), torch.tensor(2.97, dtype=F64))
    assert torch.equal(receiver.diagonal(), torch.zeros(4, dtype=F64))


@given(eta=st.floats(1e-3, 1e3), seed=st.integers(0, 50), transform=st.booleans())
def test_regularisers_ignore_eta_and_the_normaliser(eta: float, seed: int, transform: bool) -> None:
    Z = representations(3, 20, 4, seed=seed)
    plain = link(Z, transform=transform).regularisers
    scaled = link(Z, transform=transform, eta=eta).regularisers
    overall = link(Z, transform=transform, eta=eta, normalise="all").regularisers
    torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(overall, plain, rtol=1e-12, atol=1e-12)


# --- oracles 3 and 5: the rotation is orthogonal and optimal ----------------------------------


def test_rotation_is_orthogonal_and_its_transpose_leads_back() -> None:
    a, b = representations(2, 60, 9)
    B = rotation(a, b)
    torch.testing.assert_close(B @ B.T, torch.eye(9, dtype=F64))
    torch.testing.assert_close(rotation(b, a), B.T)


@given(seed=st.integers(0, 1000))
def test_no_other_orthogonal_matrix_aligns_better(seed: int) -> None:
    a, b = representations(2, 30, 4, seed=seed)
    R, best = a.T @ b, rotation(a, b)
    other = random_rotation(4, stream(seed, "other"), dtype=F64)
    assert torch.trace(best @ R) >= torch.trace(other @ R)
    assert (a @ best.T - b).norm() <= (a @ other.T - b).norm()


# --- oracles 6 and 7: limits ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"eta": 7.0}, {"normalise": "all"}], ids=str)
def test_two_nodes_get_each_other_rotated(options: dict) -> None:
    Z = representations(2, 50, 6)
    F = link(Z, **options).regularisers
    torch.testing.assert_close(F[0], Z[1] @ rotation(Z[1], Z[0]).T)
    torch.testing.assert_close(F[1], Z[0] @ rotation(Z[0], Z[1]).T)


@pytest.mark.parametrize("transform", [True, False])
def test_identical_nodes_are_not_pulled(transform: bool) -> None:
    z = draw(40, 6)
    F = link([z, z.clone(), z.clone()], transform=transform).regularisers
    torch.testing.assert_close(F, z.expand(3, -1, -1))
    assert float(torch.nn.functional.mse_loss(F[0], z)) < 1e-24


# --- oracles 8 and 9, and relabelling: symmetries ---------------------------------------------


@given(seed=st.integers(0, 1000), transform=st.booleans(), rows=st.booleans())
def test_permuting_public_examples_permutes_the_answer(
    seed: int, transform: bool, rows: bool
) -> None:
    Z = representations(3, 24, 5, seed=seed)
    order = torch.randperm(24, generator=stream(seed, "order"))
    straight = link(Z, transform=transform, normalise_rows=rows)
    permuted = link([z[order] for z in Z], transform=transform, normalise_rows=rows)
    torch.testing.assert_close(permuted.regularisers, straight.regularisers[:, order])
    torch.testing.assert_close(permuted.utilities, straight.utilities)


@given(order=st.permutations(range(4)), seed=st.integers(0, 50), transform=st.booleans())
def test_relabelling_nodes_relabels_the_answer(
    order: list[int], seed: int, transform: bool
) -> None:
    Z = representations(4, 24, 5, seed=seed)
    straight = link(Z, transform=transform)
    permuted = link([Z[k] for k in order], transform=transform)
    torch.testing.assert_close(permuted.regularisers, straight.regularisers[order])
    torch.testing.assert_close(permuted.utilities, straight.utilities[order][:, order])


@given(k=st.integers(0, 2), seed=st.integers(0, 200))
def test_a_secret_rotation_of_one_node_is_seen_by_nobody_else(k: int, seed: int) -> None:
    """Z_k -> Z_k Q^T leaves A and F_j, and turns F_k into F_k Q^T."""
    Z = representations(3, 24, 5, seed=seed)
    Q = random_rotation(5, stream(seed, "secret"), dtype=F64)
    masked = [z @ Q.T if i == k else z for i, z in enumerate(Z)]
    plain, hidden = link(Z), link(masked)
    unmasked = [F @ Q if i == k else F for i, F in enumerate(hidden.regularisers)]
    torch.testing.assert_close(torch.stack(unmasked), plain.regularisers, rtol=0, atol=1e-11)
    torch.testing.assert_close(hidden.utilities, plain.utilities)


def test_normalised_rows_ignore_each_nodes_scale() -> None:
    Z = representations(3, 24, 5)
    scaled = [z * s for z, s in zip(Z, (1.0, 100.0, 0.01), strict=True)]
    plain, same = link(Z, normalise_rows=True), link(scaled, normalise_rows=True)
    torch.testing.assert_close(same.regularisers, plain.regularisers)
    assert relative(link(scaled).utilities, link(Z).utilities) > 0.1


# --- oracle 13: the paper's tables --------------------------------------------------------------


@pytest.mark.parametrize("name", PRINTED)
def test_printed_utilities_have_our_normaliser_and_symmetric_numerators(name: str) -> None:
    """eta is printed to two decimals; A_01 A_12 A_20 = A_10 A_21 A_02 when G is symmetric."""
    eta, rows = PRINTED[name]
    A = torch.tensor(rows, dtype=F64)
    assert (A.norm(dim=1) - eta).abs().max() < 0.005
    assert (A.norm(dim=0) - eta).abs().max() > 0.05  # columns do not: rows are receivers
    forth, back = A[0, 1] * A[1, 2] * A[2, 0], A[1, 0] * A[2, 1] * A[0, 2]
    assert abs(float(forth / back) - 1) < 1e-4


@pytest.mark.parametrize("name", PRINTED)
def test_printed_utilities_follow_from_their_own_numerators(name: str) -> None:
    """Undo the row norms to get a symmetric G, then our normaliser prints the table again."""
    eta, rows = PRINTED[name]
    A = torch.tensor(rows, dtype=F64)
    d = torch.stack([A[1, 0] / A[0, 1], torch.ones((), dtype=F64), A[1, 2] / A[2, 1]])
    G = d[:, None] * A
    torch.testing.assert_close(G, G.T, rtol=2e-4, atol=0)
    again = procrustes._utilities((G + G.T) / 2, float(A[0].norm()), "receiver")
    assert (again - A).abs().max() < 2e-3
    assert abs(float(A[0].norm()) - eta) < 0.005


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_node_keeps_its_own(options: dict) -> None:
    z = draw(10, 3)
    linked = link([z], **options)
    assert torch.equal(linked.regularisers, z[None])
    assert torch.equal(linked.utilities, torch.zeros(1, 1, dtype=F64))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_node_without_any_utility_keeps_its_own(options: dict) -> None:
    """Node 0 is dead: it keeps its zeros, the others hear only each other."""
    Z = [torch.zeros(12, 4, dtype=F64), *representations(2, 12, 4)]
    linked = link(Z, **options)
    assert torch.equal(linked.regularisers[0], Z[0])
    assert torch.equal(linked.utilities[0], torch.zeros(3, dtype=F64))
    torch.testing.assert_close(linked.regularisers[1:], link(Z[1:], **options).regularisers)


def test_orthogonal_nodes_keep_their_own_without_transformation() -> None:
    Z = [torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 5.0], [0.0, 1.0]])]
    linked = link(Z, transform=False)
    assert torch.equal(linked.regularisers, torch.stack(Z))
    assert torch.isfinite(linked.utilities).all()


def test_negative_utilities_weigh_by_their_size() -> None:
    """G_01 = -1, G_02 = 1.001: the plain sum, 0.001, would blow F_0 up by a factor of 2000."""
    a = torch.tensor([[1.0, 0.0]], dtype=F64)
    b = torch.tensor([[-1.0, 2.0]], dtype=F64)
    c = torch.tensor([[1.001, 0.0]], dtype=F64)
    linked = link([a, b, c], transform=False)
    assert linked.utilities[0, 1] < 0 < linked.utilities[0, 2]
    expected = (-1.0 * b + 1.001 * c) / 2.001
    torch.testing.assert_close(linked.regularisers[0], expected)
    assert relative(linked.regularisers, literal_link([a, b, c], transform=False)[0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("N", [5, 60])
def test_where_the_rotation_is_not_unique(N: int, dtype: torch.dtype) -> None:
    """More numbers than examples, or dead units: orthogonal, optimal, one answer for both ways."""
    Z = representations(3, N, 12, dtype=dtype)
    for k in range(3):
        Z[k][:, [k, 7]] = 0.0
    tolerance = 1e-10 if dtype == F64 else 1e-5
    for products in (False, True):
        way = procrustes._polar_by_products if products else procrustes._polar_by_svd
        Q = way((Z[0].T @ Z[1]).double()[None])[0].to(dtype)
        R = Z[0].T @ Z[1]
        assert relative(Q.T @ Q, torch.eye(12)) < tolerance
        assert abs(float(torch.trace(Q.T @ R) / nuclear_norm(R.double())) - 1) < tolerance
        H = (R @ Q.T).double()  # optimal exactly if this is symmetric and semidefinite
        assert relative(H, H.T) < tolerance
        assert torch.linalg.eigvalsh(H).min() > -tolerance * H.norm()
    linked = link(Z)
    F, A = literal_link([z.double() for z in Z])
    assert relative(linked.utilities, A) < tolerance
    # B is free only where Z_k is zero (rank R_kj = rank Z_k), so Z'_kj and F are determined
    assert relative(linked.regularisers, F) < 10 * tolerance


def test_dead_units_of_every_node_leave_the_answer_determined() -> None:
    """The same two units dead everywhere: as if they were not there."""
    Z = representations(3, 60, 10)
    padded = [torch.cat([z, z.new_zeros(60, 2)], dim=1) for z in Z]
    linked, small = link(padded), link(Z)
    torch.testing.assert_close(linked.regularisers[..., :10], small.regularisers)
    assert linked.regularisers[..., 10:].abs().max() < 1e-10
    torch.testing.assert_close(linked.utilities, small.utilities)


def test_inputs_are_left_alone_and_carry_no_gradient() -> None:
    Z = [z.requires_grad_() for z in representations(3, 20, 4)]
    before = [z.detach().clone() for z in Z]
    linked = link(Z)
    assert not linked.regularisers.requires_grad
    assert all(torch.equal(z, b) for z, b in zip(Z, before, strict=True))


def test_views_and_slices_are_welcome() -> None:
    whole = draw(3, 5, 24)
    views = [whole[k].T for k in range(3)]
    torch.testing.assert_close(
        link(views).regularisers, link([v.contiguous() for v in views]).regularisers
    )


# --- random rotations ---------------------------------------------------------------------------


def test_random_rotations_are_orthogonal_repeatable_and_centred() -> None:
    Q = random_rotation(6, stream(3, "Q"))
    assert Q.dtype == torch.float32
    torch.testing.assert_close(Q @ Q.T, torch.eye(6))
    assert torch.equal(Q, random_rotation(6, stream(3, "Q")))
    many = torch.stack([random_rotation(3, stream(s, "many"), dtype=F64) for s in range(2000)])
    # Haar: mean 0 and second moment 1 / r in every entry, both signs of the determinant
    assert many.mean(dim=0).abs().max() < 0.06
    assert ((many**2).mean(dim=0) - 1 / 3).abs().max() < 0.04
    assert abs(float(torch.linalg.det(many).mean())) < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 3e-4)])
def test_cuda_equals_algorithm_3(dtype: torch.dtype, tolerance: float) -> None:
    Z = representations(4, 200, 32, decay=4.0, dtype=dtype)
    Z[1][:, 5] = Z[1][:, 6]  # one node of lower rank: its pairs fall back
    F, A = literal_link([z.double() for z in Z])
    linked = link([z.cuda() for z in Z])
    assert linked.regularisers.is_cuda
    assert relative(linked.utilities.cpu(), A) < tolerance
    for j in (0, 2, 3):
        assert torch.isfinite(linked.regularisers[j]).all()
    intact = [Z[0], Z[2], Z[3]]
    F, _ = literal_link([z.double() for z in intact])
    assert relative(link([z.cuda() for z in intact]).regularisers.cpu(), F) < tolerance

"""Theorem 1 of FedUL against mixtures, direct products and closed forms (SPEC 4.7)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from polyfed.maths.surrogate import (
    Identifiability,
    identifiable,
    log_transition,
    proportion_loss,
    surrogate_log_probs,
    surrogate_losses,
)
from polyfed.random import stream

F64 = torch.float64
SEEDS = st.integers(0, 10_000)


def simplex(rows: int, K: int, seed: int) -> Tensor:
    """Rows of positive numbers that sum to one."""
    drawn = 0.05 + torch.rand(rows, K, generator=stream(seed, "simplex", rows, K), dtype=F64)
    return drawn / drawn.sum(1, keepdim=True)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=stream(seed, "normal"), dtype=F64)


def labels(n: int, high: int, seed: int) -> Tensor:
    return torch.randint(high, (n,), generator=stream(seed, "labels"))


def _literal_q(eta: Tensor, Pi: Tensor, pibar: Tensor, pi: Tensor) -> Tensor:
    """Theorem 1 as it is printed, one sample, one set and one class at a time."""
    q = torch.zeros(len(eta), len(Pi), dtype=F64)
    for b in range(len(eta)):
        for m in range(len(Pi)):
            for k in range(Pi.shape[1]):
                q[b, m] += pibar[m] * Pi[m, k] / pi[k] * eta[b, k]
        q[b] /= q[b].sum()
    return q


def _gemm_form(logits: Tensor, T: Tensor) -> Tensor:
    """By one product of probabilities: SPEC 4.2's second form."""
    log_eta = logits.log_softmax(-1)
    top = log_eta.amax(-1, keepdim=True)
    return (((log_eta - top).exp() @ T.exp().T).log() + top).log_softmax(-1)


# ---- Theorem 1 -----------------------------------------------------------------------------------


def test_theorem_1_on_a_mixture_of_gaussians() -> None:
    """SPEC 4.7, 1: p(set | x) from the densities themselves, under a prior that is not uniform."""
    pi = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
    Pi, pibar = simplex(4, 3, 0), simplex(1, 4, 1)[0]
    x = torch.linspace(-4, 6, 60, dtype=F64)
    density = torch.exp(-((x[:, None] - torch.tensor([-1.0, 0.5, 3.0], dtype=F64)) ** 2) / 2)
    joint = pi * density  # p(y = k, x)
    surrogate = (density @ Pi.T) * pibar  # p(set = m, x)
    q = surrogate_log_probs(joint.log(), log_transition(Pi, pibar, pi)).exp()
    assert torch.allclose(q, surrogate / surrogate.sum(1, keepdim=True), rtol=1e-12, atol=0)
    assumed_uniform = surrogate_log_probs(joint.log(), log_transition(Pi, pibar)).exp()
    assert (assumed_uniform - q).abs().max() > 0.05


@given(seed=SEEDS, M=st.integers(1, 7), K=st.integers(1, 5), zero=st.booleans())
def test_log_space_is_the_literal_theorem(seed: int, M: int, K: int, zero: bool) -> None:
    """SPEC 4.7, 3."""
    Pi, pibar, pi = simplex(M, K, seed), simplex(1, M, seed)[0], simplex(1, K, seed + 1)[0]
    if zero and K > 1:
        Pi[0, 0] = 0
    logits = normal(5, K, seed=seed, scale=3)
    T = log_transition(Pi, pibar, pi)
    expected = _literal_q(logits.softmax(-1), Pi, pibar, pi)
    assert torch.allclose(surrogate_log_probs(logits, T).exp(), expected, rtol=1e-11, atol=1e-15)
    assert torch.allclose(surrogate_log_probs(logits, T), _gemm_form(logits, T), atol=1e-10)


@pytest.mark.parametrize("K", [2, 10])
def test_pure_sets_are_labels(K: int) -> None:
    """SPEC 4.7, 2: Pi = I and pibar = pi is cross-entropy."""
    pi = simplex(1, K, 3)[0]
    logits, y = normal(20, K, seed=0, scale=4), labels(20, K, 0)
    T = log_transition(torch.eye(K, dtype=F64), pi, pi)
    expected = functional.cross_entropy(logits, y, reduction="none")
    assert torch.allclose(surrogate_losses(logits, y, T), expected, rtol=1e-12, atol=1e-14)


def test_the_transition_is_what_it_says() -> None:
    Pi = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=F64)
    T = log_transition(Pi, torch.tensor([30, 10]), torch.tensor([1.0, 4.0], dtype=F64))
    by_hand = torch.tensor(
        [
            [math.log(0.75 * 0.25 / 0.2), math.log(0.75 * 0.75 / 0.8)],
            [math.log(0.25 / 0.2), -math.inf],
        ],
        dtype=F64,
    )
    assert torch.allclose(T, by_hand)
    assert T.dtype == F64
    assert log_transition(Pi.float(), torch.tensor([30, 10])).dtype == torch.float32
    nobody = log_transition(Pi[1:], torch.tensor([10]), torch.tensor([1.0, 0.0]))
    assert nobody.tolist() == [[0, -math.inf]]  # a class without prior that does not occur


@given(seed=SEEDS, factor=st.floats(1e-3, 1e3))
def test_scales_of_sizes_and_prior_do_not_matter(seed: int, factor: float) -> None:
    """SPEC 4.7, 6."""
    Pi, sizes, pi = simplex(6, 4, seed), simplex(1, 6, seed)[0], simplex(1, 4, seed)[0]
    T = log_transition(Pi, sizes, pi)
    assert torch.allclose(T, log_transition(Pi, factor * sizes, pi))
    assert torch.allclose(T, log_transition(Pi, sizes, factor * pi))
    logits, sets = normal(9, 4, seed=seed), labels(9, 6, seed)
    shifted = surrogate_losses(logits, sets, T + math.log(factor))
    assert torch.allclose(shifted, surrogate_losses(logits, sets, T))


def test_a_uniform_prior_drops_out() -> None:
    Pi, sizes = simplex(6, 4, 0), simplex(1, 6, 0)[0]
    uniform = torch.full((4,), 7.0, dtype=F64)
    assert torch.allclose(log_transition(Pi, sizes), log_transition(Pi, sizes, uniform))


@given(seed=SEEDS, order=st.permutations(range(5)))
def test_the_names_of_the_sets_do_not_matter(seed: int, order: list[int]) -> None:
    """SPEC 4.7, 11."""
    Pi, sizes = simplex(5, 3, seed), simplex(1, 5, seed)[0]
    logits, sets = normal(12, 3, seed=seed), labels(12, 5, seed)
    index = torch.tensor(order)
    renamed = index.argsort()[sets]  # row i is now what was row order[i]
    loss = surrogate_losses(logits, renamed, log_transition(Pi[index], sizes[index]))
    assert torch.allclose(loss, surrogate_losses(logits, sets, log_transition(Pi, sizes)))


# ---- what can be recovered -----------------------------------------------------------------------


@given(seed=SEEDS)
def test_full_column_rank_recovers_eta(seed: int) -> None:
    """SPEC 4.7, 4: eta_k ~ pi_k (Pi^+ D_pibar^-1 q)_k."""
    Pi, pibar, pi = simplex(8, 4, seed), simplex(1, 8, seed)[0], simplex(1, 4, seed)[0]
    logits = normal(6, 4, seed=seed)
    q = surrogate_log_probs(logits, log_transition(Pi, pibar, pi)).exp()
    back = torch.linalg.lstsq(Pi, (q / pibar).T).solution.T * pi
    eta = back / back.sum(1, keepdim=True)
    error = (eta - logits.softmax(-1)).abs().max()
    assert error < 1e-13 / float(torch.linalg.svdvals(Pi)[-1])


def test_a_lower_rank_has_two_answers() -> None:
    """SPEC 4.7, 5: classes 1 and 2 always come in the proportion 1 : 2; which is which is lost."""
    Pi = torch.tensor([[0.7, 0.1, 0.2], [0.1, 0.3, 0.6], [0.4, 0.2, 0.4]], dtype=F64)
    T = log_transition(Pi, torch.ones(3, dtype=F64))
    one, other = torch.tensor([[0.2, 0.7, 0.1], [0.2, 0.1, 0.4]], dtype=F64)  # 1 * .7 + 2 * .1 = .9
    q = surrogate_log_probs(torch.stack([one, other / other.sum()]).log(), T)
    assert torch.allclose(q[0], q[1])
    assert identifiable([Pi]).ranks == (2,)


BLOCKS = (
    torch.tensor([[0.8, 0.2, 0, 0], [0.3, 0.7, 0, 0]], dtype=F64),
    torch.tensor([[0, 0, 0.6, 0.4], [0, 0, 0.1, 0.9]], dtype=F64),
)


def test_stacked_rank_is_not_enough() -> None:
    """SPEC 4.2's counterexample: rank 4 of 4 together, and yet two dimensions of answers."""
    assert torch.linalg.matrix_rank(torch.cat(BLOCKS)) == 4
    found = identifiable(BLOCKS)
    assert found.ranks == (2, 2)
    assert found.dimension == 2
    assert found.margin < 1e-12
    # The second dimension, by hand: scale the classes of one node only; both see the same q.
    u = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=F64)
    scaled = u * torch.tensor([1, 1, 3, 3])
    for Pi in BLOCKS:
        a, b = Pi @ u, Pi @ scaled
        assert torch.allclose(a / a.sum(), b / b.sum())


def test_a_third_node_that_overlaps_both_settles_it() -> None:
    bridge = torch.tensor([[0, 0.5, 0.5, 0], [0, 0.2, 0.8, 0]], dtype=F64)
    found = identifiable([*BLOCKS, bridge])
    assert (found.ranks, found.dimension) == ((2, 2, 2), 1)
    assert found.margin > 0.01
    assert not found.is_certain


@given(seed=SEEDS, M=st.integers(1, 6), K=st.integers(2, 5), C=st.integers(1, 3))
def test_dimension_is_that_of_the_null_space(seed: int, M: int, K: int, C: int) -> None:
    """Random sets: everything that can be in general position is."""
    found = identifiable([simplex(M, K, seed + c) for c in range(C)])
    assert found.ranks == (min(M, K),) * C
    assert found.dimension == max(1, K + C - C * M)
    assert all((sigma < 1e-14) == (M < K) for sigma in found.sigmas)
    assert (found.margin < 1e-12) == (found.dimension > 1)


def test_sigma_is_that_of_numpy_and_float32_will_do() -> None:
    Pi = simplex(10, 4, 0)
    found = identifiable([Pi])
    assert abs(found.sigmas[0] - float(torch.linalg.svdvals(Pi)[3])) < 1e-15
    flat = simplex(10, 2, 1) @ simplex(2, 4, 2)  # rank 2, but for the rounding to float32
    assert identifiable([flat.float()]).ranks == identifiable([flat]).ranks == (2,)
    assert identifiable([Pi.float()]).ranks == (4,)


def test_the_sentence_says_what_to_do() -> None:
    fine = identifiable([simplex(6, 3, s) for s in range(2)])
    assert fine.is_certain
    assert "each node tell 3 classes apart" in fine.sentence(["M0", "M1"])
    assert "fedul-m1" not in fine.sentence(["M0", "M1"])
    at = fine.sigmas.index(min(fine.sigmas))
    assert f"{fine.sigmas[at]:.2g}, at M{at}" in fine.sentence(["M0", "M1"])

    empty_column = torch.cat([simplex(6, 3, 0), torch.zeros(6, 1, dtype=F64)], 1)
    poor = identifiable([empty_column, empty_column])
    assert (poor.unseen, poor.dimension) == ((3,), 2)
    text = poor.sentence(["A", "B"])
    for piece in ("A (rank 3), B (rank 3)", "in 1 way:", "No set holds class 3.", "fedul-m1"):
        assert piece in text

    joint = identifiable([empty_column, simplex(6, 4, 1)])
    text = joint.sentence(["A", "B"])
    for piece in ("sets of A (rank 3) do not tell 4", "together they determine", "fedul-m1"):
        assert piece in text
    assert "in 3 ways" in Identifiability(4, (2,), (0.0,), 4, 0.0, ()).sentence(["A"])


# ---- numbers that overflow -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("loss", ["proper", "reference"])
def test_gradients_are_finite(dtype: torch.dtype, loss: str) -> None:
    """SPEC 4.7, 10: logits of 1e4, zeros in Pi, a class that no set holds, an impossible set."""
    Pi = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.2, 0.8, 0], [0, 0, 0, 0]], dtype=dtype)
    T = log_transition(Pi, torch.tensor([5, 5, 5, 0]))
    logits = 1e4 * torch.cat([2 * torch.eye(4) - 1, torch.zeros(1, 4)]).to(dtype)
    for m in range(3):
        z = logits.clone().requires_grad_()
        losses = surrogate_losses(z, torch.full((5,), m), T, loss)  # type: ignore[arg-type]
        losses.sum().backward()
        assert losses.dtype == dtype
        assert bool(torch.isfinite(losses).all())
        assert bool(torch.isfinite(z.grad).all())


def test_a_confident_mistake_still_has_its_gradient() -> None:
    """The network is sure of class 1, the sample's set holds class 0 only.

    log q_0 = log eta_0 + log(1/2) - log(eta_0 / 2 + (eta_0 + eta_1) / 4), so for eta_0 -> 0 the
    loss is z_1 - z_0 + log(1/2) and its gradient (-1, 1). A product of probabilities says infinity.
    """
    T = log_transition(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.ones(2))
    logits = torch.tensor([[-1e4, 1e4]], requires_grad=True)
    loss = surrogate_losses(logits, torch.tensor([0]), T)[0]
    (gradient,) = torch.autograd.grad(loss, logits)
    assert abs(float(loss.detach()) - (2e4 + math.log(0.5))) < 1e-2
    assert torch.allclose(gradient, torch.tensor([[-1.0, 1.0]]))
    assert torch.isinf(_gemm_form(logits, T)[0, 0])


def test_a_class_the_node_lacks_does_not_hide_the_others() -> None:
    """All mass on a class without a column: what is left decides, as if it were all there is."""
    Pi = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]], dtype=F64)
    T = log_transition(Pi, torch.ones(2, dtype=F64))
    logits = torch.tensor([[0.3, -0.2, 5e3]], dtype=F64)
    without = surrogate_log_probs(logits[:, :2], T[:, :2])
    assert torch.allclose(surrogate_log_probs(logits, T), without)


def test_half_precision_logits_are_widened() -> None:
    Pi, logits = simplex(5, 3, 0).float(), normal(4, 3, seed=0).bfloat16()
    T = log_transition(Pi, torch.ones(5))
    got = surrogate_log_probs(logits, T)
    assert got.dtype == torch.float32
    assert torch.allclose(got, surrogate_log_probs(logits.float(), T))


def test_the_reference_loss_is_cross_entropy_of_probabilities() -> None:
    """SPEC 0, finding 6."""
    T = log_transition(simplex(5, 3, 0), simplex(1, 5, 0)[0])
    logits, sets = normal(7, 3, seed=0, scale=2), labels(7, 5, 0)
    q = surrogate_log_probs(logits, T).exp()
    expected = functional.cross_entropy(q, sets, reduction="none")
    assert torch.allclose(surrogate_losses(logits, sets, T, "reference"), expected)
    assert not torch.allclose(surrogate_losses(logits, sets, T), expected)


@given(seed=SEEDS)
def test_the_gradient_is_that_of_finite_differences(seed: int) -> None:
    T = log_transition(simplex(5, 3, seed), simplex(1, 5, seed)[0], simplex(1, 3, seed)[0])
    logits, sets = normal(4, 3, seed=seed).requires_grad_(), labels(4, 5, seed)
    assert torch.autograd.gradcheck(lambda z: surrogate_losses(z, sets, T), (logits,))


def test_the_proper_loss_is_least_at_the_truth() -> None:
    """Fisher consistency: over the true mix of sets, no logits beat log eta."""
    Pi, pibar = simplex(6, 3, 0), simplex(1, 6, 0)[0]
    T = log_transition(Pi, pibar)
    truth = normal(5, 3, seed=1)
    q = surrogate_log_probs(truth, T).exp()

    def risk(logits: Tensor) -> Tensor:
        return -(q * surrogate_log_probs(logits, T)).sum(1)

    logits = truth.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(risk(logits).sum(), logits)
    assert float(gradient.abs().max()) < 1e-12
    for seed in range(20):
        assert bool((risk(truth + normal(5, 3, seed=seed, scale=0.3)) > risk(truth)).all())


# ---- proportions ---------------------------------------------------------------------------------


def _literal_proportion_loss(logits: Tensor, sets: Tensor, Pi: Tensor) -> float:
    eta, total = logits.softmax(-1), 0.0
    for m in range(len(Pi)):
        members = eta[sets == m]
        for k in range(Pi.shape[1]):
            if len(members) and Pi[m, k] > 0:
                ratio = Pi[m, k] / members[:, k].mean()
                total += len(members) / len(sets) * float(Pi[m, k] * ratio.log())
    return total


@given(seed=SEEDS, zero=st.booleans())
def test_proportion_loss_is_the_divergence_written_out(seed: int, zero: bool) -> None:
    Pi, logits, sets = simplex(4, 3, seed), normal(9, 3, seed=seed), labels(9, 4, seed)
    if zero:
        Pi[0] = torch.tensor([0.0, 1.0, 0.0])
    got = proportion_loss(logits, sets, Pi)
    assert got.shape == ()
    assert abs(float(got) - _literal_proportion_loss(logits, sets, Pi)) < 1e-12


def test_proportion_loss_is_zero_when_the_means_fit() -> None:
    """One sample of each class, each predicted surely: the mean is uniform."""
    logits = 50 * torch.eye(3, dtype=F64)
    sets = torch.zeros(3, dtype=torch.int64)
    uniform = torch.full((2, 3), 1 / 3, dtype=F64)  # the second set has no sample in the batch
    assert abs(float(proportion_loss(logits, sets, uniform))) < 1e-12


def test_proportion_loss_has_finite_gradients() -> None:
    logits = torch.tensor([[1e4, -1e4], [1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    Pi = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    (gradient,) = torch.autograd.grad(proportion_loss(logits, torch.tensor([0, 0, 1]), Pi), logits)
    # Set 0 wants half of class 1 and gets none: -(1/2) log mean eta_1, shared by two samples; the
    # set weighs 2/3. Set 1 wants class 0 only and its one sample says 1: weight 1/3.
    expected = torch.tensor([[1.0, -1.0], [1.0, -1.0], [-2.0, 2.0]]) / 6
    assert torch.allclose(gradient, expected, atol=1e-3)  # float32 at 2e4


# ---- stacked nodes -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["proper", "reference"])
def test_vmap_over_nodes_is_the_loop(loss: str) -> None:
    Pi = torch.stack([simplex(6, 4, c) for c in range(3)])
    Pi[1, :, 2] = 0
    T = torch.stack([log_transition(p, torch.ones(6, dtype=F64)) for p in Pi])
    logits = normal(3, 8, 4, seed=0)
    sets = labels(24, 6, 0).view(3, 8)

    def losses(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return surrogate_losses(z, y, t, loss)  # type: ignore[arg-type]

    def gradient(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return torch.func.grad(lambda z: losses(z, y, t).mean())(z)

    for function in (losses, gradient):
        together = torch.func.vmap(function)(logits, sets, T)
        for k in range(3):
            assert torch.allclose(together[k], function(logits[k], sets[k], T[k]), rtol=1e-12)


def test_vmap_of_transitions_and_proportions_is_the_loop() -> None:
    Pi = torch.stack([simplex(6, 4, c) for c in range(3)])
    sizes, pi = simplex(3, 6, 0), simplex(3, 4, 1)
    T = torch.func.vmap(log_transition)(Pi, sizes, pi)
    logits, sets = normal(3, 8, 4, seed=0), labels(24, 6, 0).view(3, 8)
    fits = torch.func.vmap(proportion_loss)(logits, sets, Pi)
    for k in range(3):
        assert torch.allclose(T[k], log_transition(Pi[k], sizes[k], pi[k]))
        assert torch.allclose(fits[k], proportion_loss(logits[k], sets[k], Pi[k]))

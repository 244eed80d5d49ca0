from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.maths.relation import relation
from polyfed.random import stream


def _tasks(D: int, m: int, seed: int = 0) -> Tensor:
    return torch.randn(D, m, generator=stream(seed, "W"), dtype=torch.float64)


def _feasible(m: int, generator: torch.Generator) -> Tensor:
    """A random positive definite matrix of trace 1."""
    half = torch.randn(m, m, generator=generator, dtype=torch.float64)
    some = half @ half.T + 1e-3 * torch.eye(m).double()
    return some / some.trace()


def _cost(W: Tensor, sigma: Tensor, ridge: float) -> float:
    """tr(W Sigma^-1 W^T) + ridge * tr(Sigma^-1)."""
    inverse = torch.linalg.inv(sigma)
    return float((W @ inverse @ W.T).trace() + ridge * inverse.trace())


@given(seed=st.integers(0, 200), ridge=st.sampled_from([0.0, 1e-3, 0.5]))
def test_no_feasible_matrix_explains_the_tasks_better(seed: int, ridge: float) -> None:
    """Far away, and in every direction nearby."""
    W, generator = _tasks(7, 4, seed), stream(seed, "others")
    best = relation(W, ridge)
    least = _cost(W, best, ridge)
    for _ in range(20):
        other = _feasible(4, generator)
        assert _cost(W, other, ridge) >= least
        assert _cost(W, 0.999 * best + 0.001 * other, ridge) >= least


def test_the_least_cost_is_the_squared_nuclear_norm() -> None:
    W = _tasks(7, 4)
    assert _cost(W, relation(W, 0.0), 0.0) == pytest.approx(float(W.norm(p="nuc")) ** 2)


@given(seed=st.integers(0, 200))
def test_it_is_feasible(seed: int) -> None:
    sigma = relation(_tasks(3, 5, seed), 1e-6)  # more tasks than numbers: W^T W is singular
    assert sigma.trace().item() == pytest.approx(1)
    torch.testing.assert_close(sigma, sigma.T)
    assert torch.linalg.eigvalsh(sigma).min() > 0


def test_its_square_is_the_gram_matrix() -> None:
    W = _tasks(7, 4)
    sigma, gram = relation(W, 0.0), W.T @ W
    scale = float(gram.trace() / (sigma @ sigma).trace())
    torch.testing.assert_close(scale * sigma @ sigma, gram)


def test_limits() -> None:
    """No tasks yet: unrelated. Equal tasks: one. Opposite tasks: minus one."""
    torch.testing.assert_close(relation(torch.zeros(3, 4), 1e-3), torch.eye(4).double() / 4)
    w = torch.tensor([[1.0], [2.0]])
    equal = relation(torch.cat([w, w], 1), 1e-12)
    torch.testing.assert_close(equal, torch.full((2, 2), 0.5).double(), rtol=0, atol=1e-5)
    opposite = relation(torch.cat([w, -w], 1), 1e-12)
    wanted = torch.tensor([[0.5, -0.5], [-0.5, 0.5]]).double()
    torch.testing.assert_close(opposite, wanted, rtol=0, atol=1e-5)


def test_without_columns_that_are_alike_it_follows_their_norms() -> None:
    """Orthogonal tasks of length 3 and 1: variances 3/4 and 1/4."""
    W = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(relation(W, 0.0), torch.tensor([[0.75, 0], [0, 0.25]]).double())

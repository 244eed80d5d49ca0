from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.maths.gaussian import ClassStatistics, class_statistics, draw, pooled
from polyfed.random import stream


def _samples(n: int, d: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = stream(seed, "samples")
    y = torch.randint(classes, (n,), generator=generator)
    z = (
        torch.randn(n, d, generator=generator, dtype=torch.float64) * (1 + y.unsqueeze(1))
        + y[:, None]
    )
    return z, y


def test_class_statistics_are_numpys() -> None:
    z, y = _samples(40, 3, 4)
    found = class_statistics(z, y, 5)
    for c in range(4):
        mine = z[y == c].numpy()
        assert found.count[c] == len(mine)
        np.testing.assert_allclose(found.mean[c], mine.mean(0), atol=1e-12)
        np.testing.assert_allclose(found.covariance[c], np.cov(mine.T), atol=1e-12)


def test_one_sample_has_no_spread_and_no_sample_nothing() -> None:
    found = class_statistics(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), 3)
    assert found.count.tolist() == [0, 1, 0]
    assert found.mean.tolist() == [[0, 0], [1, 2], [0, 0]]
    assert not found.covariance.any()


def test_the_dtype_stays() -> None:
    found = class_statistics(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), 1)
    assert (found.count.dtype, found.mean.dtype) == (torch.int64, torch.float32)
    assert found.covariance.dtype == torch.float32


def _literal_pool(parties: list[ClassStatistics], c: int) -> tuple[Tensor, Tensor]:
    """Eq. (3) and (4) of the paper as they stand."""
    N = sum(int(p.count[c]) for p in parties)
    mu = sum(int(p.count[c]) / N * p.mean[c] for p in parties)
    S = sum((int(p.count[c]) - 1) / (N - 1) * p.covariance[c] for p in parties)
    S = S + sum(int(p.count[c]) / (N - 1) * torch.outer(p.mean[c], p.mean[c]) for p in parties)
    return mu, S - N / (N - 1) * torch.outer(mu, mu)


@given(seed=st.integers(0, 1000), cuts=st.tuples(st.integers(2, 20), st.integers(21, 38)))
def test_pooling_is_the_paper_and_equals_all_samples_together(
    seed: int, cuts: tuple[int, int]
) -> None:
    z, y = _samples(40, 3, 2, seed)
    rows = torch.arange(40).tensor_split(cuts)
    parties = [class_statistics(z[r], y[r], 2) for r in rows]
    both, whole = pooled(parties), class_statistics(z, y, 2)
    assert torch.equal(both.count, whole.count)
    torch.testing.assert_close(both.mean, whole.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(both.covariance, whole.covariance, rtol=0, atol=1e-11)
    for c in range(2):
        if all(int(p.count[c]) > 0 for p in parties):
            mu, S = _literal_pool(parties, c)
            torch.testing.assert_close(both.mean[c], mu, rtol=0, atol=1e-12)
            torch.testing.assert_close(both.covariance[c], S, rtol=0, atol=1e-11)


def test_a_class_that_few_hold() -> None:
    """One sample in all: no spread. Two parties with one each: half the squared distance."""
    a = class_statistics(torch.tensor([[0.0], [5.0]]), torch.tensor([0, 1]), 3)
    b = class_statistics(torch.tensor([[4.0]]), torch.tensor([0]), 3)
    both = pooled([a, b])
    assert both.count.tolist() == [2, 1, 0]
    assert both.mean.flatten().tolist() == [2.0, 5.0, 0.0]
    assert both.covariance.flatten().tolist() == [8.0, 0.0, 0.0]


def test_drawn_samples_have_the_mean_and_the_covariance() -> None:
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    half = torch.tensor([[2.0, 0, 0], [1, 1, 0], [0, -1, 0.5]], dtype=torch.float64)
    covariance = half @ half.T
    z = draw(mean, covariance, 200_000, stream(0, "draw"))
    torch.testing.assert_close(z.mean(0), mean, rtol=0, atol=0.03)
    torch.testing.assert_close(z.T.cov(), covariance, rtol=0, atol=0.06)


def test_a_singular_covariance_is_drawn_on_its_line() -> None:
    line = torch.tensor([3.0, 4.0], dtype=torch.float64)
    z = draw(torch.zeros(2, dtype=torch.float64), torch.outer(line, line), 50, stream(0, "line"))
    torch.testing.assert_close(z[:, 0] * 4, z[:, 1] * 3, rtol=0, atol=1e-6)
    assert z.std() > 1


def test_rounding_in_the_covariance_stays_rounding() -> None:
    """Equal eigenvalues have no eigenvectors of their own, but one square root."""
    mean, covariance = torch.zeros(6).double(), torch.eye(6).double()
    noise = torch.randn(6, 6, generator=stream(0, "noise"), dtype=torch.float64)
    near = covariance + 1e-14 * (noise + noise.T)
    one, other = (draw(mean, c, 10, stream(0, "same")) for c in (covariance, near))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num", [0, 1, 7])
def test_as_many_as_asked_for(num: int) -> None:
    drawn = draw(torch.zeros(2), torch.eye(2), num, stream(0, "few"))
    assert drawn.shape == (num, 2)
    assert drawn.dtype == torch.float32

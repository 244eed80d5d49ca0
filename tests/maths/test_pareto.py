"""The common descent direction against a search over all mixtures."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.maths.pareto import pareto_step
from polyfed.random import stream

F64 = torch.float64
SEEDS = st.integers(0, 10_000)


def gradients(seed: int, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Two gradients of three tensors each, the second `scale` times as long."""
    generator = stream(seed, "gradients")
    shapes = [(4, 3), (5,), ()]
    g1, g2 = ([torch.randn(s, generator=generator, dtype=F64) for s in shapes] for _ in range(2))
    return g1, [scale * g for g in g2]


def inner(x: list[Tensor], y: list[Tensor]) -> float:
    return sum(float((u * v).sum()) for u, v in zip(x, y, strict=True))


@given(seed=SEEDS, scale=st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0]))
def test_no_mixture_is_shorter(seed: int, scale: float) -> None:
    g1, g2 = gradients(seed, scale)
    d, a = pareto_step(g1, g2)
    for share in torch.linspace(0, 1, 101).tolist():
        mixed = [share * x + (1 - share) * y for x, y in zip(g1, g2, strict=True)]
        assert inner(d, d) <= inner(mixed, mixed) * (1 + 1e-12)
    again = [a * x + (1 - a) * y for x, y in zip(g1, g2, strict=True)]
    assert all(torch.allclose(u, v, rtol=0, atol=1e-12) for u, v in zip(d, again, strict=True))
    assert 0 <= float(a) <= 1


@given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_both_objectives_fall(seed: int, scale: float) -> None:
    g1, g2 = gradients(seed, scale)
    d, _ = pareto_step(g1, g2)
    assert inner(d, g1) >= inner(d, d) - 1e-9
    assert inner(d, g2) >= inner(d, d) - 1e-9


def test_two_perpendicular_gradients() -> None:
    """|a (2, 0) + (1 - a) (0, 1)|^2 = 4 a^2 + (1 - a)^2 is least at a = 1/5."""
    d, a = pareto_step([torch.tensor([2.0, 0.0])], [torch.tensor([0.0, 1.0])])
    assert abs(float(a) - 0.2) < 1e-7
    assert torch.allclose(d[0], torch.tensor([0.4, 0.8]))
    assert d[0].dtype == torch.float32


def test_a_gradient_within_the_other_is_taken_alone() -> None:
    short, long = [torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 1.0])]
    d, a = pareto_step(short, long)
    assert float(a) == 1
    assert torch.equal(d[0], short[0])
    d, a = pareto_step(long, short)
    assert float(a) == 0
    assert torch.equal(d[0], short[0])


def test_opposed_equal_and_zero_gradients() -> None:
    g = [torch.tensor([1.0, 2.0])]
    d, a = pareto_step(g, [-2 * g[0]])
    assert abs(float(a) - 2 / 3) < 1e-6
    assert float(d[0].abs().max()) < 1e-6
    d, a = pareto_step(g, [g[0].clone()])
    assert float(a) == 1
    assert torch.equal(d[0], g[0])
    assert torch.equal(pareto_step(g, [torch.zeros(2)])[0][0], torch.zeros(2))


def test_vmap_is_the_loop() -> None:
    pairs = [gradients(seed) for seed in range(4)]
    stacked = [
        [torch.stack(parts) for parts in zip(*side, strict=True)]
        for side in zip(*pairs, strict=True)
    ]
    directions, weights = torch.func.vmap(pareto_step)(*stacked)
    for k, (g1, g2) in enumerate(pairs):
        d, a = pareto_step(g1, g2)
        assert torch.allclose(weights[k], a)
        assert all(torch.allclose(u[k], v) for u, v in zip(directions, d, strict=True))

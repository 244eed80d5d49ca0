from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from polyfed.errors import ConfigError
from polyfed.maths.accountant import ORDERS, check_accountant, epsilon


def exact(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian release whose mean moves by mu deviations (Balle and Wang, 2018)."""

    def excess(eps: float) -> float:
        tail = norm.logcdf(-eps / mu - mu / 2)
        return float(norm.cdf(-eps / mu + mu / 2) - math.exp(eps + tail) - delta)

    return float(brentq(excess, 0, 500, xtol=1e-10))


def literal(noise: float, messages: int, delta: float) -> float:
    """Eq. (1) to (3), over a grid of its own."""
    best = math.inf
    for k in range(1, 10_000):
        alpha = 1 + k / 100
        divergence = 0.0
        for _ in range(messages):
            divergence += alpha * 2**2 / (2 * noise**2)  # Delta = 2 C, sigma = noise * C
        gap = math.log(1 - 1 / alpha) - math.log(delta * alpha) / (alpha - 1)
        best = min(best, divergence + gap)
    return best


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("messages", [1, 10])
def test_equals_composition_written_literally(noise: float, messages: int) -> None:
    assert epsilon(noise, messages, 1e-5) == pytest.approx(literal(noise, messages, 1e-5), rel=1e-3)


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("messages", [1, 10, 100])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_is_no_less_than_the_closed_form_and_near_it(
    noise: float, messages: int, delta: float
) -> None:
    """Composed Gaussian releases are one, whose mean moves by sqrt(T) Delta / sigma."""
    wanted = exact(math.sqrt(messages) * 2 / noise, delta)
    got = epsilon(noise, messages, delta)
    assert wanted <= got <= 1.2 * wanted + 0.02


def test_more_noise_less_loss_more_messages_more_loss() -> None:
    assert epsilon(1, 5, 1e-5) > epsilon(2, 5, 1e-5) > epsilon(2, 4, 1e-5) > 0
    assert epsilon(2, 4, 1e-3) < epsilon(2, 4, 1e-5)
    assert epsilon(1, 0, 1e-5) == 0


@pytest.mark.parametrize(("noise", "messages"), [(1e-2, 1000), (1e3, 1)])
def test_the_orders_reach_far_enough(noise: float, messages: int) -> None:
    """Opacus warns where the best order is the first or the last, and warnings are errors here."""
    assert math.isfinite(epsilon(noise, messages, 1e-5))
    assert ORDERS[0] < 1.001


def test_without_opacus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("opacus"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(ConfigError, match=r"pip install 'polyfed\[privacy\]'"):
        check_accountant()

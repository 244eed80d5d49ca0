r"""Privacy loss of messages with Gaussian noise: epsilon, by Renyi differential privacy.

    m -> m + sigma N(0, I) has   D_alpha <= alpha Delta^2 / (2 sigma^2)                (1)
    T messages:                  D_alpha <= T alpha Delta^2 / (2 sigma^2)              (2)
    eps = min_alpha D_alpha + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)        (3)

Mironov. CSF 2017, arXiv:1702.07476, Proposition 7 and Proposition 1 (composition, also of messages
that depend on the ones before); Eq. (3) is Canonne, Kamath, Steinke, arXiv:2004.00010,
Proposition 12. Computed by Opacus.
Symbols: m = a vector of norm at most C, Delta = 2 C: how far m moves when all data of the node are
replaced by any other; sigma = noise * C, so that sigma / Delta = noise / 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyfed.errors import ConfigError

ORDERS = tuple((1 + np.logspace(-4, 6, 601)).tolist())


def epsilon(noise: float, messages: int, delta: float) -> float:
    """Apply Eq. (3) to so many messages; none is no loss.

    Args:
        noise: standard deviation of the noise, as a multiple of the bound C.
        messages: how many were sent.
        delta: probability with which the loss may be larger.
    """
    if not messages:
        return 0.0
    rdp = _opacus()
    spent = rdp.compute_rdp(q=1.0, noise_multiplier=noise / 2, steps=messages, orders=ORDERS)
    found, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
    return max(float(found), 0.0)


def check_accountant() -> None:
    """Raise unless the accountant is installed."""
    _opacus()


def _opacus() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise ConfigError("guard: noise needs: pip install 'polyfed[privacy]'.") from error
    return rdp

r"""How tasks relate: the matrix that explains their weight vectors best.

    Sigma(W) = argmin tr(W Sigma^-1 W^T)  over  Sigma >= 0, tr Sigma = 1
             = (W^T W)^(1/2) / tr((W^T W)^(1/2))                                       (1)

Zhang and Yeung, UAI 2010, as MOCHA uses it (Smith et al., NeurIPS 2017, arXiv:1705.10467).
Checked against gingsmith/fmtl@53042a2, opt/run_mocha.m, the update of Sigma.
Symbols: W = one column per task; Sigma = their relation; Omega = Sigma^-1.
With a ridge, W^T W + ridge * I takes the place of W^T W: the minimiser of the same objective plus
ridge * tr(Sigma^-1), which is never singular.
Limits: W = 0 gives I/m; equal columns give 1/m everywhere as the ridge goes to 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def relation(W: Float[Tensor, "D m"], ridge: float) -> Float[Tensor, "m m"]:
    """Eq. (1), in float64.

    >>> relation(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 0.0)
    tensor([[0.7500, 0.0000],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    W = W.double()
    gram = W.T @ W
    values, vectors = torch.linalg.eigh(gram + ridge * torch.eye(len(gram)).to(gram))
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root / root.trace()

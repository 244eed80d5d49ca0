r"""One Gaussian per class, from counts, means and covariances of several parties.

    mu_ck  = (1/N_ck) sum_i z_i                                                        (1)
    S_ck   = 1/(N_ck - 1) sum_i (z_i - mu_ck)(z_i - mu_ck)^T                           (2)
    mu_c   = sum_k (N_ck / N_c) mu_ck                                                  (3)
    S_c    = sum_k (N_ck - 1)/(N_c - 1) S_ck
           + sum_k N_ck/(N_c - 1) mu_ck mu_ck^T - N_c/(N_c - 1) mu_c mu_c^T            (4)

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021, arXiv:2106.05001, Eq. (3) and (4), which are those
of all the samples together: within and between parties.
Symbols: z = feature, c = class, k = party, N = number of samples.
The last two sums of (4) are computed as sum_k N_ck/(N_c - 1) (mu_ck - mu_c)(mu_ck - mu_c)^T: the
same number, without the difference of two large ones.
Limits: one party keeps its own. One sample has covariance 0; no sample, mean 0 as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class ClassStatistics:
    """Count, mean and covariance of each class."""

    count: Int[Tensor, " C"]
    mean: Float[Tensor, "C d"]
    covariance: Float[Tensor, "C d d"]


def class_statistics(
    z: Float[Tensor, "n d"], y: Int[Tensor, " n"], classes: int
) -> ClassStatistics:
    """Eq. (1) and (2) of features `z` with labels `y` in 0 to classes - 1."""
    members = functional.one_hot(y, classes)
    count = members.sum(0)
    mean = members.T.to(z) @ z / count.clamp(min=1).unsqueeze(1)
    covariance = z.new_zeros(classes, z.shape[1], z.shape[1])
    for c in range(classes):
        apart = z[y == c] - mean[c]
        covariance[c] = apart.T @ apart / max(len(apart) - 1, 1)
    return ClassStatistics(count, mean, covariance)


def pooled(parties: Sequence[ClassStatistics]) -> ClassStatistics:
    """Eq. (3) and (4), in float64.

    >>> a = class_statistics(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0]), 1)
    >>> b = class_statistics(torch.tensor([[4.0]]), torch.tensor([0]), 1)
    >>> both = pooled([a, b])
    >>> both.mean.item(), both.covariance.item()
    (2.0, 4.0)
    """
    counts = torch.stack([p.count for p in parties]).double()
    means = torch.stack([p.mean for p in parties]).double()
    covariances = torch.stack([p.covariance for p in parties]).double()
    total = counts.sum(0)
    mean = torch.einsum("kc,kcd->cd", counts, means) / total.clamp(min=1).unsqueeze(1)
    apart = means - mean
    within = torch.einsum("kc,kcde->cde", (counts - 1).clamp(min=0), covariances)
    between = torch.einsum("kc,kcd,kce->cde", counts, apart, apart)
    covariance = (within + between) / (total - 1).clamp(min=1).view(-1, 1, 1)
    return ClassStatistics(total.long(), mean, covariance)


def draw(
    mean: Float[Tensor, " d"],
    covariance: Float[Tensor, "d d"],
    num: int,
    generator: torch.Generator,
) -> Float[Tensor, "num d"]:
    """`num` samples of N(mean, covariance); the covariance may be singular.

    By the symmetric square root, which is continuous: rounding in the covariance stays rounding.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    noise = torch.randn(num, len(mean), generator=generator, dtype=mean.dtype)
    return mean + noise.to(mean.device) @ root

r"""How well scores rank one class above the other: the area under the ROC curve.

    A = (1 / n m) sum over positives i and negatives j of  [s_i > s_j] + [s_i = s_j] / 2       (1)

Hanley and McNeil, Radiology 143, 1982: A is the probability that a positive has the higher score.
Symbols: s = scores, n and m = numbers of positives and negatives.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def area_under_roc(scores: Float[Tensor, " k"], positive: Bool[Tensor, " k"]) -> float:
    """Apply Eq. (1).

    >>> import torch
    >>> area_under_roc(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([True, True, False]))
    0.75
    """
    above = scores[positive][:, None] - scores[~positive]
    return float((above > 0).double().mean() + (above == 0).double().mean() / 2)

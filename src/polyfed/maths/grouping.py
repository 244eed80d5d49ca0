r"""Groups of nodes whose models have moved in similar directions.

    s_ij = cos(z_i - zbar, z_j - zbar)                                                    (1)
    merge the two groups with the largest mean s_ij, again and again                      (2)
    silhouette of i = (b - a) / max(a, b)                                                 (3)

Average linkage, cut where the mean of Eq. (3) is largest. Sokal and Michener 1958; Rousseeuw, J.
Comp. Appl. Math. 20, 1987.
Symbols: z_i = what node i has, zbar = their mean: where all began drops out; a = mean distance
1 - s to the others of i's own group, b = that to the nearest other group; alone in a group, Eq. (3)
is 0.
Limits: two nodes are always opposite to each other, so fewer than three are one group; so are nodes
of which no cut has a positive silhouette.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Similarity = Float[Tensor, "n n"]
Groups = list[list[int]]


def similarity(z: Float[Tensor, "n d"]) -> Similarity:
    """Apply Eq. (1) to the rows; 0 for a row that is the mean."""
    apart = z - z.mean(0)
    return torch.nn.functional.normalize(apart) @ torch.nn.functional.normalize(apart).T


def merged(s: Similarity) -> list[Groups]:
    """Partitions by Eq. (2), from everybody alone to all together.

    >>> merged(torch.tensor([[1.0, 0.1, 0.7], [0.1, 1.0, 0.2], [0.7, 0.2, 1.0]]))
    [[[0], [1], [2]], [[0, 2], [1]], [[0, 2, 1]]]
    """
    groups: Groups = [[i] for i in range(len(s))]
    total = s.double().clone()  # sums of s between groups
    found = [[*groups]]
    while len(groups) > 1:
        sizes = torch.tensor([len(group) for group in groups], dtype=total.dtype)
        mean = (total / (sizes[:, None] * sizes)).fill_diagonal_(-torch.inf)
        i, j = sorted(divmod(int(mean.argmax()), len(groups)))
        total[i] += total[j]
        total[:, i] += total[:, j]
        left = [k for k in range(len(groups)) if k != j]
        total = total[left][:, left]
        groups = [groups[k] + (groups[j] if k == i else []) for k in left]
        found.append([*groups])
    return found


def silhouette(s: Similarity, groups: Groups) -> float:
    """The mean of Eq. (3); there are two groups or more."""
    member = torch.zeros(len(s), len(groups), dtype=torch.float64)
    for g, group in enumerate(groups):
        member[group, g] = 1
    own, sizes = member.bool(), member.sum(0)
    distance = (1 - s.double()).fill_diagonal_(0) @ member
    a = distance[own] / (sizes[own.double().argmax(1)] - 1).clamp(min=1)
    b = (distance / sizes).masked_fill(own, torch.inf).min(1).values
    score = (b - a) / torch.maximum(a, b).clamp(min=1e-12)
    is_alone = sizes[own.double().argmax(1)] == 1
    return float(score.masked_fill(is_alone, 0).mean())


def grouped(s: Similarity, count: int = 0) -> Groups:
    """The groups; `count` says how many, if that is known.

    >>> near = torch.tensor([[0.0, 0.1], [0.0, 0.2], [5.0, 0.1], [5.0, 0.3], [0.1, 0.1]])
    >>> grouped(similarity(near))
    [[0, 1, 4], [2, 3]]
    """
    n = len(s)
    partitions = {len(groups): groups for groups in merged(s.cpu())}
    if count:
        chosen = partitions[min(count, n)]
    else:
        scores = {k: silhouette(s.cpu(), partitions[k]) for k in range(2, n)}
        best = max(scores, key=scores.__getitem__, default=1)
        chosen = partitions[best if scores.get(best, 0) > 0 else 1]
    return sorted(sorted(group) for group in chosen)

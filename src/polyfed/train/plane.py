"""Features laid out in the plane, for pictures: t-SNE, or UMAP where umap-learn is installed.

Van der Maaten and Hinton, JMLR 2008; McInnes, Healy, Melville, arXiv:1802.03426. Both keep near
samples near; how far apart others are means nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.errors import ConfigError, DataError

_PERPLEXITY = 30.0


def in_plane(
    features: Float[Tensor, "m n"], *, seed: int = 0, way: Literal["t-sne", "umap"] = "t-sne"
) -> Float[Tensor, "m 2"]:
    """Two coordinates for every sample, on the CPU.

    Args:
        features: one vector a sample; three samples or more.
        seed: same seed, same picture.
        way: t-sne, or umap, which needs umap-learn.

    >>> in_plane(torch.eye(5)).shape
    torch.Size([5, 2])
    """
    if len(features) < 3:
        raise DataError(f"a map needs three samples or more, got {len(features)}.")
    if not features.isfinite().all():
        raise DataError("a map needs finite features: the network diverged.")
    points = _fitted(way, len(features), seed).fit_transform(
        features.detach().float().cpu().numpy()
    )
    return torch.from_numpy(points)


def _fitted(way: str, count: int, seed: int) -> Any:
    if way == "t-sne":
        from sklearn.manifold import TSNE

        return TSNE(perplexity=min(_PERPLEXITY, (count - 1) / 3), random_state=seed, init="pca")
    if find_spec("umap") is None:
        raise ConfigError("way='umap' needs umap-learn: pip install umap-learn. Or use 't-sne'.")
    return import_module("umap").UMAP(random_state=seed, n_neighbors=min(15, count - 1))

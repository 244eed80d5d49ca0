"""Maps of features."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed.errors import ConfigError, DataError
from polyfed.random import stream
from polyfed.train import plane
from polyfed.train.plane import in_plane


def heaps() -> torch.Tensor:
    """Twenty samples around each of three places."""
    places = 20 * torch.eye(3, 6).repeat_interleave(20, dim=0)
    return places + torch.randn(60, 6, generator=stream(0, "heaps"))


def test_near_samples_stay_near() -> None:
    points = in_plane(heaps(), seed=1)
    assert points.shape == (60, 2)
    nearest = torch.cdist(points, points).fill_diagonal_(torch.inf).argmin(1)
    assert (nearest // 20).tolist() == [i // 20 for i in range(60)]


def test_the_same_seed_gives_the_same_map() -> None:
    assert torch.equal(in_plane(heaps(), seed=1), in_plane(heaps(), seed=1))


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (torch.zeros(2, 4), "three samples or more, got 2"),
        (torch.full((5, 4), torch.nan), "finite features"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(features: torch.Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        in_plane(features)


def test_umap_where_it_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install umap-learn"):
        in_plane(heaps(), way="umap")


def test_umap_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class UMAP:
        def __init__(self, **options: Any) -> None:
            self.options = options

        def fit_transform(self, x: Any) -> Any:
            return x[:, :2] + self.options["random_state"]

    monkeypatch.setattr(plane, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=UMAP))
    assert torch.equal(in_plane(heaps(), seed=3, way="umap"), heaps()[:, :2] + 3)

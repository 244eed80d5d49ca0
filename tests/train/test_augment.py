"""Rotations against turned arrays, known pixels and the loop's named stream."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Node
from polyfed.core.phase import PerSample, Phase, cross_entropy
from polyfed.errors import ConfigError
from polyfed.random import ambient, stream
from polyfed.train.augment import Rotated, rotate, rotate_randomly
from polyfed.train.evaluate import mean_loss
from polyfed.train.loop import fit

MODES = ["nearest", "bilinear"]


def images(n: int, *, side: int = 7, width: int | None = None, seed: int = 0) -> Tensor:
    shape = (n, 2, side, width or side)
    return torch.rand(shape, generator=stream(seed, "images"), dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", [6, 7])
@pytest.mark.parametrize("quarter", [-1, 0, 1, 2, 3])
def test_quarter_turns_are_those_of_the_array(mode: str, side: int, quarter: int) -> None:
    """Counter-clockwise, as rot90: what was on the right is now on top."""
    x = images(3, side=side)
    turned = rotate(x, torch.full((3,), 90.0 * quarter, dtype=x.dtype), mode=mode)
    assert torch.allclose(turned, torch.rot90(x, quarter, (-2, -1)), atol=1e-12)


def test_each_image_has_its_own_angle() -> None:
    x = images(4)
    turned = rotate(x, torch.tensor([0.0, 90.0, 180.0, -90.0]))
    for i, quarter in enumerate([0, 1, 2, -1]):
        assert torch.allclose(turned[i], torch.rot90(x[i], quarter, (-2, -1)))


def test_a_full_image_keeps_its_shape_of_pixels() -> None:
    """Not square: half a turn is exact, and a quarter turn moves by pixels, not by shares."""
    x = images(1, side=4, width=8)
    half = rotate(x, torch.tensor([180.0]))
    assert torch.allclose(half, x.flip((-2, -1)))
    quarter = rotate(x, torch.tensor([90.0]))
    assert torch.allclose(quarter[..., 2:6], torch.rot90(x[..., 2:6], 1, (-2, -1)))
    assert not quarter[..., [0, 1, 6, 7]].any()


@given(degrees=st.floats(-180, 180))
def test_a_pixel_goes_where_trigonometry_says(degrees: float) -> None:
    """One bright spot; its centre of mass after a bilinear turn."""
    x = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    x[0, 0, 18:23, 28:33] = 1  # centred 10 right of the middle
    turned = rotate(x, torch.tensor([degrees], dtype=torch.float64), mode="bilinear")[0, 0]
    place = torch.arange(41, dtype=torch.float64) - 20
    total = turned.sum()
    right = float((turned.sum(0) * place).sum() / total)
    up = -float((turned.sum(1) * place).sum() / total)
    angle = math.radians(degrees)
    assert abs(right - 10 * math.cos(angle)) < 0.15
    assert abs(up - 10 * math.sin(angle)) < 0.15


@pytest.mark.parametrize("mode", MODES)
def test_corners_are_filled(mode: str) -> None:
    x = torch.ones(1, 1, 8, 8)
    turned = rotate(x, torch.tensor([45.0]), fill=-0.5, mode=mode)[0, 0]
    assert torch.allclose(turned[0, 0], torch.tensor(-0.5))
    assert torch.allclose(turned[3:5, 3:5], torch.tensor(1.0))
    assert rotate(x.double(), torch.tensor([45.0])).dtype == torch.float64


def test_the_nearest_pixel_makes_no_new_values() -> None:
    x = (images(1, side=9) > 0.5).float()
    nearest, mixed = (rotate(x, torch.tensor([20.0]), mode=mode) for mode in MODES)
    assert set(nearest.unique().tolist()) <= {0, 1}
    assert len(mixed.unique()) > 10
    assert torch.equal(rotate(x, torch.tensor([20.0])), nearest)


def test_random_angles_are_the_ambient_stream() -> None:
    x = images(64)
    with ambient(3, "noise"):
        first = rotate_randomly(x, 20, fill=0.1)
    with ambient(3, "noise"):
        again = rotate_randomly(x, 20, fill=0.1)
    with ambient(4, "noise"):
        other = rotate_randomly(x, 20, fill=0.1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with ambient(3, "noise"):
        angles = 20 * (2 * torch.rand(64, dtype=x.dtype) - 1)
    assert torch.equal(first, rotate(x, angles, fill=0.1))
    assert torch.equal(rotate_randomly(x, 0), rotate(x, torch.zeros(64)))


def test_angles_fill_the_interval_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "polyfed.train.augment.rotate", lambda x, degrees, **_: seen.append(degrees) or x
    )
    with ambient(0, "noise"):
        rotate_randomly(torch.zeros(4000, 1, 2, 2), 20)
    (angles,) = seen
    assert -20 <= float(angles.min()) < -19.9
    assert 19.9 < float(angles.max()) <= 20
    assert abs(float(angles.mean())) < 0.6


def test_vmap_over_nodes_is_the_loop() -> None:
    x, degrees = images(6).view(2, 3, 2, 7, 7), torch.linspace(-20, 20, 6).view(2, 3)
    together = torch.func.vmap(rotate)(x, degrees)
    for k in range(2):
        assert torch.allclose(together[k], rotate(x[k], degrees[k]))


# ---- as an objective -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Brightness(PerSample):
    """The first pixel of each image, as a loss: it says what the network was shown."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return x[:, 0, 0, 0] + 0 * model(x).sum(1)


@dataclass(frozen=True)
class OnlyMean:
    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return model(x).mean()


def node() -> Node:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * 49, 3))
    x = images(20).float()
    return Node("M0", Data(train=(x, torch.arange(20) % 3)), Model.split(net, all=...), seed=5)


def test_training_sees_rotated_images_and_evaluation_plain_ones() -> None:
    party = node()
    x, y = party.data["train"].x, party.data["train"].y
    objective = Rotated(Brightness(), limit=90, fill=9.0)
    with ambient(0, "noise"):
        shown = objective.losses(party.model, x, y)
    with ambient(0, "noise"):
        mean = objective(party.model, x, y)
    with ambient(0, "noise"):
        expected = rotate_randomly(x, 90, fill=9.0)[:, 0, 0, 0]
    assert torch.equal(shown.detach(), expected)
    assert torch.allclose(mean.detach(), expected.mean())
    with evaluating(party.model.net):
        assert torch.equal(objective.losses(party.model, x, y), x[:, 0, 0, 0])
    plain = mean_loss(party.model, party.data["train"], cross_entropy)
    assert mean_loss(party.model, party.data["train"], Rotated(cross_entropy)) == plain


def test_the_loop_draws_the_same_angles_again() -> None:
    states = []
    for limit in (20, 20, 0.0):
        with ambient(1, "init"):
            party = node()
        objective = Rotated(cross_entropy, limit=limit)
        fit(party, Phase(label="local", objective=objective, epochs=2, batch=8), "tick", 1)
        states.append(party.model.state())
    first, again, unturned = (torch.cat([t.flatten() for t in s.values()]) for s in states)
    assert torch.equal(first, again)
    assert not torch.allclose(first, unturned)


def test_equal_settings_are_equal_objectives() -> None:
    assert Rotated(Brightness(), 20) == Rotated(Brightness(), 20)
    assert Rotated(Brightness(), 20) != Rotated(Brightness(), 10)


def test_losses_are_there_only_where_the_objective_has_them() -> None:
    assert hasattr(Rotated(Brightness()), "losses")
    assert not hasattr(Rotated(OnlyMean()), "losses")


@pytest.mark.parametrize("limit", [-1, 181, math.nan])
def test_the_limit_is_checked(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"Rotated\.limit must be between 0 and 180"):
        Rotated(cross_entropy, limit)

"""Views of batches: against slow transformations of one image at a time, and their statistics."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.errors import ConfigError, DataError
from polyfed.random import ambient, stream
from polyfed.train import augment_views
from polyfed.train.augment_views import ImageViews, VectorViews, blur, chroma, crop, recolour

F64 = torch.float64
LUMA = torch.tensor([0.299, 0.587, 0.114], dtype=F64)
STILL: dict[str, Any] = {"area": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "grey": 0.0}
ONLY_COLOUR: dict[str, Any] = {
    **STILL,
    "jitter": 1.0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
}


def images(m: int = 6, channels: int = 3, side: int = 8, seed: int = 0, **kind: Any) -> Tensor:
    """In the middle half of [0, 1], so that nothing is cut at the ends unless it must be."""
    g = stream(seed, "images", m, channels, side)
    return 0.25 + 0.5 * torch.rand(m, channels, side, side, generator=g, dtype=F64).to(**kind)


def seen(views: Callable[[Tensor], Tensor], x: Tensor, *path: str | int) -> Tensor:
    with ambient(0, "views", *path):
        return views(x)


def colour_views(**settings: Any) -> ImageViews:
    return ImageViews(**(ONLY_COLOUR | {"low": 0.0, "high": 1.0} | settings))


# --- crops ---------------------------------------------------------------------------------------


def literal_crop(image: Tensor, extent: Tensor, centre: Tensor) -> Tensor:
    """Pixel by pixel: where it comes from, and the mean of the four pixels around that place."""
    _, height, width = image.shape
    out = torch.empty_like(image)
    for row in range(height):
        for column in range(width):
            u = (2 * column + 1) / width - 1
            v = (2 * row + 1) / height - 1
            x = ((float(extent[0]) * u + float(centre[0]) + 1) * width - 1) / 2
            y = ((float(extent[1]) * v + float(centre[1]) + 1) * height - 1) / 2
            x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
            left, top = int(x), int(y)
            right, below = min(left + 1, width - 1), min(top + 1, height - 1)
            a, b = x - left, y - top
            above = (1 - a) * image[:, top, left] + a * image[:, top, right]
            under = (1 - a) * image[:, below, left] + a * image[:, below, right]
            out[:, row, column] = (1 - b) * above + b * under
    return out


def test_crops_are_bilinear() -> None:
    x = images(4)
    extent = torch.tensor([[0.5, 0.7], [-0.9, 0.4], [1.0, 1.0], [-0.3, 0.3]], dtype=F64)
    centre = torch.tensor([[0.5, -0.3], [0.1, 0.6], [0.0, 0.0], [-0.7, 0.7]], dtype=F64)
    expected = torch.stack([literal_crop(*each) for each in zip(x, extent, centre, strict=True)])
    torch.testing.assert_close(crop(x, extent, centre), expected, rtol=1e-10, atol=1e-12)


def test_the_whole_image_stays_and_a_negative_width_mirrors() -> None:
    x, centre = images(3), torch.zeros(3, 2, dtype=F64)
    whole = torch.ones(3, 2, dtype=F64)
    torch.testing.assert_close(crop(x, whole, centre), x)
    mirrored = crop(x, whole * torch.tensor([-1.0, 1.0]), centre)
    torch.testing.assert_close(mirrored, x.flip(3))


def test_boxes_lie_in_the_image_and_have_the_areas_that_were_asked_for() -> None:
    x = torch.zeros(20_000, 1, 1, 1, dtype=F64)
    with ambient(0, "boxes"):
        extent, centre = ImageViews(area=(0.3, 0.9), flip=0.25)._boxes(x)
    width, height = extent[:, 0].abs(), extent[:, 1]
    assert (centre.abs() + extent.abs()).max() <= 1 + 1e-12
    area = (width * height).sort().values
    uniform = torch.linspace(0.3, 0.9, len(area), dtype=F64)
    assert (area - uniform).abs().max() < 0.01  # Kolmogorov-Smirnov, 1.6 % of the range
    aspect = (width / height).log()
    assert aspect.abs().max() <= math.log(4 / 3) + 1e-12
    assert abs(float(aspect.mean())) < 0.005
    small = aspect[width * height < 0.7]  # there every aspect fits
    assert float(small.std()) == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), rel=0.02)
    assert float((extent[:, 0] < 0).double().mean()) == pytest.approx(0.25, abs=0.01)
    room = centre / (1 - extent.abs()).clamp_min(1e-9)
    assert float(room.std()) == pytest.approx(2 / math.sqrt(12), rel=0.02)
    assert abs(float(torch.corrcoef(room.T)[0, 1])) < 0.03  # across and down apart


def test_every_image_has_its_own_crop() -> None:
    x = images(1, side=16).expand(40, -1, -1, -1)
    views = seen(ImageViews(jitter=0.0, grey=0.0, low=0.0), x)
    assert len(torch.unique(views.flatten(1), dim=0)) == 40


# --- colours -------------------------------------------------------------------------------------


def literal_colours(image: Tensor, factors: dict[str, float]) -> Tensor:
    """One after the other, as a person would write them."""

    def grey(c: Tensor) -> Tensor:
        return (LUMA[:, None, None] * c).sum(0)

    c = image * factors["brightness"]
    c = factors["contrast"] * c + (1 - factors["contrast"]) * grey(c).mean()
    c = factors["saturation"] * c + (1 - factors["saturation"]) * grey(c)
    y = grey(c)
    i = 0.5959 * c[0] - 0.2746 * c[1] - 0.3213 * c[2]
    q = 0.2115 * c[0] - 0.5227 * c[1] + 0.3112 * c[2]
    angle = 2 * math.pi * factors["turn"]
    i, q = i * math.cos(angle) + q * math.sin(angle), q * math.cos(angle) - i * math.sin(angle)
    to_yiq = torch.stack([LUMA, *torch.tensor(augment_views._CHROMA, dtype=F64)])
    return torch.einsum("cy,yhw->chw", torch.linalg.inv(to_yiq), torch.stack([y, i, q]))


@pytest.mark.parametrize("quantile", [0.0, 0.35, 0.8])
def test_one_matrix_is_all_colour_changes_in_a_row(
    quantile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every draw at the same quantile of its range."""

    def at_quantile(x: Tensor, low: float, high: float, *shape: int) -> Tensor:
        return x.new_full((len(x), *shape), low + (high - low) * quantile)

    monkeypatch.setattr(augment_views, "_uniform", at_quantile)
    views = ImageViews(brightness=0.1, contrast=0.3, saturation=0.7, hue=0.2, jitter=1.0, grey=0.0)
    x, spread = images(4), 2 * quantile - 1
    factors = {
        "brightness": 1 + 0.1 * spread,
        "contrast": 1 + 0.3 * spread,
        "saturation": 1 + 0.7 * spread,
        "turn": 0.2 * spread,
    }
    expected = torch.stack([literal_colours(image, factors) for image in x])
    got = recolour(x, *views._colours(x))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def luma(x: Tensor) -> Tensor:
    return torch.einsum("c,mchw->mhw", LUMA, x)


def test_brightness_is_one_factor_an_image() -> None:
    x = images(200)
    factor = seen(colour_views(brightness=0.3), x) / x
    torch.testing.assert_close(factor, factor[:, :1, :1, :1].expand_as(factor))
    drawn = factor[:, 0, 0, 0]
    assert 0.7 <= drawn.min() < 0.75
    assert 1.25 < drawn.max() <= 1.3


def test_contrast_keeps_the_mean_grey() -> None:
    x = images(50)
    y = seen(colour_views(contrast=0.4), x)
    torch.testing.assert_close(luma(y).mean((1, 2)), luma(x).mean((1, 2)))
    ratio = y.flatten(1).std(1) / x.flatten(1).std(1)
    assert ratio.min() < 0.75
    assert ratio.max() > 1.2


@pytest.mark.parametrize("setting", [{"saturation": 0.5}, {"hue": 0.1}], ids=str)
def test_saturation_and_hue_keep_the_luma_of_every_pixel_and_greys(setting: dict) -> None:
    x = images(50)
    y = seen(colour_views(**setting), x)
    torch.testing.assert_close(luma(y), luma(x))
    assert (y - x).flatten(1).abs().amax(1).median() > 0.01
    grey = x[:, :1].expand(-1, 3, -1, -1).contiguous()
    torch.testing.assert_close(seen(colour_views(**setting), grey), grey)


@pytest.mark.parametrize(("turn", "name"), [(1 / 3, "green"), (-1 / 3, "blue")])
def test_hue_turns_as_hsv_does(turn: float, name: str) -> None:
    """A third of a turn takes red to about green, or blue: their hue in HSV within 25 degrees."""
    red = torch.tensor([0.6, 0.4, 0.4], dtype=F64)
    A = chroma(LUMA, torch.ones(1, dtype=F64), torch.tensor([turn], dtype=F64))
    hue = colorsys.rgb_to_hsv(*(A[0] @ red).tolist())[0] * 360
    assert abs(hue - {"green": 120, "blue": 240}[name]) < 25


def test_turns_add_up_and_a_full_one_is_none() -> None:
    one = torch.ones(1, dtype=F64)
    a, b = chroma(LUMA, one, 0.13 * one), chroma(LUMA, one, 0.4 * one)
    torch.testing.assert_close(a @ b, chroma(LUMA, one, 0.53 * one))
    torch.testing.assert_close(chroma(LUMA, one, one)[0], torch.eye(3, dtype=F64))


def test_greyscale_is_the_luma_in_every_channel() -> None:
    x = images(400)
    y = seen(colour_views(jitter=0.0, grey=0.3), x)
    greyed = (y.amax(1) - y.amin(1)).flatten(1).amax(1) < 1e-12
    assert float(greyed.double().mean()) == pytest.approx(0.3, abs=0.06)
    torch.testing.assert_close(y[greyed], luma(x)[greyed][:, None].expand(-1, 3, -1, -1))
    torch.testing.assert_close(y[~greyed], x[~greyed])


def test_jitter_happens_to_its_share() -> None:
    x = images(400)
    y = seen(colour_views(jitter=0.8, brightness=0.3, contrast=0.3, hue=0.1), x)
    moved = (y - x).flatten(1).abs().amax(1) > 1e-12
    assert float(moved.double().mean()) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_than_three_channels_have_brightness_and_contrast_only(channels: int) -> None:
    x = images(40, channels)
    untouched = colour_views(saturation=0.9, hue=0.4, grey=1.0)
    torch.testing.assert_close(seen(untouched, x), x)
    y = seen(colour_views(contrast=0.4), x)
    torch.testing.assert_close(y.mean((1, 2, 3)), x.mean((1, 2, 3)))


# --- blur ----------------------------------------------------------------------------------------


def test_blur_is_a_convolution() -> None:
    x, w = images(4), torch.tensor([0.0, 0.1, 0.25, 1 / 3], dtype=F64)
    for image, blurred, width in zip(x, blur(x, w), w.tolist(), strict=True):
        taps = torch.tensor([width, 1 - 2 * width, width], dtype=F64)
        kernel = torch.outer(taps, taps)[None, None]
        padded = functional.pad(image[:, None], (1, 1, 1, 1), mode="reflect")
        torch.testing.assert_close(blurred[:, None], functional.conv2d(padded, kernel))


def test_blur_widths_are_those_of_a_gaussian(monkeypatch: pytest.MonkeyPatch) -> None:
    """At sigma = 0.1 + 0.5 * 1.9 the three taps are in the ratio of the density at -1, 0, 1."""
    monkeypatch.setattr(
        augment_views, "_uniform", lambda x, low, high: x.new_full((len(x),), (low + high) / 2)
    )
    w = float(ImageViews(blur=1.0)._widths(torch.zeros(1, 1, 2, 2, dtype=F64))[0])
    assert w / (1 - 2 * w) == pytest.approx(math.exp(-1 / (2 * 1.05**2)), rel=1e-12)


def test_blur_happens_to_its_share() -> None:
    x = images(400)
    y = seen(ImageViews(**STILL, blur=0.5, low=0.0), x)
    sharp = (y - x).flatten(1).abs().amax(1) < 1e-9
    assert 0.4 < float(sharp.double().mean()) < 0.6  # a small sigma blurs nothing either
    torch.testing.assert_close(seen(ImageViews(**STILL, low=0.0), x), x)


# --- all of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(5, 3, 32, 32), (5, 1, 28, 28), (5, 1, 10, 10), (1, 3, 9, 7)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.float16, torch.bfloat16])
def test_shape_range_and_dtype_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (2 * torch.rand(shape, generator=stream(0, "x")) - 1).to(dtype)
    y = seen(ImageViews(brightness=0.9, contrast=0.9, blur=0.5), x)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert y.min() >= -1
    assert y.max() <= 1
    assert not torch.equal(y, x)


def test_the_range_is_a_setting() -> None:
    """The same draws on pixels of another range give the same views."""
    x = images(20)
    plain = seen(ImageViews(low=0.0, high=1.0, blur=0.5), x)
    moved = seen(ImageViews(low=-3.0, high=5.0, blur=0.5), 8 * x - 3)
    torch.testing.assert_close(moved, 8 * plain - 3)


@pytest.mark.parametrize("views", [ImageViews(blur=0.5), VectorViews()], ids=["images", "vectors"])
def test_views_are_named_by_their_stream(views: Callable[[Tensor], Tensor]) -> None:
    x = images(6)
    first, again, other = seen(views, x, 1), seen(views, x, 1), seen(views, x, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with ambient(0, "two"):
        assert not torch.equal(views(x), views(x))


@pytest.mark.parametrize("views", [ImageViews(blur=0.5), VectorViews()], ids=["images", "vectors"])
def test_samples_do_not_see_each_other(views: Callable[[Tensor], Tensor]) -> None:
    x = images(6)
    other = x.clone()
    other[3:] = images(3, seed=1)
    torch.testing.assert_close(seen(views, other)[:3], seen(views, x)[:3], rtol=0, atol=1e-14)


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("views", [ImageViews(blur=0.5), VectorViews()], ids=["images", "vectors"])
def test_the_number_of_kernels_does_not_grow_with_the_batch(
    views: Callable[[Tensor], Tensor],
) -> None:
    def calls(m: int) -> int:
        with _Count() as count:
            views(images(m))
        return count.calls

    calls(2)  # what is cached is made
    assert calls(2) == calls(50)


# --- vectors -------------------------------------------------------------------------------------


def test_still_vectors() -> None:
    x = images(6).flatten(1)
    assert torch.equal(seen(VectorViews(noise=0.0, mask=0.0, scale=0.0), x), x)


def test_scale_is_one_factor_a_sample() -> None:
    x = images(300).flatten(1)
    factor = seen(VectorViews(noise=0.0, mask=0.0, scale=0.2), x) / x
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    assert 0.8 <= factor.min() < 0.82
    assert 1.18 < factor.max() <= 1.2


def test_noise_has_its_deviation() -> None:
    x = torch.zeros(200, 100, dtype=F64)
    y = seen(VectorViews(noise=0.3, mask=0.0, scale=0.0), x)
    assert float(y.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float(y.mean())) < 0.01


def test_masked_features_are_zero_and_the_others_stay() -> None:
    x = images(100).flatten(1)
    y = seen(VectorViews(noise=0.0, mask=0.25, scale=0.0), x)
    gone = y == 0
    assert float(gone.double().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(y[~gone], x[~gone])
    assert len(torch.unique(gone, dim=0)) == 100  # each sample has its own
    assert not seen(VectorViews(noise=5.0, mask=1.0), x).any()


# --- wrong settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"area": (0.0, 1.0)}, r"ImageViews\.area must be two shares"),
        ({"area": (0.8, 0.2)}, r"ImageViews\.area must be two shares"),
        ({"area": (0.5, 1.5)}, r"ImageViews\.area must be two shares"),
        ({"flip": 1.5}, r"ImageViews\.flip must be between 0 and 1, got 1\.5"),
        ({"hue": 0.6}, r"ImageViews\.hue must be between 0 and 0\.5"),
        ({"low": 1.0}, r"ImageViews\.high must be > low=1, got 1"),
    ],
)
def test_wrong_image_settings(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageViews(**settings)


@pytest.mark.parametrize("settings", [{"noise": -0.1}, {"mask": 1.1}, {"scale": 2.0}], ids=str)
def test_wrong_vector_settings(settings: dict) -> None:
    with pytest.raises(ConfigError, match=f"VectorViews.{next(iter(settings))} must be"):
        VectorViews(**settings)


def test_vectors_are_no_images() -> None:
    with pytest.raises(DataError, match=r"got \[5, 64\]. For plain vectors there is VectorViews"):
        ImageViews()(torch.zeros(5, 64))

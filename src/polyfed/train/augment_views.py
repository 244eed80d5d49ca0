r"""Random views of whole batches, on their device: every sample has its own draw, no loop.

    crop      a box of area a ~ U(area) and log-uniform aspect r, resized to the image; flipped
    colour    c <- A c + b for every pixel's colour c, with A and b of the sample
    blur      x <- (k * x) along rows, then columns, k = (w, 1 - 2w, w), w = g / (1 + 2g),
              g = exp(-1 / (2 sigma^2))

Brightness f I, contrast f I with b = (1 - f) times the image's mean grey, saturation, hue and
greyscale are all affine in the colour, so one matrix does what five passes would:

    A = (G + s cos(t) (I - G) + s sin(t) S) f_brightness f_contrast

with G = 1 l^T the greyscale of luma l, s = saturation (0 is greyscale), t = angle of hue, and S a
quarter turn of the chroma plane of YIQ.
The family is that of Chen et al., ICML 2020 (SimCLR), appendix A.
Deviations from it: the order is the same for every sample; colours are cut to their range once, at
the end; hue turns in YIQ, not in HSV; the aspect is drawn among those that fit into the image,
where others draw again; the blur has three taps, enough for 32 pixels.

Draws come from torch's own generators: inside a phase they are the node's named stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.errors import ConfigError, DataError

_LUMA = (0.299, 0.587, 0.114)
_CHROMA = ((0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))  # I and Q
_ASPECT = 4 / 3
_SIGMA = (0.1, 2.0)


@dataclass(frozen=True, kw_only=True)
class ImageViews:
    """Views of images (samples, channels, height, width).

    Attributes:
        area: smallest and largest share of the image that a crop keeps.
        flip: probability of a mirror image; 0 for digits and letters.
        jitter: probability that colours change.
        brightness: factors of brightness are drawn from 1 - this to 1 + this.
        contrast: likewise.
        saturation: likewise; only of three channels.
        hue: largest share of a full turn, either way; only of three channels.
        grey: probability of greyscale; only of three channels.
        blur: probability of a Gaussian blur.
        low: the value of a black pixel.
        high: the value of a white pixel.
    """

    area: tuple[float, float] = (0.2, 1.0)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey: float = 0.2
    blur: float = 0.0
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "brightness", "contrast", "saturation", "grey", "blur"):
            check.between(self, name, 0, 1)
        check.between(self, "hue", 0, 0.5)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(
                f"ImageViews.area must be two shares of the image, 0 < least <= largest <= 1, "
                f"got {self.area}."
            )
        if not self.low < self.high:
            raise ConfigError(f"ImageViews.high must be > low={self.low:g}, got {self.high:g}.")

    def __call__(self, x: Tensor) -> Tensor:
        """One view of every image."""
        if x.dim() != 4:
            raise DataError(
                f"ImageViews needs images (samples, channels, height, width), got "
                f"{list(x.shape)}. For plain vectors there is VectorViews."
            )
        y: Tensor = x.float() if x.element_size() < 4 else x
        y = crop(y, *self._boxes(y)) - self.low
        if self.jitter or self.grey:
            y = recolour(y, *self._colours(y))
        if self.blur:
            y = blur(y, self._widths(y))
        return (y.clamp(0, self.high - self.low) + self.low).to(x)

    def _boxes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Signed half extents and centres of the crops, in the image's coordinates [-1, 1]."""
        area = _uniform(x, *self.area)
        low = area.log().clamp_min(-math.log(_ASPECT))
        aspect = (low + (-2 * low) * _uniform(x, 0, 1)).exp()
        extent = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=1)
        centre = (1 - extent) * _uniform(x, -1, 1, 2)
        mirror = 1 - 2 * _happens(x, self.flip)
        return extent * torch.stack([mirror, torch.ones_like(mirror)], dim=1), centre

    def _colours(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A and b of every image."""
        channels = x.shape[1]
        changed = _happens(x, self.jitter)
        brightness, contrast, saturation, turn = (
            changed * _uniform(x, -most, most)
            for most in (self.brightness, self.contrast, self.saturation, self.hue)
        )
        brightness, contrast = 1 + brightness, 1 + contrast
        luma, A = x.new_full((channels,), 1 / channels), torch.eye(channels).to(x)
        if channels == 3:
            luma = x.new_tensor(_LUMA)
            A = chroma(luma, (1 + saturation) * (1 - _happens(x, self.grey)), turn)
        mean = x.mean(dim=(2, 3)) @ luma
        return (brightness * contrast)[:, None, None] * A, (1 - contrast) * brightness * mean

    def _widths(self, x: Tensor) -> Tensor:
        """The w of every image; 0 where it stays sharp."""
        g = (-0.5 / _uniform(x, *_SIGMA).square()).exp()
        return _happens(x, self.blur) * g / (1 + 2 * g)


@dataclass(frozen=True, kw_only=True)
class VectorViews:
    """Views of plain vectors, best standardised: mean 0 and deviation 1 in every feature.

    Attributes:
        noise: standard deviation of what is added to every feature.
        mask: probability that a feature is set to 0.
        scale: a sample is multiplied by a number from 1 - this to 1 + this.
    """

    noise: float = 0.1
    mask: float = 0.2
    scale: float = 0.1

    def __post_init__(self) -> None:
        check.at_least(self, "noise", 0)
        check.between(self, "mask", 0, 1)
        check.between(self, "scale", 0, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """One view of every vector."""
        each = (len(x), *[1] * (x.dim() - 1))
        y = x * (1 + _uniform(x, -self.scale, self.scale)).view(each)
        y = y + self.noise * torch.randn_like(x)
        return y * (torch.rand_like(x) >= self.mask)


def crop(
    x: Float[Tensor, "m c h w"], extent: Float[Tensor, "m 2"], centre: Float[Tensor, "m 2"]
) -> Float[Tensor, "m c h w"]:
    """Resize a box of every image to the whole image, bilinearly.

    Args:
        x: Images.
        extent: Half width and height of the boxes where the image reaches from -1 to 1; a negative
            one mirrors.
        centre: Where the boxes are, in the same coordinates.
    """
    theta = torch.cat([torch.diag_embed(extent), centre[:, :, None]], dim=2)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


def recolour(
    x: Float[Tensor, "m c h w"], A: Float[Tensor, "m c c"], b: Float[Tensor, " m"]
) -> Float[Tensor, "m c h w"]:
    """A c + b for every pixel's colour c; b is a grey."""
    y: Tensor = torch.baddbmm(b[:, None, None], A, x.flatten(2))
    return y.view_as(x)


def chroma(
    luma: Float[Tensor, " 3"], saturation: Float[Tensor, " m"], turn: Float[Tensor, " m"]
) -> Float[Tensor, "m 3 3"]:
    """The matrices that scale chroma and turn it by a share of a full turn; luma and greys stay."""
    G = luma.expand(3, 3)
    sine, cosine = (
        (saturation * f(2 * math.pi * turn))[:, None, None] for f in (torch.sin, torch.cos)
    )
    turned: Tensor = G + cosine * (torch.eye(3).to(G) - G) + sine * G.new_tensor(_quarter_turn())
    return turned


@cache
def _quarter_turn() -> list[list[float]]:
    """S: from (I, Q) to (Q, -I), in RGB; that is the way HSV counts, from red to green."""
    to_yiq = torch.tensor([_LUMA, *_CHROMA], dtype=torch.float64)
    turned = torch.stack([0 * to_yiq[0], to_yiq[2], -to_yiq[1]])
    rows: list[list[float]] = torch.linalg.solve(to_yiq, turned).tolist()
    return rows


def blur(x: Float[Tensor, "m c h w"], width: Float[Tensor, " m"]) -> Float[Tensor, "m c h w"]:
    """Three-tap blur along both axes; beyond its edge the image goes on as its mirror image."""
    w = width[:, None, None, None]
    padded = functional.pad(x, (1, 1, 1, 1), mode="reflect")
    rows = padded[..., 1:-1] + w * (padded[..., 2:] - 2 * padded[..., 1:-1] + padded[..., :-2])
    return rows[..., 1:-1, :] + w * (rows[..., 2:, :] - 2 * rows[..., 1:-1, :] + rows[..., :-2, :])


def _uniform(x: Tensor, low: float, high: float, *shape: int) -> Tensor:
    """A draw for every sample."""
    return low + (high - low) * torch.rand(len(x), *shape, dtype=x.dtype, device=x.device)


def _happens(x: Tensor, probability: float) -> Tensor:
    """1 for the samples to which it happens, else 0."""
    return (_uniform(x, 0, 1) < probability).to(x.dtype)

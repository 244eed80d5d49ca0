r"""CoAtNet for small images: two stages of convolutions, then two of relative attention.

    S0  conv 3x3, BatchNorm, GELU, conv 3x3                       w channels
    S1  MBConv twice                                              w
    S2  MBConv twice, the first halves the image                 2w
    S3  transformer block twice, the first halves the image      4w
    S4  transformer block twice, the first halves the image      8w
        LayerNorm, mean over the image                        = trunk
        dropout, Linear(8w, classes)                          = head

    residual:   y = shortcut(x) + gamma f(x),   gamma a number that begins at 0                 (1)
    MBConv:     f = conv 1x1 . SE . GELU BN depthwise 3x3 . GELU BN conv 1x1 to 4 depth . GELU BN
    attention:  y_i = sum_j softmax_j(q_i k_j / sqrt(d) + b[i - j]) v_j                         (2)

Dai et al., NeurIPS 2021, arXiv:2106.04803, Eq. (3) and Table 9; sizes and the factor gamma of
ReZero (Bachlechner et al., arXiv:2003.04887) as Loop Improvement's experiments have them.
Symbols: w = width, d = channels of an attention head, i and j = places, b = a table of offsets for
each attention head, SE = squeeze and excitation (Hu et al., CVPR 2018).
Limits: with b = 0, (2) is ordinary attention, which does not know where its inputs are.
Deviations from Loop Improvement: b begins at 0, not at random.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.models.small import check_side

_BLOCKS = 2  # in each stage
_EXPANSION = 4  # of MBConv and of the feed-forward layers; also the squeeze of SE


def coatnet(
    image: tuple[int, int, int],
    classes: int,
    *,
    width: int = 64,
    head_width: int = 32,
    dropout: float = 0.3,
) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input; its sides are even.
        classes: number of outputs.
        width: channels of the first two stages.
        head_width: channels of an attention head; it divides 4 * width.
        dropout: behind attention and feed-forward layers, and before the output.
    """
    check_side("CoAtNet", image, 8)
    depth, height, side = image
    if height % 2 or side % 2:
        raise ConfigError(f"CoAtNet takes images with even sides, got {height}x{side}.")
    if 4 * width % head_width:
        raise ConfigError(
            f"CoAtNet of width {width} has {4 * width} channels for attention, which heads of "
            f"{head_width} do not divide. Fix: another width or head_width."
        )
    layers: list[nn.Module] = [
        nn.Conv2d(depth, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
    ]
    depth = width
    for following, stride in ((width, 1), (2 * width, 2)):
        for i in range(_BLOCKS):
            layers.append(_mbconv(depth, following, stride if i == 0 else 1))
            depth = following
    height, side = height // 2, side // 2
    for following in (4 * width, 8 * width):
        height, side = height // 2, side // 2
        for i in range(_BLOCKS):
            stride, place = 2 if i == 0 else 1, (height, side)
            attention = RelativeAttention(depth, following, place, head_width)
            layers += _transformer(depth, following, stride, attention, dropout)
            depth = following
    layers += [_ChannelNorm(depth), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(depth, classes))
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=head))


def _mbconv(depth: int, following: int, stride: int) -> nn.Module:
    inner = _EXPANSION * depth
    change = nn.Sequential(
        nn.BatchNorm2d(depth),
        nn.GELU(),
        nn.Conv2d(depth, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.GELU(),
        nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
        nn.BatchNorm2d(inner),
        nn.GELU(),
        _SqueezeExcite(inner),
        nn.Conv2d(inner, following, 1),
    )
    return _Residual(change, _shortcut(depth, following, stride))


def _transformer(
    depth: int, following: int, stride: int, attention: nn.Module, dropout: float
) -> list[nn.Module]:
    pool = nn.MaxPool2d(stride) if stride > 1 else nn.Identity()
    attend = nn.Sequential(_ChannelNorm(depth), pool, attention, nn.Dropout(dropout))
    forward = nn.Sequential(
        _ChannelNorm(following),
        nn.Conv2d(following, _EXPANSION * following, 1),
        nn.GELU(),
        nn.Conv2d(_EXPANSION * following, following, 1),
        nn.Dropout(dropout),
    )
    return [
        _Residual(attend, _shortcut(depth, following, stride)),
        _Residual(forward, nn.Identity()),
    ]


def _shortcut(depth: int, following: int, stride: int) -> nn.Module:
    if stride == 1 and depth == following:
        return nn.Identity()
    return nn.Sequential(nn.MaxPool2d(stride), nn.Conv2d(depth, following, 1))


class _Residual(nn.Module):
    """Eq. (1)."""

    def __init__(self, change: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.change, self.shortcut = change, shortcut
        self.gamma = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.shortcut(x) + self.gamma * self.change(x)
        return out


class _ChannelNorm(nn.Module):
    """LayerNorm over the channels of each place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The image with its channels normalised."""
        out: Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return out


class _SqueezeExcite(nn.Module):
    """Each channel times a share between 0 and 1, computed from the means of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // _EXPANSION, 1)
        self.excite = nn.Conv2d(channels // _EXPANSION, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The image with its channels weighted."""
        means = x.mean((2, 3), keepdim=True)
        shares: Tensor = self.excite(functional.gelu(self.squeeze(means))).sigmoid()
        return x * shares


class RelativeAttention(nn.Module):
    """Eq. (2) over all places of an image of known size, for several heads at once."""

    def __init__(self, depth: int, following: int, place: tuple[int, int], head_width: int) -> None:
        """Make the layer.

        Args:
            depth: channels of the input.
            following: channels of the output.
            place: height and width of the image.
            head_width: channels of an attention head; it divides `following`.
        """
        super().__init__()
        height, width = place
        self.heads = following // head_width
        self.query_key_value = nn.Conv2d(depth, 3 * following, 1)
        self.together = nn.Conv2d(following, following, 1)
        self.offsets = nn.Parameter(torch.zeros(self.heads, 2 * height - 1, 2 * width - 1))
        self.register_buffer("index", _offsets(height, width), persistent=False)
        self.index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The image after attention."""
        parts = self.query_key_value(x).flatten(2).unflatten(1, (3, self.heads, -1))
        query, key, value = parts.transpose(-1, -2).unbind(1)  # (n, heads, places, head_width)
        bias = self.offsets.flatten(1)[:, self.index].to(query.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        out = out.transpose(-1, -2).flatten(1, 2).unflatten(-1, x.shape[2:])
        image: Tensor = self.together(out)
        return image


def _offsets(height: int, width: int) -> Tensor:
    """For places i and j, row by row, where i - j stands in the flattened table of offsets."""
    row = torch.arange(height).repeat_interleave(width)
    column = torch.arange(width).repeat(height)
    down = row[:, None] - row + height - 1
    right = column[:, None] - column + width - 1
    return down * (2 * width - 1) + right

"""Three small encoders that have nothing in common but what they are for: images of a few pixels.

    conv       twice [conv 3x3, BatchNorm, ReLU, max-pool 2]; flatten; Linear(., 64)
    mlp        flatten; Linear(., 128), BatchNorm, ReLU; Linear(128, 96)
    residual   conv 3x3 stride 2, BatchNorm, ReLU; a residual block; max-pool 2; flatten;
               Linear(., 48)

each with BatchNorm and ReLU at its end = trunk, and a linear head. BatchNorm in all of them, since
BYOL needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional

from polyfed.models.small import check_side


def conv_encoder(image: tuple[int, int, int], classes: int) -> nn.Module:
    """Convolutions and poolings, for images of shape (channels, height, width)."""
    check_side("encoder 'conv'", image, 4)
    depth, height, width = image
    layers = [
        *_convolution(depth, 16),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_linear(32 * (height // 4) * (width // 4), 64),
    ]
    return _with_head(layers, 64, classes)


def mlp_encoder(image: tuple[int, int, int], classes: int) -> nn.Module:
    """A perceptron, for images of shape (channels, height, width)."""
    depth, height, width = image
    layers = [nn.Flatten(), *_linear(depth * height * width, 128), *_linear(128, 96)]
    return _with_head(layers, 96, classes)


def residual_encoder(image: tuple[int, int, int], classes: int) -> nn.Module:
    """A strided convolution and a residual block, for images of shape (channels, height, width)."""
    check_side("encoder 'residual'", image, 3)
    depth, height, width = image
    places = ((height + 1) // 4) * ((width + 1) // 4)
    layers = [
        *_convolution(depth, 12, stride=2),
        _Residual(12),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_linear(12 * places, 48),
    ]
    return _with_head(layers, 48, classes)


SMALL_ENCODERS: Mapping[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "conv": conv_encoder,
    "mlp": mlp_encoder,
    "residual": residual_encoder,
}


class _Residual(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolution(depth, depth))
        self.second = nn.Sequential(*_convolution(depth, depth)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """What goes in, and what the block makes of it."""
        return functional.relu(x + self.second(self.first(x)))


def _convolution(depth: int, following: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(depth, following, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(following), nn.ReLU()]


def _linear(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]


def _with_head(layers: list[nn.Module], width: int, classes: int) -> nn.Module:
    head = nn.Linear(width, classes)
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=head))

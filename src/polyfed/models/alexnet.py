"""AlexNet for small images: its five convolutions, and one linear layer in place of three.

conv 11x11 stride 4, w channels, pool; conv 5x5, 3w, pool; conv 3x3, 6w; 4w; 4w, pool; flatten
each convolution with a ReLU, each pooling a maximum of 2x2     = trunk
Linear(., classes)                                              = head

Krizhevsky, NIPS 2012 and arXiv:1404.5997: kernels and channels are those of the second.
Deviations from the paper: pooling of 2x2 (3x3 there), and no hidden linear layers: of 32 pixels the
last pooling leaves one place with 4w features.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.models.small import check_side


def alexnet(image: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input.
        classes: number of outputs.
        width: channels of the first convolution.
    """
    check_side("AlexNet", image, 29)
    depth, height, side = image
    trunk = nn.Sequential(
        nn.Conv2d(depth, width, 11, stride=4, padding=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 3 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    places = _left(height) * _left(side)
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(4 * width * places, classes)))


def _left(pixels: int) -> int:
    """Places that the stride of 4 and three poolings leave of a side."""
    return ((pixels + 3) // 4) // 8

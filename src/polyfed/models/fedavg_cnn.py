"""The CNN of FedAvg, FedALA and Loop Improvement's Table 1: four layers with parameters.

conv 5x5, w channels, ReLU, max-pool 2; conv 5x5, 2w, ReLU, max-pool 2; flatten
Linear(., 16w), ReLU                                         = trunk
Linear(16w, classes)                                         = head

McMahan et al., AISTATS 2017, arXiv:1602.05629, section 3; Zhang et al., AAAI 2023 (FedALA),
arXiv:2212.01197, whose convolutions have no padding: 582,026 parameters on MNIST, as here. FedAvg's
pad to the size of their input, which makes 1,663,370.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.models.small import check_side


def fedavg_cnn(image: tuple[int, int, int], classes: int, *, width: int = 32) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input.
        classes: number of outputs.
        width: channels of the first convolution.
    """
    check_side("the CNN of FedAvg", image, 16)
    depth, height, side = image
    hidden = 16 * width
    trunk = nn.Sequential(
        nn.Conv2d(depth, width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * _left(height) * _left(side), hidden),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(hidden, classes)))


def _left(pixels: int) -> int:
    """Places that the two convolutions and poolings leave of a side."""
    return ((pixels - 4) // 2 - 4) // 2

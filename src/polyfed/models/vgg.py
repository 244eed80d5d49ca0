"""VGG-9 for small images: six convolutions and three linear layers, no BatchNorm.

conv 3x3 with w, 2w | 4w, 4w | 8w, 8w channels, each with a ReLU; at each bar and at the end
a max-pooling 2x2 that halves the image
Linear(., 16w), ReLU, Linear(16w, 16w), ReLU                 = trunk
Linear(16w, classes)                                         = head

The layers of Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556, in the number that federated
learning uses for CIFAR-10: Wang et al., ICLR 2020 (FedMA), arXiv:2002.06440, 3,491,530 parameters.
Deviations from FedMA's: no dropout.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.models.small import check_side

_CHANNELS = ((1, 2), (4, 4), (8, 8))  # times the width


def vgg9(image: tuple[int, int, int], classes: int, *, width: int = 32) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input.
        classes: number of outputs.
        width: channels of the first convolution.
    """
    check_side("VGG-9", image, 8)
    depth, height, side = image
    layers: list[nn.Module] = []
    for stage in _CHANNELS:
        for times in stage:
            layers += [nn.Conv2d(depth, times * width, 3, padding=1), nn.ReLU()]
            depth = times * width
        layers.append(nn.MaxPool2d(2))
        height, side = height // 2, side // 2
    hidden = 16 * width
    layers += [nn.Flatten(), nn.Linear(depth * height * side, hidden), nn.ReLU()]
    layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=nn.Linear(hidden, classes)))

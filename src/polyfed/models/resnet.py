"""ResNet-18 and ResNet-34 for small images, and ResNet-18 as it was published, for large ones.

conv 3x3, BatchNorm, ReLU                                    stem: no stride, no pooling
or conv 7x7 stride 2, BatchNorm, ReLU, max-pool 3x3 stride 2       as published, for 224 pixels
4 stages of residual blocks, channels w, 2w, 4w, 8w; every stage but the first halves the image
mean over the image                                          = trunk
Linear(8w, classes)                                          = head

    block(x) = ReLU(BN(conv(ReLU(BN(conv(x))))) + shortcut(x))                                  (1)

He et al., CVPR 2016, arXiv:1512.03385, section 4.1 and Figure 5, left. The shortcut is the identity
or, where the shape changes, a 1x1 convolution with BatchNorm (option B).
Deviation from the paper: the first stem, which is what 32 pixels are usually given. With the other,
32 pixels are 8 before the first stage and one pixel in the last, where all of a filter but its
middle sees nothing but padding.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from polyfed.train.norms import rectified


def resnet18(image: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """The network of 18 layers for images of shape (channels, height, width).

    Args:
        image: shape of one input.
        classes: number of outputs.
        width: channels of the first stage.

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    11173962
    """
    return _resnet(image[0], classes, width, (2, 2, 2, 2))


def resnet34(image: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """The network of 34 layers; arguments as for `resnet18`."""
    return _resnet(image[0], classes, width, (3, 4, 6, 3))


def resnet18_224(image: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """The network of 18 layers with the stem it was published with; arguments as for `resnet18`.

    That stem is for images of 224 pixels, yet code that takes the network from a library trains it
    on 32 pixels, too: FedALA's does, in which Loop Improvement's Table 1 was made.

    >>> sum(p.numel() for p in resnet18_224((3, 32, 32), 10).parameters())
    11181642
    """
    stem = _convolution(image[0], width, kernel=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    net = _resnet(image[0], classes, width, (2, 2, 2, 2), stem)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # as the paper, by what leaves a layer, as libraries
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _resnet(
    depth: int,
    classes: int,
    width: int,
    blocks: tuple[int, ...],
    stem: tuple[nn.Module, ...] = (),
) -> nn.Module:
    layers = list[nn.Module](stem or (_convolution(depth, width), nn.ReLU()))
    depth = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            following, stride = width * 2**stage, 2 if stage > 0 and i == 0 else 1
            layers.append(_Block(depth, following, stride))
            depth = following
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=nn.Linear(depth, classes)))


class _Block(nn.Module):
    """Eq. (1)."""

    def __init__(self, depth: int, following: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(depth, following, stride=stride)
        self.second = _convolution(following, following)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or depth != following:
            self.shortcut = _convolution(depth, following, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = rectified(self.first[1], self.first[0](x))
        return rectified(self.second[1], self.second[0](inner), self.shortcut(x))


def _convolution(depth: int, following: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size, but for the stride, and BatchNorm."""
    convolution = nn.Conv2d(depth, following, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(following))

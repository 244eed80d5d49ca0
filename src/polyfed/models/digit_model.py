"""DigitModel: the network with which FedUL reads digits.

conv 5x5, w channels, BatchNorm, ReLU, max-pool 2; the same again; conv 5x5, 2w, BatchNorm, ReLU
flatten, Linear(., 32w), BatchNorm, ReLU, Linear(32w, 8w), BatchNorm, ReLU        = trunk
Linear(8w, classes)                                                               = head

Lu et al., ICLR 2022 (FedUL), arXiv:2204.03304; 14,219,210 parameters for three channels of 28x28
and ten classes. Convolutions pad to the size of their input. BatchNorm in training takes away
whatever a bias before it adds, so its gradient is 0: that is said here, and not computed as a sum
over all pixels.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.models.small import check_side


def digit_model(image: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input; the paper repeats a grey image in three channels.
        classes: number of outputs.
        width: channels of the first convolution.

    >>> sum(p.numel() for p in digit_model((3, 28, 28), 10).parameters())
    14219210
    """
    check_side("DigitModel", image, 4)
    depth, height, side = image
    places = (height // 4) * (side // 4)
    trunk = _Trunk(
        *_convolution(depth, width),
        nn.MaxPool2d(2),
        *_convolution(width, width),
        nn.MaxPool2d(2),
        *_convolution(width, 2 * width),
        nn.Flatten(),
        *_linear(2 * width * places, 32 * width),
        *_linear(32 * width, 8 * width),
    )
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(8 * width, classes)))


class _Trunk(nn.Sequential):
    """Biases before a BatchNorm that takes the batch's mean away have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """One module after the other."""
        modules = list(self)
        for module, following in zip(modules, [*modules[1:], None], strict=True):
            if isinstance(following, _BatchNorm) and following.training:
                x = functional_call(module, {"bias": module.get_parameter("bias").detach()}, (x,))
            else:
                x = module(x)
        return x


def _convolution(depth: int, following: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(depth, following, 5, padding=2), nn.BatchNorm2d(following), nn.ReLU()


def _linear(width: int, following: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, following), nn.BatchNorm1d(following), nn.ReLU()

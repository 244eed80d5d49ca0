"""FedLinked's convolutional network (Kadar 2021, section 4.3).

b blocks of [conv 3x3, ReLU, conv 3x3, ReLU, max-pool 2, dropout p], channels c * 2^i
flatten, Linear(., r)                                        = trunk
dropout p_l, Linear(r, classes)                              = head

Images may be mirrored at random before all that, of which the paper says nothing.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed.errors import ConfigError


class Mirrored(nn.Module):
    """Images as they are or mirrored, left to right, by chance; in eval mode as they are."""

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """Half of them mirrored, more or less."""
        if not self.training:
            return x
        chance = torch.rand(len(x), 1, 1, 1, device=x.device)
        return torch.where(chance < 0.5, x.flip(-1), x)


def conv_net(
    image: tuple[int, int, int],
    classes: int,
    *,
    blocks: int = 3,
    channels: int = 64,
    representation: int = 256,
    dropout: float = 0.0,
    last_dropout: float = 0.0,
    relu: bool = False,
    mirror: bool = False,
) -> nn.Module:
    """The network for images of shape (channels, height, width).

    Args:
        image: shape of one input.
        classes: number of outputs.
        blocks: number of convolution blocks (the paper's b).
        channels: channels of the first block (c); each block has twice those of the one before.
        representation: width of the trunk's output (r).
        dropout: after every block (p).
        last_dropout: before the output layer (p_l).
        relu: whether the representation passes a ReLU; the paper names none.
        mirror: whether images are mirrored at random while it trains.
    """
    depth, height, width = image
    if min(height, width) < 2**blocks:
        raise ConfigError(
            f"{blocks} blocks halve the image {blocks} times; {height}x{width} is too small."
        )
    layers: list[nn.Module] = [Mirrored()] if mirror else []
    for i in range(blocks):
        following = channels * 2**i
        layers += [
            nn.Conv2d(depth, following, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(following, following, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
        ]
        depth, height, width = following, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(depth * height * width, representation)]
    if relu:
        layers.append(nn.ReLU())
    head = nn.Sequential(nn.Dropout(last_dropout), nn.Linear(representation, classes))
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=head))

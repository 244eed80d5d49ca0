"""Multi-layer perceptron: a trunk of hidden layers and a linear head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], outputs: int, *, relu_trunk: bool = True) -> nn.Module:
    """Fully connected network `inputs-hidden...-outputs`, for inputs of any shape.

    Args:
        inputs: number of input features, after flattening.
        hidden: widths of the hidden layers; the last is the representation.
        outputs: number of classes.
        relu_trunk: whether the representation passes a ReLU before it leaves the trunk.

    >>> sum(p.numel() for p in mlp(784, [512], 10).parameters())
    407050
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in zip([inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(width, following), nn.ReLU()]
    if not relu_trunk:
        layers.pop()
    trunk, head = nn.Sequential(*layers), nn.Linear(hidden[-1], outputs)
    return nn.Sequential(OrderedDict(trunk=trunk, head=head))

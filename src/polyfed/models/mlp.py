"""Multi-layer perceptrons: a trunk of hidden layers, and a head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

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


def sigmoid_mlp(*widths: int, sigmoid_head: bool = True) -> nn.Module:
    """Fully connected network with sigmoids, for inputs of any shape; the last layer is the head.

    Weights are Xavier uniform, biases 0. Partial averaging paper, section IV.1, which leaves the
    initialisation open.

    Args:
        widths: of all layers, with the input layer.
        sigmoid_head: whether outputs pass a sigmoid, too.

    >>> sum(p.numel() for p in sigmoid_mlp(784, 300, 100, 10).parameters())
    266610
    """
    layers = [nn.Linear(before, width) for before, width in pairwise(widths)]
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    hidden = [module for layer in layers[:-1] for module in (layer, nn.Sigmoid())]
    head = [layers[-1], *([nn.Sigmoid()] if sigmoid_head else [])]
    parts = {"trunk": nn.Sequential(nn.Flatten(), *hidden), "head": nn.Sequential(*head)}
    return nn.Sequential(OrderedDict(parts))

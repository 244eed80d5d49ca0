"""Multi-layer perceptrons: a trunk of hidden layers, and a head."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import nn

from polyfed.errors import ConfigError


def mlp(inputs: int, hidden: Sequence[int], outputs: int, *, relu_trunk: bool = True) -> nn.Module:
    """Fully connected network `inputs-hidden...-outputs`, for inputs of any shape.

    Args:
        inputs: number of input features, after flattening.
        hidden: widths of the hidden layers; the last is the representation. Without any the model
            is linear, and its trunk has no parameters.
        outputs: number of classes.
        relu_trunk: whether the representation passes a ReLU before it leaves the trunk.

    >>> sum(p.numel() for p in mlp(784, [512], 10).parameters())
    407050
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in zip([inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(width, following), nn.ReLU()]
    if hidden and not relu_trunk:
        layers.pop()
    trunk, head = nn.Sequential(*layers), nn.Linear([inputs, *hidden][-1], outputs)
    return nn.Sequential(OrderedDict(trunk=trunk, head=head))


class Start(NamedTuple):
    """How the weights of a layer are drawn.

    Attributes:
        kind: xavier, with biases 0, or uniform, biases too.
        scale: the gain of Xavier's, which is 4 where a sigmoid's slope of 1/4 at most is made up
            for; or the bound.
    """

    kind: Literal["xavier", "uniform"]
    scale: float

    @classmethod
    def parse(cls, text: str) -> Start:
        """From what a person types.

        >>> Start.parse("xavier:4"), Start.parse("uniform:0.5")
        (Start(kind='xavier', scale=4.0), Start(kind='uniform', scale=0.5))
        """
        kind, _, number = text.partition(":")
        try:
            scale = float(number)
        except ValueError:
            scale = 0.0
        if kind not in ("xavier", "uniform") or not 0 < scale < math.inf:
            raise ConfigError(f"weights '{text}': write xavier:1 (or another gain) or uniform:1.")
        return cls("xavier" if kind == "xavier" else "uniform", scale)

    def fill(self, layer: nn.Linear) -> None:
        """Draw a layer's weights and biases."""
        if self.kind == "xavier":
            nn.init.xavier_uniform_(layer.weight, self.scale)
            nn.init.zeros_(layer.bias)
        else:
            nn.init.uniform_(layer.weight, -self.scale, self.scale)
            nn.init.uniform_(layer.bias, -self.scale, self.scale)


XAVIER = Start("xavier", 1.0)


def sigmoid_mlp(*widths: int, sigmoid_head: bool = True, weights: Start = XAVIER) -> nn.Module:
    """Fully connected network with sigmoids, for inputs of any shape; the last layer is the head.

    Partial averaging paper, section IV.1, which leaves the initialisation open.

    Args:
        widths: of all layers, with the input layer.
        sigmoid_head: whether outputs pass a sigmoid, too.
        weights: how they start.

    >>> sum(p.numel() for p in sigmoid_mlp(784, 300, 100, 10).parameters())
    266610
    """
    layers = [nn.Linear(before, width) for before, width in pairwise(widths)]
    for layer in layers:
        weights.fill(layer)
    hidden = [module for layer in layers[:-1] for module in (layer, nn.Sigmoid())]
    head = [layers[-1], *([nn.Sigmoid()] if sigmoid_head else [])]
    parts = {"trunk": nn.Sequential(nn.Flatten(), *hidden), "head": nn.Sequential(*head)}
    return nn.Sequential(OrderedDict(parts))

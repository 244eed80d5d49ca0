r"""Associative memory: two layers of thresholds that complete a binary vector, and their rule.

    h  = [Wh v >= th]                                                    (Algorithm 3, lines 1-5)
    v' = [Wv h >= th]                                                   (Algorithm 3, lines 6-10)
    Wh[i, j] += (l / 2) v_j (s(h_i) - Wh[i, j])                          (Algorithm 4, lines 1-7)
    Wv[i, j] += (l / 2) h_j (s(v_i) - Wv[i, j])                         (Algorithm 4, lines 8-14)

Partial averaging paper, section IV.2 and Algorithms 3 and 4. A link out of an active neuron moves
towards 1 if the neuron it enters is active and towards -1 if not; other links stay. The paper
writes the two cases apart, (1 - w) l / 2 up and (1 + w) l / 2 down: s makes them one.
Symbols: v = visible, h = hidden, both 0 or 1; Wh = hidden.weight, Wv = visible.weight; th =
threshold; l = rate; s(0) = -1, s(1) = 1.
Limits: l = 2 replaces a link by its target. For l <= 2 weights never leave [-1, 1], rounding
included. A sum equal to the threshold fires.
Deviations from the paper: none from the algorithms; the prose of IV.2 would also lower a link from
a resting neuron to an active one. The initial weights, unstated there, are uniform on [-1, 1]:
without negative ones all neurons fire, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed import check
from polyfed.core.model import Model
from polyfed.errors import ModelError

HiddenWeight = Float[Tensor, "hidden visible"]
VisibleWeight = Float[Tensor, "visible hidden"]


class AssociativeMemory(nn.Module):
    """A visible and a hidden layer, each fully linked to the other; its parts are the two layers.

    >>> model = Model.split(AssociativeMemory(6, 8), hidden="hidden", visible="visible")
    >>> model.names()
    ['hidden.weight', 'visible.weight']
    """

    def __init__(self, visible: int = 50, hidden: int = 400, *, threshold: float = 0.5) -> None:
        """Draw the weights.

        Args:
            visible: length of the binary vectors.
            hidden: number of hidden neurons.
            threshold: the weighted sum from which on a neuron fires.
        """
        super().__init__()
        self.threshold = threshold
        self.hidden = nn.Linear(visible, hidden, bias=False)
        self.visible = nn.Linear(hidden, visible, bias=False)
        for layer in (self.hidden, self.visible):
            nn.init.uniform_(layer.weight, -1, 1)

    def forward(self, v: Float[Tensor, "*batch visible"]) -> Float[Tensor, "*batch visible"]:
        """Complete binary vectors by Algorithm 3."""
        h = fires(self.hidden(v), self.threshold)
        return fires(self.visible(h), self.threshold)


@dataclass(frozen=True)
class Hebbian:
    """The rule that trains an `AssociativeMemory`, in the place of a loss and an optimiser.

    Attributes:
        rate: the learning rate, l.
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        check.positive(self, "rate")
        check.between(self, "rate", 0, 2, hint="Above 2 weights leave [-1, 1].")

    def update(self, model: Model, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Present a batch, one vector after another, to the layers that may move.

        Args:
            model: an `AssociativeMemory`; a layer whose weight takes no gradient stays.
            x: complete binary vectors, one a row.
            y: not used: a vector is its own target.

        Returns:
            The share of bits of `x` that the network got wrong before it learnt them.
        """
        net = model.net
        if not isinstance(net, AssociativeMemory):
            raise ModelError(
                f"Hebbian trains an AssociativeMemory, got {type(net).__name__}. "
                "Use an objective such as cross_entropy for other networks."
            )
        weights = (net.hidden.weight, net.visible.weight)
        with torch.no_grad():
            wrong: Tensor = (net(x) != x).to(x.dtype).mean()
            learnt = learn(*weights, x, rate=self.rate, threshold=net.threshold)
            for weight, value in zip(weights, learnt, strict=True):
                if weight.requires_grad:
                    weight.copy_(value)
        return wrong


def fires(total: Float[Tensor, "*n"], threshold: float) -> Float[Tensor, "*n"]:
    """1 where a weighted sum reaches the threshold, else 0.

    >>> fires(torch.tensor([0.4, 0.5, 0.6]), 0.5)
    tensor([0., 1., 1.])
    """
    return (total >= threshold).to(total.dtype)


def learn(
    hidden: HiddenWeight,
    visible: VisibleWeight,
    x: Float[Tensor, "batch visible"],
    *,
    rate: float,
    threshold: float,
) -> tuple[HiddenWeight, VisibleWeight]:
    """Apply Algorithm 4 to the rows of `x`, in their order; `torch.func.vmap` takes it over nodes.

    Args:
        hidden: weights into the hidden layer, Wh.
        visible: weights into the visible layer, Wv.
        x: complete binary vectors.
        rate: the learning rate, l.
        threshold: the weighted sum from which on a hidden neuron fires.

    Returns:
        The new weights.
    """
    for v in x:
        h = fires(hidden @ v, threshold)
        hidden = _pulled(hidden, v, h, rate)
        visible = _pulled(visible, h, v, rate)
    return hidden, visible


def _pulled(
    weight: Float[Tensor, "out in"],
    source: Float[Tensor, " in"],
    target: Float[Tensor, " out"],
    rate: float,
) -> Float[Tensor, "out in"]:
    """Move the links out of active neurons by half the rate towards 1 or -1."""
    sign = 2 * target[:, None] - 1
    return weight + (sign - weight) * (rate / 2) * source

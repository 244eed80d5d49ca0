"""Networks for self-supervision: any trunk, a projector and, by kind, a predictor and a target.

    byol      x -> trunk -> projector -> predictor;   target = moving average of trunk and projector
    simsiam   x -> trunk -> projector -> predictor
    simclr    x -> trunk -> projector

Grill et al., NeurIPS 2020 (BYOL); Chen and He, CVPR 2021 (SimSiam); Chen et al., ICML 2020
(SimCLR). With `projector_hidden=0` the projector is one linear layer to a common size: FedFoA's
calibration layer, which lets different trunks be compared (Liu et al., section 3.5).
Deviations: all three kinds take the same heads, of one hidden layer with BatchNorm; SimSiam's own
projector has one layer more.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn

from polyfed.core.model import Model

Kind = Literal["byol", "simsiam", "simclr"]


class Siamese(nn.Module):
    """A network whose children are the parts `trunk`, `projector`, `predictor`, `target`."""

    def __init__(
        self,
        trunk: nn.Module,
        projector: nn.Module,
        predictor: nn.Module | None = None,
        *,
        target: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            trunk: what self-supervision is for; it puts out one vector per sample.
            projector: from the trunk's output to the space in which views are compared.
            predictor: from one view's projection to the other's.
            target: whether to keep a copy of trunk and projector that gradients do not reach.
        """
        super().__init__()
        self.trunk, self.projector = trunk, projector
        if predictor is not None:
            self.predictor = predictor
        if target:
            copies = OrderedDict(trunk=copy.deepcopy(trunk), projector=copy.deepcopy(projector))
            self.target = nn.Sequential(copies).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The online path: prediction, or projection where there is no predictor."""
        online = [m for name, m in self.named_children() if name != "target"]
        for module in online:
            x = module(x)
        return x

    def as_model(self) -> Model:
        """The network with its parts named after its children."""
        return Model.split(self, **{name: name for name, _ in self.named_children()})


def siamese(
    kind: Kind,
    trunk: nn.Module,
    width: int,
    *,
    projection: int = 256,
    hidden: int = 4096,
    projector_hidden: int = 0,
) -> Siamese:
    """The network of one kind around a trunk.

    Args:
        kind: byol, simsiam or simclr.
        trunk: any module that puts out one vector per sample; used as it is.
        width: length of that vector.
        projection: length of a projection (n).
        hidden: width of the predictor's hidden layer.
        projector_hidden: width of the projector's hidden layer; 0 is a single linear layer.

    >>> net = siamese("byol", nn.Flatten(), 64, projection=16, hidden=32)
    >>> list(net.as_model().parts)
    ['trunk', 'projector', 'predictor', 'target']
    """
    linear = nn.Linear(width, projection)
    projector = _head(width, projector_hidden, projection) if projector_hidden else linear
    predictor = None if kind == "simclr" else _head(projection, hidden, projection)
    return Siamese(trunk, projector, predictor, target=kind == "byol")


def _head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )

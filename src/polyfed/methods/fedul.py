r"""FedUL: a classifier from unlabelled sets whose class proportions are known; and labels at a hub.

    f_c     <- f, trained on the sets of node c by the loss of Theorem 1 (maths/surrogate.py)
    fbar    <- f + alpha_g ((1/C) sum_c f_c - f)                                             (1)
    fedul       f <- fbar
    fedul-m1    f <- fbar, trained on the hub's labelled set L                               (2)
    fedul-m2    f' <- a model trained on L;  f <- (1 - h) fbar + h f'                        (3)
    fedul-mgda  g1 = f - fbar,  g2 = f - f',  f <- f - (a g1 + (1 - a) g2),
                a = argmin |a g1 + (1 - a) g2|^2 over 0 <= a <= 1 (maths/pareto.py)          (4)

Lu, Wang, Li, Niu, Dou, Sugiyama, ICLR 2022, arXiv:2204.03304 (FedUL); Alzahrani 2024, Algorithm 1
(Methods 1 and 2). (4) is not in either: Desideri's common descent direction of two objectives,
with what the nodes and the hub did in a round in the gradients' place.
Symbols: f = the network as last broadcast, f_c = that of node c, C = number of nodes that answer,
L = labelled samples of the hub, h = share of the hub's model, a = 1 - h.
Limits: h = 0 and hub_epochs = 0 in (2) are fedul; h = 1 is f'. One node and alpha_g = 1 is training
on its sets alone. (4) is (3) with h = 1 - a.
Deviations from the papers: the aggregation and the broadcast of Methods 1 and 2 are written out
(the printed algorithm lacks the one and has the other in Method 2 only); batches are not dropped.
h may be "auto": each round the h with the lowest loss on the hub's validation split.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Phase
from polyfed.errors import ConfigError, DataError
from polyfed.maths.line_search import golden_section
from polyfed.maths.mixing import weighted_mean
from polyfed.maths.pareto import pareto_step
from polyfed.maths.surrogate import Kind
from polyfed.methods._unlabelled import (
    HUB,
    IdentifiabilityWarning,
    OnSets,
    mean_of,
    validation_loss,
)
from polyfed.train.rollback import SPLIT
from polyfed.train.surrogate import SurrogateLoss

__all__ = ["FedUL", "FedULM1", "FedULM2", "FedULMgda", "IdentifiabilityWarning"]

_OWN = "own"
_POINTS = 10  # of the line search, besides its ends: h to about 0.01

State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SurrogateTrained(OnSets):
    """Nodes train by Theorem 1, and the hub aggregates by Eq. (1).

    Attributes:
        loss: the likelihood of the sets (proper), or the double softmax of the authors' code.
        alpha_g: how far the hub goes from the last network to the mean of the nodes'.
    """

    loss: Kind = "proper"
    alpha_g: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "loss", ("proper", "reference"))
        check.positive(self, "alpha_g")
        check.between(self, "alpha_g", 0, 1)

    def check(self, nodes: Sequence[Node]) -> None:
        """As all that train on sets; a step that is not whole needs the last network."""
        super().check(nodes)
        if self.alpha_g != 1 and not any(n.name == HUB and n.model.parts for n in nodes):
            raise ConfigError(
                f"{self.name}: alpha_g={self.alpha_g:g} goes on from the network that the hub sent "
                "last, but the hub has none. Add Node('hub', model=...), or use alpha_g=1."
            )

    def loss_on_sets(self) -> Objective:
        """How badly a sample's set is predicted."""
        return SurrogateLoss(self.loss)

    def aggregate(self, hub: Node, got: Mapping[Name, Message]) -> dict[str, Tensor]:
        """Apply Eq. (1)."""
        mean = mean_of(got)
        return mean if self.alpha_g == 1 else blend(hub.model.state(), mean, self.alpha_g)


@dataclass(frozen=True, kw_only=True)
class FedUL(SurrogateTrained):
    """Learn from the nodes' sets alone."""

    name: ClassVar[str] = "fedul"
    title: ClassVar[str] = "learn from unlabelled sets with known class proportions"
    needs_identifiable: ClassVar[bool] = True

    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """Apply Eq. (1)."""
        if hub.model.parts:
            hub.model.load(self.aggregate(hub, got))
        return ()


@dataclass(frozen=True, kw_only=True)
class FedULM1(SurrogateTrained):
    """Method 1: the hub trains the aggregate on its labels.

    Attributes:
        hub_epochs: epochs of the hub on its labels in each round.
    """

    name: ClassVar[str] = "fedul-m1"
    title: ClassVar[str] = "fedul, and the hub trains the mean on its labels"
    needs_labels: ClassVar[bool] = True

    hub_epochs: int = 1

    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """Apply Eq. (2)."""
        hub.model.load(self.aggregate(hub, got))
        yield self.supervised(self.hub_epochs)


@dataclass(frozen=True, kw_only=True)
class Blended(SurrogateTrained):
    """The hub trains a model of its own, and blends it with the aggregate.

    Attributes:
        hub_epochs: epochs of the hub on its labels in each round.
    """

    needs_labels: ClassVar[bool] = True

    hub_epochs: int = 1

    @abstractmethod
    def share(self, hub: Node, last: State, mean: State, own: State) -> float:
        """The share h of the hub's own model."""

    def begin(self, hub: Node, mean: State) -> None:
        """Where the hub's own model starts: at the last broadcast, which the hub has."""
        return

    def end(self, hub: Node, own: State) -> None:
        """What the hub keeps of its own model: nothing."""
        return

    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """Apply Eq. (3), with h from `share`."""
        last, mean = hub.model.state(), self.aggregate(hub, got)
        self.begin(hub, mean)
        yield self.supervised(self.hub_epochs)
        own = hub.model.state()
        self.end(hub, own)
        h = self.share(hub, last, mean, own)
        hub.notes["h"] = h
        hub.model.load(blend(mean, own, h))


@dataclass(frozen=True, kw_only=True)
class FedULM2(Blended):
    """Method 2: blend by a share that is given, or sought on the validation split.

    Attributes:
        h: share of the hub's own model, or auto: the best on its validation split, each round.
        hub_start: where that model starts in a round: the network last broadcast, the aggregate
            of this round, or where it stood itself after the last round (persistent).
    """

    name: ClassVar[str] = "fedul-m2"
    title: ClassVar[str] = "fedul, blended with a model that the hub trains on its labels"

    h: float | Literal["auto"] = 0.5
    hub_start: Literal["broadcast", "aggregate", "persistent"] = "broadcast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.h != "auto":
            check.between(self, "h", 0, 1)
        check.one_of(self, "hub_start", ("broadcast", "aggregate", "persistent"))

    def check(self, nodes: Sequence[Node]) -> None:
        """As all of the family; a share that is sought needs a validation split."""
        super().check(nodes)
        if self.h == "auto" and not any(n.name == HUB and SPLIT in n.data for n in nodes):
            raise DataError(
                f"{self.name}: h='auto' looks for h on the hub's split '{SPLIT}', which is "
                "missing. Give the hub one, or a number for h."
            )

    def begin(self, hub: Node, mean: State) -> None:
        """The last broadcast, the aggregate, or what the hub's own model was."""
        if self.hub_start == "aggregate":
            hub.model.load(mean)
        elif self.hub_start == "persistent":
            hub.model.load(hub.recall(_OWN))

    def end(self, hub: Node, own: State) -> None:
        """What the next round starts from."""
        if self.hub_start == "persistent":
            hub.remember(_OWN, own)

    def share(self, hub: Node, last: State, mean: State, own: State) -> float:
        """The given h, or the one with the lowest validation loss."""
        if self.h != "auto":
            return self.h

        def loss(h: float) -> float:
            hub.model.load(blend(mean, own, h))
            return validation_loss(hub)

        return golden_section(loss, _POINTS)


@dataclass(frozen=True, kw_only=True)
class FedULMgda(Blended):
    """A step along the common descent direction of the nodes' and the hub's objectives."""

    name: ClassVar[str] = "fedul-mgda"
    title: ClassVar[str] = "fedul and the hub's labels by their common descent direction"

    def share(self, hub: Node, last: State, mean: State, own: State) -> float:
        """Apply Eq. (4): 1 - a. Buffers follow the parameters, but have no say."""
        names = [name for name, _ in hub.model.net.named_parameters()]
        g1, g2 = ([last[n] - state[n] for n in names] for state in (mean, own))
        _, a = pareto_step(g1, g2)
        u, v = (torch.cat([t.flatten() for t in g]) for g in (g1, g2))
        hub.notes["cosine"] = float(torch.cosine_similarity(u, v, dim=0))
        return 1 - float(a)


def blend(first: State, second: State, share: float) -> dict[str, Tensor]:
    """(1 - share) first + share second, tensor by tensor; counters are rounded."""
    return weighted_mean([first, second], [1 - share, share])

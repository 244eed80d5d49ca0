r"""FedBYOL, FedU and FedEMA: the hub averages what BYOL trains at nodes without labels.

    W <- sum_k (n_k / n) W_k,   P <- sum_k (n_k / n) P_k          at the hub                 (1)
    fedbyol   W_k <- W,  P_k <- P                                                            (2)
    fedu      W_k <- W,  P_k <- P  if d_k < mu, else  P_k                                    (3)
    fedema    W_k <- mu_k W_k + (1 - mu_k) W,  and P_k likewise,                             (4)
              mu_k = min(lambda_k d_k, 1),   lambda_k = tau / d_k in the node's first round  (5)
    d_k       paper: |W - W_k|;   drift: mean of |A' - A| over the trunk's weights A,
              before (A) and after (A') the training of the round                            (6)
    byol      nothing is shared: the lower control

Zhuang, Gan, Wen, Zhang, Yi. ICCV 2021, arXiv:2108.06492 (FedU). Zhuang, Wen, Zhang. ICLR 2022,
arXiv:2204.04385 (FedEMA). FedBYOL is the plain combination both compare with.
Symbols: W_k = online encoder of node k (trunk and projector), P_k = its predictor, n_k = its
number of samples. The target of every node is its own and stays.
Limits: fedu with a mu beyond all d_k is fedbyol; so is fedema with tau = 0. One node: byol.
Deviations from the papers: buffers (BatchNorm statistics) are averaged and blended with the
parameters. Both definitions of (6) are offered: FedU's threshold 0.4 belongs to the drift that
EasyFL, the authors' code, measures, over convolutions there and over all matrices here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Phase
from polyfed.maths.mixing import weighted_mean
from polyfed.methods._self_taught import (
    PREDICTOR,
    PROJECTOR,
    TRUNK,
    CollapseWarning,
    SelfTaught,
)
from polyfed.train.agree import check_same_parts

__all__ = ["BYOLAlone", "Blend", "CollapseWarning", "FedBYOL", "FedEMA", "FedU", "NearPredictor"]

Divergence = Literal["paper", "drift"]
State = Mapping[str, Tensor]

_ENCODER = (TRUNK, PROJECTOR)
_ONLINE = (TRUNK, PROJECTOR, PREDICTOR)
_COUNT, _BEFORE, _DRIFT, _LAMBDA = "num_examples", "before", "drift", "lambda"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What of a node is averaged, and what it does with the mean: Eq. (1) and (2).

    Attributes:
        divergence: how far a node has gone, for the rules that ask.
    """

    divergence: Divergence | None = None

    def check(self, nodes: Sequence[Node]) -> None:
        """The online networks are alike."""
        check_same_parts(nodes, *_ONLINE)

    def begin(self, node: Node) -> None:
        """Before a round: keep what a drift is measured from."""
        if self.divergence == "drift":
            node.remember(_BEFORE, _weights(node))

    def end(self, node: Node) -> None:
        """After a round: the drift of Eq. (6)."""
        if self.divergence == "drift":
            before = node.recall(_BEFORE)
            moved = [(after - before[name]).norm() for name, after in _weights(node).items()]
            node.memory[_DRIFT] = torch.stack(moved).mean()
            node.forget(_BEFORE)

    def hears(self, node: Node) -> Spec:
        """The mean."""
        return node.model.spec(*_ONLINE)

    def sends(self, node: Node) -> Spec:
        """The online network, and the number of samples it was trained on."""
        return {**self.hears(node), _COUNT: TensorSpec((), torch.int64, least=1)}

    def send(self, node: Node) -> dict[str, Tensor]:
        """The online network, and the number of samples it was trained on."""
        return {**node.model.state(*_ONLINE), _COUNT: torch.tensor(len(node.data["train"]))}

    def mean(self, got: Iterable[State]) -> dict[str, Tensor]:
        """Apply Eq. (1)."""
        told = [dict(state) for state in got]
        counts = [float(state.pop(_COUNT)) for state in told]
        return weighted_mean(told, counts)

    def distance(self, node: Node, mean: State) -> float:
        """d_k of Eq. (6)."""
        if self.divergence == "drift":
            return float(node.memory[_DRIFT])
        own = dict(node.model.net.named_parameters())
        names = [name for name in node.model.names(*_ENCODER) if name in own]
        return float(torch.stack([(mean[n] - own[n].detach()).norm() for n in names]).norm())

    def receive(self, node: Node, mean: State) -> None:
        """Apply Eq. (2)."""
        node.model.load(mean)


@dataclass(frozen=True, kw_only=True)
class NearPredictor(Sharing):
    """Take the mean predictor only where the node has not gone far.

    Attributes:
        mu: how far that is.
    """

    mu: float

    def receive(self, node: Node, mean: State) -> None:
        """Apply Eq. (3); a node whose training diverged takes the mean."""
        d = self.distance(node, mean)
        own = set(node.model.names(PREDICTOR)) if d >= self.mu else set()
        node.notes |= {"divergence": d, "predictor": "own" if own else "mean"}
        node.model.load({name: t for name, t in mean.items() if name not in own})


@dataclass(frozen=True, kw_only=True)
class Blend(Sharing):
    """Go the less towards the mean the further it is.

    Attributes:
        tau: share of the node's own network that stays in its first round.
    """

    tau: float

    def receive(self, node: Node, mean: State) -> None:
        """Apply Eq. (4) and (5); a node whose training diverged takes the mean."""
        d = self.distance(node, mean)
        if _LAMBDA not in node.memory and d > 0:
            node.memory[_LAMBDA] = torch.tensor(self.tau / d, dtype=torch.float64)
        mu = min(float(node.memory.get(_LAMBDA, 0)) * d, 1.0) if math.isfinite(d) else 0.0
        node.notes |= {"divergence": d, "mu": mu}
        own = node.model.state(*_ONLINE)
        node.model.load(weighted_mean([own, mean], [mu, 1 - mu]) if mu else mean)


@dataclass(frozen=True, kw_only=True)
class BYOLAlone(SelfTaught):
    """Every node alone."""

    name: ClassVar[str] = "byol"
    title: ClassVar[str] = "self-supervision at every node alone: the lower control"
    topologies: ClassVar[tuple[str, ...]] = ("alone",)


@dataclass(frozen=True, kw_only=True)
class Averaged(SelfTaught):
    """Nodes whose online networks are averaged; a method says by which rule."""

    topologies: ClassVar[tuple[str, ...]] = ("star", "mesh")
    averages: ClassVar[bool] = True

    @property
    @abstractmethod
    def rule(self) -> Sharing:
        """What a node does with the mean."""

    def check(self, nodes: Sequence[Node]) -> None:
        """As all of the family; and online networks are alike."""
        super().check(nodes)
        self.rule.check(nodes)

    def begin(self, node: Node) -> None:
        """What the rule keeps."""
        self.rule.begin(node)

    def end(self, node: Node, objective: Objective) -> None:
        """What the rule measures."""
        self.rule.end(node)

    def sends(self, node: Node) -> Spec:
        """The online network, and the number of samples it was trained on."""
        return self.rule.sends(node)

    def hears(self, node: Node) -> Spec:
        """The mean of the online networks."""
        return self.rule.hears(node)

    def send(self, node: Node) -> Message:
        """The online network, and the number of samples it was trained on."""
        return Message(self.rule.send(node))

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The mean for everybody."""
        return dict.fromkeys(to, Message(self.rule.mean(m.tensors for m in got.values())))

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """What the rule says."""
        self.rule.receive(node, message.tensors)
        return ()


@dataclass(frozen=True, kw_only=True)
class FedBYOL(Averaged):
    """Take the mean."""

    name: ClassVar[str] = "fedbyol"
    title: ClassVar[str] = "average what self-supervision trains"

    @property
    def rule(self) -> Sharing:
        """Eq. (2)."""
        return Sharing()


@dataclass(frozen=True, kw_only=True)
class FedU(Averaged):
    """Take the mean, but keep the own predictor where a node has gone far.

    Attributes:
        mu: divergence from which on a node keeps its predictor.
        divergence: distance from the mean (paper), or how far the node's training moved (drift).
    """

    name: ClassVar[str] = "fedu"
    title: ClassVar[str] = "fedbyol, where nodes that went far keep their predictors"

    mu: float = 0.4
    divergence: Divergence = "drift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "mu", 0)
        check.one_of(self, "divergence", ("paper", "drift"))

    @property
    def rule(self) -> Sharing:
        """Eq. (3)."""
        return NearPredictor(mu=self.mu, divergence=self.divergence)


@dataclass(frozen=True, kw_only=True)
class FedEMA(Averaged):
    """Blend the own network with the mean.

    Attributes:
        tau: share of its own network that a node keeps in its first round.
        divergence: distance from the mean (paper), or how far the node's training moved (drift).
    """

    name: ClassVar[str] = "fedema"
    title: ClassVar[str] = "fedbyol, where nodes keep the more of their own the further it is"

    tau: float = 0.7
    divergence: Divergence = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(self, "tau", 0, 1)
        check.one_of(self, "divergence", ("paper", "drift"))

    @property
    def rule(self) -> Sharing:
        """Eq. (4) and (5)."""
        return Blend(tau=self.tau, divergence=self.divergence)


def _weights(node: Node) -> dict[str, Tensor]:
    """The trunk's matrices and kernels, copied."""
    named, trunk = dict(node.model.net.named_parameters()), node.model.names(TRUNK)
    return {n: named[n].detach().clone() for n in trunk if n in named and named[n].dim() > 1}

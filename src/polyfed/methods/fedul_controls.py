r"""Controls for FedUL: what the sets are worth by other means, and the hub's labels by themselves.

    fedllp    nodes minimise the proportion loss of maths/surrogate.py; the hub averages
    fedpl     nodes minimise cross-entropy to labels that they guess; the hub averages
              rounds 1 to W: the most frequent class of the sample's set, argmax_k Pi_mk
              later: argmax_k eta_k(x) of the network as received, if that is above tau      (1)
    hub-only  the hub trains on its labels, the nodes do nothing but hear the result         (2)

Lu et al., ICLR 2022 (FedUL), section 4: FedLLP and FedPL are baselines there; (2) is what
Alzahrani 2024 leaves out: whether the sets add anything to the labels.
Read from lunanbit/FedUL@3d49211, federated/fedpl_mnist.py and fedllp_mnist.py.
Symbols: Pi_mk = share of class k in set m, eta = softmax of the network's output, W = `warm`,
tau = `threshold`.
Limits: warm >= rounds: labels are never guessed by the network; threshold = 0: no guess is dropped.
Deviations from that code: fedllp takes batches of all sets mixed, not one whole set at a time;
fedpl has no mix-up, and guesses once a round with the network received instead of in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.message import Message, Spec
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, PerSample, Phase
from polyfed.errors import ConfigError
from polyfed.methods._unlabelled import HubJudged, OnSets
from polyfed.train import outputs
from polyfed.train.surrogate import SETS, ProportionLoss, set_proportions

_GUESS, _ROUND, _NONE = "pseudo_labels", "round", -1


@dataclass(frozen=True, kw_only=True)
class FedLLP(OnSets):
    """Match the mean prediction over a set to its proportions."""

    name: ClassVar[str] = "fedllp"
    title: ClassVar[str] = "match predictions on unlabelled sets to their class proportions"
    needs_identifiable: ClassVar[bool] = True

    def loss_on_sets(self) -> Objective:
        """How far the mean prediction over a set is from its proportions."""
        return ProportionLoss()


@dataclass(frozen=True)
class GuessedLabels(PerSample):
    """Cross-entropy to labels of which some are missing (-1): those count as 0."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Cross-entropy of each sample that has a label."""
        if y is None:
            raise ConfigError("GuessedLabels needs guesses: set Phase.target.")
        return functional.cross_entropy(model(x), y, ignore_index=_NONE, reduction="none")


@dataclass(frozen=True, kw_only=True)
class FedPL(OnSets):
    """Guess labels, and train on them.

    Attributes:
        warm: rounds in which a sample is taken for the most frequent class of its set.
        threshold: probability that a guess of the network must reach; others are left out.
    """

    name: ClassVar[str] = "fedpl"
    title: ClassVar[str] = "guess the labels of unlabelled sets and train on them"

    warm: int = 5
    threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "warm", 0)
        check.between(self, "threshold", 0, 1)

    def loss_on_sets(self) -> Objective:
        """Cross-entropy to the guesses."""
        return GuessedLabels()

    def local(self, node: Node) -> Iterable[Phase]:
        """Guess, then train."""
        t = int(node.memory.get(_ROUND, 0)) + 1
        node.memory[_ROUND] = torch.tensor(t)
        node.memory[_GUESS] = guess = self._guess(node, t)
        node.notes["guessed"] = float((guess != _NONE).double().mean())
        yield self.on_sets(self.loss_on_sets(), _GUESS)

    def _guess(self, node: Node, t: int) -> Tensor:
        """Apply Eq. (1)."""
        if t <= self.warm:
            return set_proportions(node.model).argmax(1)[node.memory[SETS]]
        eta = outputs(node.model, node.data["train"].x).softmax(-1)
        sure, label = eta.max(-1)
        return label.masked_fill(sure < self.threshold, _NONE)


@dataclass(frozen=True, kw_only=True)
class HubOnly(HubJudged):
    """The hub's labels alone.

    Attributes:
        hub_epochs: epochs of the hub on its labels in each round.
    """

    name: ClassVar[str] = "hub-only"
    title: ClassVar[str] = "the hub's labels alone: what unlabelled sets must improve on"
    needs_labels: ClassVar[bool] = True

    hub_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """Nothing."""
        return ()

    def sends(self, node: Node) -> Spec:
        """Nothing."""
        return {}

    def send(self, node: Node) -> Message:
        """Nothing."""
        return Message({})

    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """The hub's training."""
        yield self.supervised(self.hub_epochs)

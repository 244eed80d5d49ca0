"""Method: hyper-parameters, and a few functions on the explicit state of a node.

One tick, for every engine and topology:

    active nodes:   phases of local(node); message = send(node)
    each meeting:   phases of gather(place, messages); replies = combine(place, messages, to)
    each receiver:  phases of receive(node, reply)

A function that trains yields phases; the engine trains each before it asks for the next, so code
after a `yield` sees the trained model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polyfed import check
from polyfed.core.guard import Guard
from polyfed.core.message import Message, Spec
from polyfed.core.node import Name, Node
from polyfed.core.phase import (
    EarlyStop,
    Objective,
    Optimiser,
    OptimiserName,
    Phase,
    Rule,
    cross_entropy,
)
from polyfed.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A method; its hyper-parameters are its fields.

    Attributes:
        rounds: number of rounds (ticks, in a star).
        batch: samples in a batch, or, below 1, the share of the node's data.
        lr: learning rate.
        optimiser: sgd, adam or adamw.
        momentum: of sgd.
        weight_decay: L2 weight decay.
        guard: privacy tools for messages: clip=1,noise=0.5 or compress=int8 or secure.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    topologies: ClassVar[tuple[str, ...]] = ("star",)  # the first is the default
    own_tasks: ClassVar[Mapping[str, str]] = {}  # what the command line takes for a task's name
    hub_trains: ClassVar[bool] = False  # a node called as the hub is: its data and model
    averages: ClassVar[bool] = False  # a place uses nothing but the (weighted) mean of messages

    rounds: int = 10
    batch: float = 32
    lr: float = 1e-3
    optimiser: OptimiserName = "adam"
    momentum: float = 0.0
    weight_decay: float = 0.0
    guard: str | None = None

    def __post_init__(self) -> None:
        check.types(self)
        check.at_least(self, "rounds", 0)
        check.positive(self, "batch")
        if self.batch > 1 and self.batch != int(self.batch):
            raise ConfigError(f"batch is a whole number, or a share below 1, got {self.batch}.")
        self._optimiser()
        Guard.parse(self.guard)

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The federation the method works on; almost always the one it is given."""
        return nodes

    def check(self, nodes: Sequence[Node]) -> None:
        """Raise, before any training, if the method cannot work on these nodes."""
        return

    def start(self, node: Node) -> Iterable[Phase]:
        """Before the first tick: pre-training."""
        return ()

    @abstractmethod
    def local(self, node: Node) -> Iterable[Phase]:
        """This tick's training, before anything is sent."""

    def sends(self, node: Node) -> Spec:
        """What `send` returns: names, shapes, dtypes. Nothing else may leave the node."""
        return {}

    def hears(self, node: Node) -> Spec:
        """What the node expects in reply."""
        return self.sends(node)

    def send(self, node: Node) -> Message:
        """What leaves the node, and nothing else does."""
        return Message({})

    def known(self, node: Node) -> Mapping[str, Tensor]:
        """What a message would hold if the node had not looked at its data, where that is told.

        A guard that clips bounds how far a message goes from there.
        """
        state = node.model.state()
        return {name: state[name] for name in self.sends(node) if name in state}

    def topics(self, nodes: Sequence[Node]) -> Mapping[str, tuple[Name, ...]]:
        """What is spoken about apart, and by whom; empty if a message is one whole.

        What belongs to topic `a` is named `a` or `a/...` in messages. Topologies that keep topics
        apart (groups, gossip) let only that travel to a meeting about `a`.
        """
        return {}

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """What the place of a meeting itself trains with what arrived, before it answers."""
        return ()

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """How messages meet: from what arrived (in name order) to a reply for each of `to`."""
        return {}

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """What the node does with what it hears."""
        return ()

    def finish(self, node: Node) -> Iterable[Phase]:
        """After the last tick: rollback, fine-tuning."""
        return ()

    def views(self, node: Node) -> Mapping[Name, Node]:
        """The parties whose test accuracy this node answers for; almost always itself."""
        return {node.name: node}

    def phase(
        self,
        label: str,
        *,
        objective: Objective | Rule = cross_entropy,
        patience: int = 0,
        **settings: Any,
    ) -> Phase:
        """A phase with this method's batch and optimiser.

        Args:
            label: what to call it.
            objective: the loss.
            patience: early stopping on `val_es` after that many epochs without gain; 0 is off.
            settings: other fields of the phase.
        """
        stop = EarlyStop(patience=patience) if patience else None
        own: dict[str, Any] = {"batch": self.batch, "optimiser": self._optimiser(), "stop": stop}
        return Phase(label=label, objective=objective, **(own | settings))

    def _optimiser(self) -> Optimiser:
        return Optimiser(
            name=self.optimiser,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

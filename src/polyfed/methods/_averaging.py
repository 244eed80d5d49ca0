r"""Averaging: nodes train, and the hub averages the parts that they share. The family of FedAvg.

    shared <- sum_k w_k shared_k / sum_k w_k,    w_k = n_k or 1                        (1)

A method of the family says which parts are shared and what a node trains; the rest is here.
Symbols: shared_k = parameters and buffers of node k's shared parts, n_k = its training examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Optimiser, Phase
from polyfed.errors import ConfigError, ModelError
from polyfed.maths.mixing import weighted_mean
from polyfed.train.agree import check_same_parts, parts_beside

Shares = Literal["all", "trunk", "heads"]  # heads: every part but the trunk
Weighting = Literal["examples", "uniform"]

TRUNK, VISITS = "trunk", "visits"
_COUNT = "num_examples"


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """Average the shared parts at the hub.

    Attributes:
        weighting: of the mean: by number of examples, or uniform.
    """

    averages: ClassVar[bool] = True
    shares: ClassVar[Shares]

    weighting: Weighting = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "weighting", ("examples", "uniform"))
        for field in fields(self):
            if field.name.endswith("_epochs"):
                check.at_least(self, field.name, 0)

    def shared(self, node: Node) -> tuple[str, ...]:
        """The parts of a node that travel; empty means all."""
        if self.shares == "all":
            return ()
        heads = parts_beside(node, TRUNK)
        return (TRUNK,) if self.shares == "trunk" else heads

    def check(self, nodes: Sequence[Node]) -> None:
        """Shared parts have the same shape; if outputs are shared, they mean the same classes."""
        first, parts = nodes[0], self.shared(nodes[0])
        for node in nodes[1:]:
            if self.shared(node) != parts:
                raise ModelError(
                    f"{self.name} averages the parts {', '.join(parts)} of {first.name}, but node "
                    f"{node.name} has {', '.join(self.shared(node))}. Call them the same."
                )
        check_same_parts(nodes, *parts)
        if self.shares != "trunk":
            self._check_classes(nodes)

    def sends(self, node: Node) -> Spec:
        """The shared parts, and the number of examples they were trained on."""
        count = {_COUNT: TensorSpec((), torch.int64, least=1)}
        return {
            **node.model.spec(*self.shared(node)),
            **(count if self.weighting == "examples" else {}),
        }

    def hears(self, node: Node) -> Spec:
        """The mean of the shared parts."""
        return node.model.spec(*self.shared(node))

    def send(self, node: Node) -> Message:
        """The shared parts, and the number of examples they were trained on."""
        count = {_COUNT: torch.tensor(len(node.data["train"]))}
        return Message(
            {
                **node.model.state(*self.shared(node), copied=False),
                **(count if self.weighting == "examples" else {}),
            }
        )

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The mean for everybody."""
        return dict.fromkeys(to, Message(self.mean(got)))

    def mean(self, got: Mapping[Name, Message]) -> dict[str, Tensor]:
        """Apply Eq. (1)."""
        states = [{n: t for n, t in m.tensors.items() if n != _COUNT} for m in got.values()]
        weights = [float(m.tensors[_COUNT]) if _COUNT in m.tensors else 1.0 for m in got.values()]
        return weighted_mean(states, weights)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the mean."""
        node.model.load(message.tensors)
        return ()

    def _check_classes(self, nodes: Sequence[Node]) -> None:
        what = "whole networks" if self.shares == "all" else "heads"
        for node in nodes[1:]:
            if node.classes != nodes[0].classes:
                raise ConfigError(
                    f"{self.name} averages {what}, but the outputs of {nodes[0].name} mean "
                    f"{_listed(nodes[0])} and those of {node.name} mean {_listed(node)}. "
                    "Use fedper or fedavg-trunk, or give every node an output for every class "
                    "(the option 'heads' of a task: --heads all)."
                )


@dataclass(frozen=True, kw_only=True)
class Decaying(Averaging):
    """Averaging whose learning rate may fall in steps.

    Attributes:
        decay: factor on learning rates after every `decay_every` visits to a node.
        decay_every: visits to a node (rounds of its training) between two decays; 0 is never.
    """

    decay: float = 0.5
    decay_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "decay")
        check.at_least(self, "decay_every", 0)

    def decayed(self, node: Node) -> float:
        """The factor on learning rates in this visit to a node, which is counted."""
        if not self.decay_every:
            return 1.0
        visits = int(node.memory.get(VISITS, 0))
        node.memory[VISITS] = torch.tensor(visits + 1)
        return self.decay ** (visits // self.decay_every)

    def slowed(self, factor: float) -> Optimiser:
        """The optimiser, its learning rate times the factor."""
        optimiser = self._optimiser()
        return replace(optimiser, lr=optimiser.lr * factor)


def _listed(node: Node) -> str:
    return "{" + ", ".join(node.classes) + "}"

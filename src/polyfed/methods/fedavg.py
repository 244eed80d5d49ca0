r"""FedAvg: every node trains the whole network, the hub averages.

    theta <- sum_k (n_k / n) theta_k                                                   (1)

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017, arXiv:1602.05629, Algorithm 1.
Symbols: theta_k = parameters and buffers of node k, n_k = its number of training examples.
Limits: one node is local training; equal data and one full-batch step is centralised descent.
Deviations from the paper: all nodes take part in every round; buffers (BatchNorm statistics) are
averaged with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.errors import ConfigError
from polyfed.maths.mixing import weighted_mean
from polyfed.train.agree import check_same_parts

_COUNT = "num_examples"


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Average the whole network.

    Attributes:
        local_epochs: epochs in each round.
        weighting: by number of examples, as the paper, or uniform.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "average the whole network at a hub"

    local_epochs: int = 1
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "local_epochs", 0)
        check.one_of(self, "weighting", ("examples", "uniform"))

    def check(self, nodes: Sequence[Node]) -> None:
        """All networks have the same shape, and their outputs mean the same classes."""
        check_same_parts(nodes)
        for node in nodes[1:]:
            if node.classes != nodes[0].classes:
                raise ConfigError(
                    f"fedavg averages whole networks, but the outputs of {nodes[0].name} mean "
                    f"{_listed(nodes[0])} and those of {node.name} mean {_listed(node)}. "
                    "Use fedavg-trunk, or give every node an output for every class "
                    "(the option 'heads' of a task: --heads all)."
                )

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

    def sends(self, node: Node) -> Spec:
        """All parameters and buffers, and the number of examples they were trained on."""
        count = (
            {_COUNT: TensorSpec((), torch.int64, least=1)} if self.weighting == "examples" else {}
        )
        return {**node.model.spec(), **count}

    def hears(self, node: Node) -> Spec:
        """The mean of all parameters and buffers."""
        return node.model.spec()

    def send(self, node: Node) -> Message:
        """All parameters and buffers, and the number of examples they were trained on."""
        count = torch.tensor(len(node.data["train"]))
        return Message(
            {**node.model.state(), **({_COUNT: count} if self.weighting == "examples" else {})}
        )

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """Apply Eq. (1)."""
        states = [{n: t for n, t in m.tensors.items() if n != _COUNT} for m in got.values()]
        weights = [float(m.tensors[_COUNT]) if _COUNT in m.tensors else 1.0 for m in got.values()]
        reply = Message(weighted_mean(states, weights))
        return dict.fromkeys(to, reply)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the mean."""
        node.model.load(message.tensors)
        return ()


def _listed(node: Node) -> str:
    return "{" + ", ".join(node.classes) + "}"

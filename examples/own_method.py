r"""A method of your own, complete: FedAvg whose local training is pulled to what was last received.

    theta_k <- argmin F_k(theta) + (mu / 2) |theta - w|^2,   w <- (1/K) sum_k theta_k         (1)

Li et al., MLSys 2020 (FedProx), arXiv:1812.06127, Algorithm 2, with uniform weights, all nodes in
every round, and a fixed number of epochs in place of an inexactness gamma.
Symbols: w = anchor (received; at first the initial weights), theta_k = the node's network.
Limits: mu = 0 would be FedAvg with uniform weights; mu -> inf keeps w.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import polyfed as pf
from polyfed import check
from polyfed.core.message import Spec
from polyfed.core.phase import cross_entropy
from polyfed.maths.mixing import weighted_mean
from polyfed.testing import check_method
from polyfed.train.agree import check_same_parts


@dataclass(frozen=True, eq=False)
class Pulled:
    """The objective of Eq. (1) on a batch."""

    mu: float
    anchor: Mapping[str, Tensor]

    def __call__(self, model: pf.Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Cross-entropy and the pull."""
        pairs = ((p, self.anchor[name]) for name, p in model.net.named_parameters())
        pull = sum(((p - w).square().sum() for p, w in pairs), start=x.new_zeros(()))
        return cross_entropy(model, x, y) + self.mu / 2 * pull


@dataclass(frozen=True, kw_only=True)
class PulledAveraging(pf.Method):
    """Average the network; pull local training towards the average.

    Attributes:
        mu: strength of the pull.
        local_epochs: epochs in each round.
    """

    name: ClassVar[str] = "pulled-averaging"
    title: ClassVar[str] = "average the network, pull local training towards it"

    mu: float
    local_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "mu", hint="mu=0 is FedAvg: use FedAvg().")
        check.at_least(self, "local_epochs", 0)

    def check(self, nodes: Sequence[pf.Node]) -> None:
        """All networks have the same shape."""
        check_same_parts(nodes)

    def start(self, node: pf.Node) -> Iterable[pf.Phase]:
        """The first anchor is the network as it begins."""
        node.remember("anchor", node.model.state())
        return ()

    def local(self, node: pf.Node) -> Iterable[pf.Phase]:
        """All parts on the node's own data, by Eq. (1)."""
        objective = Pulled(self.mu, node.recall("anchor"))
        yield self.phase("local", objective=objective, epochs=self.local_epochs)

    def sends(self, node: pf.Node) -> Spec:
        """All parameters and buffers."""
        return node.model.spec()

    def send(self, node: pf.Node) -> pf.Message:
        """All parameters and buffers."""
        return pf.Message(node.model.state())

    def combine(
        self, place: pf.Node, got: Mapping[str, pf.Message], to: Sequence[str]
    ) -> Mapping[str, pf.Message]:
        """The uniform mean."""
        mean = weighted_mean([m.tensors for m in got.values()], [1.0] * len(got))
        return dict.fromkeys(to, pf.Message(mean))

    def receive(self, node: pf.Node, message: pf.Message) -> Iterable[pf.Phase]:
        """The mean is the new network and the new anchor."""
        node.model.load(message.tensors)
        node.remember("anchor", node.model.state())
        return ()


if __name__ == "__main__":
    method = PulledAveraging(mu=0.01, rounds=10, batch=16, lr=3e-3, local_epochs=10)
    fedavg = pf.FedAvg(weighting="uniform", rounds=10, batch=16, lr=3e-3, local_epochs=10)
    print(pf.compare([method, fedavg], pf.tasks.digits(), seeds=1).table())
    check_method(PulledAveraging(mu=0.1, batch=8, local_epochs=1))
    print("check_method: no complaint")

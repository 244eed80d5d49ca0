r"""FedPer: the trunk is averaged, the head stays personal, both are trained together.

    (trunk_k, head_k) <- (trunk, head_k) trained for E epochs on the data of node k
    trunk             <- sum_k (n_k / n) trunk_k                                       (1)

Arivazhagan, Aggarwal, Singh, Choudhary. arXiv:1912.00818, Algorithms 1 and 2.
Symbols: trunk = the paper's base layers W_B, head_k = its personalisation layers W_P,
n_k = number of training examples.
Limits: one node is local training; a head without parameters would make it FedAvg.
Deviations from the paper: all nodes take part in every round; Adam is the default optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import Averaging, Shares


@dataclass(frozen=True, kw_only=True)
class FedPer(Averaging):
    """Average the trunk, keep the heads.

    Attributes:
        local_epochs: epochs of trunk and head together, in each round.
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "average the trunk, keep personal heads, train both together"
    shares: ClassVar[Shares] = "trunk"

    local_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

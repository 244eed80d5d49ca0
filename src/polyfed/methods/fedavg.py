r"""FedAvg: every node trains the whole network, the hub averages.

    theta <- sum_k (n_k / n) theta_k                                                   (1)

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017, arXiv:1602.05629, Algorithm 1.
Symbols: theta_k = parameters and buffers of node k, n_k = its number of training examples.
Limits: one node is local training; equal data and one full-batch step is centralised descent.
Deviations from the paper: all nodes take part in every round; buffers (BatchNorm statistics) are
averaged with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import Averaging, Shares


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """Average the whole network.

    Attributes:
        local_epochs: epochs in each round.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "average the whole network at a hub"
    shares: ClassVar[Shares] = "all"

    local_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

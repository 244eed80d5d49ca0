r"""LG-FedAvg: trunks stay local, the head is averaged: the opposite of FedPer.

    (trunk_k, head_k) <- (trunk_k, head) trained for E epochs on the data of node k
    head              <- sum_k (n_k / n) head_k                                        (1)

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. arXiv:2001.01523, Algorithm 1.
Checked against pliang279/LG-FedAvg@8ee6a68, main_lg.py.
Symbols: trunk_k = the paper's local representation l_m, head = its global model g,
n_k = number of training examples.
Limits: one node is local training; a trunk without parameters would make it FedAvg.
Deviations from the paper: all nodes take part in every round; the authors' experiments begin with
a network trained by FedAvg, here it begins with the weights it is given; they keep each node's best
round by its test accuracy, here the last round stays; Adam is the default optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import Averaging, Shares


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Averaging):
    """Average the head, keep the trunks.

    Attributes:
        local_epochs: epochs of trunk and head together, in each round.
    """

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "average the head, keep personal trunks, train both together"
    shares: ClassVar[Shares] = "heads"

    local_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

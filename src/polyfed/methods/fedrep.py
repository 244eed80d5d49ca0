r"""FedRep: first the personal head is fitted to the shared trunk, then the trunk to that head.

    head_k  <- head_k trained for E_h epochs, trunk frozen
    trunk_k <- trunk trained for E_t epochs, head_k frozen
    trunk   <- (1/K) sum_k trunk_k                                                     (1)

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021, arXiv:2102.07078, Algorithm 1.
Symbols: trunk = the paper's representation phi, head_k = h_k, K = number of nodes in the round.
Limits: one node is alternating training; head_epochs = 0 never trains a head.
Deviations from the paper: all nodes take part in every round; what is frozen is in eval mode,
without dropout and without drift of BatchNorm statistics; Adam is the default optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import TRUNK, Averaging, Shares, Weighting
from polyfed.train.agree import parts_beside


@dataclass(frozen=True, kw_only=True)
class FedRep(Averaging):
    """Train the head, then the trunk; average the trunk.

    Attributes:
        head_epochs: epochs of the head in each round, trunk frozen.
        trunk_epochs: epochs of the trunk after that, head frozen.
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "average the trunk, train personal heads and the trunk in turn"
    shares: ClassVar[Shares] = "trunk"

    weighting: Weighting = "uniform"
    head_epochs: int = 10
    trunk_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """The head, then the trunk, on the node's own data."""
        yield self.phase("head", parts=parts_beside(node, TRUNK), epochs=self.head_epochs)
        yield self.phase("trunk", parts=(TRUNK,), epochs=self.trunk_epochs)

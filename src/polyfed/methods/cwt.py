r"""CWT, cyclical weight transfer: the whole network travels a ring, and trains at every stop.

    stop at node c:  theta <- theta trained for E epochs on the data of c;  on to the next     (1)

Chang, Balachandar, Lam, Yi, Brown, Beers, et al. Distributed deep learning networks among
institutions for medical imaging. JAMIA 25(8), 2018.
Symbols: theta = parameters and buffers of the whole network, E = local_epochs.
Limits: one node is local training with a fresh optimiser every round; LI that shares all parts and
has no head phase is CWT.
Deviations from the paper: none in Eq. (1); optimiser, learning rate and number of cycles are
options; a broken ring goes on as for LI (`topologies/ring.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import Decaying, Shares


@dataclass(frozen=True, kw_only=True)
class CWT(Decaying):
    """Pass the whole network from node to node.

    Attributes:
        local_epochs: epochs at every stop.
    """

    name: ClassVar[str] = "cwt"
    title: ClassVar[str] = "the whole network travels a ring of nodes; no hub"
    topologies: ClassVar[tuple[str, ...]] = ("ring", "dual-ring", "pipeline")
    averages: ClassVar[bool] = False  # one hands over to the next
    shares: ClassVar[Shares] = "all"

    local_epochs: int = 1

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        optimiser = self.slowed(self.decayed(node))
        yield self.phase("local", epochs=self.local_epochs, optimiser=optimiser)

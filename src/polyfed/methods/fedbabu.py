r"""FedBABU: only the trunk is trained and averaged, under a head that nobody trains until the end.

    trunk_k <- trunk trained for E epochs under the common, random head
    trunk   <- sum_k (n_k / n) trunk_k                                                 (1)
    finally: trunk and head (or the head alone) trained for E_f epochs on the data of node k

Oh, Kim, Yun. ICLR 2022, arXiv:2106.06042, Algorithm 1 and section 5.
Symbols: trunk = the paper's body theta_ext, head = theta_cls, n_k = number of training examples.
Limits: finetune_epochs = 0 ends with the shared trunk under the random head.
Deviations from the paper: all nodes take part in every round; the frozen head is in eval mode;
Adam is the default optimiser. Heads of different shapes cannot be common: each keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from polyfed import check
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import TRUNK, Averaging, Shares
from polyfed.train.agree import parts_beside


@dataclass(frozen=True, kw_only=True)
class FedBABU(Averaging):
    """Average a trunk that was trained under a frozen random head; fine-tune at the end.

    Attributes:
        local_epochs: epochs of the trunk in each round, head frozen.
        finetune_epochs: epochs after the last round, on the node's own data.
        finetune_parts: what moves in them, all or the head.
    """

    name: ClassVar[str] = "fedbabu"
    title: ClassVar[str] = "average a trunk trained under a frozen random head, fine-tune at last"
    shares: ClassVar[Shares] = "trunk"

    local_epochs: int = 1
    finetune_epochs: int = 10
    finetune_parts: Literal["all", "head"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "finetune_parts", ("all", "head"))

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The head of the first node, by name, for every node whose head has its shape."""
        first = min(nodes, key=lambda node: node.name)
        head = first.model.state(*parts_beside(first, TRUNK))
        spec = first.model.spec(*parts_beside(first, TRUNK))
        prepared = []
        for node in nodes:
            model = node.model.copy()
            if model.spec(*parts_beside(node, TRUNK)) == spec:
                model.load(head)
            prepared.append(replace(node, model=model))
        return prepared

    def local(self, node: Node) -> Iterable[Phase]:
        """The trunk on the node's own data."""
        yield self.phase("local", parts=(TRUNK,), epochs=self.local_epochs)

    def finish(self, node: Node) -> Iterable[Phase]:
        """The personal network: fine-tune on the node's own data."""
        parts = parts_beside(node, TRUNK) if self.finetune_parts == "head" else ()
        yield self.phase("finetune", parts=parts, epochs=self.finetune_epochs)

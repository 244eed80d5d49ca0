r"""FedAvg on the trunk, with fine-tuned heads: FedLinked's baseline for different tasks.

    train all parts locally;  trunk <- (1/K) sum_k trunk_k;  train the head, trunk frozen   (1)

Kadar 2021, section 5.3, on FedAvg (McMahan et al., AISTATS 2017), Algorithm 1 with weights 1/K.
Symbols: K = number of nodes in the round.
Limits: one node is local training with a head phase; finetune_epochs = 0 is FedPer.
Deviations from the paper: patience is not stated there; 5 is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed import check
from polyfed.core.message import Message
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._averaging import TRUNK, Averaging, Shares, Weighting
from polyfed.train import keep_best, roll_back
from polyfed.train.agree import parts_beside


@dataclass(frozen=True, kw_only=True)
class FedAvgTrunk(Averaging):
    """Average the trunk, then fine-tune the head.

    Attributes:
        init_epochs: epochs of pre-training before the first round.
        local_epochs: epochs of all parts in each round, before averaging.
        finetune_epochs: epochs of the head after averaging, trunk frozen.
        patience: early stopping of init and local epochs on `val_es`; 0 is off.
        rollback: end with the round that was best on `val_rb`.
    """

    name: ClassVar[str] = "fedavg-trunk"
    title: ClassVar[str] = "average the trunk at a hub, fine-tune the heads"
    shares: ClassVar[Shares] = "trunk"

    weighting: Weighting = "uniform"
    init_epochs: int = 0
    local_epochs: int = 5
    finetune_epochs: int = 2
    patience: int = 5
    rollback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "patience", 0)

    def start(self, node: Node) -> Iterable[Phase]:
        """Pre-training."""
        yield self.phase("init", epochs=self.init_epochs, patience=self.patience)

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs, patience=self.patience)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the mean trunk, then fit the head to it."""
        node.model.load(message.tensors)
        heads = parts_beside(node, TRUNK)
        yield self.phase("finetune", parts=heads, epochs=self.finetune_epochs)
        if self.rollback:
            keep_best(node)

    def finish(self, node: Node) -> Iterable[Phase]:
        """Rollback to the best round."""
        roll_back(node)
        return ()

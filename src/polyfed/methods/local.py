"""Local: every node trains alone, nothing is shared. The lower control ("separated" in FedLinked).

Symbols: none; training is the same sum of phases the sharing methods use, without the exchange.
Limits: with one round and no early stopping this is a plain training loop.
Deviations from the paper (Kadar 2021, section 5.2): patience is not stated there; 5 is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed import check
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.train import keep_best, roll_back


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Train alone.

    Attributes:
        init_epochs: epochs before the first round.
        local_epochs: epochs in each round.
        patience: early stopping on `val_es` after that many epochs without improvement; 0 is off.
        rollback: end with the round that was best on `val_rb`.
    """

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "every node alone: the lower control"
    topologies: ClassVar[tuple[str, ...]] = ("alone",)

    init_epochs: int = 0
    local_epochs: int = 5
    patience: int = 5
    rollback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "init_epochs", 0)
        check.at_least(self, "local_epochs", 0)
        check.at_least(self, "patience", 0)

    def start(self, node: Node) -> Iterable[Phase]:
        """Pre-training."""
        yield self.phase("init", epochs=self.init_epochs, patience=self.patience)

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs, patience=self.patience)
        if self.rollback:
            keep_best(node)

    def finish(self, node: Node) -> Iterable[Phase]:
        """Rollback to the best round."""
        roll_back(node)
        return ()

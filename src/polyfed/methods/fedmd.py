r"""FedMD: nodes with different networks digest the mean of their scores on public inputs.

    before round 1   f_k is trained on the data of node k
    round t          s_k = f_k(X_t), before the softmax; c = (1/K) sum_k s_k                   (1)
                     digest:   f_k <- argmin mean |f_k(x) - c(x)| on X_t                       (2)
                     revisit:  f_k is trained on its own data
    fedmd-ssl        the same with projections (n numbers) for scores, and BYOL for training: first
                     BYOL, then (1) and (2), in which trunk and projector move

Li, Wang. FedMD: Heterogenous Federated Learning via Model Distillation, 2019, arXiv:1910.03581,
Algorithm 1. fedmd-ssl is how FedFoA's paper (Liu et al., section 4.1) uses it.
Symbols: f_k = network of node k, X_t = `alignment` public inputs drawn for round t, K = nodes that
tell, c = consensus.
Limits: digest_epochs = 0 is local training. One node digests its own scores: at first no change.
Deviations from the paper: nodes are not trained on the public set before, which needs its labels.
Weights 1/K, and mean absolute error as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.methods._consensus import ALIGNED, AbsoluteError, Consensus, check_classes
from polyfed.methods._self_taught import PROJECTOR, TRUNK, SelfTaught
from polyfed.train import outputs


@dataclass(frozen=True, kw_only=True)
class Digesting(Consensus):
    """Digest the mean.

    Attributes:
        digest_epochs: epochs towards the mean scores in each round.
    """

    part: ClassVar[str | None] = None  # whose output is told
    moving: ClassVar[tuple[str, ...]] = ()  # what digests; empty is all

    alignment: int = 5000
    digest_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "digest_epochs", 0)

    def tell(self, node: Node, x: Tensor) -> Tensor:
        """Scores before the softmax, or projections."""
        return outputs(node.model, x, self.part)

    def agree(self, scores: Sequence[Tensor]) -> Tensor:
        """Apply Eq. (1)."""
        return torch.stack(list(scores)).mean(0)

    def towards(self, node: Node) -> Phase:
        """Apply Eq. (2)."""
        return self.phase(
            "digest",
            objective=AbsoluteError(self.part),
            parts=self.moving,
            split=ALIGNED,
            epochs=self.digest_epochs,
            batch=self.public_batch,
        )


@dataclass(frozen=True, kw_only=True)
class FedMD(Digesting):
    """Digest scores, revisit labels.

    Attributes:
        init_epochs: epochs on the node's own data before the first round.
        revisit_epochs: epochs on the node's own data in each round.
        patience: early stopping of the first of these on `val_es`; 0 is off.
    """

    name: ClassVar[str] = "fedmd"
    title: ClassVar[str] = "digest the mean scores on public inputs, for any networks"

    rounds: int = 20
    init_epochs: int = 25
    revisit_epochs: int = 4
    patience: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("init_epochs", "revisit_epochs", "patience"):
            check.at_least(self, name, 0)

    def check(self, nodes: Sequence[Node]) -> None:
        """As all of the family; and outputs mean the same classes."""
        check_classes(self.name, nodes)
        super().check(nodes)

    def start(self, node: Node) -> Iterable[Phase]:
        """Training on the node's own data."""
        yield self.phase("init", epochs=self.init_epochs, patience=self.patience)

    def private(self, node: Node) -> Iterable[Phase]:
        """Nothing before nodes tell: a round begins with what the last one left."""
        return ()

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Digest, then revisit."""
        yield from super().receive(node, message)
        yield self.phase("revisit", epochs=self.revisit_epochs)


@dataclass(frozen=True, kw_only=True)
class FedMDSSL(SelfTaught, Digesting):
    """Digest projections; no labels."""

    name: ClassVar[str] = "fedmd-ssl"
    title: ClassVar[str] = "self-supervision, and digest the mean projections of public inputs"
    part: ClassVar[str | None] = PROJECTOR
    moving: ClassVar[tuple[str, ...]] = (TRUNK, PROJECTOR)

    def check(self, nodes: Sequence[Node]) -> None:
        """As both families."""
        SelfTaught.check(self, nodes)
        Digesting.check(self, nodes)

    def local(self, node: Node) -> Iterable[Phase]:
        """BYOL, before nodes tell."""
        return Digesting.local(self, node)

    def private(self, node: Node) -> Iterable[Phase]:
        """BYOL on the node's own samples."""
        return SelfTaught.local(self, node)

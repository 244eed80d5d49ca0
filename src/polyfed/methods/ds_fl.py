r"""DS-FL: nodes distil what all of them predict for public inputs, sharpened.

    update   f_k is trained on the data of node k
    tell     p_k = softmax(f_k(X_t)) on public inputs
    agree    era:  c = softmax(pbar / T),    sa:  c = pbar,     pbar = (1/K) sum_k p_k         (1)
    distil   f_k <- argmin -mean sum_i c_i(x) log softmax(f_k(x))_i  on X_t                    (2)

Itahara, Nishio, Koda, Morikura, Yamamoto. IEEE Transactions on Mobile Computing 2021,
arXiv:2008.06180, Algorithm 2, Eq. (13) to (16).
Symbols: f_k = network of node k, X_t = `alignment` public inputs drawn for round t (all of them by
default), K = nodes that tell, T = `temperature` (era: entropy reduction aggregation; sa: simple
aggregation). A hub with a network of its own, Node("hub", Data(public=x, test=...), model),
distils too: it is the paper's global model.
Limits: distil_epochs = 0 is local training. With T near 0, c is the majority's label. softmax(pbar)
has T = 1: flatter than pbar, since probabilities take the place of scores there.
Deviations from the paper: all nodes take part in every round; SGD there, Adam by default here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import PerSample, Phase
from polyfed.errors import ConfigError
from polyfed.methods._consensus import ALIGNED, Consensus, check_classes
from polyfed.train import accuracy, outputs


@dataclass(frozen=True)
class SoftCrossEntropy(PerSample):
    """Cross-entropy of the network's output against probabilities."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Eq. (2), of each sample."""
        if y is None:
            raise ConfigError("SoftCrossEntropy needs targets, but this split has none.")
        return functional.cross_entropy(model(x), y, reduction="none")


@dataclass(frozen=True, kw_only=True)
class DSFL(Consensus):
    """Distil sharpened predictions.

    Attributes:
        aggregation: sharpen the mean prediction (era), or take it as it is (sa).
        temperature: of era: the smaller, the sharper.
        local_epochs: epochs on the node's own data in each round.
        distil_epochs: epochs on public inputs in each round.
    """

    name: ClassVar[str] = "ds-fl"
    title: ClassVar[str] = "distil the sharpened mean prediction for public inputs, any networks"
    hub_trains: ClassVar[bool] = True

    aggregation: Literal["era", "sa"] = "era"
    temperature: float = 0.1
    local_epochs: int = 5
    distil_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "aggregation", ("era", "sa"))
        check.positive(self, "temperature")
        check.at_least(self, "local_epochs", 0)
        check.at_least(self, "distil_epochs", 0)

    def check(self, nodes: Sequence[Node]) -> None:
        """As all of the family; and outputs mean the same classes."""
        speakers = [node for node in nodes if node.model.parts]  # a hub may have no network
        check_classes(self.name, speakers)
        super().check(speakers)

    def private(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

    def tell(self, node: Node, x: Tensor) -> Tensor:
        """Predicted probabilities."""
        return outputs(node.model, x).softmax(-1)

    def agree(self, scores: Sequence[Tensor]) -> Tensor:
        """Apply Eq. (1)."""
        mean = torch.stack(list(scores)).mean(0)
        return mean if self.aggregation == "sa" else (mean / self.temperature).softmax(-1)

    def towards(self, node: Node) -> Phase:
        """Apply Eq. (2)."""
        return self.phase(
            "distil",
            objective=SoftCrossEntropy(),
            split=ALIGNED,
            epochs=self.distil_epochs,
            batch=self.public_batch,
        )

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """The hub's own network distils, if it has one; how well it does is noted."""
        if place.model.parts:
            yield from self.receive(place, self.consensus(got))
            if "test" in place.data:
                place.notes["test_accuracy"] = accuracy(place.model, place.data["test"])

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The consensus for everybody; its entropy is noted."""
        agreed = self.consensus(got)
        c = agreed.tensors["consensus"]
        place.notes["entropy"] = float(torch.special.entr(c).sum(-1).mean())
        return dict.fromkeys(to, agreed)

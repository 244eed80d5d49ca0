r"""Consensus: nodes tell what they make of public inputs, and learn what all make of them.

    node k   s_k = f_k(X_t)        X_t = public inputs of round t, the same for everybody        (1)
    hub      c = agree(s_1, ..., s_K)
    node k   f_k is trained towards c on X_t                                                    (2)

The family of FedMD and DS-FL: a method says what is told, how it becomes one, and by which loss it
is learned. Networks may differ; what they put out must mean the same.
Symbols: X_t = `alignment` of the public inputs, drawn anew every round, or all of them.
Everybody draws the same X_t from the number of the round, so no index travels. A node that was away
does not know that number: what it tells is not used then, and it hears the number with c.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import PerSample, Phase
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.random import stream

PUBLIC, ALIGNED = "public", "aligned"
_SCORES, _CONSENSUS, _ROUND = "scores", "consensus", "aligned_round"
_DATED: Spec = {_ROUND: TensorSpec((), torch.int64, least=1)}


@dataclass(frozen=True)
class AbsoluteError(PerSample):
    """Mean absolute difference between a part's output and given targets.

    Attributes:
        part: whose output; None is the network's.
    """

    part: str | None = None

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The mean of |output - target| over dimensions, of each sample."""
        if y is None:
            raise ConfigError("AbsoluteError needs targets, but this split has none.")
        out = model(x) if self.part is None else model.output(x, self.part)
        return (out - y).abs().mean(1)


@dataclass(frozen=True, kw_only=True)
class Consensus(Method):
    """Tell, agree, learn.

    Attributes:
        alignment: public inputs drawn for a round; 0 is all of them.
        public_batch: samples in a batch of public inputs.
    """

    alignment: int = 0
    public_batch: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "alignment", 0)
        check.at_least(self, "public_batch", 1)

    @abstractmethod
    def tell(self, node: Node, x: Tensor) -> Tensor:
        """s_k: what a node makes of inputs."""

    @abstractmethod
    def agree(self, scores: Sequence[Tensor]) -> Tensor:
        """What all together make of them."""

    def check(self, nodes: Sequence[Node]) -> None:
        """Everybody holds the same public inputs, and tells as many numbers about each."""
        check_public(self.name, nodes)
        sizes = {node.name: self.tell(node, node.data[PUBLIC].x[:1]).shape[1] for node in nodes}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {width}" for name, width in sizes.items())
            raise ModelError(
                f"{self.name} averages what networks put out, but its sizes differ: {listed}. "
                "Give every network an output for every class."
            )

    def local(self, node: Node) -> Iterable[Phase]:
        """What the method trains before nodes tell."""
        node.memory[_ROUND] = node.memory.get(_ROUND, torch.tensor(0)) + 1
        yield from self.private(node)

    @abstractmethod
    def private(self, node: Node) -> Iterable[Phase]:
        """Training on the node's own data, before it tells."""

    @abstractmethod
    def towards(self, node: Node) -> Phase:
        """Eq. (2): the training towards the consensus, on the split `aligned`."""

    def sends(self, node: Node) -> Spec:
        """Scores, and the number of the round."""
        one = self.tell(node, node.data[PUBLIC].x[:1])
        return {_SCORES: TensorSpec((self._rows(node), one.shape[1]), one.dtype), **_DATED}

    def hears(self, node: Node) -> Spec:
        """The consensus and the number of its round."""
        return {_CONSENSUS: self.sends(node)[_SCORES], **_DATED}

    def send(self, node: Node) -> Message:
        """What the node makes of the inputs of this round."""
        t = node.memory[_ROUND]
        return Message({_SCORES: self.tell(node, self._inputs(node, int(t))), _ROUND: t})

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The consensus for everybody."""
        return dict.fromkeys(to, self.consensus(got))

    def consensus(self, got: Mapping[Name, Message]) -> Message:
        """What those agree on who tell of the newest round."""
        newest = max((m.tensors[_ROUND] for m in got.values()), key=int)
        scores = [m.tensors[_SCORES] for m in got.values() if m.tensors[_ROUND] == newest]
        return Message({_CONSENSUS: self.agree(scores), _ROUND: newest})

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Learn the consensus."""
        node.memory[_ROUND] = message.tensors[_ROUND]
        inputs = self._inputs(node, int(message.tensors[_ROUND]))
        own = node.data
        aligned = Split(inputs, message.tensors[_CONSENSUS])
        node.data = Data(may_miss_classes=True, **own, aligned=aligned)
        yield self.towards(node)
        node.data = own

    def _rows(self, node: Node) -> int:
        there = len(node.data[PUBLIC])
        return min(self.alignment, there) if self.alignment else there

    def _inputs(self, node: Node, t: int) -> Tensor:
        """X_t; the run's seed is the same for everybody."""
        x = node.data[PUBLIC].x
        if self._rows(node) == len(x):
            return x
        order = torch.randperm(len(x), generator=stream(node.seed, ALIGNED, t))
        return x[order[: self.alignment].to(x.device)]


def check_public(method: str, nodes: Sequence[Node]) -> None:
    """Raise DataError unless everybody holds the same public inputs in the same order."""
    for node in nodes:
        if PUBLIC not in node.data:
            raise DataError(
                f"node {node.name} has no split 'public'. {method} compares what networks make of "
                "inputs that every node holds: Data(..., public=x)."
            )
    first = nodes[0]
    wanted = first.data[PUBLIC]
    for node in nodes[1:]:
        public = node.data[PUBLIC]
        if public.x is not wanted.x and public.fingerprint() != wanted.fingerprint():
            raise DataError(
                f"the public inputs of node {node.name} differ from those of {first.name}, or are "
                "in another order. The order is how what is told is matched: give every node the "
                "same tensor."
            )


def check_classes(method: str, nodes: Sequence[Node]) -> None:
    """Raise ConfigError unless outputs mean the same classes at all nodes."""
    for node in nodes[1:]:
        if node.classes != nodes[0].classes:
            raise ConfigError(
                f"{method} averages scores, but the outputs of {nodes[0].name} mean "
                f"{{{', '.join(nodes[0].classes)}}} and those of {node.name} mean "
                f"{{{', '.join(node.classes)}}}. Give every node an output for every class (the "
                "option 'heads' of a task: --heads all)."
            )

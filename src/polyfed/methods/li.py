r"""LI, Loop Improvement: one trunk travels a ring of nodes, every node keeps its head; no hub.

    visit of node c:  head_c <- head_c - eta_h grad L_c(head_c; trunk fixed)     E_head epochs   (1)
                      trunk  <- trunk  - eta_t grad L_c(trunk; head_c fixed)     E_trunk epochs  (2)
                      optionally both together                                   E_full epochs
                      trunk goes to the next node; a round visits every node once

Li, Loo, Liew, Liu. Loop Improvement, Algorithm 1 (the trunk is its backbone).
Symbols: eta_h, eta_t = lr * head_rate, lr * trunk_rate; C = number of nodes.
Limits: one node is alternating training; sharing all parts, without head phase, is CWT; that with
visit_steps = 1 and SGD is mini-batch SGD over the nodes' batches in turn (the paper's Solution 1).
Deviations from the paper: what does not train in a phase is in eval mode (`reference=True` leaves
all in training mode, as the authors' code does); what happens when parts of a broken ring come
together is our choice: the mean of their trunks (`topologies/ring.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import OptimiserName, Phase, cross_entropy
from polyfed.errors import ModelError, UnknownNameError
from polyfed.methods._averaging import TRUNK, Decaying, Shares

LOOP = "loop"


@dataclass(frozen=True, kw_only=True)
class LI(Decaying):
    """Pass the trunk from node to node, keep the heads.

    Attributes:
        share: the parts that travel, "trunk" or several as "stem+body"; all others stay.
        head_epochs: epochs of what stays at each visit, first and alone.
        trunk_epochs: epochs of what travels, after that and alone.
        full_epochs: epochs of everything together, after that; the paper's optional step.
        head_rate: learning rate of the head phase, as a share of lr.
        trunk_rate: learning rate of the trunk phase, as a share of lr; the full phase has lr.
        visit_steps: mini-batches of each phase of a visit, in place of epochs; 0 is epochs.
        finetune_epochs: the last round passes the trunk on as it is, and fits the head to it for so
            many epochs; 0 is a round like the others.
        finetune_rate: learning rate of that fitting, as a share of lr.
        reference: leave what does not train in training mode, as the authors' code does.
    """

    name: ClassVar[str] = "li"
    title: ClassVar[str] = "the trunk travels a ring of nodes, the heads stay; no hub"
    topologies: ClassVar[tuple[str, ...]] = ("ring", "dual-ring", "pipeline")
    averages: ClassVar[bool] = False  # one hands over to the next
    shares: ClassVar[Shares] = "trunk"

    batch: float = 10
    lr: float = 5e-4
    optimiser: OptimiserName = "adamw"
    weight_decay: float = 0.1
    share: str = TRUNK
    head_epochs: int = 1
    trunk_epochs: int = 1
    full_epochs: int = 0
    head_rate: float = 0.2
    trunk_rate: float = 0.8
    decay_every: int = 10
    visit_steps: int = 0
    finetune_epochs: int = 0
    finetune_rate: float = 0.04
    reference: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "head_rate", "trunk_rate", "finetune_rate")
        check.at_least(self, "visit_steps", 0)

    def shared(self, node: Node) -> tuple[str, ...]:
        """The parts that travel."""
        return tuple(self.share.split("+"))

    def check(self, nodes: Sequence[Node]) -> None:
        """What travels is there and has the same shape everywhere; something stays to be fitted."""
        for node in nodes:
            for part in self.shared(node):
                if part not in node.model.parts:
                    raise UnknownNameError(f"part of node {node.name}", part, node.model.parts)
            if not self._stays(node) and (self.head_epochs or self.finetune_epochs):
                raise ModelError(
                    f"all parts of node {node.name} travel, so none is left for the head phase. "
                    "Name its last layers as a part of their own: Model.split(net, trunk=..., "
                    "head='fc'); or set head_epochs=0."
                )
        super().check(nodes)
        if not self._stays(nodes[0]):
            self._check_classes(nodes)

    def local(self, node: Node) -> Iterable[Phase]:
        """One visit: Eq. (1), Eq. (2), and the optional step."""
        loop, decayed = _number(node, LOOP) + 1, self.decayed(node)
        node.memory[LOOP] = torch.tensor(loop)
        if self.finetune_epochs and loop >= self.rounds:
            yield self._phase(
                "finetune", self._stays(node), self.finetune_rate, epochs=self.finetune_epochs
            )
            return
        for label, parts, rate, epochs in (
            ("head", self._stays(node), self.head_rate, self.head_epochs),
            (TRUNK, self.shared(node), self.trunk_rate, self.trunk_epochs),
            ("full", (), 1.0, self.full_epochs),
        ):
            steps: dict[str, Any] = {"steps": self.visit_steps, "walk": True}
            length = steps if self.visit_steps else {"epochs": epochs}
            if epochs:
                yield self._phase(label, parts, rate * decayed, keep=label, **length)

    def sends(self, node: Node) -> Spec:
        """The trunk, the number of examples, and the loop it is in if the last is special."""
        return {**super().sends(node), **self._loop_spec()}

    def hears(self, node: Node) -> Spec:
        """The trunk, and the loop it is in if the last is special."""
        return {**super().hears(node), **self._loop_spec()}

    def send(self, node: Node) -> Message:
        """The trunk, the number of examples, and the loop it is in if the last is special."""
        loop = {LOOP: torch.tensor(_number(node, LOOP))} if self.finetune_epochs else {}
        return Message({**super().send(node).tensors, **loop})

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the trunk; who missed loops learns which one it is."""
        tensors = dict(message.tensors)
        if LOOP in tensors:
            done = int(tensors.pop(LOOP)) - 1
            node.memory[LOOP] = torch.tensor(max(_number(node, LOOP), done))
        node.model.load(tensors)
        return ()

    def _stays(self, node: Node) -> tuple[str, ...]:
        return tuple(part for part in node.model.parts if part not in self.shared(node))

    def _phase(self, label: str, parts: tuple[str, ...], rate: float, **settings: Any) -> Phase:
        objective = InTraining() if self.reference else cross_entropy
        optimiser = self.slowed(rate)
        return self.phase(label, objective=objective, parts=parts, optimiser=optimiser, **settings)

    def _loop_spec(self) -> Spec:
        return {LOOP: TensorSpec((), torch.int64, least=0)} if self.finetune_epochs else {}


@dataclass(frozen=True)
class InTraining:
    """Cross-entropy with the whole network in training mode, whatever moves.

    Dropout acts in frozen parts too, and their BatchNorm statistics drift, but for batches of one.
    """

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The mean of the samples' losses."""
        model.net.train(len(x) > 1)
        return cross_entropy(model, x, y)

    def after_step(self, model: Model) -> None:
        """Nothing to do; an objective that has this is trained node by node."""


def _number(node: Node, name: str) -> int:
    return int(node.memory.get(name, 0))

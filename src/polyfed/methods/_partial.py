"""What the methods with partial models have in common: the declaration, training, messages.

A method of the family says when slices are averaged and who averages them; the rest is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Phase, Rule, SquaredError, cross_entropy
from polyfed.errors import ConfigError
from polyfed.maths.mixing import weighted_mean
from polyfed.maths.scheme import GLOBAL
from polyfed.maths.slices import Slices
from polyfed.methods._layout import Plan, State
from polyfed.methods._slicing import Declared, checked, plan_of
from polyfed.models.associative import Hebbian
from polyfed.random import stream

_COUNT = "num_examples"


@dataclass(frozen=True, kw_only=True)
class PartialModels(Method):
    """Nodes whose networks are cut into slices.

    Attributes:
        scheme: cells of the global model in every layer, 784-250-80-10, or 80% of the hidden
            cells; none is no global model.
        groups: models that some share: fr=0-50-20-0@M0+M1;en=0-50-20-0@M2+M3.
        depends: what groups depend on: fr:global;qc:fr+global; or global, for all groups.
        cross: average between models neither of which depends on the other, too.
        weighting: of the mean: uniform, or by number of examples.
        loss: cross-entropy; squared, the error of one-hot labels; hebbian, an associative memory's
            rule.
        block: samples between two averagings, on through the data from block to block; 0: epochs.
        local_epochs: epochs between two averagings, where there are no blocks.
        shuffle: a new order for every pass through the data; else their own.
        own_start: groups and what nobody shares begin with values of their own, drawn from those
            of the network.
    """

    scheme: str | None = "80%"
    groups: str = ""
    depends: str = ""
    cross: bool = False
    weighting: Literal["uniform", "examples"] = "uniform"
    loss: Literal["cross-entropy", "squared", "hebbian"] = "cross-entropy"
    block: int = 0
    local_epochs: int = 1
    shuffle: bool = True
    own_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "weighting", ("uniform", "examples"))
        check.one_of(self, "loss", ("cross-entropy", "squared", "hebbian"))
        check.at_least(self, "block", 0)
        check.at_least(self, "local_epochs", 0)
        if self.block and self.batch < 1:
            raise ConfigError(
                f"{type(self).__name__}.batch={self.batch:g} is a share of the data, but a block "
                "counts samples. Set batch=1 for one after another, as in the paper."
            )
        self._objective()
        self.declared.check()

    @cached_property
    def declared(self) -> Declared:
        """The partial models, as typed."""
        return Declared(self.scheme, self.groups, self.depends, self.cross)

    def slices(self, nodes: Sequence[Node]) -> Slices:
        """Who shares which parameters; `report.network.network_svg` draws it."""
        return checked(self.declared, nodes)

    def check(self, nodes: Sequence[Node]) -> None:
        """Slices fit the networks and each other."""
        self.slices(nodes)

    def topics(self, nodes: Sequence[Node]) -> Mapping[str, tuple[Name, ...]]:
        """The partial models that two nodes or more implement."""
        slices = self.slices(nodes)
        return {topic: slices.implementers(topic) for topic in slices.topics()}

    # ---- training ------------------------------------------------------------------------------

    def start(self, node: Node) -> Iterable[Phase]:
        """Values of their own for all but the global model, if so wished."""
        if self.own_start:
            plan, state = self.plan(node)
            shared = [topic for topic in plan.index if topic != GLOBAL]
            streams = {topic: stream(node.seed, "slices", topic) for topic in shared}
            plan.begin_own(state, {**streams, "": node.stream("slices")})
        return ()

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data: a block of it, or epochs."""
        return (self._training,)

    @cached_property
    def _training(self) -> Phase:
        length: dict[str, Any] = {"epochs": self.local_epochs}
        if self.block:
            length = {"steps": -(-self.block // int(self.batch)), "walk": True}
        phase = self.phase("local", shuffle=self.shuffle, **length)
        return replace(phase, objective=self._objective())

    def _objective(self) -> Objective | Rule:
        if self.loss == "hebbian":
            return Hebbian(rate=self.lr)
        return SquaredError() if self.loss == "squared" else cross_entropy

    # ---- messages ------------------------------------------------------------------------------

    def plan(self, node: Node) -> tuple[Plan, State]:
        """What the node shares, and the tensors of its network."""
        return plan_of(self.declared, node)

    def announced(self, topics: Spec) -> Spec:
        """Numbers of topics, each with the number of examples where that counts."""
        if self.weighting == "uniform":
            return topics
        count = TensorSpec((), torch.int64, least=1)
        return {**topics, **{f"{topic}/{_COUNT}": count for topic in topics}}

    def said(self, node: Node, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, for a message."""
        if self.weighting == "uniform":
            return dict(vectors)
        count = torch.tensor(len(node.data["train"]))
        return {**vectors, **{f"{topic}/{_COUNT}": count for topic in vectors}}

    def known(self, node: Node) -> Mapping[str, Tensor]:
        """The numbers of the network that the node begins with."""
        plan, state = self.plan(node)
        return plan.pack(state)

    def mean(self, topic: str, got: Iterable[Message]) -> Tensor:
        """Of what was said about a topic, in the order of the messages."""
        said = [m.tensors for m in got if topic in m.tensors]
        weights = [float(t.get(f"{topic}/{_COUNT}", 1)) for t in said]
        return weighted_mean([{topic: t[topic]} for t in said], weights)[topic]


def spoken_of(got: Iterable[Message], what: str = "") -> list[str]:
    """The topics whose numbers, or something else about them, are in one of the messages."""
    names = {tuple(name.partition("/")[::2]) for message in got for name in message.tensors}
    return sorted(topic for topic, said in names if said == what)


def replies(answers: Mapping[Name, Mapping[str, Tensor]]) -> dict[Name, Message]:
    """A message for everybody who gets an answer; those who hear the same have the same one."""
    made: dict[tuple[str, ...], Message] = {}
    return {
        name: made.setdefault(tuple(answer), Message(answer))
        for name, answer in answers.items()
        if answer
    }

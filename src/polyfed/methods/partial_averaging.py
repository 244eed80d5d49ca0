r"""Partial averaging: nodes average slices of their networks, each slice with those who share it.

    every node trains;  then for every partial model m and each of its parameters pi
    z_pi <- mean {z_pi on p : p implements m}                                             (1)

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, Algorithm 1; with `cross` Algorithm 2.
Symbols: a partial model is cells of every layer that all its nodes have; a node's slice is its
cells that belong to one model; pi belongs to the model of its cells, or to the one of two that
depends on the other (`maths/scheme.py`).
Limits: one global model of everything is FedAvg with uniform weights; a scheme of zeros is local
training. After Eq. (1) all who share a parameter have the same value.
Deviations from the paper: `weighting` by examples is not in it. Its training, which it does not
spell out, is `loss="squared"` with `block` and `batch=1`: one sample after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.message import Message, Spec
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.errors import ConfigError
from polyfed.methods._partial import PartialModels, replies, spoken_of

LEVELS = {0: 0, 15: 50, 30: 100, 60: 200, 80: 250, 100: 300}  # second and first hidden layer


def paper_scheme(level: int, outputs: int = 10) -> str:
    """The paper's averaging level of its network 784=300=100=k, section V.1.

    >>> paper_scheme(80), paper_scheme(0)
    ('784-250-80-10', '0-0-0-0')
    """
    if level not in LEVELS:
        raise ConfigError(f"level {level} is none of the paper's: {', '.join(map(str, LEVELS))}.")
    return f"784-{LEVELS[level]}-{level}-{outputs}" if level else "0-0-0-0"


@dataclass(frozen=True, kw_only=True)
class PartialAveraging(PartialModels):
    """Average slices of networks, each among the nodes that share it."""

    name: ClassVar[str] = "partial-averaging"
    title: ClassVar[str] = "average slices of networks, each among those who share it"
    topologies: ClassVar[tuple[str, ...]] = ("star", "groups", "gossip")
    averages: ClassVar[bool] = True

    def sends(self, node: Node) -> Spec:
        """The numbers of each topic that the node shares."""
        plan, _ = self.plan(node)
        return self.announced(plan.spec)

    def hears(self, node: Node) -> Spec:
        """Their means."""
        plan, _ = self.plan(node)
        return plan.spec

    def send(self, node: Node) -> Message:
        """The numbers of each topic that the node shares."""
        plan, state = self.plan(node)
        return Message(self.said(node, plan.pack(state)))

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """Eq. (1) for every topic; to each node the topics that it shares."""
        means = {topic: self.mean(topic, got.values()) for topic in spoken_of(got.values())}
        shares = self.declared.shares
        return replies({n: {t: means[t] for t in means if shares(n, t)} for n in to})

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Put the means in their places."""
        plan, state = self.plan(node)
        plan.unpack(state, message.tensors)
        return ()

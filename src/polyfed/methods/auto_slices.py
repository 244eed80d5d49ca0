r"""Automatic slices: partial averaging whose groups the hub finds while nodes train.

    s_pq = cos(z_p - zbar, z_q - zbar)            of the slices that groups are to share        (1)
    groups = average linkage of s, cut by silhouette (`maths/grouping.py`)
    z_p <- mean {z_q : q in the group of p}       from then on; the global model all the while  (2)

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section VII, leave it as a next step to assign
models to peers automatically. This way to do so is ours.
Symbols: z_p = node p's numbers of the slice: its weights and biases, and the weights between it and
the global model, on which it depends. All nodes begin with the same; zbar = their mean. With
`cross` the weights between the two belong to the slice, too, if neither depends on the other.
Until the groups are to be found the slice is each node's own and is not sent; then the hub asks for
it (1 byte). A node that was away is asked when it is back, and the groups are found anew.
Limits: `count` = 1 averages the slice among all; `after` >= `rounds` is partial averaging with
slices of their own.
Deviations from the paper: it has no such method. Similarity of updates has been used to cluster
nodes before (Sattler, Mueller, Samek, arXiv:1910.01991); here it decides about a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import torch

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.errors import ConfigError
from polyfed.maths.grouping import grouped, similarity
from polyfed.maths.scheme import GLOBAL
from polyfed.methods._partial import PartialModels, spoken_of
from polyfed.methods._slicing import Declared

T = TypeVar("T")
AUTO = "auto"
_ASK, _ASKED, _MEETINGS, _GROUP = f"{AUTO}/ask", "asked", "meetings", "group"


@dataclass(frozen=True, kw_only=True)
class AutoSlices(PartialModels):
    """Average a global model among all, and one more slice among groups that the hub finds.

    Attributes:
        groups: cells of the slice that groups share, 0-50-20-0; rest is what the global model
            leaves of the hidden layers.
        depends: what the slice depends on: global, or nothing.
        after: rounds before the groups are found.
        count: how many groups there are; 0 is as many as the silhouette says.
    """

    name: ClassVar[str] = "auto-slices"
    title: ClassVar[str] = "partial averaging whose groups the hub finds"
    topologies: ClassVar[tuple[str, ...]] = ("star",)

    groups: str = "rest"
    depends: str = GLOBAL
    after: int = 30
    count: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "after", 0)
        check.at_least(self, "count", 0)

    @cached_property
    def declared(self) -> Declared:
        """The global model, and a slice that everybody has."""
        return Declared(self.scheme, f"{AUTO}={self.groups}@*", self.depends, self.cross)

    def check(self, nodes: Sequence[Node]) -> None:
        """As partial averaging, and there is something for groups to share."""
        super().check(nodes)
        if not any(AUTO in self.plan(node)[0].index for node in nodes):
            raise ConfigError(
                f"auto-slices: with scheme={self.scheme} and groups={self.groups} no cell is left "
                "for groups to share. Fix: a smaller global model."
            )

    def sends(self, node: Node) -> Spec:
        """The numbers of the global model; those of the slice, once they were asked for."""
        return self.announced(self._topics(node, self.plan(node)[0].spec))

    def hears(self, node: Node) -> Spec:
        """Their means; before, whether the slice is asked for."""
        spec = self.plan(node)[0].spec
        ask = {} if _is_asked(node) else {_ASK: TensorSpec((), torch.bool)}
        return {**self._topics(node, spec), **ask}

    def send(self, node: Node) -> Message:
        """The numbers of the global model; those of the slice, once they were asked for."""
        plan, state = self.plan(node)
        return Message(self.said(node, self._topics(node, plan.pack(state))))

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """Eq. (2), and before there are groups the question, when its time has come."""
        meetings = int(place.memory.get(_MEETINGS, 0)) + 1
        place.memory[_MEETINGS] = torch.tensor(meetings)
        topics = spoken_of(got.values())
        whole = {topic: self.mean(topic, got.values()) for topic in topics if topic == GLOBAL}
        asked = [name for name, message in got.items() if AUTO in message.tensors]
        question = Message({**whole, _ASK: torch.tensor(meetings >= self.after)})
        replies = {name: question for name in to if name in got and name not in asked}
        own = [topic for topic in topics if topic != GLOBAL]
        for members in self._found(place, {name: got[name] for name in asked}):
            means = {topic: self.mean(topic, [got[name] for name in members]) for topic in own}
            replies |= dict.fromkeys(set(members) & set(to), Message({**whole, **means}))
        return replies

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Put the means in their places; note whether the slice is asked for."""
        plan, state = self.plan(node)
        plan.unpack(state, {t: z for t, z in message.tensors.items() if t != _ASK})
        if _ASK in message.tensors:
            node.memory[_ASKED] = message.tensors[_ASK]
        return ()

    def _topics(self, node: Node, every: Mapping[str, T]) -> dict[str, T]:
        """What the node speaks about."""
        return {t: each for t, each in every.items() if t == GLOBAL or _is_asked(node)}

    def _found(self, place: Node, got: Mapping[Name, Message]) -> list[list[Name]]:
        """Who is in a group with whom; found anew when somebody joins."""
        known = {name: int(group) for name, group in place.recall(_GROUP).items()}
        if not got.keys() <= known.keys():
            names = sorted(got)
            z = torch.stack([got[name].tensors[AUTO] for name in names])
            groups = grouped(similarity(z), self.count)
            known = {names[i]: g for g, group in enumerate(groups) for i in group}
            place.remember(_GROUP, {name: torch.tensor(g) for name, g in known.items()})
        found: dict[int, list[Name]] = {}
        for name in sorted(got):
            found.setdefault(known[name], []).append(name)
        if found:
            place.notes["groups"] = " ".join("+".join(members) for members in found.values())
        return list(found.values())


def _is_asked(node: Node) -> bool:
    return bool(node.memory.get(_ASKED, False))

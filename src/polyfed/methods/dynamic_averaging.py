r"""Dynamic averaging: slices are averaged only when they have moved far enough to be worth it.

    d_p = |z_p - r_p| / sqrt(n)              how far node p's n numbers of a topic have moved   (1)
    mean_p d_p > drift                       then they are averaged, in the next round          (2)

Kamp et al., ECML-PKDD 2018, arXiv:1807.03210, on the slices of partial averaging (Bouchra Pilet,
Frey, Taiani, IDA 2021), whose section VII names it as a next step.
Symbols: z_p = a node's numbers of a topic, r_p = what they were when last averaged, at first the
initial values; drift = the bound.
In a round a node says d_p for each topic, 4 bytes. If Eq. (2) holds, the hub asks, 1 byte; if not,
it is silent. Who was asked sends its numbers in the next round in place of d_p, and gets the mean.
A node that was away when the others were asked is asked by itself, and meets them the next time.
Limits: drift -> 0 averages in every second round; drift -> inf is local training.
Deviations from the papers: Kamp et al. average as soon as one |z_p - r|^2 is above a bound, and try
to do so among few nodes first; here the mean decides, for all, and one round later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.methods._partial import PartialModels, replies, spoken_of

_MOVED, _ASK = "moved", "ask"
_AVERAGED, _ASKED = "averaged", "asked"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DynamicAveraging(PartialModels):
    """Average slices among those who share them, when they have moved far enough.

    Attributes:
        drift: root mean square change of the shared numbers from which on they are averaged.
    """

    name: ClassVar[str] = "dynamic-averaging"
    title: ClassVar[str] = "average slices of networks when they have moved far enough"
    topologies: ClassVar[tuple[str, ...]] = ("star", "groups")

    drift: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "drift", hint="To average in every round use PartialAveraging().")

    def start(self, node: Node) -> Iterable[Phase]:
        """Remember where the slices begin."""
        yield from super().start(node)
        plan, state = self.plan(node)
        node.remember(_AVERAGED, plan.pack(state))

    def sends(self, node: Node) -> Spec:
        """The numbers of topics that were asked for; of the others, how far they have moved."""
        asked, other = _sorted(node, self.plan(node)[0].spec)
        moved = {f"{topic}/{_MOVED}": TensorSpec((), spec.dtype) for topic, spec in other.items()}
        return {**self.announced(asked), **moved}

    def hears(self, node: Node) -> Spec:
        """The means of what was asked for; of the other topics, whether they are asked for."""
        asked, other = _sorted(node, self.plan(node)[0].spec)
        return {**asked, **{f"{topic}/{_ASK}": TensorSpec((), torch.bool) for topic in other}}

    def send(self, node: Node) -> Message:
        """The numbers of topics that were asked for; of the others d_p of Eq. (1)."""
        plan, state = self.plan(node)
        asked, other = _sorted(node, plan.pack(state))
        moved = {
            f"{topic}/{_MOVED}": (z - node.memory[f"{_AVERAGED}/{topic}"]).square().mean().sqrt()
            for topic, z in other.items()
        }
        return Message({**self.said(node, asked), **moved})

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The means of what was sent, and Eq. (2) for the rest; silence where there is neither."""
        means, asks = {}, {}
        for topic in spoken_of(got.values()):
            means[topic] = self.mean(topic, got.values())
        for topic in spoken_of(got.values(), _MOVED):
            asks[topic] = self._asks(place, topic, got.values())
        answers = {}
        for name in to:
            said = got[name].tensors if name in got else {}
            answer = {topic: mean for topic, mean in means.items() if topic in said}
            flags = {f"{t}/{_ASK}": ask for t, ask in asks.items() if f"{t}/{_MOVED}" in said}
            if answer or any(flags.values()):
                answers[name] = {**answer, **flags}
        return replies(answers)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Put the means in their places; note what is asked for."""
        plan, state = self.plan(node)
        means = {topic: t for topic, t in message.tensors.items() if topic in plan.index}
        plan.unpack(state, means)
        for topic, mean in means.items():
            node.memory[f"{_AVERAGED}/{topic}"] = mean
            node.memory[f"{_ASKED}/{topic}"] = torch.tensor(False)
        for topic in plan.index:
            if f"{topic}/{_ASK}" in message.tensors:
                node.memory[f"{_ASKED}/{topic}"] = message.tensors[f"{topic}/{_ASK}"]
        return ()

    def _asks(self, place: Node, topic: str, got: Iterable[Message]) -> Tensor:
        """Whether Eq. (2) holds for a topic."""
        said = [m.tensors.get(f"{topic}/{_MOVED}") for m in got]
        moved = torch.stack([d for d in said if d is not None]).mean()
        place.notes[f"{_MOVED} {topic}"] = float(moved)
        return (moved > self.drift).cpu()


def _sorted(node: Node, topics: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Topics that the node was asked for, and the others."""
    is_asked = {topic: bool(node.memory.get(f"{_ASKED}/{topic}", False)) for topic in topics}
    asked = {topic: each for topic, each in topics.items() if is_asked[topic]}
    return asked, {topic: each for topic, each in topics.items() if not is_asked[topic]}

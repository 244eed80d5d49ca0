"""Groups: a hub for every topic. Who shares a partial model meets at its hub, and nowhere else.

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section II.4: several servers, one a model (and
one for each pair of models, where weights between two models are averaged too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyfed import check
from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Tick, Topology
from polyfed.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Groups(Topology):
    """One hub for every topic: it hears what is said about that topic, and nothing else.

    Attributes:
        every: meet in every so manieth round; in the others nodes only train.
    """

    name: ClassVar[str] = "groups"

    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "every", 1)

    @property
    def places(self) -> tuple[Name, ...]:
        """A hub for every topic."""
        return tuple(map(_hub, self.topics))

    def check(self) -> None:
        """No node is called as a hub is."""
        for name in self.names:
            if name in self.places:
                raise ConfigError(
                    f"node name {name!r} is taken: the topology {self.name} has a place of that "
                    "name. Call the node something else."
                )

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """All alive nodes work; those who share a topic meet at its hub."""
        meetings = []
        for topic, names in self.topics.items() if t % self.every == 0 else ():
            here = tuple(sorted(alive.intersection(names)))
            if here:
                meetings.append(Meeting(_hub(topic), here, here, topic))
        return Tick(tuple(sorted(alive)), tuple(meetings))


def _hub(topic: str) -> Name:
    return f"hub-{topic}"

"""Star: every node that is alive trains; all messages meet at one hub, which answers all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Tick, Topology


@dataclass(frozen=True)
class Star(Topology):
    """One hub, everybody meets there at every tick."""

    name: ClassVar[str] = "star"
    places: ClassVar[tuple[Name, ...]] = ("hub",)

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """All alive nodes work and meet at the hub."""
        everyone = tuple(sorted(alive))
        return Tick(everyone, (Meeting("hub", everyone, everyone),))

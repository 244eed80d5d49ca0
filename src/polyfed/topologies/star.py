"""Star: every node that is alive trains; all messages meet at one hub, which answers all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Tick, Topology

HUB = "hub"


@dataclass(frozen=True, kw_only=True)
class Star(Topology):
    """One hub, everybody meets there at every tick."""

    name: ClassVar[str] = "star"

    @property
    def places(self) -> tuple[Name, ...]:
        """One hub."""
        return (HUB,)

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """All alive nodes work and meet at the hub."""
        everyone = tuple(sorted(alive))
        return Tick(everyone, (Meeting(HUB, everyone, everyone),))

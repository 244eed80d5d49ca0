"""Alone: every node trains, nobody meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Name
from polyfed.core.topology import Tick, Topology


@dataclass(frozen=True, kw_only=True)
class Alone(Topology):
    """No meetings: the topology of local and joint training."""

    name: ClassVar[str] = "alone"

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """All alive nodes work."""
        return Tick(tuple(sorted(alive)), ())

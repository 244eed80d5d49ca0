"""Mesh: every node that is alive trains, then tells everybody; nobody is in the middle.

Every node is the place of a meeting with all others: it combines what it hears itself. A link that
is cut keeps the two from hearing each other, and nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Seen, State, Tick, Topology


@dataclass(frozen=True, kw_only=True)
class Mesh(Topology):
    """Everybody tells everybody, without a hub."""

    name: ClassVar[str] = "mesh"
    has_links: ClassVar[bool] = True

    def round(self, t: int, seen: Seen) -> Iterable[Tick]:
        """One tick among what works in round t."""
        yield _meetings(seen(t))

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """One tick where no link is cut."""
        return _meetings(State(alive))


def _meetings(state: State) -> Tick:
    """A meeting at every node with all whose links to it work, and itself."""
    names = tuple(sorted(state.alive))
    return Tick(
        names,
        tuple(
            Meeting(at, tuple(n for n in names if frozenset((at, n)) not in state.cut), (at,))
            for at in names
        ),
    )

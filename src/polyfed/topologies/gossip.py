"""Gossip: no hub. Nodes train, then meet in random pairs, cycle after cycle (`maths/gossip.py`).

A pair meets about one topic at a time, and only those who share it meet about it. Both have what
they agreed on when they meet the next, so what all have together stays the same: the mean is kept,
whoever is away, and nodes that were away catch up when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import ClassVar, Literal

from polyfed import check
from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Seen, State, Tick, Topology
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.maths import gossip
from polyfed.random import stream

COMPLETE, RING, REGULAR = "complete", "ring", "regular"
_FORM = "Write complete, ring, regular:4 or the links themselves, M0:M1+M1:M2."

Links = Mapping[Name, frozenset[Name]]


@dataclass(frozen=True, kw_only=True)
class Gossip(Topology):
    """No hub: nodes meet in random pairs, and both take what the two have on average.

    Attributes:
        cycles: how often everybody meets somebody in a round.
        pairs: of a cycle: all at once, nobody in two (matching), or every node in turn picks one
            (sequential), which mixes faster and takes more time and twice the messages.
        graph: who can meet: complete, ring, regular:4 (the four nearest on the ring of names), or
            the links themselves, M0:M1+M1:M2.
        every: meet in every so manieth round; in the others nodes only train.
    """

    name: ClassVar[str] = "gossip"
    has_links: ClassVar[bool] = True

    cycles: int = 10
    pairs: Literal["matching", "sequential"] = "matching"
    graph: str = COMPLETE
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "cycles", 1)
        check.at_least(self, "every", 1)
        check.one_of(self, "pairs", ("matching", "sequential"))

    def check(self) -> None:
        """Whoever shares a topic can be reached by all others who do, through nodes who do."""
        for topic, names in self._shared().items():
            links = self._links(names, State(frozenset(names)))
            if links is None or not names:
                continue
            found = gossip.reached(links, 0)
            lost = [name for i, name in enumerate(names) if i not in found]
            if lost:
                about = f" that share '{topic}'" if topic else ""
                raise ConfigError(
                    f"gossip: the graph '{self.graph}' does not connect the nodes{about}: no way "
                    f"from {names[0]} to {', '.join(lost)}. Fix: add links, or graph=complete."
                )

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """Not for gossip: a round has several ticks."""
        raise NotImplementedError("a round of gossip has several ticks: use round(t, seen).")

    def round(self, t: int, seen: Seen) -> Iterator[Tick]:
        """All train; then cycle after cycle, in each topic's own pairs."""
        state = seen(t)
        steps = self._steps(t, state) if t % self.every == 0 else iter(())
        yield Tick(tuple(sorted(state.alive)), next(steps, ()))
        yield from (Tick((), meetings) for meetings in steps)

    def _steps(self, t: int, state: State) -> Iterator[tuple[Meeting, ...]]:
        """Meetings that take place at the same time, step by step."""
        for cycle in range(self.cycles):
            each = [
                self._cycle(topic, names, t, cycle, state)
                for topic, names in self._shared().items()
            ]
            for step in zip_longest(*each, fillvalue=()):
                yield tuple(meeting for meetings in step for meeting in meetings)

    def _cycle(
        self, topic: str, names: Sequence[Name], t: int, cycle: int, state: State
    ) -> list[tuple[Meeting, ...]]:
        """One cycle of one topic; the second of a pair is where the two meet."""
        here = [i for i, name in enumerate(names) if name in state.alive]
        chance = stream(self.seed, "topology", self.name, topic, t, cycle)
        draw = gossip.matching if self.pairs == "matching" else gossip.sequential
        steps = gossip.layered(draw(here, chance, self._links(names, state)))
        return [
            tuple(
                Meeting(names[b], (names[a], names[b]), (names[a], names[b]), topic)
                for a, b in step
            )
            for step in steps
        ]

    def _shared(self) -> Mapping[str, tuple[Name, ...]]:
        """Who meets about what; about everything, where a message is one whole."""
        topics = self.topics or {"": self.names}
        return {topic: tuple(sorted(names)) for topic, names in topics.items()}

    def _links(self, names: Sequence[Name], state: State) -> gossip.Graph | None:
        """Who of these can meet, by their places in `names`; None if all can."""
        if self.graph == COMPLETE and not state.cut:
            return None
        links = links_of(self.graph, self.names)
        place = {name: i for i, name in enumerate(names) if name in state.alive}
        return {
            i: sorted(
                place[other]
                for other in links[name] & place.keys()
                if frozenset((name, other)) not in state.cut
            )
            for name, i in place.items()
        }


@lru_cache(maxsize=16)
def links_of(graph: str, names: tuple[Name, ...]) -> Links:
    """Each node's neighbours in a graph that a person typed.

    >>> {name: sorted(others) for name, others in links_of("A:B+B:C", ("A", "B", "C")).items()}
    {'A': ['B'], 'B': ['A', 'C'], 'C': ['B']}
    """
    found: dict[Name, set[Name]] = {name: set() for name in names}
    for a, b in _typed(graph, names):
        for name in (a, b):
            if name not in found:
                raise UnknownNameError("node of topology gossip", name, names)
        found[a].add(b)
        found[b].add(a)
    return {name: frozenset(others - {name}) for name, others in found.items()}


def _typed(graph: str, names: Sequence[Name]) -> list[tuple[Name, Name]]:
    """The links of a graph."""
    kind, _, number = graph.partition(":")
    if graph == COMPLETE:
        return [(a, b) for a in names for b in names]
    if graph == RING or (kind == REGULAR and number.isdecimal()):
        near = int(number or 2)
        if near < 2 or near % 2:
            raise ConfigError(f"gossip: graph '{graph}' must have an even number of neighbours.")
        n = len(names)
        return [(names[i], names[(i + d) % n]) for i in range(n) for d in range(1, near // 2 + 1)]
    pairs = [link.split(":") for link in graph.split("+")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ConfigError(f"gossip: graph '{graph}' is not understood. {_FORM}")
    return [(a, b) for a, b in pairs]

"""Rings: what a method shares goes from node to node along links, and there is no hub.

    ring        one way round; a node hands on to the next that is alive
    dual-ring   both ways: where a link is cut, messages go the other way round, in the same order
    pipeline    a dual ring on which several trunks travel at the same time

A round visits every node once. A tick is a visit: the node trains, then hands on to the next; what
the last visit of a round left behind is handed on when the next round begins, so that after a round
every node still has what it had after its own visit.

The ring joins the nodes that are alive, in its order, and a link is cut if its two ends cannot talk
directly. One cut makes the ring a line, two or more make it fall into parts. Both ways round, every
part goes on as a ring of its own, from the trunk of its node that was visited last; one way round,
it goes on as a line, whose first node hears from nobody. When parts come together again, their
trunks meet at the first node (its method averages them). Li et al. (LI), section 3.5 and Fig. 3,
leave this open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch

from polyfed import check
from polyfed.core.node import Name
from polyfed.core.topology import Meeting, Seen, State, Tick, Topology
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.random import stream

RANDOM = "random"


@dataclass(frozen=True)
class Part:
    """Nodes that can reach each other in a round.

    Attributes:
        line: all of them, along their links.
        is_closed: whether the last has a link to the first.
        arcs: those that are visited, one after the other, for each trunk that travels.
    """

    line: tuple[Name, ...]
    is_closed: bool
    arcs: tuple[tuple[Name, ...], ...]

    def hops(self, source: Name, to: Name, *, both_ways: bool) -> int:
        """Links that a message crosses."""
        here, there = self.line.index(source), self.line.index(to)
        if not self.is_closed:
            return abs(there - here)
        forward = (there - here) % len(self.line)
        return min(forward, len(self.line) - forward) if both_ways else forward


@dataclass(frozen=True, kw_only=True)
class Loop(Topology):
    """What all rings have in common.

    Attributes:
        order: of the nodes along the ring, "M2+M0+M1"; empty is the order of their names; "random"
            visits them in another order every round, along the ring of their names.
        balance: slow nodes that are visited less often: "M2:3+M5:2" visits M2 in every third round
            and M5 in every second, from the first on.
    """

    has_links: ClassVar[bool] = True
    both_ways: ClassVar[bool] = True

    order: str = ""
    balance: str = ""

    def check(self) -> None:
        """At least two nodes, and an order that names each of them once."""
        if len(self.names) < 2:
            raise ConfigError(
                f"a {self.name} needs at least two nodes, got {len(self.names)}: "
                f"{', '.join(self.names)}. For one node use the method local."
            )
        ring = self._ring()
        for name in [*ring, *self._pauses()]:
            if name not in self.names:
                raise UnknownNameError(f"node of topology {self.name}", name, self.names)
        for name in self.names:
            if ring.count(name) != 1:
                raise ConfigError(
                    f"{self.name}: order '{self.order}' names {name} {ring.count(name)} times. It "
                    "must name every node once, as in 'M2+M0+M1'."
                )

    def trunks(self, visits: int) -> int:
        """How many trunks travel at the same time, where so many nodes are visited."""
        return 1

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """Not for rings: a round has several ticks."""
        raise NotImplementedError("a round of a ring has several ticks: use round(t, seen).")

    def round(self, t: int, seen: Seen) -> Iterator[Tick]:
        """Hand on what the last round left behind, then visit node after node."""
        parts = self.parts(t, seen(t))
        begun = tuple(meeting for part in parts for meeting in self._hand_on(t, part, seen))
        if begun:
            yield Tick((), begun)
        arcs = [(part, arc) for part in parts for arc in part.arcs]
        for i in range(max((len(arc) for _, arc in arcs), default=0)):
            active = tuple(arc[i] for _, arc in arcs if i < len(arc))
            yield Tick(
                active,
                tuple(self._meeting(p, arc[i + 1], arc[i]) for p, arc in arcs if i + 1 < len(arc)),
            )

    def parts(self, t: int, state: State) -> list[Part]:
        """The parts that the ring is in, in round t."""
        lines, is_closed = cut_ring([n for n in self._ring() if n in state.alive], state.cut)
        return [Part(tuple(line), is_closed, self._arcs(t, line, is_closed)) for line in lines]

    def _arcs(self, t: int, line: Sequence[Name], is_closed: bool) -> tuple[tuple[Name, ...], ...]:
        """Who of a part is visited in round t; if all would rest, all are."""
        order = [n for n in self._turn(t) if n in line] if self.both_ways or is_closed else line
        pauses = self._pauses()
        due = [n for n in order if (t - 1) % pauses.get(n, 1) == 0] or order
        return shares(due, self.trunks(len(due)))

    def _hand_on(self, t: int, part: Part, seen: Seen) -> Iterator[Meeting]:
        """What the round before left behind goes to the first nodes of this one."""
        if not (self.both_ways or part.is_closed):
            return
        ends, firsts = self._ends(t, part, seen), [arc[0] for arc in part.arcs]
        n = max(len(ends), len(firsts))
        sources: dict[Name, list[Name]] = {first: [] for first in firsts}
        for i in range(n if ends else 0):
            first = firsts[(i * len(firsts) // n + 1) % len(firsts)]
            sources[first].append(ends[i * len(ends) // n])
        for first, found in sources.items():
            if set(found) - {first}:
                yield self._meeting(part, first, *found, *self._keeps(first, ends))

    def _keeps(self, first: Name, ends: Sequence[Name]) -> tuple[Name, ...]:
        """Who meets what arrives at a first node: nobody, it replaces what the node has."""
        return ()

    def _ends(self, t: int, part: Part, seen: Seen) -> list[Name]:
        """Nodes of a part that were visited last, for each trunk that one of them had."""
        turn = self._turn(t)
        for earlier in range(t - 1, 0, -1):
            arcs = [arc for old in self.parts(earlier, seen(earlier)) for arc in old.arcs]
            here = [[name for name in arc if name in part.line] for arc in arcs]
            ends = [visited[-1] for visited in here if visited]
            if ends:
                return sorted(ends, key=turn.index)
        return []

    def _meeting(self, part: Part, to: Name, *sources: Name) -> Meeting:
        """Trunks meet at the node that goes on with them; the way is that of the farthest."""
        far = max(part.hops(source, to, both_ways=self.both_ways) for source in sources)
        return Meeting(to, tuple(dict.fromkeys(sources)), (to,), hops=far)

    def _ring(self) -> tuple[Name, ...]:
        return self.names if self.order in ("", RANDOM) else tuple(self.order.split("+"))

    def _turn(self, t: int) -> tuple[Name, ...]:
        """All nodes in the order of round t's visits."""
        ring = self._ring()
        if self.order != RANDOM:
            return ring
        chance = stream(self.seed, "topology", "ring", t)
        return tuple(ring[i] for i in torch.randperm(len(ring), generator=chance).tolist())

    def _pauses(self) -> dict[Name, int]:
        """In every how manieth round a node is visited, if not in every."""
        found = {}
        for entry in filter(None, self.balance.split("+")):
            name, _, number = entry.partition(":")
            if not number.isdecimal() or int(number) < 1:
                raise ConfigError(
                    f"{self.name}: balance '{entry}': write NODE:N, as in 'M2:3' for a node that "
                    "is visited in every third round."
                )
            found[name] = int(number)
        return found


@dataclass(frozen=True, kw_only=True)
class Ring(Loop):
    """One trunk travels from node to node, one way round."""

    name: ClassVar[str] = "ring"
    both_ways: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class DualRing(Loop):
    """A ring with links both ways: it goes on if one is cut, in parts if more are."""

    name: ClassVar[str] = "dual-ring"


@dataclass(frozen=True, kw_only=True)
class Pipeline(Loop):
    """A dual ring on which several trunks travel at once: all nodes are busy.

    The nodes of a round are shared out among the trunks, in stretches of the ring; with a trunk for
    every node all train at once and pass on. So a round trains and sends as much as that of a ring.

    Attributes:
        tokens: trunks that travel at once; 0 is one for every node.
        merge: what arrives at a node that has itself just trained is averaged with its own trunk
            (mean) or replaces it.
    """

    name: ClassVar[str] = "pipeline"

    tokens: int = 0
    merge: Literal["mean", "replace"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "tokens", 0)
        check.one_of(self, "merge", ("mean", "replace"))
        if self.tokens and self.merge == "mean":
            raise ConfigError(
                f"pipeline: tokens={self.tokens} leaves nodes without a trunk of this round to "
                "average with. Say merge=replace, or leave tokens out."
            )

    def check(self) -> None:
        """Not more trunks than nodes."""
        super().check()
        if self.tokens > len(self.names):
            raise ConfigError(
                f"pipeline: {self.tokens} tokens for {len(self.names)} nodes. At most one each."
            )

    def trunks(self, visits: int) -> int:
        """As many as asked for, and not more than nodes."""
        return min(self.tokens or visits, visits)

    def _keeps(self, first: Name, ends: Sequence[Name]) -> tuple[Name, ...]:
        return (first,) if self.merge == "mean" and first in ends else ()


def cut_ring(
    ring: Sequence[Name], cut: Iterable[frozenset[Name]]
) -> tuple[list[Sequence[Name]], bool]:
    """A ring's nodes in lines between the links that are cut, and whether it is still closed.

    >>> cut_ring("ABCD", [frozenset("AB")]), cut_ring("ABCD", [frozenset("BC"), frozenset("AD")])
    (([['B', 'C', 'D', 'A']], False), ([['C', 'D'], ['A', 'B']], False))
    """
    links, n = set(cut), len(ring)
    after = [i + 1 for i in range(n) if frozenset((ring[i], ring[(i + 1) % n])) in links]
    if not after:
        return [ring] if ring else [], True
    ends = [*after[1:], after[0] + n]
    return [[ring[i % n] for i in range(*span)] for span in zip(after, ends, strict=True)], False


def shares(names: Sequence[Name], count: int) -> tuple[tuple[Name, ...], ...]:
    """Names in `count` stretches, as equal as can be.

    >>> shares("ABCDE", 2)
    (('A', 'B', 'C'), ('D', 'E'))
    """
    bounds = [-(-i * len(names) // count) for i in range(count + 1)]
    return tuple(tuple(names[a:b]) for a, b in pairwise(bounds))

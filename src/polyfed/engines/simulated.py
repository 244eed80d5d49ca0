"""A simulated network: the parties of the peer engine, above a transport made of one seeded clock.

Every frame has a delay; a script of faults, drawn from the seed, loses, repeats and reorders them,
crashes parties and begins them again, cuts the network in two and heals it, makes parties slow and
their clocks wrong. Everything is a function of the seed: a run that fails is replayed from it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from polyfed.core.node import Name, Node
from polyfed.engines.charter import Charter
from polyfed.engines.party import Party
from polyfed.engines.player import Work
from polyfed.engines.store import MemoryStore
from polyfed.errors import RunError
from polyfed.random import seed_of
from polyfed.record import Recorder
from polyfed.train.together import Trainer


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What the network does to frames, and how parties are; times are seconds.

    Attributes:
        delay: the longest that a frame takes; they overtake each other.
        loss: share of frames that are lost.
        twice: share of frames that arrive twice.
        notice: the longest until parties see that another came or went.
        slow: how long a party takes for a piece of work, by name.
        skew: by how much a party's clock runs fast, by name: 0.1 is ten per cent.
    """

    delay: float = 0.01
    loss: float = 0.0
    twice: float = 0.0
    notice: float = 0.1
    slow: Mapping[Name, float] = field(default_factory=dict)
    skew: Mapping[Name, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A fault at a time: crash X, start X, cut X+Y (from all others), sever X+Y, heal."""

    at: float
    verb: str
    names: tuple[Name, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb} {'+'.join(self.names)} @{self.at:.2f}"


Make = Callable[[Name], Node | None]
Watch = Callable[["Network"], None]


class Network:
    """All parties of a run, and what happens between them.

    Args:
        charter: what they agree on.
        make: a party's own node, as its site would build it, at the beginning of every life.
        seed: of everything that is left to chance.
        weather: of the network.
        events: faults.
        piece: bytes of a frame.
        watch: called after every event.
        trace: takes a line for everything that happens.
    """

    def __init__(
        self,
        charter: Charter,
        make: Make,
        *,
        seed: int = 0,
        weather: Weather | None = None,
        events: Sequence[Event] = (),
        piece: int = 1 << 16,
        watch: Watch | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.charter, self.weather = charter, weather or Weather()
        self.stores = {name: MemoryStore() for name in charter.parties}
        self.recorders = {name: Recorder.in_memory() for name in charter.parties}
        self.parties: dict[Name, Party] = {}
        self.over: dict[Name, Party] = {}
        self.now = 0.0
        self._make, self._watch, self._trace, self._piece = make, watch, trace, piece
        self._chance = Chance(seed)
        self._side: frozenset[Name] = frozenset()  # a part that is cut off from the rest
        self._severed: set[frozenset[Name]] = set()
        self._seen: dict[tuple[Name, Name], bool] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wakes: dict[Name, float] = {}
        self._begun: dict[Name, Work] = {}
        self._trainer = Trainer("never")
        for event in events:
            self._at(event.at, partial(self._strike, event))
        for name in charter.parties:
            self._at(self._chance() * self.weather.delay, partial(self._start, name))

    def run(self, limit: float = 1e6) -> None:
        """Until every party that is there is over."""
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            if self.now > limit:
                raise RunError(f"not over after {limit:g} simulated seconds: {self._standing()}")
            act()
            if self._watch is not None:
                self._watch(self)

    def reaches(self, one: Name, other: Name) -> bool:
        """Whether two parties could talk now."""
        here = one in self.parties and other in self.parties
        joined = (one in self._side) == (other in self._side)
        return here and joined and frozenset((one, other)) not in self._severed

    # ---- events --------------------------------------------------------------------------------

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, act))

    def _strike(self, event: Event) -> None:
        self._say(str(event))
        if event.verb == "crash":
            for name in event.names:
                self.parties.pop(name, None)
        elif event.verb == "start":
            for name in event.names:
                if name not in self.parties and name not in self.over:
                    self._start(name)
        elif event.verb == "sever":
            self._severed.add(frozenset(event.names))
        else:
            self._side = frozenset(event.names) if event.verb == "cut" else frozenset()
            self._severed.clear()
        self._look()

    def _start(self, name: Name) -> None:
        node = self.charter.enter(name, self._make(name), torch.device("cpu"))
        party = Party(
            self.charter, name, node, self.stores[name], self.recorders[name], piece=self._piece
        )
        self.parties[name] = party
        self._wakes.pop(name, None)
        for other in self.charter.parties:
            self._seen.pop((name, other), None)
            if self._seen.get((other, name)):
                self._seen[other, name] = False  # a new life is seen anew
        self._call(party, "begin")
        self._look()

    def _look(self) -> None:
        """Let every party notice, a little later, who can be reached now."""
        for one in self.parties:
            for other in self.charter.parties:
                if one == other:
                    continue
                reached = self.reaches(one, other)
                if self._seen.get((one, other), False) != reached:
                    self._seen[one, other] = reached
                    wait = self._chance() * self.weather.notice
                    party = self.parties[one]
                    self._at(self.now + wait, partial(self._notice, party, other))

    def _notice(self, party: Party, other: Name) -> None:
        is_there = self.reaches(party.name, other)
        self._call(party, "up" if is_there else "down", other)

    def _call(self, party: Party, what: str, *given: Any) -> None:
        """Let something happen to a party that is still there, then do what it asks for."""
        if self.parties.get(party.name) is not party:
            return
        getattr(party, what)(*given, self._clock(party.name))
        if self._trace is not None:
            self._say(f"{party.name} {what} {_short(given)}")
        for to, frame in party.outbox:
            self._send(party.name, to, frame)
        party.outbox.clear()
        if party.work is not None and party.work is not self._begun.get(party.name):
            self._work(party, party.work)
        if party.is_over:
            self.over[party.name] = self.parties.pop(party.name)
            self._look()
            return
        due = party.due(self._clock(party.name)) / self._rate(party.name)
        planned = self._wakes.get(party.name, math.inf)
        if due < math.inf and (due < planned or planned <= self.now):
            self._wakes[party.name] = due
            self._at(max(due, self.now + 1e-6), lambda: self._call(party, "tick"))

    def _work(self, party: Party, work: Work) -> None:
        """Do it at once, and let the party know when it would have been done."""
        self._begun[party.name] = work
        results = work.do(self._trainer)
        wait = self.weather.slow.get(party.name, 0.05) * (0.5 + self._chance())
        self._at(self.now + wait, lambda: self._call(party, "worked", results))

    def _send(self, sender: Name, to: Name, frame: bytes) -> None:
        if self._chance() < self.weather.loss:
            return
        for _ in range(1 + (self._chance() < self.weather.twice)):
            wait = self._chance() * self.weather.delay

            def arrive() -> None:
                if to in self.parties and self.reaches(sender, to):
                    self._call(self.parties[to], "hear", sender, frame)

            self._at(self.now + wait, arrive)

    def _rate(self, name: Name) -> float:
        return 1 + self.weather.skew.get(name, 0.0)

    def _clock(self, name: Name) -> float:
        return self.now * self._rate(name)

    def _say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:10.4f}  {text}")

    def _standing(self) -> str:
        return "; ".join(
            f"{p.name} {p.council.accepted and p.council.accepted.round} awaits {p._awaited}"
            for p in self.parties.values()
        )


class Chance:
    """Numbers between 0 and 1, drawn one after the other from a seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed_of(seed, "simulated network")

    def __call__(self) -> float:
        """The next number (splitmix64, Steele et al. 2014)."""
        mask = (1 << 64) - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def _short(given: Sequence[Any]) -> str:
    return " ".join(f"{len(g)} bytes" if isinstance(g, bytes) else str(g)[:60] for g in given)

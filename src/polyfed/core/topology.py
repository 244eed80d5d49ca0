"""Topology: who works when, and where messages meet. A function of (seed, round, what is alive)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from polyfed import check
from polyfed.core.node import Name


@dataclass(frozen=True)
class Meeting:
    """A place where the messages of `sources` are combined for `to`.

    Attributes:
        at: a place of the topology, or a node: what a node says to itself crosses nothing.
        sources: who sends.
        to: who is answered.
        topic: only what is sent about this topic travels; empty means everything.
        hops: links that each message crosses on its way.
    """

    at: Name
    sources: tuple[Name, ...]
    to: tuple[Name, ...]
    topic: str = ""
    hops: int = 1


@dataclass(frozen=True)
class Tick:
    """One tick: nodes that train, then meetings of what is sent, all at the same time."""

    active: tuple[Name, ...]
    meetings: tuple[Meeting, ...]


@dataclass(frozen=True)
class State:
    """What works in a round: the nodes alive, and the links that are cut."""

    alive: frozenset[Name]
    cut: frozenset[frozenset[Name]] = frozenset()


Seen = Callable[[int], State]


@dataclass(frozen=True, kw_only=True)
class Topology(ABC):
    """Who works and who meets; its options are its fields.

    Attributes:
        seed: of its random choices; set by the engine.
        names: all nodes, in the order of their names; set by the engine.
        topics: who takes part in what, as the method says; set by the engine.
    """

    name: ClassVar[str]
    has_links: ClassVar[bool] = False  # nodes are neighbours: a link between two can be cut

    seed: int = field(default=0, repr=False)
    names: tuple[Name, ...] = field(default=(), repr=False)
    topics: Mapping[str, tuple[Name, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check.types(self)

    @property
    def places(self) -> tuple[Name, ...]:
        """Where messages meet, besides at nodes."""
        return ()

    def joined(
        self, seed: int, names: Iterable[Name], topics: Mapping[str, tuple[Name, ...]]
    ) -> Topology:
        """This topology among these nodes; raises where they cannot be joined so."""
        bound = replace(self, seed=seed, names=tuple(sorted(names)), topics=dict(topics))
        bound.check()
        return bound

    def check(self) -> None:
        """Raise, before any training, if these nodes cannot be joined so."""
        return

    def round(self, t: int, seen: Seen) -> Iterable[Tick]:
        """The ticks of round t, one after the other; `seen` tells what worked in any round."""
        yield self.tick(t, seen(t).alive)

    @abstractmethod
    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """The plan of round t among the nodes that are alive, where a round is one tick."""

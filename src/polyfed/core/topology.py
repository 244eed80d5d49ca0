"""Topology: who works at tick t, and where messages meet. A function of (seed, t, alive)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.node import Name


@dataclass(frozen=True)
class Meeting:
    """A place where the messages of `sources` are combined for `to`."""

    at: Name
    sources: tuple[Name, ...]
    to: tuple[Name, ...]


@dataclass(frozen=True)
class Tick:
    """One tick: the nodes that train, then the meetings of what they send."""

    active: tuple[Name, ...]
    meetings: tuple[Meeting, ...]


@dataclass(frozen=True)
class Topology(ABC):
    """Who works and who meets."""

    name: ClassVar[str]
    places: ClassVar[tuple[Name, ...]] = ()

    @abstractmethod
    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """The plan of tick t among the nodes that are alive."""

"""Topologies: who works at a tick, and where messages meet."""

from polyfed.core.topology import Topology
from polyfed.errors import UnknownNameError
from polyfed.topologies.alone import Alone
from polyfed.topologies.star import Star

TOPOLOGIES: dict[str, type[Topology]] = {t.name: t for t in (Star, Alone)}


def make(name: str) -> Topology:
    """The topology of that name."""
    if name not in TOPOLOGIES:
        raise UnknownNameError("topology", name, TOPOLOGIES)
    return TOPOLOGIES[name]()


__all__ = ["TOPOLOGIES", "Alone", "Star", "make"]

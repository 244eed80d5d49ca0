"""Topologies: who works when, and where messages meet.

A topology is named as a method is, with its options after a colon: `gossip:cycles=3`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from polyfed import options
from polyfed.core.topology import Topology
from polyfed.errors import UnknownNameError
from polyfed.topologies.alone import Alone
from polyfed.topologies.gossip import Gossip
from polyfed.topologies.groups import Groups
from polyfed.topologies.mesh import Mesh
from polyfed.topologies.ring import DualRing, Pipeline, Ring
from polyfed.topologies.star import Star

TOPOLOGIES: dict[str, type[Topology]] = {
    "star": Star,
    "alone": Alone,
    "mesh": Mesh,
    "groups": Groups,
    "gossip": Gossip,
    "ring": Ring,
    "dual-ring": DualRing,
    "pipeline": Pipeline,
}

__all__ = [
    "TOPOLOGIES",
    "Alone",
    "DualRing",
    "Gossip",
    "Groups",
    "Mesh",
    "Pipeline",
    "Ring",
    "Star",
    "label",
    "make",
    "options_of",
]


def make(text: str) -> Topology:
    """The topology of that name, with the options after its colon."""
    name, own = options.parse_label(text)
    if name not in TOPOLOGIES:
        raise UnknownNameError("topology", name, TOPOLOGIES)
    cls = TOPOLOGIES[name]
    known = options_of(cls)
    for option in own:
        if option not in known:
            raise UnknownNameError(f"option of topology {name}", option, known)
    return options.build(cls, own, f"topology {name}")


def options_of(cls: type[Topology]) -> list[str]:
    """What a person may set of a topology; the engine sets the rest."""
    common = options.fields_of(Topology)
    return [name for name in options.fields_of(cls) if name not in common]


def label(topology: Topology) -> str:
    """The text that `make` turns into this topology.

    >>> label(make("star"))
    'star'
    """
    own = {
        field.name: getattr(topology, field.name)
        for field in dataclasses.fields(topology)
        if field.name in options_of(type(topology))
    }
    changed = [f"{n}={_plain(v)}" for n, v in own.items() if v != _default(topology, n)]
    return f"{topology.name}:{','.join(changed)}" if changed else topology.name


def _plain(value: Any) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _default(topology: Topology, name: str) -> Any:
    return options.fields_of(type(topology))[name].default

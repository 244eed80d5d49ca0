"""Who worked when: a topology is a function of seed, round and what is alive, so it is replayed.

A run folder does not hold the ticks of a round, and need not: its configuration gives them again.
A tick is `[who trains, [[from, to], ...]]` with numbers of names; rounds with the same ticks are
one pattern, as in `traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed import methods, topologies
from polyfed.core.faults import Faults
from polyfed.core.node import Name, Node
from polyfed.core.topology import Meeting, State, Tick, Topology
from polyfed.record.ledger import Crossing

ENTRIES = 60_000  # trainings and messages in a page
UNTOLD = (
    "Who worked when cannot be told: it depends on the nodes, and these cannot be made again. "
    "The ledger below has every message."
)
_ANY_ORDER = ("", "random")


def replay(
    config: Mapping[str, Any],
    nodes: Sequence[Node],
    names: Sequence[Name],
    rounds: int,
    most: int = ENTRIES,
) -> dict[str, Any]:
    """The ticks of all rounds, who was away, which links were cut.

    Args:
        config: of the run's folder.
        nodes: of the task, without those that are hubs; empty if they are not at hand.
        names: of all nodes that take part.
        rounds: how many are over.
        most: trainings and messages to keep; rounds after that are left out.
    """
    bound = _topology(config, nodes, names)
    faults = Faults.parse(config["settings"].get("fail") or "", names)
    absent = config["settings"].get("absent") or {}

    def seen(t: int) -> State:
        script = faults.state(t)
        return State(script.alive - frozenset(absent.get(t, ())), script.cut)

    number = {name: i for i, name in enumerate([*names, *bound.places])}
    patterns: dict[Any, int] = {}
    order, room = [], most
    for t in range(1, rounds + 1):
        ticks = tuple(_tick(tick, number) for tick in bound.round(t, seen))
        key = (ticks, _broken(seen(t), number))
        if key not in patterns:
            room -= sum(len(active) + len(sent) for active, sent in ticks)
            if room < 0:
                break
            patterns[key] = len(patterns)
        order.append(patterns[key])
    return {
        "names": list(number),
        "nodes": len(names),
        "topology": bound.name,
        "ring": _ring(bound, number),
        "rounds": order,
        "of": rounds,
        "patterns": [_pattern(*key) for key in patterns],
    }


def explains(work: Mapping[str, Any], crossings: Iterable[Crossing]) -> bool:
    """Whether every message of the ledger is one of those replayed, in the rounds that are.

    It is not where the topology depends on what only the nodes knew: topics of a method.

    Args:
        work: what `replay` found.
        crossings: of the run.
    """
    numbers = {name: i for i, name in enumerate(work["names"])}
    known = [
        {link for _, sent in pattern["ticks"] for link in sent} for pattern in work["patterns"]
    ]
    rounds = [known[pattern] for pattern in work["rounds"]]
    return all(
        (numbers.get(c.source), numbers.get(c.to)) in rounds[c.tick - 1]
        for c in crossings
        if 1 <= c.tick <= len(rounds)
    )


def _topology(config: Mapping[str, Any], nodes: Sequence[Node], names: Sequence[Name]) -> Topology:
    """As the engine joins it."""
    topics: Mapping[str, tuple[Name, ...]] = {}
    if nodes and config["method"] in methods.METHODS:
        topics = methods.make(config["method"], config["options"]).topics(nodes)
    return topologies.make(config["topology"]).joined(config["settings"]["seed"], names, topics)


def _tick(tick: Tick, number: dict[Name, int]) -> tuple[Any, ...]:
    sent = dict.fromkeys(link for meeting in tick.meetings for link in _links(meeting))
    for name in (name for link in sent for name in link):
        number.setdefault(name, len(number))
    return (
        tuple(number[name] for name in tick.active),
        tuple((number[a], number[b]) for a, b in sent),
    )


def _links(meeting: Meeting) -> list[tuple[Name, Name]]:
    """From whom to whom messages go; what a node says to itself goes nowhere."""
    there = [(source, meeting.at) for source in meeting.sources]
    back = [(meeting.at, to) for to in meeting.to]
    return [(a, b) for a, b in [*there, *back] if a != b]


def _broken(state: State, number: Mapping[Name, int]) -> tuple[Any, ...]:
    """Who is alive, and the links that are cut."""
    cut = sorted(tuple(sorted(number[name] for name in link)) for link in state.cut)
    return tuple(sorted(number[name] for name in state.alive)), tuple(cut)


def _pattern(ticks: Sequence[Any], broken: tuple[Any, ...]) -> dict[str, Any]:
    return {"ticks": ticks, "alive": broken[0], "cut": broken[1]}


def _ring(bound: Topology, number: Mapping[Name, int]) -> list[int] | None:
    """The order along the ring, where nodes are neighbours on one."""
    if not bound.has_links or not hasattr(bound, "order"):
        return None
    names = bound.names if bound.order in _ANY_ORDER else bound.order.split("+")
    return [number[name] for name in names]

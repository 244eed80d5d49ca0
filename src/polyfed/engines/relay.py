"""The relay: rounds in exchanges, for networks where only a hub can speak first.

Some systems (Flower) start a short-lived process at a node for every message. There a node's part
is a function (state on disk, bytes) -> (state on disk, bytes), an exchange:

    conductor (at the hub)    decides who plays a round, plays the places of the topology, and takes
                              what a node says to another there
    clerk (at a node)         plays as much of the round as it can with what it is given, saves,
                              answers with what it says

This file has what both need: a node's part of a round in stages, between which it can stop; the
form of an exchange; and the desk, where facts and bytes lie that are saved with the state.

A round costs as many exchanges as a node must wait for others in it. What a node only has to take
home at the end of a round comes with the first exchange of the next: a round of a star is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.core.node import Name, Node
from polyfed.core.topology import Tick
from polyfed.engines.decision import Decision
from polyfed.engines.player import ANSWER, SAY, Key, Player, Steps
from polyfed.engines.wire import pack, unpack
from polyfed.errors import MessageError, RunError

HELLO, PLAY, REFUSED = "hello", "play", "refused"
Number = tuple[int, int]  # of an exchange: which life of the hub, which in it
TRAIN, SPEAK, MEET, LISTEN = "train", "speak", "meet", "listen"
_DESK = "~desk"  # no node can be called so


@dataclass(frozen=True)
class Stage:
    """A stretch of a node's round in which it waits for nobody.

    Attributes:
        kind: train, speak, meet or listen.
        k: the tick.
        i: the meeting, where it is about one.
        needs: what must have arrived from others.
        says: what it says to others.
    """

    kind: str
    k: int
    i: int = -1
    needs: frozenset[Key] = frozenset()
    says: frozenset[Key] = frozenset()


def stages(ticks: Sequence[Tick], me: Name) -> list[Stage]:
    """A node's part of a round, in the order in which the player plays it."""
    found = []
    for k, tick in enumerate(ticks):
        if me in tick.active:
            found.append(Stage(TRAIN, k))
        meetings = list(enumerate(tick.meetings))
        places = [(i, m.at) for i, m in meetings if me in m.sources]
        if places:
            says = frozenset((SAY, k, i, me, at) for i, at in places if at != me)
            found.append(Stage(SPEAK, k, says=says))
        for i, m in meetings:
            if m.at == me:
                needs = frozenset((SAY, k, i, name, me) for name in m.sources if name != me)
                says = frozenset((ANSWER, k, i, me, name) for name in m.to if name != me)
                found.append(Stage(MEET, k, i, needs, says))
        for i, m in meetings:
            if me in m.to:
                keys = () if m.at == me else ((ANSWER, k, i, m.at, me),)
                found.append(Stage(LISTEN, k, i, frozenset(keys)))
    return found


def reach(todo: Sequence[Stage], begun: int, arrived: Iterable[Key]) -> int:
    """Up to which stage a node comes with what has arrived."""
    known = set(arrived)
    while begun < len(todo) and todo[begun].needs <= known:
        begun += 1
    return begun


class Paced(Player):
    """A player that plays a round stage by stage."""

    def ticks(self, decision: Decision) -> list[Tick]:
        """The ticks of a round, as decided."""
        return list(self._ticks(decision))

    def enter(self, number: int, visits: Iterable[tuple[str, Name, int]] = ()) -> None:
        """Begin a round, or go on with it: how often each stage was come to already."""
        self._tick = number
        self._visits.clear()
        self._visits.update({(stage, name): count for stage, name, count in visits})

    @property
    def visits(self) -> list[tuple[str, Name, int]]:
        """How often each stage was come to in this round."""
        return [(stage, name, count) for (stage, name), count in self._visits.items()]

    def pace(self, stage: Stage, tick: Tick) -> Steps:
        """Play one stage."""
        if self.node is None:
            raise RunError("only a node plays stages.")
        if stage.kind == TRAIN:
            yield from self._train("local", self.node, self.method.local(self.node))
        elif stage.kind == SPEAK:
            self._say(stage.k, tick.meetings)
        elif stage.kind == MEET:
            yield from self._meet(stage.k, stage.i, tick.meetings[stage.i])
        else:
            yield from self._listen(stage.k, stage.i, tick.meetings[stage.i])


@dataclass(frozen=True)
class Letter:
    """A message of a round as it travels: a header that says what it is, and its tensors."""

    header: Mapping[str, Any]
    payload: bytes

    @property
    def key(self) -> Key:
        """Where it belongs; raises MessageError if it says so nowhere."""
        try:
            k, i, source, to = self.header["key"]
            return str(self.header["kind"]), int(k), int(i), str(source), str(to)
        except (TypeError, ValueError, LookupError) as error:
            raise MessageError(f"a message of no round: {error!r}") from error

    def to_bytes(self) -> bytes:
        """Header and tensors in one."""
        return b"".join(pack(self.header, self.payload))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Letter:
        """Read what `to_bytes` wrote; anything else is refused."""
        return cls(*unpack([raw]))


def bundle(header: Mapping[str, Any], letters: Sequence[Letter] = ()) -> bytes:
    """An exchange, or the answer to one: a header, and messages.

    >>> unbundle(bundle({"kind": "play"}, [Letter({"kind": "say"}, b"abc")]))[1]
    [Letter(header={'kind': 'say'}, payload=b'abc')]
    """
    raws = [letter.to_bytes() for letter in letters]
    return b"".join(pack({**header, "sizes": [len(raw) for raw in raws]}, b"".join(raws)))


def unbundle(raw: bytes) -> tuple[dict[str, Any], list[Letter]]:
    """Read what `bundle` made; anything else is refused."""
    header, payload = unpack([raw])
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or not all(type(n) is int and n > 0 for n in sizes):
        raise MessageError(f"not an exchange: its sizes are {sizes!r}"[:200])
    if sum(sizes) != len(payload):
        raise MessageError(f"an exchange says {sum(sizes)} bytes and has {len(payload)}")
    letters, start = [], 0
    for size in sizes:
        letters.append(Letter.from_bytes(payload[start : start + size]))
        start += size
    return header, letters


def read_number(header: Mapping[str, Any]) -> Number:
    """The number of an exchange; anything else is refused."""
    found = header.get("exchange")
    if not (isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found)):
        raise MessageError(f"an exchange without a number: {found!r}"[:200])
    return found[0], found[1]


@dataclass
class Desk:
    """Facts and messages that are saved in the same file as the state of nodes.

    Attributes:
        facts: what JSON can hold.
        piles: messages, by what they are for.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    piles: dict[str, list[Letter]] = field(default_factory=dict)

    def as_node(self) -> Node:
        """Something that a checkpoint can hold."""
        memory = {"facts": _tensor(json.dumps(self.facts).encode())}
        for name, letters in self.piles.items():
            for i, letter in enumerate(letters):
                memory[f"pile/{i:06d}/{name}"] = _tensor(letter.to_bytes())
        return Node(_DESK, memory=memory)

    def read(self, node: Node) -> None:
        """Take over what `as_node` made."""
        try:
            self.facts = json.loads(_bytes(node.memory["facts"]))
        except (KeyError, ValueError) as error:
            raise RunError(f"a checkpoint that is not of this engine: {error!r}.") from error
        self.piles = {}
        for path in sorted(node.memory):
            kind, _, rest = path.partition("/")
            if kind == "pile":
                name = rest.partition("/")[2]
                letter = Letter.from_bytes(_bytes(node.memory[path]))
                self.piles.setdefault(name, []).append(letter)


def blank_desk() -> Node:
    """A node into which a checkpoint's desk is read."""
    return Node(_DESK)


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()

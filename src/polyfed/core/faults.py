"""Faults on purpose: a script of what breaks, and when.

    cut 0-1 @3; kill M2 @5; heal @8

From round 3 on nodes 0 and 1 cannot talk directly, from round 5 on M2 is away, from round 8 on all
is well again; `heal M2 @8` and `heal 0-1 @8` mend one thing. A node goes by its name, or by its
place among the names in order, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.core.node import Name
from polyfed.core.topology import State
from polyfed.errors import ConfigError, UnknownNameError

_STATEMENT = re.compile(r"(cut|kill|heal)(?:\s+([^\s@]+))?\s*@\s*([1-9]\d*)")
_FORM = "Write 'cut A-B @ROUND', 'kill A @ROUND', 'heal @ROUND', 'heal A @ROUND' or 'heal A-B ...'."


@dataclass(frozen=True)
class Event:
    """One statement of a script: a node (one name), a link (two), or everything (none)."""

    verb: str
    what: frozenset[Name]
    since: int


@dataclass(frozen=True)
class Faults:
    """What works in each round, as a script says.

    >>> faults = Faults.parse("cut 0-1 @3; kill M2 @5; heal @8", ["M0", "M1", "M2"])
    >>> sorted(faults.state(5).alive), len(faults.state(5).cut), faults.changes(8)
    (['M0', 'M1'], 1, [('M2', 'healed'), ('M0-M1', 'healed')])
    """

    names: tuple[Name, ...]
    events: tuple[Event, ...] = ()

    @classmethod
    def parse(cls, script: str, names: Sequence[Name], rounds: int | None = None) -> Faults:
        """Read a script; raise where it cannot be carried out by these nodes, in these rounds."""
        names = tuple(sorted(names))
        statements = [text.strip() for text in script.split(";") if text.strip()]
        events = [_event(statement, names) for statement in statements]
        for statement, event in zip(statements, events, strict=True):
            if rounds is not None and event.since > rounds:
                raise ConfigError(
                    f"fault '{statement}' never happens: the last round is {rounds}. Name an "
                    "earlier round, or run more."
                )
        return cls(names, tuple(sorted(events, key=lambda event: event.since)))

    def state(self, t: int) -> State:
        """The nodes that are alive in round t, and the links that are cut."""
        broken: set[frozenset[Name]] = set()
        for event in self.events:
            if event.since > t:
                break
            if event.verb != "heal":
                broken.add(event.what)
            elif event.what:
                broken.discard(event.what)
            else:
                broken.clear()
        killed = {name for what in broken if len(what) == 1 for name in what}
        cut = frozenset(what for what in broken if len(what) == 2)
        return State(frozenset(self.names) - killed, cut)

    def changes(self, t: int) -> list[tuple[str, str]]:
        """What is new in round t: a node or a link, and whether it is killed, cut or healed."""
        before, now = self.state(t - 1), self.state(t)
        return [
            *((name, "killed") for name in sorted(before.alive - now.alive)),
            *((name, "healed") for name in sorted(now.alive - before.alive)),
            *((name, "cut") for name in _listed(now.cut - before.cut)),
            *((name, "healed") for name in _listed(before.cut - now.cut)),
        ]


def _event(statement: str, names: Sequence[Name]) -> Event:
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        raise ConfigError(f"fault '{statement}' is not understood. {_FORM}")
    verb, what, since = match[1], match[2] or "", int(match[3])
    node, link = _node(what, names), _link(what, names)
    if verb == "heal" and not what:
        return Event(verb, frozenset(), since)
    if verb != "cut" and node is not None:
        return Event(verb, frozenset((node,)), since)
    if verb != "kill" and link is not None:
        return Event(verb, link, since)
    kind = {"cut": "link (A-B)", "kill": "node", "heal": "node or link (A-B)"}[verb]
    raise UnknownNameError(f"{kind} in fault '{statement}':", what, names)


def _node(text: str, names: Sequence[Name]) -> Name | None:
    if text in names:
        return text
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else None


def _link(text: str, names: Sequence[Name]) -> frozenset[Name] | None:
    """Two nodes with a hyphen between them; names may have hyphens too."""
    for hyphen in re.finditer("-", text):
        ends = _node(text[: hyphen.start()], names), _node(text[hyphen.end() :], names)
        if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
            return frozenset((ends[0], ends[1]))
    return None


def _listed(links: frozenset[frozenset[Name]]) -> list[str]:
    return sorted("-".join(sorted(link)) for link in links)

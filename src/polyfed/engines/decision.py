"""What parties tell each other about rounds: decisions, and reports to a leader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.node import Name
from polyfed.errors import MessageError

Attempt = tuple[int, int]  # ballot, number: which decision
Note = dict[str, Any]
MOST = 1 << 60  # no ballot and no number is ever as large


@dataclass(frozen=True)
class Settled:
    """A round that all who were named have played."""

    attempt: Attempt
    members: tuple[Name, ...]


@dataclass(frozen=True)
class Decision:
    """Who plays a round.

    Attributes:
        attempt: its number; later ones replace earlier ones.
        round: from 1; one more than the method has rounds is the end.
        members: who takes part.
        log: the rounds before, one by one.
    """

    attempt: Attempt
    round: int
    members: tuple[Name, ...]
    log: tuple[Settled, ...] = ()

    def plain(self) -> Note:
        """As JSON can hold it."""
        log = [[*s.attempt, list(s.members)] for s in self.log]
        return {
            "attempt": list(self.attempt),
            "round": self.round,
            "members": list(self.members),
            "log": log,
        }

    @classmethod
    def read(cls, plain: Any, names: Sequence[Name]) -> Decision:
        """Read what `plain` made; anything else is refused."""
        try:
            log = tuple(
                Settled(read_attempt([b, n]), _known(who, names)) for b, n, who in plain["log"]
            )
            attempt, number = read_attempt(plain["attempt"]), plain["round"]
            members = _known(plain["members"], names)
        except (TypeError, ValueError, KeyError) as error:
            raise MessageError(f"not a decision: {error!r}") from error
        if type(number) is not int or number != len(log) + 1:
            raise MessageError(f"a decision of round {number} after {len(log)} rounds")
        return cls(attempt, number, members, log)


@dataclass
class Report:
    """What a party tells its leader about itself.

    Attributes:
        born: which life of it this is.
        accepted: the last decision it follows.
        done: the last that it has played to the end.
        card: what all shall know of it.
        roster: the cards of all, if it has them.
        lacks: whom it needs and cannot reach.
        when: its life, and how many notes it had written in it.
    """

    born: int
    accepted: Decision | None
    done: Attempt | None
    card: Any
    roster: dict[Name, Any]
    lacks: set[Name]
    when: tuple[int, int]

    @classmethod
    def read(cls, note: Mapping[str, Any], names: Sequence[Name]) -> Report:
        """Read a hello; anything else is refused."""
        accepted, done, born = note.get("accepted"), note.get("done"), note.get("born")
        if type(born) is not int:
            raise MessageError(f"a hello without a life: {born!r}")
        held = None if accepted is None else Decision.read(accepted, names)
        finished = None if done is None else read_attempt(done)
        roster = note.get("roster")
        cards = read_roster(roster, names) if roster else {}
        lacks = read_names(note.get("lacks", []), names)
        when = (born, read_count(note))
        return cls(born, held, finished, note.get("card"), cards, lacks, when)


def read_roster(plain: Any, names: Sequence[Name]) -> dict[Name, Any]:
    """The cards of all parties; anything else is refused."""
    if not isinstance(plain, dict) or set(plain) != set(names):
        raise MessageError("a roster that does not name all parties")
    if not all(isinstance(card, dict) for card in plain.values()):
        raise MessageError("a roster whose cards say nothing")
    return dict(plain)


def read_count(note: Mapping[str, Any]) -> int:
    """Which of its sender's notes this is."""
    count = note.get("count")
    if type(count) is not int:
        raise MessageError(f"a note without a count: {count!r}")
    return count


def read_attempt(plain: Any) -> Attempt:
    """A ballot and a number; anything else is refused."""
    if not isinstance(plain, list) or [type(each) for each in plain] != [int, int]:
        raise MessageError(f"not an attempt: {plain!r}")
    if not all(0 <= each < MOST for each in plain):
        raise MessageError(f"attempt {plain} is out of range")
    return plain[0], plain[1]


def read_names(plain: Any, names: Sequence[Name]) -> set[Name]:
    """Names of parties; anything else is refused."""
    try:
        return set(_known(plain, names))
    except (TypeError, ValueError) as error:
        raise MessageError(f"not names: {error}") from error


def _known(names: Any, all_names: Sequence[Name]) -> tuple[Name, ...]:
    found = tuple(n for n in all_names if n in names)
    if not isinstance(names, list) or len(found) != len(names):
        raise ValueError(f"names {names!r}")
    return found

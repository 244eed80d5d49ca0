"""A seat in the council: what a party sees and is told, whom it follows, and when it takes over.

The protocol is explained in `council.py`; this is the part of it that every party plays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.node import Name
from polyfed.engines.decision import (
    MOST,
    Attempt,
    Decision,
    Note,
    Report,
    read_count,
    read_names,
    read_roster,
)
from polyfed.errors import MessageError

LINGER = 3  # times grace: how long a leader waits at the end for who is gone
CONTROL = ("hello", "prepare", "go", "done", "spare", "lacks", "over", "canvass", "agree", "stale")


@dataclass
class Seat:
    """A party that follows a leader, or takes over where it must.

    Attributes:
        me: its name.
        names: all parties, in order.
        nodes: those of them that train; the others only play a place.
        host: who plays the places, and leads for ever; None if messages meet at nodes only.
        rounds: of the method.
        grace: seconds that a party may be gone before the others go on without it.
        born: which life this is.
        card: what the party tells about itself, once.
        promised: the smallest ballot it follows.
        accepted: the last decision it follows.
        done: the last that it has played to the end.
        roster: the cards of all.
    """

    me: Name
    names: tuple[Name, ...]
    nodes: tuple[Name, ...]
    host: Name | None
    rounds: int
    grace: float
    born: int
    card: Any
    promised: int = 0
    accepted: Decision | None = None
    done: Attempt | None = None
    roster: dict[Name, Any] = field(default_factory=dict)
    outbox: list[tuple[Name, Note]] = field(default_factory=list)
    orders: list[Decision] = field(default_factory=list)
    spared: list[Name] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._up: set[Name] = {self.me}
        self._gone: dict[Name, float] = {}
        self._reports: dict[Name, Report] = {}
        self._given: dict[Name, int] = {}  # which life of each got the decision in force
        self._done: set[Name] = set()
        self._spared: set[Name] = set()
        self._lost: set[Name] = set()
        self._agreed: set[Name] = set()
        self._asked = -math.inf  # when this party last asked whether others see the leader
        self._over: Attempt | None = None
        self._is_ready = False
        self._count = 0  # of notes, in this life
        self._since = 0.0  # when this leader began to lead, in this life

    @property
    def is_over(self) -> bool:
        """Whether enough parties have played the end for it to stand."""
        return self.accepted is not None and self._over == self.accepted.attempt

    # ---- what is seen --------------------------------------------------------------------------

    @property
    def leader(self) -> Name:
        """Whom this party follows."""
        return self.host or self.names[self.promised % len(self.names)]

    def awaited(self, before: float = math.inf) -> list[Name]:
        """Who is waited for, in order, and went before a time or never came."""
        held = self.accepted
        wanted = self.names if held is None else (*held.members, self.leader)
        away = {name for name, since in self._gone.items() if since <= before} - self._up
        return [name for name in self.names if name in wanted and name in away]

    def ready(self, now: float) -> None:
        """The party can play: it tells the leader."""
        self._is_ready, self._since = True, now
        for name in self.names:
            if name not in self._up:
                self._gone.setdefault(name, now)
        self._greet()
        self._decide(now)

    def up(self, name: Name, now: float) -> None:
        """A party is seen."""
        self._up.add(name)
        self._gone.pop(name, None)
        if name in self._lost:
            self._lost.discard(name)
            self._tell(self.leader, "lacks", names=sorted(self._lost))
        if name == self.leader:
            self._greet()
        elif self.leader == self.me:
            self._tell(name, "prepare")
        self.tick(now)

    def down(self, name: Name, now: float) -> None:
        """A party is not seen any more."""
        self._up.discard(name)
        self._gone.setdefault(name, now)

    def finished(self, attempt: Attempt, now: float) -> None:
        """This party has played a decision to the end, and saved that."""
        if self.accepted is not None and self.accepted.attempt == attempt:
            self.done = attempt
            self._tell(self.leader, "done", attempt=list(attempt))
            self._decide(now)

    def need(self, names: set[Name], now: float) -> None:
        """The party cannot go on without these; the leader must know which it cannot reach."""
        gone = self._gone.keys() - {self.leader}
        lost = {n for n in names & gone if now >= self._gone[n] + self.grace}
        if self.host is None and lost - self._lost:
            self._lost |= lost
            self._tell(self.leader, "lacks", names=sorted(self._lost))

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.host is None and self._is_ready and now >= self._due_to_lead():
            self._agreed, self._asked = {self.me}, now
            for name in sorted(self._up - {self.me}):
                self._tell(name, "canvass")
        self._decide(now)

    def due(self, now: float) -> float:
        """When, after now, `tick` may have something to do; never is infinity."""
        marks = (*self._gone.values(), self._since)
        times = [t + n * self.grace for t in marks for n in (1, LINGER)]
        if self.host is None:
            times.append(self._due_to_lead())
        return min((t for t in times if t > now), default=math.inf)

    def _due_to_lead(self) -> float:
        """When the leader has been gone for long enough that it is this party's turn to lead."""
        if self.leader not in self._gone or not self.is_enough(self._up):
            return math.inf
        before = [n for n in self.names[: self.names.index(self.me)] if n in self._up]
        patient = self._gone[self.leader] + self.grace * (1 + len(before))
        return max(patient, self._asked + self.grace)

    def _lead(self, now: float) -> None:
        """Take over, with the next number that is this party's."""
        mine = self.names.index(self.me)
        self.promised += (mine - self.promised - 1) % len(self.names) + 1
        self._reports.clear()
        self._agreed.clear()
        self._since = now
        self._greet()
        for name in sorted(self._up - {self.me}):
            self._tell(name, "prepare")

    # ---- notes ---------------------------------------------------------------------------------

    def hear(self, sender: Name, note: Note, now: float) -> None:
        """A note has arrived; raises MessageError if it is no good."""
        ballot = note.get("ballot")
        if sender not in self._up:
            self._gone[sender] = now  # it was there a moment ago
        if type(ballot) is not int or not 0 <= ballot < MOST:
            raise MessageError(f"a note without a ballot: {ballot!r}")
        if ballot < self.promised:
            if note["kind"] != "stale":
                self._tell(sender, "stale")
            return
        if ballot > self.promised:
            if self.host is not None:
                raise MessageError(f"ballot {ballot}, where {self.host} leads for ever")
            self.promised = ballot
            self._reports.clear()
            self._greet()
        if note["kind"] == "prepare" and sender == self.leader:
            self._greet()
        elif note["kind"] == "hello" and self.leader == self.me:
            report = Report.read(note, self.names)
            if sender not in self._reports or report.when >= self._reports[sender].when:
                self._reports[sender] = report
                self.roster = self.roster or report.roster
        elif note["kind"] == "go" and sender == self.leader:
            decision = Decision.read(note.get("decision"), self.names)
            if decision.attempt[0] != ballot:
                raise MessageError(f"decision {decision.attempt} in ballot {ballot}")
            if decision.round > self.rounds + 1 or self.me not in decision.members:
                raise MessageError(f"round {decision.round} with {decision.members}")
            if not (self.roster or note.get("roster")):
                raise MessageError("a decision, and nobody has told of the parties")
            self._take(decision, note.get("roster"))
        elif note["kind"] == "done" and self.leader == self.me:
            self._note_done(sender, note.get("attempt"))
        elif note["kind"] == "spare" and sender == self.leader:
            self._note_spared(note)
        elif note["kind"] == "over" and sender == self.leader:
            is_this = self.accepted and note.get("attempt") == list(self.accepted.attempt)
            self._over = self.accepted.attempt if self.accepted and is_this else self._over
        elif note["kind"] == "lacks" and sender in self._reports:
            self._note_lacks(self._reports[sender], note)
        elif note["kind"] == "canvass" and self.leader in self._gone:
            self._tell(sender, "agree")
        elif note["kind"] == "agree" and self.leader in self._gone:
            self._agreed.add(sender)
            if self.is_enough(self._agreed & self._up):
                self._lead(now)
        self._decide(now)

    def _greet(self) -> None:
        if not self._is_ready:
            return
        self._tell(
            self.leader,
            "hello",
            born=self.born,
            accepted=self.accepted.plain() if self.accepted else None,
            done=list(self.done) if self.done else None,
            card=self.card,
            roster=self.roster,
            lacks=sorted(self._lost),
        )

    def _take(self, decision: Decision, roster: Any) -> None:
        """Follow a decision, unless a later one is followed already."""
        if roster:
            self.roster = read_roster(roster, self.names)
        if self.accepted is None or decision.attempt > self.accepted.attempt:
            self.accepted = decision
            self.orders.append(decision)

    def _tell(self, to: Name, kind: str, **more: Any) -> None:
        """Send a note; one to oneself is heard at once."""
        self._count += 1
        note = {"kind": kind, "ballot": self.promised, "count": self._count, **more}
        if to != self.me:
            self.outbox.append((to, note))
        elif kind == "hello":
            self._reports[self.me] = Report.read(note, self.names)
        elif kind == "done":
            self._note_done(self.me, note["attempt"])
        elif kind == "spare":
            self._note_spared(note)

    def _note_lacks(self, report: Report, note: Note) -> None:
        """Notes may overtake each other: the latest counts."""
        when = (report.born, read_count(note))
        if when >= report.when:
            report.lacks, report.when = read_names(note.get("names"), self.names), when

    def _note_spared(self, note: Note) -> None:
        if self.accepted is not None and note.get("attempt") == list(self.accepted.attempt):
            self.spared.append(str(note.get("name")))

    def _note_done(self, sender: Name, attempt: Any) -> None:
        if self.accepted is not None and attempt == list(self.accepted.attempt):
            self._done.add(sender)
            if sender in self._reports:
                self._reports[sender].done = self.accepted.attempt
                self._reports[sender].roster = self.roster

    def is_enough(self, present: set[Name]) -> bool:
        """Whether these may decide: with the host and a node, or more than half."""
        if self.host is not None:
            return self.host in present and bool(present & set(self.nodes))
        double, n = 2 * len(present), len(self.names)
        return double > n or (double == n and self.names[0] in present)

    def _decide(self, now: float) -> None:
        """What a leader does: see `Council`."""
        raise NotImplementedError

"""The council: how parties agree who takes part in which round, whatever breaks.

A run is a list of decisions. A decision says: round t is played by these, from where each stood
after the rounds before. The leader decides; who is told plays the round, saves its state and says
done; when all have, the round is settled and the next is decided. So a round is played by all who
were named, or it is played again, by others, from the state before it: nothing happens by halves.

    hello    to the leader: I am here, this is what I last accepted and finished
    prepare  I lead now: say hello to me
    go       the decision
    done     to the leader: I have played it
    spare    this party has played it and is gone: do not wait until it confirms what it was told
    over     all have played the end: leave
    lacks    to the leader: I cannot reach this party, and need it
    canvass  I do not see the leader; do you?
    agree    neither do I
    stale    to whoever follows an older leader: there is a newer one

Leaders are numbered (ballots; ballot b belongs to name b mod n), and nobody follows a smaller
number than it has seen. Where messages meet at a place, whoever plays that place leads, for ever.
Elsewhere the first name leads; if it is gone the next takes over, and every decision needs more
than half of all names (or half, with the first): so of two sides that cannot see each other at most
one goes on, and what it begins from was known to some of the others. This is Lamport's Paxos with
one sequence of decisions a leader. Pure: events in, notes out, time is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.core.node import Name
from polyfed.engines.decision import Decision, Settled
from polyfed.engines.seat import LINGER, Seat


@dataclass
class Council(Seat):
    """One party's seat, with what it does while it leads."""

    def _decide(self, now: float) -> None:
        """As leader: begin, go on, or begin a round again, if it is time to."""
        if self.leader != self.me or self.me not in self._reports:
            return
        present = self._together({n for n in self._reports if n in self._up})
        doubtful = {n for n, since in self._gone.items() if now < since + self.grace}
        held = self._mine
        if held is None:
            self._begin(present, doubtful, is_early=now < self._since + self.grace)
            return
        missing = set(held.members) - self._done
        reborn = {
            n for n in missing & self._reports.keys() if self._reports[n].born != self._given[n]
        }
        if held.round > self.rounds:
            self._end(held, present, reborn, now)
        elif doubtful & set(held.members):
            return  # whoever is gone may be back in a moment
        elif not missing:
            self._settle(held, present)
        elif reborn or missing & self._gone.keys() or self._is_torn(held, missing):
            self._again(held, present)
        else:
            self._spare(held, self._done & self._gone.keys(), missing)

    def _together(self, present: set[Name]) -> set[Name]:
        """Those of them that can reach each other; of two that cannot, the first in order."""
        kept: set[Name] = set()
        for name in sorted(present, key=lambda n: (n != self.me, n)):
            lacks = self._reports[name].lacks
            if not any(other in lacks or name in self._reports[other].lacks for other in kept):
                kept.add(name)
        return kept

    def _is_torn(self, held: Decision, missing: set[Name]) -> bool:
        """Whether somebody waits for another member that it cannot reach."""
        members = set(held.members)
        return any(self._reports[n].lacks & members for n in missing & self._reports.keys())

    def _spare(self, held: Decision, lost: set[Name], missing: set[Name]) -> None:
        """Let those who have not finished know who has, and will not say more."""
        for name in sorted(lost - self._spared):
            self._spared.add(name)
            for other in sorted(missing):
                self._tell(other, "spare", attempt=list(held.attempt), name=name)

    def _end(self, held: Decision, present: set[Name], reborn: set[Name], now: float) -> None:
        """The end is over when all have played it, or enough, and the others stay away.

        If those who stay away leave too few, it is played again, with whoever has come since.
        """
        for name in sorted(reborn):
            self._give(name, held)
        lost = {n for n, since in self._gone.items() if now >= since + LINGER * self.grace}
        if set(held.members) - self._done - lost or self.is_over:
            return
        if not self.is_enough(self._done):
            self._again(held, present)
            return
        self._over = held.attempt
        for name in sorted(set(held.members) - {self.me}):
            self._tell(name, "over", attempt=list(held.attempt))

    @property
    def _mine(self) -> Decision | None:
        """The decision in force, if it is of this leader in this life."""
        held = self.accepted
        is_mine = held is not None and held.attempt[0] == self.promised and self._given
        return held if is_mine else None

    def _begin(self, present: set[Name], doubtful: set[Name], *, is_early: bool) -> None:
        """The first decision of a leader: from the last that anybody tells of."""
        if not self.roster:
            if len(self._reports) < len(self.names):
                return  # a run begins when all have been there once
            self.roster = {name: r.card for name, r in self._reports.items()}
        known = [r.accepted for r in self._reports.values() if r.accepted is not None]
        last = max(known, key=lambda d: d.attempt, default=None)
        if last is None:
            if not doubtful:
                self._issue(1, present, (), 0)
            return
        silent = {n for n in last.members if n not in self._reports}
        given_up = self._gone.keys() - doubtful
        if doubtful & set(last.members) or (is_early and silent - given_up):
            return
        if all(n in self._reports and self._reports[n].done == last.attempt for n in last.members):
            self._settle(last, present)
        else:
            self._again(last, present)

    def _settle(self, last: Decision, present: set[Name]) -> None:
        """All have played: the next round, or, after the end, the end again for who missed it."""
        if last.round > self.rounds:
            self._again(last, present)
            return
        log = (*last.log, Settled(last.attempt, last.members))
        self._issue(last.round + 1, present, log, last.attempt[1])

    def _again(self, last: Decision, present: set[Name]) -> None:
        self._issue(last.round, present, last.log, last.attempt[1])

    def _issue(self, number: int, present: set[Name], log: tuple[Settled, ...], after: int) -> None:
        if not self.is_enough(present):
            return
        members = tuple(n for n in self.names if n in present)
        decision = Decision((self.promised, after + 1), number, members, log)
        self._done, self._spared = set(), set()
        self._given = {}
        for name in members:
            self._give(name, decision)

    def _give(self, name: Name, decision: Decision) -> None:
        self._given[name] = self._reports[name].born
        if name == self.me:
            self._take(decision, None)
            return
        more = {} if self._reports[name].roster else {"roster": self.roster}
        self._tell(name, "go", decision=decision.plain(), **more)

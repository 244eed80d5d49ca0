"""One party of a run across machines: a state machine without network, clock or threads.

Whoever drives it (`simulated.py`, `peer.py`) calls what happens, one call at a time, each with the
time of the party's own clock:

    begin   hear(sender, frame)   up(name)   down(name)   worked(results)   tick

and after each call does what the party asks for: sends what is in `outbox` (frames, by receiver),
does `work` if there is any and calls `worked` with what it came to, and calls `tick` when `due`
says. Until `is_over`. The same party runs on a simulated network and on a real one.

The council (`council.py`) says which round is played by whom; the player (`player.py`) plays it;
the channel (`channel.py`) brings parcels, once each; the store (`store.py`) is what a killed party
comes back with. A round is finished when its state is saved. A decision for a round that was begun
or finished before puts the state back to where that round begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.node import Name, Node
from polyfed.engines.agreement import Terms, differences, read_terms, terms_of
from polyfed.engines.channel import Channel
from polyfed.engines.charter import Charter, check_cards, read_spec
from polyfed.engines.council import Council
from polyfed.engines.decision import Attempt, Decision
from polyfed.engines.mail import Mail
from polyfed.engines.player import Await, Player, Said, Steps, Work
from polyfed.engines.privacy import summary
from polyfed.engines.seat import CONTROL
from polyfed.engines.store import Kept, States, Store
from polyfed.engines.wire import PIECE, pack, unpack
from polyfed.errors import MessageError
from polyfed.record import Recorder

TERMS = "terms"  # what a party agreed to: the first that it tells another
_ROUND = "round"  # what the messages of a round are posted as
_FAULTS = 1000  # that are recorded of one party in a life
_LONGEST = 500  # letters of what is recorded


class Party:
    """One party.

    Args:
        charter: what all agree on.
        name: of the party.
        node: as `charter.enter` made it; the host's may be None.
        store: what its lives before this one left.
        recorder: what happens is written there.
        piece: bytes of a frame.
        since: the least number of this life; one that grows with time tells two processes apart.
    """

    def __init__(
        self,
        charter: Charter,
        name: Name,
        node: Node | None,
        store: Store,
        recorder: Recorder,
        *,
        piece: int = PIECE,
        since: int = 1,
    ) -> None:
        kept = Kept.read(store.facts(), charter)
        self.terms = terms_of(charter)
        self.charter, self.name, self.store, self.recorder = charter, name, store, recorder
        self.born = max(kept.born + 1, since)
        own = node if name in charter.nodes else None
        self.player = Player(charter.method, charter.topology, own, {}, recorder, self._tell)
        self.mail = Mail(charter, name)
        self._hub = None if own is node else node
        self.council = Council(
            name,
            charter.parties,
            charter.nodes,
            charter.host,
            charter.method.rounds,
            charter.grace,
            self.born,
            charter.card(own),
            *(kept.promised, kept.accepted, kept.done, kept.roster),
        )
        self.channel = Channel(
            self.born,
            [other for other in charter.parties if other != name],
            resend=charter.resend,
            largest=charter.largest,
            piece=piece,
        )
        self.states = States(store, kept.points)
        self._pristine: list[Any] = []
        self.work: Work | None = None
        self.accuracy: dict[Name, float] | None = None
        self.strangers: dict[Name, str] = {}  # whose terms are others, and how they differ
        self.is_alone = False  # it has given up waiting for the others
        self.missed: list[Name] = []  # for whom it waited then
        self.lost = 0  # a round of which its folder holds nothing any more
        self.refused: Name | None = None  # the leader whom it does not follow
        self.is_over = False
        self._steps: Steps | None = None
        self._awaited: Await | None = None
        self._played: Attempt | None = None
        self._next: Decision | None = None
        self._kept: tuple[Any, ...] = ()
        self._faults: Counter[Name] = Counter()
        self._now = self._moved = self._begun = 0.0

    @property
    def outbox(self) -> list[tuple[Name, bytes]]:
        """Frames to send, each with its receiver; whoever sends them empties the list."""
        return self.channel.outbox

    def due(self, now: float) -> float:
        """When to call `tick` at the latest."""
        times = [self.channel.due, self.council.due(now)]
        if self.work is None:
            times.append(self._moved + self.charter.patience)
        return min(times)

    # ---- what happens --------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The party is there."""
        self._now = self._moved = now
        self.council.ready(now)
        held = self.council.accepted
        if held is not None and held.round > self.charter.method.rounds:
            self.council.orders.append(held)  # the end needs nobody else
        self._settle(now)

    def up(self, name: Name, now: float) -> None:
        """Another party is seen, or begins a new life."""
        if name in self.charter.parties and name != self.name:
            self.strangers.pop(name, None)
            self.council.up(name, now)
            self._introduce(name, now)
            self._settle(now)

    def down(self, name: Name, now: float) -> None:
        """Another party is not seen any more."""
        if name in self.charter.parties and name != self.name:
            self.council.down(name, now)
            self.channel.away(name)
            self._settle(now)

    def hear(self, sender: Name, raw: bytes, now: float) -> None:
        """A frame has arrived from a party whose name the network vouches for."""
        self._now = now
        try:
            parcel = self.channel.take(sender, raw)
            if parcel is not None:
                self._read(sender, *unpack(parcel))
        except MessageError as error:
            self._fault(sender, "message refused", str(error))
        self._settle(now)

    def _read(self, sender: Name, header: Mapping[str, Any], payload: bytes) -> None:
        """Take a parcel; raises MessageError if it is no good."""
        kind, now = header["kind"], self._now
        if kind in (TERMS, "hello"):
            self._compare(sender, read_terms(header.get("terms")))
        if sender in self.strangers:
            return
        self._moved = now
        if kind in CONTROL:
            check_cards(self.charter, sender, header)
            self.council.hear(sender, dict(header), now)
        elif kind != TERMS:
            is_current = self._next is None and not self.council.orders
            self.mail.arrive(sender, header, payload, self.council.accepted, is_current)

    def _compare(self, sender: Name, theirs: Terms) -> None:
        """Have nothing to do with who agreed to something else; do not follow such a leader."""
        said = differences(self.terms, theirs, f"at {sender}")
        if not said:
            return
        if sender not in self.strangers:
            self._fault(sender, "party refused", f"another federation file: {said}")
        self.strangers[sender] = said
        self.council.down(sender, self._now)
        if sender == self.council.leader:
            self._introduce(sender, self._now)  # it shall know why this party goes
            self.refused, self.is_over = sender, True

    def _introduce(self, name: Name, now: float) -> None:
        self.channel.cancel(TERMS, name)
        self.channel.post(name, pack({"kind": TERMS, "terms": self.terms}), now, TERMS)
        self.channel.back(name, now)

    def worked(self, results: Sequence[Any], now: float) -> None:
        """The work that was asked for is done."""
        self.work, self._now, self._moved = None, now, now
        if self._next is None:
            self._resume(results, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        self.channel.resend(now)
        self.council.need(self._needed(), now)
        self.council.tick(now)
        if self.work is None and now >= self._moved + self.charter.patience and not self.is_over:
            long = now - min(self.charter.grace, self.charter.patience / 2)
            self._moved, self.is_alone = now, True  # others who give up go at about this moment
            self.missed = self.council.awaited(long) or self.council.awaited()
            self._fault(self.name, "left alone", f"no progress for {self.charter.patience:g} s")
            self.is_over = self.accuracy is None
        self._settle(now)

    def _needed(self) -> set[Name]:
        """The parties that this one waits for, or that have not confirmed what it said."""
        keys = self._awaited.keys - self.player.heard.keys() if self._awaited else ()
        waited = {self.charter.plays(key[3]) for key in keys}
        return waited | self.channel.unconfirmed(_ROUND)

    # ---- one step after the other --------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Carry out what was decided; make it durable; only then tell others."""
        while self.council.orders or self._next is not None:
            if self.council.orders:
                self._next = self.council.orders[-1]
                self.council.orders.clear()
            if self.work is not None or self._next is None:
                break  # what is under way must end before the state can be put back
            decision, self._next = self._next, None
            self._keep()
            self._follow(decision, now)
        if self.work is None and self._awaited is not None:
            self._resume(None, now)
        for name in self.council.spared:
            self.channel.cancel(_ROUND, name)
        self.council.spared.clear()
        if self._played is not None and not self.channel.unconfirmed(_ROUND):
            # a round is done when it is saved, and all that was said has arrived
            self.council.finished(self._played, now)
            self._played = None
        self._keep()
        for to, note in self.council.outbox:
            more = {"terms": self.terms} if note["kind"] == "hello" else {}
            self.channel.post(to, pack(note | more), now)
        self.council.outbox.clear()
        ended = self.accuracy is not None and (self.council.is_over or self.is_alone)
        if ended and not self.is_over and self.channel.is_settled():
            loss = summary(self.recorder.metrics.records, self.charter.method.guard)
            self.recorder.finish({"accuracy": self.accuracy, "rounds": self.states.last, **loss})
            self.is_over = True

    def _follow(self, decision: Decision, now: float) -> None:
        self._moved, self.accuracy, self.is_alone = now, None, False
        self.channel.cancel(_ROUND)
        self.lost = self.states.lost(decision, self.name)
        if self.lost:
            self.is_over = True
            return
        self._join()
        self.player.heard = self.mail.open(decision.attempt)
        if decision.round > self.charter.method.rounds:
            self._start(self._end(decision), now)
        else:
            self._start(self._round(decision), now)

    def _round(self, decision: Decision) -> Steps:
        base = yield from self._from_base(decision)
        yield from self.player.round(decision, base)
        every, last = self.charter.evaluate_every, self.charter.method.rounds
        is_due = decision.round % every == 0 or decision.round == last
        yield from self._close(decision.round, evaluate=is_due)
        for key in self.player.heard:
            self._fault(key[3], "message refused", f"nobody waits for {key}")
        yield Work(())  # nothing to do, but what was said leaves before the disk is waited for
        self.states.save((decision.round, *decision.attempt), self.player.own)
        return decision.attempt

    def _end(self, decision: Decision) -> Steps:
        yield from self._from_base(decision)
        yield from self.player.finish()
        self.accuracy = yield from self.player.evaluate()
        self._note("final", self.accuracy)
        return decision.attempt

    def _start(self, steps: Steps, now: float) -> None:
        self._begun, self._steps = now, steps
        self._awaited = self._played = None
        self._resume(None, now)

    def _resume(self, results: Any, now: float) -> None:
        """Go on until there is work, or something that has not arrived, or the end."""
        while self._steps is not None:
            if self._awaited is not None:
                if not self._awaited.keys <= self.player.heard.keys():
                    return
                self._awaited = None
            try:
                asked = self._steps.send(results)
            except StopIteration as end:
                self._steps = None
                self._played = end.value
                return
            results = None
            if isinstance(asked, Work):
                self.work = asked
                return
            self._awaited = asked

    # ---- state ---------------------------------------------------------------------------------

    def _join(self) -> None:
        """Take the places of the topology, once all have told about themselves."""
        player, charter = self.player, self.charter
        if player.topology.names:
            return
        player.topology = charter.joined(self.council.roster)
        self.mail.announced = {
            name: read_spec(card.get("sends", {})) for name, card in self.council.roster.items()
        }
        if self.name == charter.host:
            hub = {} if self._hub is None else {self._hub.name: self._hub}
            player.places = {
                place: hub.get(place, Node(place, seed=charter.seed))
                for place in player.topology.places
            }
        self._pristine = [(n.model.state(), dict(n.memory)) for n in player.own]

    def _from_base(self, decision: Decision) -> Steps:
        """Put the state back from which a decision begins; at first, make it."""
        states = self.states
        base = states.base(decision)
        if base is None:
            for node, (state, memory) in zip(self.player.own, self._pristine, strict=True):
                node.model.load(state)
                node.memory = dict(memory)
            yield from self.player.start()
            yield from self._close(0, evaluate=True)
            states.save((0, 0, 0), self.player.own)
            states.standing = None
            return (0, 0, 0)
        if not (states.standing == base or self.player.is_trained(decision, base)):
            self.store.load(base, self.player.own)
        states.standing = None
        states.forget(decision)
        return base

    def _keep(self) -> None:
        """Make what must outlive the party durable, if it has changed."""
        council = self.council
        held = council.accepted
        known = (council.promised, held and held.attempt, council.done, len(council.roster))
        if known == self._kept:
            return
        self._kept = known
        self.store.keep(
            {
                "born": self.born,
                "promised": council.promised,
                "accepted": held.plain() if held else None,
                "done": list(council.done) if council.done else None,
                "roster": council.roster,
                "points": self.states.points,
            }
        )

    def _tell(self, said: Said) -> None:
        """Post a message of this round."""
        if self.council.accepted is not None:
            parcel = self.mail.parcel(said, self.council.accepted.attempt)
            self.channel.post(self.charter.plays(said.key[4]), parcel, self._now, _ROUND)

    # ---- records -------------------------------------------------------------------------------

    def _close(self, number: int, *, evaluate: bool) -> Steps:
        accuracy = (yield from self.player.evaluate()) if evaluate else {}
        self._note(number, accuracy)
        seconds = round(self._moved - self._begun, 4)
        self.recorder.metrics.append({"tick": number, "seconds": seconds})

    def _note(self, tick: int | str, accuracy: Mapping[Name, float]) -> None:
        for node in self.player.own:
            if node.notes:
                self.recorder.metrics.append({"tick": tick, "node": node.name, **node.notes})
                node.notes.clear()
        for name, value in accuracy.items():
            self.recorder.metrics.append({"tick": tick, "node": name, "test_accuracy": value})

    def _fault(self, node: Name, fault: str, why: str) -> None:
        """Record what was wrong; of one party not more than a few in a life, whatever it sends."""
        self._faults[node] += 1
        if self._faults[node] > _FAULTS:
            return
        is_last = self._faults[node] == _FAULTS
        why = why[:_LONGEST] + ("; more of this party are not recorded" if is_last else "")
        held = self.council.accepted
        tick = 0 if held is None else held.round
        self.recorder.faults.append(
            {"tick": tick, "node": node, "fault": fault, "why": why[:_LONGEST]}
        )

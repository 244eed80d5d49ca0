"""The conductor: the hub's side of the relay.

For every round it decides who plays it, hands each node in turn what it waits for, plays the places
of the topology itself, and passes on what one node says to another. A node that does not answer is
absent from the round: the round is played again without it, from the state before it, and it is
asked again in the next. So the numbers are those of one process with the same absences.

A round is settled when nobody has to say anything more; what nodes only have to take home goes with
their next exchange. Then the state is saved, in one file: a conductor that is killed goes on with a
new attempt at the round it was in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from polyfed.core.node import Name, Node
from polyfed.engines.agreement import terms_of
from polyfed.engines.charter import Charter, check_card, read_spec
from polyfed.engines.decision import Attempt, Decision, Settled
from polyfed.engines.game import Game
from polyfed.engines.mail import Mail
from polyfed.engines.relay import (
    HELLO,
    PLAY,
    REFUSED,
    Desk,
    Letter,
    blank_desk,
    bundle,
    unbundle,
)
from polyfed.engines.store import MemoryStore
from polyfed.errors import MessageError, RunError
from polyfed.record import Recorder
from polyfed.record.checkpoint import Checkpoint

Address = Hashable


@runtime_checkable
class Post(Protocol):
    """What brings exchanges to nodes and their answers back."""

    def present(self) -> Mapping[Address, Name | None]:
        """Who can be reached now; with the name that is vouched for, if one is."""

    def exchange(self, given: Mapping[Address, bytes]) -> Mapping[Address, bytes]:
        """Send, and wait for the answers; who is lost is left out."""


class Conductor:
    """The hub of a run.

    Args:
        charter: what all agree on.
        hub: the hub's own data and network, for methods whose hub trains; as `charter.enter` made.
        recorder: of the hub's run folder.
        point: where the last life ended; None in the first.
        post: brings exchanges.
        shown: takes a line whenever something is worth saying.
        pause: seconds between two looks at who is there.
    """

    def __init__(
        self,
        charter: Charter,
        hub: Node | None,
        recorder: Recorder,
        point: Checkpoint | None,
        post: Post,
        *,
        shown: Callable[[str], None] | None = None,
        pause: float = 1.0,
    ) -> None:
        self.charter, self.recorder, self._post = charter, recorder, post
        self._hub, self._say, self._pause = hub, shown or (lambda text: None), pause
        self._point = point
        self.places: dict[Name, Node] = {}
        self.log: list[Settled] = []
        self._topology = charter.topology
        self._mail = Mail(charter, charter.host or "")
        self._roster: dict[Name, Any] = {}
        self._addresses: dict[Name, Address] = {}
        self._seen: set[Address] = set()
        self._refused: dict[Address, str] = {}
        self._briefed: set[Name] = set()  # who has the roster
        self._pending: dict[Name, list[Letter]] = {name: [] for name in charter.nodes}
        self._base = MemoryStore()
        self._born, self._attempts, self._exchanges = 1, 0, 0
        self._desk = Desk()
        if point is not None:
            self._remember(point)

    def run(self) -> None:
        """From the start, or from where the last life ended, to the end."""
        self._assemble()
        rounds = self.charter.method.rounds
        for number in range(len(self.log) + 1, rounds + 1):
            self._round(number)
        self._end(rounds + 1)
        self.recorder.finish({"accuracy": {}, "rounds": rounds})

    # ---- who is there --------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Wait until every node has told about itself; then take the places of the topology."""
        nodes = self.charter.nodes

        def missing() -> str:
            return ", ".join(name for name in nodes if name not in self._roster)

        end = time.monotonic() + self.charter.grace
        while len(self._post.present()) < len(nodes) and time.monotonic() < end:
            time.sleep(self._pause)  # to ask all at once is cheaper
        self._wait_until(lambda: not missing(), lambda: f"waiting for {missing()}")
        self._topology = self.charter.joined(self._roster)
        self._mail.announced = {n: read_spec(card["sends"]) for n, card in self._roster.items()}
        hub = {} if self._hub is None else {self._hub.name: self._hub}
        self.places = {
            name: hub.get(name, Node(name, seed=self.charter.seed))
            for name in self._topology.places
        }
        if self._point is not None and self.log:
            self._point.load_into(list(self.places.values()))
        self._save()

    def _wait_until(self, is_so: Callable[[], bool], why: Callable[[], str]) -> None:
        begun, said = time.monotonic(), ""
        while True:
            self._greet()
            if is_so():
                return
            self._seen.clear()  # while it waits, it asks again
            if why() != said:
                said = why()
                self._say(said)
            if time.monotonic() > begun + self.charter.patience:
                raise RunError(
                    f"{why()} for {self.charter.patience:g} s (patience). Start the nodes; the "
                    "same command then goes on where the run stands."
                )
            time.sleep(self._pause)

    def _here(self) -> set[Name]:
        there = self._post.present()
        return {name for name, address in self._addresses.items() if address in there}

    def _greet(self) -> None:
        """Ask who they are: those who are new and, when others came or went, all who are not in."""
        there = self._post.present()
        new = [address for address in there if address not in self._addresses.values()]
        if self._seen == set(there) or not new:
            return
        self._seen = set(there)
        raw = bundle(self._header(HELLO))
        for address, answer in self._post.exchange(dict.fromkeys(new, raw)).items():
            try:
                self._admit(address, there[address], unbundle(answer)[0])
            except MessageError as error:
                if self._refused.get(address) != str(error):
                    self._refused[address] = str(error)
                    name = there[address] or str(address)
                    self._fault(name, "node refused", str(error))
                    self._say(f"node {name} is not taken: {error}")

    def _admit(self, address: Address, vouched: Name | None, header: Mapping[str, Any]) -> None:
        """Take a node in; raises MessageError if it is none of this federation."""
        if header["kind"] == REFUSED:
            raise MessageError(f"it refused: {header.get('why')}")
        name, card = header.get("name"), header.get("card")
        if name not in self.charter.nodes:
            raise MessageError(f"a node that calls itself {name!r}"[:200])
        if vouched not in (None, name):
            raise MessageError(f"{vouched} calls itself {name}")
        if name in self._here():
            raise MessageError(f"a second node calls itself {name}")
        check_card(card, is_node=True)
        if self._roster.setdefault(name, card) != card:
            raise MessageError(f"{name} announces something else than before")
        self._addresses[name] = address
        self._briefed.discard(name)
        self._say(f"{name} is here")

    # ---- a round -------------------------------------------------------------------------------

    def _round(self, number: int) -> None:
        begun, lost = time.monotonic(), set[Name]()
        self._base.save((0, 0, 0), list(self.places.values()))
        while True:
            self._wait_until(lambda: bool(self._here()), lambda: "waiting for any node")
            members = sorted(self._here() - lost)
            if not members:
                if time.monotonic() > begun + self.charter.patience:
                    raise RunError(f"round {number}: no node answers; faults.jsonl says why.")
                lost.clear()
                time.sleep(self._pause)
                continue
            decision = Decision(self._attempt(), number, tuple(members), tuple(self.log))
            last = self.charter.method.rounds
            self._say(f"round {number} of {last} with {', '.join(members)}")
            gone = self._play(decision)
            if not gone:
                break
            lost |= gone
            self._base.load((0, 0, 0), list(self.places.values()))
        for name in sorted(set(self.charter.nodes) - set(members)):
            self.recorder.faults.append({"tick": number, "node": name, "fault": "absent"})
        self.log.append(Settled(decision.attempt, decision.members))
        for place in self.places.values():
            if place.notes:
                record = {"tick": number, "node": place.name, **place.notes}
                self.recorder.metrics.append(record)
                place.notes.clear()
        seconds = round(time.monotonic() - begun, 4)
        self.recorder.metrics.append({"tick": number, "seconds": seconds})
        self._save()

    def _play(self, decision: Decision) -> set[Name]:
        """One attempt at a round; who was lost in it."""
        game = Game(self.charter, self._topology, decision, self.places, self._mail, self.recorder)
        while turns := game.turns():
            answers = self._exchange(decision, turns)
            lost = set(turns) - answers.keys()
            for name, (header, letters) in answers.items():
                try:
                    game.take(name, header, letters)
                except MessageError as error:
                    self._fault(name, "message refused", str(error), decision.round)
                    lost.add(name)
            if lost:
                return lost
        for name, letters in game.rest().items():
            self._pending[name] += letters
        return set()

    def _end(self, number: int) -> None:
        """Let every node finish; who is away has `grace` seconds to come back."""
        self._say("the end")
        missing, begun = set(self.charter.nodes), time.monotonic()
        while missing and (missing & self._here() or time.monotonic() < begun + self.charter.grace):
            members = sorted(missing & self._here())
            decision = Decision(self._attempt(), number, tuple(members), tuple(self.log))
            answers = self._exchange(decision, {name: [] for name in members})
            missing -= answers.keys()
            if missing:
                time.sleep(self._pause)
                self._greet()
        for name in sorted(missing):
            self.recorder.faults.append({"tick": number - 1, "node": name, "fault": "absent"})

    # ---- exchanges -----------------------------------------------------------------------------

    def _exchange(
        self, decision: Decision, given: Mapping[Name, Sequence[Letter]]
    ) -> dict[Name, tuple[dict[str, Any], list[Letter]]]:
        """Send to all at the same time; the answers. Who fails and is still there is asked twice.

        The second time it is the same exchange: a node that had done it says what it said.
        """
        found: dict[Name, tuple[dict[str, Any], list[Letter]]] = {}
        raws = {name: self._sealed(decision, name, letters) for name, letters in given.items()}
        for _ in range(2):
            here = self._here()
            asked = {n: raw for n, raw in raws.items() if n in here and n not in found}
            if not asked:
                break
            addressed = {self._addresses[name]: raw for name, raw in asked.items()}
            answers = self._post.exchange(addressed)
            for name in asked:
                answer = answers.get(self._addresses[name])
                if answer is None:
                    self._fault(name, "no answer", "an exchange failed", decision.round)
                    continue
                try:
                    found[name] = self._read(answer)
                except MessageError as error:
                    self._fault(name, "message refused", str(error), decision.round)
                    continue
                self._briefed.add(name)
                self._pending[name] = []
        return found

    def _sealed(self, decision: Decision, name: Name, letters: Sequence[Letter]) -> bytes:
        header = {**self._header(PLAY), "decision": decision.plain()}
        if name not in self._briefed:
            header["roster"] = self._roster
        return bundle(header, [*self._pending[name], *letters])

    def _read(self, answer: bytes) -> tuple[dict[str, Any], list[Letter]]:
        header, letters = unbundle(answer)
        if header["kind"] != PLAY:
            raise MessageError(f"it refused: {header.get('why')}")
        for letter in letters:
            if len(letter.payload) > self.charter.largest:
                raise MessageError(f"a message of {len(letter.payload)} bytes")
        return header, letters

    def _header(self, kind: str) -> dict[str, Any]:
        self._exchanges += 1
        number = [self._born, self._exchanges]
        return {"kind": kind, "exchange": number, "terms": terms_of(self.charter)}

    def _attempt(self) -> Attempt:
        self._attempts += 1
        return self._born, self._attempts

    # ---- state ---------------------------------------------------------------------------------

    def _save(self) -> None:
        self._desk.facts = {
            "born": self._born,
            "roster": self._roster,
            "log": [[list(s.attempt), list(s.members)] for s in self.log],
        }
        self._desk.piles = {name: list(letters) for name, letters in self._pending.items()}
        nodes = [*self.places.values(), self._desk.as_node()]
        self.recorder.checkpoint(len(self.log), nodes)

    def _remember(self, point: Checkpoint) -> None:
        desk = blank_desk()
        point.load_into([desk])
        self._desk.read(desk)
        facts = self._desk.facts
        self._born = facts["born"] + 1
        self._roster = facts["roster"]
        self.log = [Settled((a, b), tuple(members)) for (a, b), members in facts["log"]]
        self._pending |= self._desk.piles

    def _fault(self, node: Name, fault: str, why: str, tick: int = 0) -> None:
        self.recorder.faults.append({"tick": tick, "node": node, "fault": fault, "why": why})

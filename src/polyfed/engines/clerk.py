"""The clerk: a node's side of the relay, one exchange at a time.

A clerk lives as long as one exchange. It takes up the state that the last one left, plays what the
hub has decided as far as it comes with the messages it is given, saves, and answers with what the
node says. The state is one file, so that a clerk that is killed has done an exchange or has not:

    RUN/checkpoints/ROUND-COUNT.000000.safetensors   network, memory, and where in the round it is

The same exchange once more gets the same answer, and nothing is trained twice. A new attempt at a
round begins from the state after the round before, unless the node has heard nothing yet and what
it has done is the same in both: then it says the same again. What came of a round lies with the
state until the hub has settled it, and is written into the metrics then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.message import Message
from polyfed.core.node import Name, Node
from polyfed.engines.agreement import differences, open_folder, read_terms, terms_of
from polyfed.engines.charter import Charter, check_card, plain, read_spec
from polyfed.engines.decision import Decision, read_roster
from polyfed.engines.mail import Mail
from polyfed.engines.player import Key, Said, Steps, Work
from polyfed.engines.privacy import summary
from polyfed.engines.relay import (
    HELLO,
    PLAY,
    REFUSED,
    Desk,
    Letter,
    Number,
    Paced,
    blank_desk,
    bundle,
    reach,
    read_number,
    stages,
    unbundle,
)
from polyfed.engines.store import FolderStore, Point
from polyfed.errors import MessageError
from polyfed.record import Recorder
from polyfed.record.checkpoint import Checkpoint
from polyfed.train.together import Trainer

_SAID, _OWN = "said", "own"  # what it said in this round, and what it said to itself


class Clerk:
    """One node, for one exchange.

    Args:
        charter: what all agree on.
        node: as `charter.enter` made it.
        recorder: of the site's run folder.
        point: where the last exchange ended; None at the first.
    """

    def __init__(
        self, charter: Charter, node: Node, recorder: Recorder, point: Checkpoint | None
    ) -> None:
        self.charter, self.node, self.recorder = charter, node, recorder
        self.player = Paced(charter.method, charter.topology, node, {}, recorder, self._tell)
        self.accuracy: dict[Name, float] | None = None
        self._store, self._trainer = FolderStore(recorder), Trainer("never")
        self._mail = Mail(charter, node.name)
        self._desk = Desk(
            {
                "exchange": [0, 0],
                "answer": {},
                "roster": {},
                "count": 0,
                "points": [],  # [round, attempt, file, *metrics]: the states after rounds
                "file": None,
                "round": 0,
                "over": None,
            }
        )
        self._decision: Decision | None = None
        self._begin()
        if point is not None:
            desk = blank_desk()
            point.load_into([node, desk])
            self._desk.read(desk)
            self._remember()

    # ---- an exchange ---------------------------------------------------------------------------

    def answer(self, raw: bytes) -> bytes:
        """Play what the hub sends, and answer; raises MessageError for what is no good."""
        header, letters = unbundle(raw)
        number = read_number(header)
        differs = differences(terms_of(self.charter), read_terms(header.get("terms")), "at the hub")
        if differs:
            raise MessageError(
                f"the hub has another federation file than {self.node.name}: {differs}. Give all "
                "sites the same file, then type the same command again"
            )
        if header["kind"] == HELLO:
            card = self.charter.card(self.node)
            return bundle({**_named(HELLO, number), "name": self.node.name, "card": card})
        if header["kind"] != PLAY:
            raise MessageError(f"an exchange of no kind: {header['kind']!r}"[:200])
        last = tuple(self._desk.facts["exchange"])
        if number < last:
            raise MessageError(f"exchange {number} comes after {last}")
        if number > last:
            self._play(number, header, letters)
        return bundle(self._desk.facts["answer"], self._desk.piles.get(_SAID, ()))

    def refuse(self, error: MessageError) -> bytes:
        """Write down that an exchange was no good; what to answer."""
        self._fault("hub", str(error))
        if self._desk.facts["points"]:  # a folder in which nothing was played stays so
            self._save(self._desk.facts["file"][0])
        return bundle({"kind": REFUSED, "why": str(error)})

    def close(self) -> None:
        """Let go of the run folder; if the run is over, say so there."""
        if self.accuracy is None:
            self.recorder.close()
            return
        rounds = self._desk.facts["points"][-1][0]
        loss = summary(self.recorder.metrics.records, self.charter.method.guard)
        self.recorder.finish({"accuracy": self.accuracy, "rounds": rounds, **loss})

    def _play(self, number: Number, header: Mapping[str, Any], letters: Sequence[Letter]) -> None:
        self._join(header.get("roster"))
        decision = Decision.read(header.get("decision"), self.charter.nodes)
        facts = self._desk.facts
        if self._decision is None or self._decision.round != decision.round:
            self._desk.piles[_SAID] = []
        if not facts["points"]:
            self._do(self.player.start())
            self._finish_round(0, (0, 0), evaluate=True)
            self._save(0)
        for each in self._due(decision):
            mine = [x for x in letters if x.header.get("attempt") == list(each.attempt)]
            self._take_up(each)
            self._go_on(each, mine)
            if each is not decision:
                point = self._ended(each)
                if point is None:
                    raise MessageError(f"round {each.round} is settled, and not all of it was sent")
                self._settle(point)
                self._save(each.round)
        if decision.round > self.charter.method.rounds and self.accuracy is None:
            self._do(self.player.finish())
            self.accuracy = self._do(self.player.evaluate())
            self._write(*self._noted("final", self.accuracy))
        facts["exchange"] = list(number)
        facts["answer"] = {**_named(PLAY, number), "stage": self._stage}
        self._save(decision.round)

    def _join(self, roster: Any) -> None:
        """Take the place among the others, once the hub has told about them."""
        facts, charter = self._desk.facts, self.charter
        if roster is not None:
            facts["roster"] = read_roster(roster, charter.nodes)
            for card in facts["roster"].values():
                check_card(card, is_node=True)
        if not facts["roster"]:
            raise MessageError("the hub has told nothing about the other nodes")
        self.player.topology = charter.joined(facts["roster"])
        self._mail.announced = {
            name: read_spec(card["sends"]) for name, card in facts["roster"].items()
        }

    def _due(self, decision: Decision) -> Iterator[Decision]:
        """The rounds that are settled and not played to the end here, then the one decided now."""
        log = decision.log
        settled = {(i + 1, *each.attempt) for i, each in enumerate(log)} | {(0, 0, 0)}
        facts = self._desk.facts
        valid = [p for p in facts["points"] if (p[0], *p[1]) in settled]
        if not valid:
            raise MessageError("the hub has no round that was played here: its run is another one")
        base = max(valid)
        self._settle(base)
        for point in facts["points"]:
            if point is not base and point[0] < decision.round:
                self._drop(point[2])
        facts["points"] = [p for p in facts["points"] if p is base or p[0] >= decision.round]
        for i, each in enumerate(log):
            if i + 1 > base[0]:  # of a round that it was absent from it has no part, and ends it
                yield Decision(each.attempt, i + 1, each.members, log[:i])
        is_last = decision.round > self.charter.method.rounds
        if self.node.name in decision.members and not is_last:
            yield decision

    # ---- a round -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._stage, self._heard, self._spent = 0, False, 0.0

    def _take_up(self, decision: Decision) -> None:
        """Be in the state from which this attempt goes on."""
        now, piles, points = self._decision, self._desk.piles, self._desk.facts["points"]
        if now is not None and now.attempt == decision.attempt:
            piles[_SAID] = []  # the hub has heard it, or it would not go on
            return
        if now is not None and self._is_same_so_far(now, decision):
            self._decision = decision
            piles[_SAID] = [_for_attempt(letter, decision) for letter in piles.get(_SAID, ())]
            for point in points:
                if point[:2] == [now.round, list(now.attempt)]:
                    point[1] = list(decision.attempt)
            return
        base = max(point for point in points if point[0] < decision.round)
        standing = [0, [0, 0]] if now is None else [now.round, list(now.attempt)]
        if standing != base[:2]:  # it had begun, or ended, what the others gave up
            self._store.load(_point(base[2]), [self.node])
            self.node.notes.clear()
        self._decision = decision
        self._begin()
        piles[_SAID] = []
        self.player.enter(decision.round)
        self.player.heard = {}

    def _ended(self, decision: Decision) -> list[Any] | None:
        """The state after this attempt at a round, if it was played to the end here."""
        done = [decision.round, list(decision.attempt)]
        return next((p for p in self._desk.facts["points"] if p[:2] == done), None)

    def _is_same_so_far(self, now: Decision, then: Decision) -> bool:
        if self._heard or now.round != then.round or self.charter.method.guard:
            return False  # what passes a guard is said anew
        old, new = (stages(self.player.ticks(d), self.node.name) for d in (now, then))
        return old[: self._stage] == new[: self._stage]

    def _go_on(self, decision: Decision, letters: Sequence[Letter]) -> None:
        """Play as far as can be."""
        ticks = self.player.ticks(decision)
        todo = stages(ticks, self.node.name)
        self._open(decision, letters)
        for stage in todo[self._stage : reach(todo, self._stage, self.player.heard)]:
            self._do(self.player.pace(stage, ticks[stage.k]))
            self._stage += 1
        for key in self.player.heard:
            if key[3] != self.node.name:
                self._fault(key[3], f"nobody waits for {key}")
        if self._stage < len(todo) or self._ended(decision) is not None:
            return
        every, last = self.charter.evaluate_every, self.charter.method.rounds
        is_due = decision.round % every == 0 or decision.round == last
        self._finish_round(decision.round, decision.attempt, evaluate=is_due)

    def _open(self, decision: Decision, letters: Sequence[Letter]) -> None:
        """Hear what has come for this attempt, besides what the node said to itself."""
        own = self.player.heard
        heard = self._mail.open(decision.attempt)
        for letter in letters:
            try:
                source = self.charter.plays(letter.key[3])
                if source == self.node.name or source not in self.charter.parties:
                    raise MessageError(f"nothing comes from {source} this way")
                self._mail.arrive(source, letter.header, letter.payload, decision, True)
            except MessageError as error:
                self._fault("hub", str(error))
        self._heard = self._heard or bool(heard)
        heard.update(own)
        self.player.heard = heard

    def _tell(self, said: Said) -> None:
        if self._decision is not None:
            header, payload = self._mail.parcel(said, self._decision.attempt)
            letter = Letter.from_bytes(header + payload)
            self._desk.piles.setdefault(_SAID, []).append(letter)

    def _finish_round(self, number: int, attempt: tuple[int, int], *, evaluate: bool) -> None:
        accuracy = self._do(self.player.evaluate()) if evaluate else {}
        metrics = self._noted(number, accuracy)
        metrics.append({"tick": number, "seconds": round(self._spent, 4)})
        self._spent = 0.0
        facts = self._desk.facts  # what is saved next is the state after this round
        facts["points"].append([number, list(attempt), [number, facts["count"] + 1], *metrics])

    def _settle(self, point: list[Any]) -> None:
        """Nobody can give this round up any more: write down what came of it, once."""
        self._write(*point[3:])
        del point[3:]

    # ---- state ---------------------------------------------------------------------------------

    def _save(self, number: int) -> None:
        """Write one file that holds everything; drop the one before it, if nothing needs it."""
        facts, last = self._desk.facts, self._desk.facts["file"]
        facts["count"] += 1
        facts["file"] = [number, facts["count"]]
        facts["over"] = self.accuracy
        now = self._decision
        facts["now"] = None if now is None else now.plain()
        facts["stage"], facts["heard"], facts["spent"] = self._stage, self._heard, self._spent
        facts["visits"], facts["notes"] = self.player.visits, dict(self.node.notes)
        me = self.node.name
        held = {key: found for key, found in self.player.heard.items() if key[3] == me}
        self._desk.piles[_OWN] = [_own(key, found) for key, found in held.items()]
        self._store.save(_point(facts["file"]), [self.node, self._desk.as_node()])
        if last is not None and all(last != p[2] for p in facts["points"]):
            self._drop(last)

    def _remember(self) -> None:
        facts = self._desk.facts
        now = facts["now"]
        self._decision = None if now is None else Decision.read(now, self.charter.nodes)
        self._stage, self._heard, self._spent = facts["stage"], facts["heard"], facts["spent"]
        self.accuracy = facts["over"]
        self.node.notes.update(facts["notes"])
        self.player.enter(0 if now is None else now["round"], map(tuple, facts["visits"]))
        for letter in self._desk.piles.get(_OWN, ()):
            message = Message.from_bytes(letter.payload)
            self.player.heard[letter.key] = message, read_spec(letter.header["spec"])

    def _drop(self, file: Sequence[int]) -> None:
        if file != self._desk.facts["file"]:
            self._store.drop(_point(file))

    # ---- records -------------------------------------------------------------------------------

    def _do(self, steps: Steps) -> Any:
        """Take steps to their end; nothing is waited for, it is there or the stage is not begun."""
        begun, results = time.perf_counter(), None
        while True:
            try:
                asked = steps.send(results)
            except StopIteration as end:
                self._spent += time.perf_counter() - begun
                return end.value
            results = asked.do(self._trainer) if isinstance(asked, Work) else None

    def _noted(self, tick: int | str, accuracy: Mapping[Name, float]) -> list[dict[str, Any]]:
        """What was noted at the node, and how good it is, as metrics."""
        notes = dict(self.node.notes)
        self.node.notes.clear()
        found = [{"tick": tick, "node": self.node.name, **notes}] if notes else []
        return found + [{"tick": tick, "node": n, "test_accuracy": v} for n, v in accuracy.items()]

    def _write(self, *metrics: dict[str, Any]) -> None:
        for record in metrics:
            self.recorder.metrics.append(record)

    def _fault(self, node: Name, why: str) -> None:
        now = self._decision
        tick = 0 if now is None else now.round
        record = {"tick": tick, "node": node, "fault": "message refused", "why": why}
        self.recorder.faults.append(record)


def serve(
    charter: Charter,
    make: Callable[[], Node],
    folder: Path,
    config: Mapping[str, Any],
    raw: bytes,
) -> bytes:
    """Answer one exchange from what a run folder holds.

    Args:
        charter: what all agree on.
        make: the node as `charter.enter` makes it.
        folder: of the run; made at the first exchange.
        config: what to write there at first.
        raw: what the hub sent.
    """

    def opened() -> Clerk:
        return Clerk(charter, make(), *open_folder(folder, config))

    clerk = opened()
    try:
        return clerk.answer(raw)
    except MessageError as error:
        clerk.recorder.close()
        clerk = opened()  # nothing of it has happened
        return clerk.refuse(error)
    finally:
        clerk.close()


def _named(kind: str, number: Number) -> dict[str, Any]:
    return {"kind": kind, "exchange": list(number)}


def _point(file: Sequence[int]) -> Point:
    return file[0], file[1], 0


def _for_attempt(letter: Letter, decision: Decision) -> Letter:
    return Letter({**letter.header, "attempt": list(decision.attempt)}, letter.payload)


def _own(key: Key, found: Any) -> Letter:
    """What a node has said to itself, kept until it comes to hear it."""
    message, spec = found
    header = {"kind": key[0], "key": list(key[1:]), "spec": plain(spec)}
    return Letter(header, message.to_bytes())

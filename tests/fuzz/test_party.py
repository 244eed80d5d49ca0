"""Fuzz the state machine: notes that were never written, and frames that were changed on the way.

`notes` drives one party with mutations of genuine notes, in sealed frames, between things that
happen to it. `garbled` runs the scenarios of the simulated network while frames are damaged, come
again much later, or come from strangers: the run must come to the same numbers all the same.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed import topologies
from polyfed.core.message import Message
from polyfed.core.node import Name
from polyfed.engines import chaos
from polyfed.engines.agreement import terms_of
from polyfed.engines.charter import Charter
from polyfed.engines.decision import Decision, Settled
from polyfed.engines.party import Party
from polyfed.engines.simulated import Chance, Network
from polyfed.engines.store import MemoryStore
from polyfed.engines.wire import DATA, Frame
from polyfed.record import Recorder
from polyfed.train.together import Trainer

NODES = ("M0", "M1", "M2")

# ---- notes that were never written ---------------------------------------------------------------


@cache
def charter(topology: str, host: Name | None) -> Charter:
    made = topologies.make(topology)
    method = chaos.Number(rounds=3)
    return Charter(run="f", method=method, topology=made, nodes=NODES, host=host, largest=50_000)


SEATS = (("star", "hub", "M1"), ("star", "hub", "hub"), ("ring", None, "M1"), ("ring", None, "M0"))


def seat(number: int) -> Party:
    """A party that has begun and sees all others."""
    topology, host, name = SEATS[number % len(SEATS)]
    agreed = charter(topology, host)
    node = chaos._node(name) if name in NODES else None
    party = Party(agreed, name, node, MemoryStore(), Recorder.in_memory(), piece=1 << 16)
    party.begin(0.0)
    for other in agreed.parties:
        party.up(other, 0.0)
    return party


class Driver:
    """Does to a party what lines of bytes say, and checks it after each."""

    def __init__(self, party: Party) -> None:
        self.party, self.now = party, 0.0
        self.others = [n for n in party.charter.parties if n != party.name]
        self.numbers: dict[Name, int] = defaultdict(int)
        self.spoke: set[Name] = {party.name}
        self.trainer = Trainer("never")
        self.notes = 0

    def line(self, line: bytes) -> None:
        what, who = (line[0], line[1]) if len(line) > 1 else (0, 0)
        sender = self.others[who % len(self.others)]
        party, before = self.party, self._standing()
        self.now += 0.1 * (what >> 4)
        verb = what & 15
        if verb == 1:
            party.up(sender, self.now)
        elif verb == 2:
            party.down(sender, self.now)
        elif verb == 3:
            party.tick(self.now)
        elif verb == 4:
            party.hear(sender, line[2:], self.now)
        elif verb == 5 and party.work is not None:
            party.worked(party.work.do(self.trainer), self.now)
        else:
            self.spoke.add(sender)
            self._note(sender, line[2:])
        self._check(before, sender)
        party.outbox.clear()

    def _note(self, sender: Name, raw: bytes) -> None:
        text, _, payload = raw.partition(b"|")
        piece = len(text).to_bytes(4, "big") + text + payload
        number, self.numbers[sender] = self.numbers[sender], self.numbers[sender] + 1
        self.notes += 1
        self.party.hear(sender, Frame(DATA, 1, number, 0, 0, 1, piece).to_bytes(), self.now)

    def _standing(self) -> tuple[Any, ...]:
        council = self.party.council
        return council.promised, council.accepted

    def _check(self, before: tuple[Any, ...], sender: Name) -> None:
        party, council = self.party, self.party.council
        promised, accepted = before
        assert council.promised >= promised
        if council.accepted is not accepted:
            assert council.accepted is not None
            assert accepted is None or council.accepted.attempt > accepted.attempt
            assert council.leader in (sender, party.name)  # nobody else decides
            assert council.accepted.round == len(council.accepted.log) + 1 <= 4
            assert party.name in council.accepted.members
        for key in party.player.heard:
            assert party.charter.plays(key[3]) in self.spoke
            assert party.charter.plays(key[4]) == party.name
        assert all(to in self.others for to, _ in party.outbox)
        for crossing in party.recorder.ledger.crossings():
            assert {party.charter.plays(crossing.source), crossing.to} <= {*self.spoke, *NODES}
        refused = [f for f in party.recorder.faults.records if f["fault"] == "message refused"]
        assert all(len(f["why"]) < 600 for f in refused)


def notes(data: bytes) -> None:
    driver = Driver(seat(data[0] if data else 0))
    for line in data[1:].split(b"\n")[:12]:
        driver.line(line)


def _line(sender: Name, header: dict[str, Any], payload: bytes = b"", seat: int = 0) -> bytes:
    topology, host, name = SEATS[seat]
    others = [n for n in charter(topology, host).parties if n != name]
    text = json.dumps({"ballot": 0, "count": 1, **header}, separators=(",", ":")).encode()
    raw = bytes([0x10, others.index(sender)]) + text + b"|" + payload
    assert b"\n" not in raw
    return raw


def genuine_notes() -> list[bytes]:
    samples = []
    number = Message({"number": chaos.torch.tensor(3.0, dtype=chaos.torch.float64)}).to_bytes()
    for i, (topology, host, me) in enumerate(SEATS):
        agreed = charter(topology, host)
        cards = {n: agreed.card(chaos._node(n) if n in NODES else None) for n in agreed.parties}
        first = Decision((0, 1), 1, agreed.parties)
        second = Decision((0, 2), 2, agreed.parties, (Settled((0, 1), agreed.parties),))
        leader, others = host or "M0", [n for n in agreed.parties if n != me]
        hellos = [
            _line(n, {"kind": "hello", "born": 1, "accepted": None, "done": None, "card": cards[n],
                      "roster": {}, "lacks": [], "terms": terms_of(agreed)}, seat=i)
            for n in others
        ]  # fmt: skip
        going = [
            _line(leader, {"kind": "go", "decision": d.plain(), "roster": cards}, seat=i)
            for d in (first, second)
            if leader != me
        ]
        says = [
            _line(n, {"kind": kind, "key": [0, 0, n, place], "attempt": [0, 1], "topic": "",
                      "none": False}, number, seat=i)
            for n in others
            for kind in ("say", "answer")
            for place in [me]
        ]  # fmt: skip
        rest = [
            _line(others[0], {"kind": "done", "attempt": [0, 1]}, seat=i),
            _line(leader if leader != me else others[0],
                  {"kind": "spare", "attempt": [0, 1], "name": "M2"}, seat=i),
            _line(others[-1], {"kind": "lacks", "names": ["M0"]}, seat=i),
            _line(others[-1], {"kind": "stale", "ballot": 4}, seat=i),
            _line(others[0], {"kind": "canvass"}, seat=i),
            _line(others[0], {"kind": "terms", "terms": terms_of(agreed)}, seat=i),
            _line(others[0], {"kind": "over", "attempt": [0, 2]}, seat=i),
        ]  # fmt: skip
        work, wait = b"\x15\x00", b"\xf3\x00"
        lines = [*hellos, *going[:1], work, *says[:2], work, *says[2:3], work, *rest[:2], wait]
        samples.append(bytes([i]) + b"\n".join(lines))
        lines = [*going, *says[:1], work, b"\x12\x01", wait, *rest[2:], wait, b"\x11\x01"]
        samples.append(bytes([i]) + b"\n".join(lines))
    return samples


# ---- frames that were changed on the way ---------------------------------------------------------


class Garbled(Network):
    """A network on which frames are damaged, come again much later, or come from strangers."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.old: dict[tuple[Name, Name], list[bytes]] = defaultdict(list)
        self.damaged, self.replayed = 0, 0
        self.draw = Chance(more["seed"] + 1)

    def _send(self, sender: Name, to: Name, frame: bytes) -> None:
        super()._send(sender, to, frame)
        old = self.old[sender, to]
        old.append(frame)
        kind = int(self.draw() * 8)
        if kind < 2:
            raw, who = self._damage(frame), sender
        elif kind == 2:
            raw, who = old[int(self.draw() * len(old))], sender
        elif kind == 3:
            raw, who = frame, "stranger"
        else:
            return
        is_damaged = who == "stranger" or raw not in old

        def arrive() -> None:
            if to in self.parties and self.reaches(sender, to):
                self.damaged += is_damaged
                self.replayed += not is_damaged
                self._call(self.parties[to], "hear", who, raw)

        self._at(self.now + self.draw() * (0.1 if is_damaged else 3.0), arrive)

    def _damage(self, frame: bytes) -> bytes:
        raw, kind = bytearray(frame), int(self.draw() * 4)
        place = int(self.draw() * len(raw))
        if kind == 0:
            raw[place] ^= 1 << int(self.draw() * 8)
        elif kind == 1:
            del raw[place:]
        elif kind == 2:
            raw[place:place] = raw[: int(self.draw() * 20) + 1]
        else:
            raw[place : place + 4] = bytes(int(self.draw() * 256) for _ in range(4))
        return bytes(raw)


class Lenient(chaos.Judge):
    """Lets pass what was refused, if it was damaged."""

    def _check_books(self, network: Network) -> None:
        assert isinstance(network, Garbled)
        refused = 0
        for recorder in network.recorders.values():
            refused += sum(f["fault"] == "message refused" for f in recorder.faults.records)
            kept = [f for f in recorder.faults.records if f["fault"] != "message refused"]
            recorder.faults.records[:] = kept
        assert refused == network.damaged, f"{refused} refused of {network.damaged} damaged"
        super()._check_books(network)


def garbled(data: bytes) -> int:
    """Run a scenario; how many frames came that nobody sent like that."""
    seed = int.from_bytes(data[:4], "big")
    drawn = chaos.scenario(seed)
    judge = Lenient(drawn.charter)
    network = Garbled(
        drawn.charter,
        lambda name: chaos._node(name) if name in drawn.charter.nodes else None,
        seed=seed,
        weather=drawn.weather,
        events=copy.copy(drawn.events),
        piece=128,
        watch=judge.watch,
    )
    network.run(limit=3000.0)
    judge.end(network)
    return network.damaged + network.replayed


TARGETS = {"notes": notes, "garbled": garbled}


@cache
def genuine() -> dict[str, list[bytes]]:
    return {"notes": genuine_notes(), "garbled": [i.to_bytes(4, "big") for i in range(50)]}


def test_genuine_notes_are_taken() -> None:
    """A party plays its round with them; nothing but what is out of place is refused."""
    for sample in genuine_notes()[::2]:
        driver = Driver(seat(sample[0]))
        for line in sample[1:].split(b"\n"):
            driver.line(line)
        assert driver.party.council.accepted is not None
        assert driver.notes > 5


@settings(max_examples=150)
@given(st.data())
def test_no_notes_do_harm(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(genuine()["notes"])))
    tokens = st.sampled_from(
        [b"1e999", b"null", b"-1", b'"M9"', b"[]", b"{}", b"99999999999999999"]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        stop = data.draw(st.integers(start, min(len(raw), start + 6)))
        raw[start:stop] = data.draw(tokens | st.binary(max_size=4))
    notes(bytes(raw))


def test_damaged_and_replayed_frames_change_nothing() -> None:
    assert sum(garbled(seed.to_bytes(4, "big")) for seed in range(3)) > 200


def test_the_state_machine_gets_many_inputs_in_processes_of_their_own() -> None:
    """Where types are not checked, so that there are many more inputs in the same time."""
    program = Path(__file__).parent / "run.py"
    command = [sys.executable, str(program), "--plain", "--inputs", "2000", *TARGETS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(TARGETS)

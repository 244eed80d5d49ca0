"""Hostile input: nothing that arrives can crash a party, or get into it what should not."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyfed as pf
from polyfed import topologies
from polyfed.core.message import Message
from polyfed.engines.channel import Channel
from polyfed.engines.charter import Charter
from polyfed.engines.decision import Decision
from polyfed.engines.party import Party
from polyfed.engines.store import MemoryStore
from polyfed.engines.wire import ACK, DATA, Frame, cut, pack, unpack
from polyfed.errors import MessageError
from polyfed.record import Recorder
from polyfed.testing import tiny
from polyfed.train.together import Trainer

NAMES = ("M0", "M1", "M2")


# ---- frames and parcels --------------------------------------------------------------------------


@given(st.binary(max_size=3000), st.integers(1, 700))
def test_a_parcel_survives_its_frames(payload: bytes, size: int) -> None:
    parcel = pack({"kind": "say", "more": "x" * (size // 3)}, payload)
    frames = [Frame.from_bytes(f.to_bytes()) for f in cut(parcel, 3, 7, 5, size)]
    assert unpack([f.piece for f in frames]) == (
        {"kind": "say", "more": "x" * (size // 3)},
        payload,
    )
    assert all(len(f.piece) <= size for f in frames[1:])
    assert {(f.born, f.number, f.floor, f.count) for f in frames} == {(3, 7, 5, len(frames))}
    assert [f.index for f in frames] == list(range(len(frames)))


@given(st.binary(max_size=200))
def test_whatever_is_no_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(MessageError):
        Frame.from_bytes(raw)
    with pytest.raises(MessageError):
        Frame.from_bytes(b"pF\x01\x00" + raw)


@given(st.data())
def test_a_frame_with_one_byte_changed_is_refused(data: st.DataObject) -> None:
    raw = bytearray(Frame(DATA, 1, 2, 0, 0, 1, b"some tensors").to_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageError):
        Frame.from_bytes(bytes(raw))


def test_a_piece_beyond_the_last_is_refused() -> None:
    with pytest.raises(MessageError, match="piece 2 of 2"):
        Frame.from_bytes(Frame(DATA, 1, 0, 0, 2, 2, b"x").to_bytes())


@given(st.binary(max_size=300))
def test_whatever_is_no_parcel_is_refused(raw: bytes) -> None:
    try:
        header, _ = unpack([raw[:50], raw[50:]])
    except MessageError:
        return
    assert isinstance(header["kind"], str)


def test_headers_that_lie_about_their_length_are_refused() -> None:
    for length in (0, 5, 1 << 31, (1 << 32) - 1):
        with pytest.raises(MessageError):
            unpack([struct.pack(">I", length) + b"[1]"])


def test_a_message_takes_two_per_cent_more_than_its_tensors_at_most() -> None:
    message = Message({f"layer{i}.weight": torch.randn(300, 300) for i in range(8)})
    parcel = pack({"kind": "say", "key": [0, 0, "M0", "M1"]}, message.to_bytes())
    sent = sum(len(frame.to_bytes()) for frame in cut(parcel, 1, 1, 0))
    assert sent <= 1.02 * message.nbytes


# ---- the channel ---------------------------------------------------------------------------------


def pair(**more: Any) -> tuple[Channel, Channel]:
    a, b = Channel(1, ["B"], piece=64, **more), Channel(1, ["A"], piece=64, **more)
    a.back("B", 0.0)
    b.back("A", 0.0)
    return a, b


def test_parcels_arrive_once_each_whatever_is_lost_or_repeated() -> None:
    from polyfed.engines.simulated import Chance

    a, b = pair(resend=1.0)
    chance, got, now = Chance(5), [], 0.0
    wanted = [bytes([i]) * (i * 37) for i in range(20)]
    for payload in wanted:
        a.post("B", (b"", payload), now)
    while not a.is_settled():
        now += 1.0
        for sender, channel, other in (("A", a, b), ("B", b, a)):
            frames, channel.outbox[:] = list(channel.outbox), []
            for _, raw in sorted(frames, key=lambda _: chance()):
                for _ in range(int(3 * chance())):  # lost, delivered, or delivered twice
                    parcel = other.take(sender, raw)
                    if parcel is not None:
                        got.append(b"".join(parcel))
        a.resend(now)
        assert now < 500
    assert sorted(got) == sorted(wanted)


def test_a_frame_that_is_replayed_does_nothing() -> None:
    a, b = pair()
    a.post("B", (b"", b"hello"), 0.0)
    ((_, raw),) = a.outbox
    assert b.take("A", raw) == [b"hello"]
    assert b.take("A", raw) is None
    newer = Frame(DATA, 2, 0, 0, 0, 1, b"new life").to_bytes()
    assert b.take("A", newer) == [b"new life"]
    old = Frame(DATA, 1, 5, 0, 0, 1, b"late").to_bytes()
    assert b.take("A", old) is None  # of a life that is over


def test_what_is_below_the_floor_is_not_taken_again() -> None:
    a, b = pair()
    for text in (b"one", b"two"):
        a.post("B", (b"", text), 0.0)
    first, second = (raw for _, raw in a.outbox)
    b.take("A", first)
    (_, ack), *_ = b.outbox
    a.take("B", ack)
    a.outbox.clear()
    a.post("B", (b"", b"three"), 0.0)
    ((_, third),) = a.outbox
    assert Frame.from_bytes(third).floor == 1
    assert b.take("A", third) == [b"three"]
    assert b.take("A", first) is None
    assert b.take("A", second) == [b"two"]


def test_strangers_are_refused() -> None:
    _, b = pair()
    with pytest.raises(MessageError, match="not admitted"):
        b.take("C", Frame(DATA, 1, 0, 0, 0, 1, b"x").to_bytes())


def test_a_parcel_that_is_too_large_takes_no_memory() -> None:
    _, b = pair(largest=1000)
    with pytest.raises(MessageError, match="larger than 1000"):
        b.take("A", Frame(DATA, 1, 0, 0, 0, 1 << 20, bytes(64)).to_bytes())
    for number in range(1000):  # begun and never finished
        try:
            b.take("A", Frame(DATA, 1, number, 0, 0, 2, bytes(64)).to_bytes())
        except MessageError:
            break
    else:
        raise AssertionError("a sender may begin any number of parcels")


def test_an_ack_of_another_life_settles_nothing() -> None:
    a, _ = pair()
    a.post("B", (b"", b"x"), 0.0)
    a.take("B", Frame(ACK, 9, 0).to_bytes())
    assert not a.is_settled()
    a.take("B", Frame(ACK, 1, 0).to_bytes())
    assert a.is_settled()


# ---- the party -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
KINDS = st.sampled_from(["hello", "prepare", "go", "done", "spare", "stale", "say", "answer", "x"])
FIELDS = st.sampled_from(
    ["ballot", "born", "accepted", "done", "roster", "card", "decision", "attempt", "key", "spec"]
)


def a_party(name: str = "M1") -> Party:
    charter = Charter(
        run="t", method=pf.LI(rounds=2), topology=topologies.make("ring"), nodes=NAMES
    )
    node = charter.enter(name, {n.name: n for n in tiny()}[name], torch.device("cpu"))
    party = Party(charter, name, node, MemoryStore(), Recorder.in_memory())
    party.begin(0.0)
    for other in NAMES:
        party.up(other, 0.0)
    party.outbox.clear()
    return party


class Sender:
    """Sends a party parcels, each with its own number."""

    def __init__(self, party: Party, name: str) -> None:
        self.party, self.name, self.number = party, name, 0

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        for frame in cut(pack(header, payload), 1, self.number, 0):
            self.party.hear(self.name, frame.to_bytes(), 1.0)
        self.number += 1


@settings(max_examples=60)
@given(
    st.lists(st.tuples(KINDS, st.dictionaries(FIELDS, JSON), st.binary(max_size=40)), max_size=8)
)
def test_no_note_crashes_a_party(notes: list[tuple[str, dict[str, Any], bytes]]) -> None:
    party = a_party()
    senders = [Sender(party, "M0"), Sender(party, "M2")]
    for i, (kind, fields, payload) in enumerate(notes):
        senders[i % 2].send({**fields, "kind": kind}, payload)
    assert party.council.accepted is None
    assert not party.is_over
    assert all(fault["fault"] == "message refused" for fault in party.recorder.faults.records)


@given(st.binary(max_size=120))
def test_no_bytes_crash_a_party(raw: bytes) -> None:
    party = a_party()
    party.hear("M0", raw, 1.0)
    assert [f["fault"] for f in party.recorder.faults.records] == ["message refused"]


def begun() -> tuple[Party, Sender]:
    """M1 in the first round of a ring, where it waits for the trunk of M0."""
    party = a_party()
    leader = Sender(party, "M0")
    decision = Decision((0, 1), 1, NAMES).plain()
    card = party.council.card
    roster = dict.fromkeys(NAMES, card)
    leader.send({"kind": "go", "ballot": 0, "decision": decision, "roster": roster})
    assert party.council.accepted is not None
    while party.work is not None:  # the evaluation before the first round
        party.worked([0.5] * len(party.work.jobs), 1.0)
    return party, leader


def trunk() -> dict[str, torch.Tensor]:
    node = tiny()[0]
    return dict(pf.LI(rounds=2).send(node).tensors)


SAY: dict[str, Any] = {"kind": "say", "key": [0, 0, "M0", "M1"], "attempt": [0, 1], "topic": ""}


def test_a_good_message_is_taken() -> None:
    party, leader = begun()
    leader.send(SAY, Message(trunk()).to_bytes())
    assert party.recorder.faults.records == []
    assert party.work is not None  # it trains with the trunk
    assert len(party.recorder.ledger) == 1


def nan() -> bytes:
    return Message({**trunk(), "trunk.0.weight": torch.full((8, 6), torch.nan)}).to_bytes()


def short() -> bytes:
    return Message({n: t for n, t in trunk().items() if n != "trunk.0.weight"}).to_bytes()


def wide() -> bytes:
    return Message({**trunk(), "trunk.0.weight": torch.zeros(8, 7)}).to_bytes()


def double() -> bytes:
    return Message({**trunk(), "trunk.0.weight": torch.zeros(8, 6).double()}).to_bytes()


def none() -> bytes:
    return Message({**trunk(), "num_examples": torch.tensor(0)}).to_bytes()


BAD: list[tuple[bytes, str]] = [
    (b"", "not a message"),
    (b"\x80\x04\x95", "not a message"),  # a pickle begins so
    (Message(trunk()).to_bytes()[:-1], "not a message"),
    (nan(), "NaN or infinity in 'trunk.0.weight'"),
    (short(), "tensors missing: trunk.0.weight"),
    (wide(), r"'trunk.0.weight' is float32\[8, 7\]"),
    (double(), r"'trunk.0.weight' is float64\[8, 6\]"),
    (none(), "expected at least 1"),
]


@pytest.mark.parametrize(("payload", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_message_is_refused_recorded_and_the_round_goes_on(payload: bytes, why: str) -> None:
    import re

    party, leader = begun()
    leader.send(SAY, payload)
    (fault,) = party.recorder.faults.records
    assert (fault["node"], fault["to"], fault["fault"]) == ("M0", "M1", "message refused")
    assert re.search(why, fault["why"])
    assert party.work is not None  # the visit takes place without it


def test_nobody_speaks_for_another() -> None:
    party, _ = begun()
    Sender(party, "M2").send(SAY, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert (fault["node"], fault["why"]) == ("M2", "M2 speaks as M0")
    assert party.work is None


def test_a_message_that_comes_twice_is_taken_once() -> None:
    party, leader = begun()
    leader.send(SAY, Message(trunk()).to_bytes())
    leader.send(SAY, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert "came twice" in fault["why"]
    assert len(party.recorder.ledger) == 1


def test_a_message_that_came_early_is_not_taken_again_later() -> None:
    party = a_party()
    leader = Sender(party, "M0")
    leader.send(SAY, Message(trunk()).to_bytes())
    roster = dict.fromkeys(NAMES, party.council.card)
    decision = Decision((0, 1), 1, NAMES).plain()
    leader.send({"kind": "go", "ballot": 0, "decision": decision, "roster": roster})
    leader.send(SAY, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert "came twice" in fault["why"]


def test_messages_of_an_attempt_that_is_over_are_dropped() -> None:
    party, leader = begun()
    leader.send({**SAY, "attempt": [0, 0]}, Message(trunk()).to_bytes())
    assert party.work is None
    assert party.recorder.faults.records == []


def test_a_round_is_done_when_all_that_was_said_is_confirmed() -> None:
    """Others would wait for a party that says done and dies with messages still on their way."""
    party, leader = begun()
    leader.send(SAY, Message(trunk()).to_bytes())
    while party.work is not None:
        party.worked(party.work.do(Trainer("never")), 2.0)
    frames = [(to, Frame.from_bytes(raw)) for to, raw in party.outbox]
    said = [unpack([f.piece])[0]["kind"] for to, f in frames if f.kind == DATA and to == "M0"]
    assert "done" not in said
    party.outbox.clear()
    (handed_on,) = {f.number for to, f in frames if f.kind == DATA and to == "M2"}
    party.hear("M2", Frame(ACK, party.born, handed_on).to_bytes(), 3.0)
    ((_, raw),) = party.outbox
    assert unpack([Frame.from_bytes(raw).piece])[0]["kind"] == "done"


GOOD = {"sends": {"w": [[2], "torch.float32", None]}, "public": None}
CARDS: list[Any] = [
    None,
    [1],
    {},
    {**GOOD, "sends": 3},
    {**GOOD, "sends": {"w": [[2], "torch.float99", None]}},
    {**GOOD, "sends": {"w": [[-2], "torch.float32", None]}},
    {**GOOD, "public": [1]},
    {**GOOD, "shapes": {"w": [[2], "torch.float32", None]}},
    {**GOOD, "shapes": {"w": [[2], "torch.float32", None]}, "parts": {"trunk": ["v"]}},
    {**GOOD, "shapes": {"": [[2], "torch.float32", None]}, "parts": {}},
]


@pytest.mark.parametrize("card", CARDS)
def test_a_card_that_says_nothing_is_refused(card: Any) -> None:
    party = a_party("M0")
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 1, "card": card}
    Sender(party, "M1").send(hello)
    (fault,) = party.recorder.faults.records
    assert "card" in fault["why"]
    Sender(party, "M2").send({**hello, "card": party.council.card})
    assert party.council.accepted is None  # M1 has not been there


def test_only_the_leader_decides() -> None:
    party = a_party()
    decision = Decision((0, 1), 1, NAMES).plain()
    Sender(party, "M2").send({"kind": "go", "ballot": 0, "decision": decision})
    assert party.council.accepted is None


def test_nothing_is_unpickled_on_a_path_from_the_network_or_from_disk() -> None:
    from pathlib import Path

    import polyfed

    root = Path(polyfed.__file__).parent
    words = (
        "import pickle",
        "from pickle",
        "torch.load",
        "import marshal",
        "import shelve",
        "eval(",
    )
    for folder in ("engines", "record", "core"):
        for path in (root / folder).glob("*.py"):
            text = path.read_text(encoding="utf-8").replace(".eval(", "")
            assert [word for word in words if word in text] == [], path


def test_headers_are_json_and_checksums_are_of_everything() -> None:
    raw = Frame(DATA, 1, 2, 0, 0, 1, pack({"kind": "x"})[0]).to_bytes()
    head, found = raw[:40], struct.unpack(">I", raw[40:44])[0]
    assert zlib.crc32(raw[44:], zlib.crc32(head)) == found
    assert json.loads(raw[48:]) == {"kind": "x"}

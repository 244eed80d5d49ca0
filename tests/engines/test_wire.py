"""Hostile input: nothing that arrives can crash a party, or get into it what should not."""

from __future__ import annotations

import ast
import json
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
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
from polyfed.engines.decision import Decision, Settled
from polyfed.engines.party import Party
from polyfed.engines.player import Said
from polyfed.engines.store import FolderStore, MemoryStore
from polyfed.engines.wire import ACK, DATA, Frame, cut, pack, unpack
from polyfed.engines.words import failure, standing
from polyfed.errors import ConfigError, MessageError, RunError
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


def test_a_floor_above_the_parcel_is_refused() -> None:
    with pytest.raises(MessageError, match="parcel 3, where all below 4 are settled"):
        Frame.from_bytes(Frame(DATA, 1, 3, 4, 0, 1, b"x").to_bytes())


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000])
def test_numbers_that_are_none_are_refused(number: bytes) -> None:
    text = b'{"kind":"say","key":[%s]}' % number
    with pytest.raises(MessageError, match="not JSON"):
        unpack([struct.pack(">I", len(text)) + text])


def test_headers_that_lie_about_their_length_are_refused() -> None:
    for length in (0, 5, 1 << 31, (1 << 32) - 1):
        with pytest.raises(MessageError):
            unpack([struct.pack(">I", length) + b"[1]"])
    text = b'{"kind":"x"}'
    assert unpack([struct.pack(">I", len(text)) + text]) == ({"kind": "x"}, b"")
    with pytest.raises(MessageError, match="a header of 13 bytes in a parcel of 16"):
        unpack([struct.pack(">I", 13) + text])


def test_a_parcel_may_be_cut_anywhere_after_its_length() -> None:
    raw = b"".join(pack({"kind": "x", "more": "yz"}, b"abc"))
    for place in range(4, len(raw)):
        assert unpack([raw[:place], raw[place:]]) == ({"kind": "x", "more": "yz"}, b"abc")


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


def test_pieces_of_nothing_are_not_counted_for_ever() -> None:
    _, b = pair(largest=1000)
    with pytest.raises(MessageError, match="larger than 1000"):
        b.take("A", Frame(DATA, 1, 0, 0, 0, 1 << 20, b"").to_bytes())
    with pytest.raises(MessageError, match="larger than 1000"):
        b.take("A", Frame(DATA, 1, 0, 0, 0, 18, b"x").to_bytes())
    assert b.take("A", Frame(DATA, 1, 0, 0, 0, 17, b"x").to_bytes()) is None


def test_a_parcel_has_one_number_of_pieces() -> None:
    _, b = pair()
    assert b.take("A", Frame(DATA, 1, 0, 0, 2, 3, b"c").to_bytes()) is None
    for count in (1, 2, 4):
        with pytest.raises(MessageError, match=f"of 3 pieces, and of {count}"):
            b.take("A", Frame(DATA, 1, 0, 0, 0, count, b"x").to_bytes())
    assert b.take("A", Frame(DATA, 1, 0, 0, 0, 3, b"a").to_bytes()) is None
    assert b.take("A", Frame(DATA, 1, 0, 0, 1, 3, b"b").to_bytes()) == [b"a", b"b", b"c"]


def test_pieces_of_parcels_that_are_never_finished_are_held_up_to_a_limit() -> None:
    _, b = pair(largest=1000)
    for i in range(31):
        b.take("A", Frame(DATA, 1, i // 15, 0, i % 15, 16, bytes(64)).to_bytes())
    assert b._heard["A"].held == 31 * 64
    with pytest.raises(MessageError, match="too many parcels are begun"):
        b.take("A", Frame(DATA, 1, 2, 0, 1, 16, bytes(64)).to_bytes())
    assert b._heard["A"].held == 30 * 64  # the parcel that was one too many is forgotten


def test_what_is_held_and_never_finished_is_given_back() -> None:
    _, b = pair(largest=1000)
    for number in range(1, 30):
        b.take("A", Frame(DATA, 1, number, number, 0, 2, bytes(64)).to_bytes())
        assert (b._heard["A"].held, len(b._heard["A"].begun)) == (64, 1)


def test_parcels_after_one_that_never_comes_are_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polyfed.engines.channel._SETTLED", 100)
    _, b = pair()
    for number in range(1, 101):
        b.take("A", Frame(DATA, 1, number, 0, 0, 1, b"x").to_bytes())
    with pytest.raises(MessageError, match="100 parcels after one that never came"):
        b.take("A", Frame(DATA, 1, 101, 0, 0, 1, b"x").to_bytes())
    assert b.take("A", Frame(DATA, 1, 101, 101, 0, 1, b"x").to_bytes()) == [b"x"]


def test_what_is_not_confirmed_is_sent_later_and_later() -> None:
    a, _ = pair(resend=1.0)
    a.post("B", (b"", b""), 0.0)
    times = []
    while len(times) < 6:
        a.outbox.clear()
        a.resend(a.due - 1e-6)
        assert a.outbox == []
        times.append(a.due)
        a.resend(a.due)
        assert len(a.outbox) == 1
    assert times == [1, 3, 7, 15, 23, 31]


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
KINDS = st.sampled_from(
    ["hello", "terms", "prepare", "go", "done", "spare", "stale", "say", "answer", "x"]
)
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


def test_a_message_that_goes_to_many_is_written_once_a_tick() -> None:
    party, _ = begun()
    message, spec = Message(trunk()), party.mail.announced["M1"]
    (first, second, later), other = (
        [party.mail.parcel(Said(("say", k, i, "M1", to), message, spec), (0, 1))
         for k, i, to in ((0, 0, "M0"), (0, 1, "M2"), (1, 0, "M0"))],
        party.mail.parcel(Said(("say", 1, 1, "M1", "M2"), Message(trunk()), spec), (0, 1)),
    )  # fmt: skip
    assert first[1] is second[1]
    assert later[1] is not first[1]
    assert other[1] is not later[1]
    assert first[1] == later[1] == other[1] == message.to_bytes()
    assert json.loads(second[0][4:])["key"] == [0, 1, "M1", "M2"]


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


def test_what_is_for_another_is_refused() -> None:
    party, leader = begun()
    leader.send({**SAY, "key": [0, 0, "M0", "M2"]}, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert fault["why"] == "M0 speaks to M2"


KEYS: list[Any] = [
    None,
    [0, 0, "M0"],
    [0, 0.0, "M0", "M1"],
    [True, 0, "M0", "M1"],
    ["0", 0, "M0", 1],
]
ATTEMPTS: list[Any] = [None, 3, [0], [0, 1.0], [0, -1], ["0", "1"], [0, 1 << 60], [0, 1, 2]]


@pytest.mark.parametrize("changed", [{"key": k} for k in KEYS] + [{"attempt": a} for a in ATTEMPTS])
def test_a_message_of_no_round_is_refused(changed: dict[str, Any]) -> None:
    party, leader = begun()
    leader.send({**SAY, **changed}, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert "attempt" in fault["why"] or "no round" in fault["why"]
    assert party.work is None


def test_who_floods_a_party_stops_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages for rounds to come wait; of one sender only so many, and others have their own."""
    monkeypatch.setattr("polyfed.engines.mail._MOST", 50)
    party = a_party()
    monkeypatch.setattr(party.mail, "_charter", replace(party.charter, largest=1000))
    leader, flood = Sender(party, "M0"), Sender(party, "M2")
    for number in range(2000):
        flood.send({**SAY, "key": [0, 0, "M2", "M1"], "attempt": [5, number]}, b"x" * 10)
    kept = sum(map(len, party.mail._waiting.values()))
    assert kept == len(party.mail._waiting) == 50
    assert len(party.recorder.faults.records) == 1000  # and no more of this party
    assert "more of this party are not recorded" in party.recorder.faults.records[-1]["why"]
    leader.send(SAY, Message(trunk()).to_bytes())
    assert sum(map(len, party.mail._waiting.values())) == 51


def test_what_waits_for_later_rounds_still_counts_when_one_is_opened() -> None:
    party, leader = begun()
    leader.send({**SAY, "attempt": [0, 2]}, b"x" * 100)
    before = party.mail._held["M0"]
    party.mail.open((0, 1))
    assert party.mail._held["M0"] == before > 100
    party.mail.open((0, 3))
    assert party.mail._held["M0"] == 0


@pytest.mark.parametrize(
    "spec",
    [
        3,
        {"w": [[2], "torch.float32", "a"]},
        {"w": [[2], "torch.float32", 1 << 50]},
        {"w": [[1 << 70], "torch.float32", None]},
        {"w": [[2.0], "torch.float32", None]},
        {"w": [[2], ["torch.float32"], None]},
        {"w": [[2], "torch.float32"]},
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(spec: Any) -> None:
    party, leader = begun()
    leader.send({**SAY, "spec": spec}, Message(trunk()).to_bytes())
    (fault,) = party.recorder.faults.records
    assert "not an announcement" in fault["why"]
    assert party.work is not None  # the visit takes place without it


def test_a_dtype_that_torch_cannot_look_at_is_refused() -> None:
    """Numbers of eight bits have no sum, so nobody can say whether they are finite."""
    party, leader = begun()
    message = Message({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)})
    spec = {"w": [[2], "torch.float8_e4m3fn", None]}
    leader.send({**SAY, "spec": spec}, message.to_bytes())
    (fault,) = party.recorder.faults.records
    assert (fault["node"], fault["fault"]) == ("M0", "message refused")


def test_what_is_neither_true_nor_false_is_refused() -> None:
    """Torch takes any byte for a truth and computes with it as it likes. Found by atheris."""
    raw = Message({"b": torch.tensor([True, False])}).to_bytes()
    assert Message.from_bytes(raw).tensors["b"].tolist() == [True, False]
    with pytest.raises(MessageError, match="'b' is neither true nor false"):
        Message.from_bytes(raw[:-1] + b"[")


def test_sizes_that_no_tensor_has_are_refused() -> None:
    text = b'{"w":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}'
    with pytest.raises(MessageError, match="are not a message"):
        Message.from_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"roster": None}, "nobody has told of the parties"),
        ({"roster": {"M0": {}}}, "card"),
        ({"decision": Decision((0, 1), 1, ("M0", "M2")).plain()}, "with"),
        ({"decision": {**Decision((0, 1), 1, NAMES).plain(), "round": 1.0}}, "after 0 rounds"),
        (
            {"decision": {**Decision((0, 1), 1, NAMES).plain(), "attempt": [0, True]}},
            "not an attempt",
        ),
        ({"decision": {**Decision((0, 1), 1, NAMES).plain(), "members": "M0M1"}}, "not a decision"),
        ({"ballot": True}, "ballot"),
    ],
)
def test_decisions_that_cannot_be_are_refused(changed: dict[str, Any], why: str) -> None:
    party = a_party()
    roster = dict.fromkeys(NAMES, party.council.card)
    note = {"kind": "go", "ballot": 0, "decision": Decision((0, 1), 1, NAMES).plain()}
    Sender(party, "M0").send({**note, "roster": roster, **changed})
    (fault,) = party.recorder.faults.records
    assert why in fault["why"]
    assert party.council.accepted is None


def test_a_decision_beyond_the_end_is_refused() -> None:
    party = a_party()
    log = tuple(Settled((0, t), NAMES) for t in range(1, 4))
    note = {"kind": "go", "ballot": 0, "decision": Decision((0, 4), 4, NAMES, log).plain()}
    Sender(party, "M0").send({**note, "roster": dict.fromkeys(NAMES, party.council.card)})
    assert "round 4" in party.recorder.faults.records[0]["why"]
    assert party.council.accepted is None


def test_what_is_recorded_of_a_refusal_is_short() -> None:
    party = a_party()
    Sender(party, "M0").send({"kind": "say", "key": "x" * 100_000})
    assert len(party.recorder.faults.records[0]["why"]) == 500


def test_who_is_left_alone_has_not_finished_and_says_who_is_missing() -> None:
    party, _ = begun()
    party.down("M0", 2.0)
    assert standing(party) == (
        "round 1 of 2 with M0, M1, M2; waiting for M0, 600 s at most (patience)"
    )
    party.tick(5000.0)
    assert (party.is_over, party.is_alone, party.accuracy) == (True, True, None)
    assert [fault["fault"] for fault in party.recorder.faults.records] == ["left alone"]
    assert re.match(
        r"M1 is left alone after 0 of 2 rounds: it has waited 600 s \(patience\) for M0\. "
        r"Nothing is lost: the same command goes on from here\. Start the others too",
        str(failure(party)),
    )


def test_who_has_played_the_end_needs_nobody() -> None:
    """All rounds are settled then, and it has its result."""
    party = a_party()
    party.accuracy = {"M1": 0.5}
    for other in ("M0", "M2"):
        party.down(other, 1.0)
    party.tick(5000.0)
    assert (party.is_over, party.is_alone, failure(party)) == (True, True, None)


# ---- terms ---------------------------------------------------------------------------------------


def test_who_agreed_to_something_else_is_not_heard_until_it_has_put_that_right() -> None:
    party = a_party("M0")  # it leads
    other = {**party.terms, "options: rounds": "5"}
    sender = Sender(party, "M1")
    sender.send({"kind": "terms", "terms": other})
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 1, "card": party.council.card}
    for name in ("M1", "M2"):
        Sender(party, name).send({**hello, "terms": party.terms})
    sender.send({**hello, "terms": party.terms})
    assert party.council.accepted is None
    assert not party.is_over
    (fault,) = party.recorder.faults.records
    assert (fault["node"], fault["fault"]) == ("M1", "party refused")
    assert standing(party).startswith(
        "waiting for M1 (another federation file: options: rounds is 2 here and 5 at M1), 600 s"
    )
    party.up("M1", 2.0)
    sender.send({**hello, "terms": party.terms})
    assert party.council.accepted is not None
    assert party.council.accepted.members == NAMES


def test_a_hello_with_other_terms_is_refused_even_if_it_overtakes_them() -> None:
    party = a_party("M0")
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 1, "card": party.council.card}
    Sender(party, "M1").send({**hello, "terms": {**party.terms, "seed": "7"}})
    Sender(party, "M2").send({**hello, "terms": party.terms})
    assert party.council.accepted is None
    assert party.strangers == {"M1": "seed is 0 here and 7 at M1"}


def test_a_leader_who_agreed_to_something_else_is_not_followed() -> None:
    party = a_party()
    Sender(party, "M0").send({"kind": "terms", "terms": {**party.terms, "method": "fedavg"}})
    assert party.is_over
    assert party.refused == "M0"
    with pytest.raises(ConfigError, match="M1 has another federation file than M0, who leads the"):
        raise failure(party) or AssertionError
    assert "method is li here and fedavg at M0. Give all sites the same" in str(failure(party))


@pytest.mark.parametrize("terms", [None, [], {"seed": 1}, {"seed": "x" * 20_000}])
def test_terms_that_are_none_are_refused(terms: Any) -> None:
    party = a_party()
    Sender(party, "M0").send({"kind": "terms", "terms": terms})
    assert "terms of a run" in party.recorder.faults.records[0]["why"]
    assert not party.is_over


def test_a_folder_that_lost_its_rounds_is_found() -> None:
    """Else the site would begin anew, in the midst of the others."""
    party = a_party()
    log = (Settled((0, 1), NAMES),)
    note = {"kind": "go", "ballot": 0, "decision": Decision((0, 2), 2, NAMES, log).plain()}
    Sender(party, "M0").send({**note, "roster": dict.fromkeys(NAMES, party.council.card)})
    assert party.is_over
    assert party.work is None
    assert "M1 has played round 1, as the others know, and its folder" in str(failure(party))


# ---- the disk ------------------------------------------------------------------------------------

KEPT: dict[str, Any] = {"born": 2, "promised": 0, "accepted": None, "done": None}
KEPT |= {"roster": {}, "points": [[0, 0, 0]]}


@pytest.mark.parametrize(
    "changed",
    [
        {"born": "2"}, {"born": -1}, {"promised": 1.5}, {"accepted": {}}, {"done": [1]},
        {"roster": {"M0": {}}}, {"roster": {name: {} for name in NAMES}}, {"points": [[1, 2]]},
        {"points": 5}, {"points": [[0, 0, None]]},
    ],
)  # fmt: skip
def test_a_damaged_memory_is_an_error_that_says_so(changed: dict[str, Any]) -> None:
    party = a_party()
    store = MemoryStore()
    store.keep(KEPT)
    assert Party(party.charter, "M1", None, store, Recorder.in_memory()).born == 3
    store.keep({**KEPT, **changed})
    with pytest.raises(RunError, match="is damaged"):
        Party(party.charter, "M1", None, store, Recorder.in_memory())


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_damaged_files_are_errors_that_say_so(raw: bytes, tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path / "run", {})
    store = FolderStore(recorder)
    store.save((1, 0, 1), [tiny()[0]])
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    path.write_bytes(raw)
    with pytest.raises(RunError, match=f"{path.name} is damaged"):
        store.load((1, 0, 1), [tiny()[0]])
    (tmp_path / "run" / "party.json").write_bytes(raw)
    with pytest.raises(RunError, match=r"party.json is damaged"):
        store.facts()
    recorder.close()


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
    {**GOOD, "shapes": {"a" + ".a" * 200_000: [[2], "torch.float32", None]}, "parts": {}},
]


@pytest.mark.parametrize("card", CARDS)
def test_a_card_that_says_nothing_is_refused(card: Any) -> None:
    party = a_party("M0")
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 1, "card": card}
    hello["terms"] = party.terms
    Sender(party, "M1").send(hello)
    (fault,) = party.recorder.faults.records
    assert "card" in fault["why"]
    Sender(party, "M2").send({**hello, "card": party.council.card})
    assert party.council.accepted is None  # M1 has not been there


@pytest.mark.parametrize(
    "changed", [{"count": c} for c in (None, "1", 1.0, True)] + [{"born": "1"}]
)
def test_a_hello_that_does_not_say_when_it_was_written_is_refused(changed: dict[str, Any]) -> None:
    party = a_party("M0")
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 1, "card": party.council.card}
    hello["terms"] = party.terms
    Sender(party, "M1").send({**hello, **changed})
    (fault,) = party.recorder.faults.records
    assert "without" in fault["why"]


def test_only_the_leader_decides() -> None:
    party = a_party()
    decision = Decision((0, 1), 1, NAMES).plain()
    Sender(party, "M2").send({"kind": "go", "ballot": 0, "decision": decision})
    assert party.council.accepted is None


# What runs what it reads. Published CIFAR files are pickles: `tasks/files.py` reads them with an
# unpickler that makes nothing but arrays, and tests/tasks/test_files.py attacks it.
BITES = {
    "pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle",
    "eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
ALLOWED = {"tasks/files.py": ["pickle"]}


def bites(source: str) -> list[str]:
    """Imports and calls in a file that could run what is read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in BITES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BITES:
            found.append(str(node.module))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += ["allow_pickle"] * (ast.unparse(node.value) != "False")
        elif isinstance(node, ast.Call):
            found += [called] if (called := ast.unparse(node.func)) in BITES else []
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import joblib", "import shelve, os",
        "torch.load(path)", "np.load(path, allow_pickle=True)", "yaml.load(text, L)", "eval(text)",
        "yaml.unsafe_load(text)", "exec(text)", "__import__(name)", "from dill import load",
    ],
)  # fmt: skip
def test_what_runs_what_it_reads_is_found(line: str) -> None:
    assert bites(line)
    assert not bites("model.eval()\nyaml.safe_load(text)\nre.compile(text)\nnode.model.load(x)")


def test_nothing_is_unpickled_on_a_path_from_the_network_or_from_disk() -> None:
    root = Path(pf.__file__).parent
    found = {p.relative_to(root): bites(p.read_text(encoding="utf-8")) for p in root.rglob("*.py")}
    assert len(found) > 100
    assert {str(path): what for path, what in found.items() if what} == ALLOWED


def test_headers_are_json_and_checksums_are_of_everything() -> None:
    raw = Frame(DATA, 1, 2, 0, 0, 1, pack({"kind": "x"})[0]).to_bytes()
    head, found = raw[:40], struct.unpack(">I", raw[40:44])[0]
    assert zlib.crc32(raw[44:], zlib.crc32(head)) == found
    assert json.loads(raw[48:]) == {"kind": "x"}

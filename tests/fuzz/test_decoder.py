"""Fuzz what reads bytes from the network and from disk: only the right error, nothing changed.

A target takes any bytes. What is read from them must come out the same when it is written again;
everything else must be refused with MessageError (network) or RunError (disk). Here each gets some
mutations of genuine bytes from Hypothesis; `run.py` (`make fuzz`) gives them a million.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed import topologies
from polyfed.core.message import Message, TensorSpec
from polyfed.core.node import Node
from polyfed.engines.channel import Channel
from polyfed.engines.chaos import Number, _node
from polyfed.engines.charter import Charter, check_card, plain, read_spec
from polyfed.engines.decision import Decision, Report, Settled
from polyfed.engines.party import Party
from polyfed.engines.store import FolderStore
from polyfed.engines.wire import ACK, DATA, Frame, pack, unpack
from polyfed.errors import MessageError, RunError
from polyfed.record import Recorder

NAMES = ("M0", "M1", "M2")
TOKENS = (
    *b"null true -1 0 1.5 1e999 NaN Infinity 99999999999999999999 9223372036854775807".split(),
    *b'18446744073709551615 1e9 "" [] {} [[]] "M0" "M9" "kind" "torch.complex64" "C64"'.split(),
    *b'"torch.float8_e4m3fn" "F8_E4M3" "\\ud800"'.split(),
    b"[" * 2000, b"9" * 5000, b"\xff\xff\xff\xff", b"\x00" * 8, b"\x7f" + b"\xff" * 7,
)  # fmt: skip


# ---- frames, parcels, messages -------------------------------------------------------------------


def sealed(raw: bytes) -> bytes:
    """The same bytes with the length and the checksum that they should have."""
    if len(raw) < 44:
        return raw
    head = b"pF\x01" + raw[3:36] + struct.pack(">I", len(raw) - 44)
    return head + struct.pack(">I", zlib.crc32(raw[44:], zlib.crc32(head))) + raw[44:]


def frame(data: bytes) -> None:
    for raw in (data, sealed(data)):
        try:
            read = Frame.from_bytes(raw)
        except MessageError:
            continue
        assert read.to_bytes() == raw
        assert read.index < read.count
        assert read.floor <= read.number


def parcel(data: bytes) -> None:
    cut = data[0] if data else 0
    try:
        read = unpack([data[1 : 1 + cut], data[1 + cut :]])
    except MessageError:
        return
    assert read == unpack([data[1:]])
    assert read == unpack(pack(*read))


def header(data: bytes) -> None:
    """A parcel whose lengths are right."""
    text, _, payload = data.partition(b"|")
    parcel(b"\xff" + struct.pack(">I", len(text)) + text + payload)


def message(data: bytes) -> None:
    try:
        read = Message.from_bytes(data)
    except MessageError:
        return
    again = Message.from_bytes(read.to_bytes())
    assert contents(again) == contents(read)
    assert sum(t.numel() * t.element_size() for t in read.tensors.values()) <= len(data)
    try:
        read.check({name: TensorSpec.of(t) for name, t in read.tensors.items()})
    except (MessageError, NotImplementedError):  # torch cannot look at all dtypes
        return


def contents(read: Message) -> dict[str, tuple[Any, ...]]:
    return {
        name: (t.dtype, tuple(t.shape), bytes(t.contiguous().view(-1).view(torch.uint8).numpy()))
        for name, t in read.tensors.items()
    }


# ---- what notes hold -----------------------------------------------------------------------------


def note(data: bytes) -> None:
    """Decisions, reports, announcements and cards, as JSON."""
    try:
        (raw, _) = unpack(pack({"kind": "x", "raw": json.loads(data)}))
    except (ValueError, RecursionError, MessageError):
        return
    raw = raw["raw"]
    for read, write in (
        (lambda: Decision.read(raw, NAMES), lambda found: found.plain()),
        (lambda: read_spec(raw), plain),
    ):
        try:
            found = read()
        except MessageError:
            continue
        assert json.dumps(write(found), sort_keys=True) == json.dumps(raw, sort_keys=True)
    if isinstance(raw, dict):
        try:
            report = Report.read(raw, NAMES)
        except MessageError:
            pass
        else:
            assert report.lacks <= set(NAMES)
            assert type(report.born) is int
    try:
        check_card(raw, is_node=True)
    except MessageError:
        return
    charter().joined(dict.fromkeys(NAMES, raw))


@cache
def charter(topology: str = "star", host: str | None = "hub") -> Charter:
    made = topologies.make(topology)
    return Charter(
        run="fuzz", method=Number(rounds=3), topology=made, nodes=NAMES, host=host, largest=100_000
    )


# ---- the channel ---------------------------------------------------------------------------------

_OP = struct.Struct(">BBHHHHB")
WIDE = (0, 1, 1 << 31, (1 << 32) - 1)


def channel(data: bytes) -> None:
    """Any frames in any order: what is delivered was sent, whole and once; little is kept."""
    end = Channel(1, ["A"], piece=64, largest=1000)
    end.back("A", 0.0)
    sent: dict[tuple[int, int, int, int], set[bytes]] = {}
    delivered: set[tuple[int, int]] = set()
    newest = -1
    for at in range(0, min(len(data), 60 * _OP.size) - _OP.size + 1, _OP.size):
        kind, born, number, floor, index, count, size = _OP.unpack_from(data, at)
        count = WIDE[count & 3] if count >> 15 else count & 15
        number, floor = number & 255, floor & 255
        piece = bytes([at & 255]) * size
        raw = Frame(kind & 1, born & 3, number, floor, index & 15, count, piece).to_bytes()
        sent.setdefault((born & 3, number, index & 15, count), set()).add(piece)
        try:
            got = end.take("A", raw)
        except MessageError:
            got = None
        end.outbox.clear()
        heard = end._heard["A"]
        assert len(heard.begun) <= 64
        assert heard.held <= 3000
        assert heard.held == sum(
            len(p) for each in heard.begun.values() for p in each.pieces.values()
        )
        if got is None:
            continue
        assert kind & 1 == DATA
        assert (born & 3) >= newest
        newest = born & 3
        assert (newest, number) not in delivered
        delivered.add((newest, number))
        assert len(got) == count
        for i, each in enumerate(got):
            assert bytes(each) in sent[newest, number, i, count]
        assert sum(map(len, got)) <= 1128


# ---- the disk ------------------------------------------------------------------------------------


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="polyfed-fuzz-"))
    (made / "config.yaml").touch()  # a run folder has one
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    (made / "checkpoints").mkdir()
    return made


@cache
def recorder() -> Recorder:
    made = Recorder.in_memory()
    made.folder = folder()
    return made


def facts(data: bytes) -> None:
    """party.json: a party begins from it, or says that it is damaged."""
    (folder() / "party.json").write_bytes(data)
    store = FolderStore(recorder())
    try:
        party = Party(charter(), "M1", own_node(), store, Recorder.in_memory())
    except RunError:
        return
    party.begin(0.0)
    party.up("hub", 0.0)
    assert party.born > 0


@cache
def own_node() -> Node | None:
    return charter().enter("M1", _node("M1"), torch.device("cpu"))


def checkpoint(data: bytes) -> None:
    (folder() / "checkpoints" / "000001-000000.000001.safetensors").write_bytes(data)
    node = _node("M1")
    before = node.model.state()
    try:
        FolderStore(recorder()).load((1, 0, 1), [node])
    except RunError:
        return
    after = node.model.state()
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }


# ---- genuine bytes -------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@cache
def genuine() -> dict[str, list[bytes]]:
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(4), "h": torch.ones(2).half()}
    payload = Message(tensors).to_bytes()
    decision = Decision((0, 3), 2, NAMES, (Settled((0, 1), ("M0", "M2")),))
    spec = plain({n: TensorSpec.of(t) for n, t in tensors.items()})
    card = {"sends": spec, "public": "abc", "shapes": {"a.b": [[2, 2], "torch.float32", None]}}
    card["parts"] = {"trunk": ["a.b"]}
    hello = {"kind": "hello", "ballot": 0, "count": 1, "born": 2, "accepted": decision.plain()}
    hello |= {"done": [0, 1], "card": card, "roster": {}, "lacks": ["M1"]}
    say = {"kind": "say", "key": [0, 0, "M1", "hub"], "attempt": [0, 1], "topic": "", "spec": spec}
    frames = [
        Frame(DATA, 2, 7, 3, 1, 4, b"abc").to_bytes(),
        Frame(DATA, 1, 0, 0, 0, 1, b"".join(pack(say, payload))).to_bytes(),
        Frame(ACK, 1, 9).to_bytes(),
    ]
    kept = {"born": 3, "promised": 0, "accepted": decision.plain(), "done": [0, 1]}
    kept |= {"roster": dict.fromkeys((*NAMES, "hub"), card), "points": [[0, 0, 0], [1, 0, 1]]}
    store, node = FolderStore(recorder()), _node("M1")
    node.memory["number"] = torch.tensor(3.0)
    store.save((1, 0, 1), [node])
    saved = (folder() / "checkpoints" / "000001-000000.000001.safetensors").read_bytes()
    ops = [(0, 1, 1, 0, i, 3, 60) for i in range(3)] + [
        (0, 1, 2, 0, 0, 1, 9),
        (1, 1, 0, 0, 0, 1, 0),
    ]
    return {
        "frame": frames,
        "parcel": [b"\x40" + b"".join(pack(say, payload)), b"\x03" + b"".join(pack(hello))],
        "header": [_json(say) + b"|" + payload, _json(hello)],
        "message": [
            payload,
            Message({"e": torch.zeros(0, 3), "b": torch.ones(2).bool()}).to_bytes(),
        ],
        "note": [_json(decision.plain()), _json(spec), _json(card), _json(hello)],
        "channel": [b"".join(_OP.pack(*op) for op in ops)],
        "facts": [_json(kept), b"{}"],
        "checkpoint": [saved],
    }


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (frame, parcel, header, message, note, channel, facts, checkpoint)
}


@pytest.mark.parametrize("name", TARGETS)
def test_genuine_bytes_are_taken(name: str) -> None:
    for raw in genuine()[name]:
        TARGETS[name](raw)


@st.composite
def mutated(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    raw = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        stop = draw(st.integers(start, min(len(raw), start + 8)))
        raw[start:stop] = draw(st.sampled_from(TOKENS) | st.binary(max_size=4))
    return bytes(raw)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=120)
@given(st.data())
def test_mutations_of_genuine_bytes_do_no_harm(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(mutated(genuine()[name])))

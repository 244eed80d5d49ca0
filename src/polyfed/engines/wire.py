"""What crosses between machines: parcels, cut into frames.

    parcel   4 bytes: length of the header;  header: JSON;  payload: safetensors, or nothing
    frame    a fixed head (whose, which parcel, which piece of how many, checksum), then a piece

Everything that arrives is taken for hostile until it is read: sizes, counts and checksums are
checked before memory is spent, and whatever does not fit raises MessageError. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.errors import MessageError

PIECE = 1 << 20  # bytes of a parcel in a frame
_MAGIC, _VERSION = b"pF", 1
DATA, ACK = 0, 1
Parcel = tuple[bytes, bytes]  # header, payload
_HEAD = struct.Struct(">2sBBQQQIII")
_SUM = struct.Struct(">I")
_LENGTH = struct.Struct(">I")
_LONGEST_HEADER = 1 << 22


@dataclass(frozen=True)
class Frame:
    """A piece of a parcel, or the word that a parcel has arrived.

    Attributes:
        kind: DATA or ACK.
        born: which life of the sender, of those that were begun one after the other.
        number: of the parcel, among those for this receiver in this life.
        floor: the smallest number the sender still waits for; all below are settled.
        index: of the piece.
        count: pieces of the parcel.
        piece: the bytes.
    """

    kind: int
    born: int
    number: int
    floor: int = 0
    index: int = 0
    count: int = 1
    piece: bytes | memoryview = b""

    def to_bytes(self) -> bytes:
        """The frame as it crosses."""
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            self.born,
            self.number,
            self.floor,
            self.index,
            self.count,
            len(self.piece),
        )
        return b"".join((head, _SUM.pack(zlib.crc32(self.piece, zlib.crc32(head))), self.piece))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Frame:
        """Read what `to_bytes` wrote; anything else is refused."""
        start = _HEAD.size + _SUM.size
        if len(raw) < start:
            raise MessageError(f"a frame of {len(raw)} bytes is shorter than its head of {start}")
        magic, version, kind, born, number, floor, index, count, length = _HEAD.unpack_from(raw)
        if magic != _MAGIC or version != _VERSION or kind not in (DATA, ACK):
            raise MessageError(f"not a frame of this version: it begins with {raw[:4].hex()}")
        piece = memoryview(raw)[start:]
        if length != len(piece):
            raise MessageError(f"a frame says {length} bytes and has {len(piece)}: truncated")
        (expected,) = _SUM.unpack_from(raw, _HEAD.size)
        if zlib.crc32(piece, zlib.crc32(memoryview(raw)[: _HEAD.size])) != expected:
            raise MessageError("a frame has the wrong checksum")
        if index >= count:
            raise MessageError(f"piece {index} of {count}")
        if floor > number:
            raise MessageError(f"parcel {number}, where all below {floor} are settled")
        return cls(kind, born, number, floor, index, count, piece)


def cut(parcel: Parcel, born: int, number: int, floor: int, size: int = PIECE) -> Iterator[Frame]:
    """A parcel in frames of at most `size` bytes and, in the first, its header."""
    head, payload = parcel
    whole = memoryview(payload)
    count = 1 + -(-max(0, len(head) + len(whole) - size) // size)
    taken = max(0, size - len(head))
    yield Frame(DATA, born, number, floor, 0, count, head + bytes(whole[:taken]))
    for index in range(1, count):
        start = taken + (index - 1) * size
        yield Frame(DATA, born, number, floor, index, count, whole[start : start + size])


def pack(header: Mapping[str, Any], payload: bytes = b"") -> Parcel:
    """A header and a payload as one parcel.

    >>> unpack(pack({"kind": "hello"}, b"abc"))
    ({'kind': 'hello'}, b'abc')
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text, payload


def unpack(pieces: Sequence[bytes | memoryview]) -> tuple[dict[str, Any], bytes]:
    """Read what `pack` wrote, in pieces; anything else is refused."""
    first = pieces[0]
    size = sum(map(len, pieces))
    if len(first) < _LENGTH.size:
        raise MessageError(f"a parcel of {size} bytes has no header")
    (length,) = _LENGTH.unpack_from(first)
    end = _LENGTH.size + length
    if length > min(_LONGEST_HEADER, size - _LENGTH.size):
        raise MessageError(f"a header of {length} bytes in a parcel of {size}")
    if end > len(first):
        first, pieces = b"".join(pieces), pieces[:1]
    try:
        header = json.loads(
            bytes(first[_LENGTH.size : end]), parse_constant=_finite, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a header that is not JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise MessageError("a header without a kind")
    return header, b"".join((first[end:], *pieces[1:]))


def _finite(text: str) -> float:
    """JSON has no infinity; Python's reader takes it, and 1e999 for it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value

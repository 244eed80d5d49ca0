"""A channel: parcels that arrive once each, over a network that loses, repeats and reorders.

A parcel is cut into frames and kept until the receiver says that it has all of it; what is not
settled is sent again, later and later, and at once when the receiver is seen again. The receiver
remembers which parcels it had, so none is delivered twice. There is no order between parcels.
Time is given, never read; the network is whoever takes what `outbox` holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from polyfed.core.node import Name
from polyfed.engines.wire import ACK, PIECE, Frame, Parcel, cut
from polyfed.errors import MessageError

_OPEN_PARCELS = 64  # that one sender may have begun and not finished
_SETTLED = 100_000  # parcels of one sender that came while it waits for an earlier one
_BYTES_A_SECOND = 1e6  # a slow line, for how long to wait before a parcel is sent again

Piece = bytes | memoryview


@dataclass
class _Posted:
    parcel: Parcel
    topic: str
    due: float
    pause: float
    longest: float


@dataclass
class _Begun:
    """A parcel of which some pieces have arrived."""

    count: int
    pieces: dict[int, Piece] = field(default_factory=dict)


@dataclass
class _Heard:
    """What a receiver remembers about one life of one sender."""

    born: int = -1
    floor: int = 0
    settled: set[int] = field(default_factory=set)
    begun: dict[int, _Begun] = field(default_factory=dict)
    held: int = 0


class Channel:
    """One party's end of its channels to all others.

    Args:
        born: which life this is; greater than all before.
        names: who is admitted; others are refused.
        resend: seconds until a small parcel is sent again.
        largest: bytes of the largest parcel that is taken.
        piece: bytes of a frame.
    """

    def __init__(
        self,
        born: int,
        names: Iterable[Name],
        *,
        resend: float = 1.0,
        largest: int = 1 << 31,
        piece: int = PIECE,
    ) -> None:
        self.born, self._resend, self._largest, self._piece = born, resend, largest, piece
        self._posted: dict[Name, dict[int, _Posted]] = {name: {} for name in names}
        self._numbers = dict.fromkeys(self._posted, 0)
        self._heard = {name: _Heard() for name in self._posted}
        self._away = set(self._posted)  # until they are seen
        self.outbox: list[tuple[Name, bytes]] = []

    def post(self, to: Name, parcel: Parcel, now: float, topic: str = "") -> None:
        """Send a parcel until it has arrived, or until its topic is cancelled."""
        number = self._numbers[to]
        self._numbers[to] += 1
        pause = self._resend + sum(map(len, parcel)) / _BYTES_A_SECOND
        self._posted[to][number] = _Posted(parcel, topic, now + pause, pause, 8 * pause)
        self._send(to, number)

    def cancel(self, topic: str, to: Name | None = None) -> None:
        """Forget what was posted about a topic, to one or to all, and has not arrived."""
        for name, posted in self._posted.items():
            if to not in (None, name):
                continue
            for number in [n for n, each in posted.items() if each.topic == topic]:
                del posted[number]

    def unconfirmed(self, topic: str) -> set[Name]:
        """Those to whom something was posted about a topic that has not arrived."""
        return {
            name
            for name, posted in self._posted.items()
            if any(each.topic == topic for each in posted.values())
        }

    def take(self, sender: Name, raw: bytes) -> list[Piece] | None:
        """The pieces of a parcel that a frame completes, if it does; raises MessageError."""
        if sender not in self._posted:
            raise MessageError(f"{sender} is not admitted")
        frame = Frame.from_bytes(raw)
        if frame.kind == ACK:
            if frame.born == self.born:
                self._posted[sender].pop(frame.number, None)
            return None
        heard = self._heard[sender]
        if frame.born < heard.born:
            return None  # of a life that is over
        if frame.born > heard.born:
            heard = self._heard[sender] = _Heard(frame.born)
        _settle(heard, frame.floor)
        if frame.number < heard.floor or frame.number in heard.settled:
            self._acknowledge(sender, frame)
            return None
        parcel = self._add(heard, frame)
        if parcel is not None:
            heard.settled.add(frame.number)
            self._acknowledge(sender, frame)
        return parcel

    def away(self, name: Name) -> None:
        """Send nothing to a party that is not there."""
        self._away.add(name)

    def back(self, name: Name, now: float) -> None:
        """Send everything that is not settled to a party that is there again."""
        self._away.discard(name)
        for number, posted in self._posted[name].items():
            posted.due = now + posted.pause
            self._send(name, number)

    def resend(self, now: float) -> None:
        """Send again what is due."""
        for name in self._there():
            for number, posted in self._posted[name].items():
                if posted.due <= now:
                    posted.pause = min(2 * posted.pause, posted.longest)
                    posted.due = now + posted.pause
                    self._send(name, number)

    @property
    def due(self) -> float:
        """When something must be sent again; never is infinity."""
        return min(
            (p.due for n in self._there() for p in self._posted[n].values()), default=math.inf
        )

    def is_settled(self) -> bool:
        """Whether all that was posted to those who are there has arrived."""
        return not any(self._posted[name] for name in self._there())

    def _there(self) -> list[Name]:
        return [name for name in self._posted if name not in self._away]

    def _send(self, to: Name, number: int) -> None:
        if to in self._away:
            return
        posted = self._posted[to]
        floor = min(posted)
        for frame in cut(posted[number].parcel, self.born, number, floor, self._piece):
            self.outbox.append((to, frame.to_bytes()))

    def _acknowledge(self, sender: Name, frame: Frame) -> None:
        self.outbox.append((sender, Frame(ACK, frame.born, frame.number).to_bytes()))

    def _add(self, heard: _Heard, frame: Frame) -> list[Piece] | None:
        """Keep a piece; the parcel, once it is whole."""
        size = frame.count * max(len(frame.piece), self._piece)
        if size > self._largest + 2 * self._piece:
            raise MessageError(
                f"a parcel of {frame.count} pieces is larger than {self._largest} bytes"
            )
        if len(heard.settled) >= _SETTLED:
            raise MessageError(f"{_SETTLED} parcels after one that never came")
        begun = heard.begun.setdefault(frame.number, _Begun(frame.count))
        if begun.count != frame.count:
            raise MessageError(f"a parcel of {begun.count} pieces, and of {frame.count}")
        pieces = begun.pieces
        if frame.index not in pieces:
            heard.held += len(frame.piece)
            pieces[frame.index] = frame.piece
        if len(heard.begun) > _OPEN_PARCELS or heard.held > 2 * self._largest:
            _drop(heard, frame.number)
            raise MessageError("too many parcels are begun and not finished")
        if len(pieces) < frame.count:
            return None
        _drop(heard, frame.number)
        return [pieces[i] for i in range(frame.count)]


def _settle(heard: _Heard, floor: int) -> None:
    """Forget what the sender does not wait for any more."""
    if floor > heard.floor:
        heard.floor = floor
        heard.settled = {n for n in heard.settled if n >= floor}
        for number in [n for n in heard.begun if n < floor]:
            _drop(heard, number)


def _drop(heard: _Heard, number: int) -> None:
    begun = heard.begun.pop(number, None)
    heard.held -= 0 if begun is None else sum(map(len, begun.pieces.values()))

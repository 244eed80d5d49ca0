"""The messages of rounds, as parcels: sorted by the attempt they belong to until it is played.

A message says which attempt at which round it is for, from whom and to whom. Whoever sent it is
known from the network; who speaks for another is refused. It may come before the party has heard of
the attempt: then it waits, unread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.core.message import Message, Spec, about
from polyfed.core.node import Name
from polyfed.engines.charter import Charter, plain, read_spec
from polyfed.engines.decision import Attempt, Decision, read_attempt
from polyfed.engines.player import ANSWER, SAY, Key, Said
from polyfed.engines.wire import Parcel, pack
from polyfed.errors import MessageError

Header = Mapping[str, Any]
Opened = tuple[Message, Spec] | MessageError | None
_COST = 4096  # bytes that a message costs beside its tensors, roughly
_MOST = 10_000  # messages beside large ones that one sender may have waiting


@dataclass(frozen=True)
class _Letter:
    """A message as it came: not read before its attempt is played."""

    is_none: bool
    topic: str
    spec: Any
    payload: bytes

    @property
    def cost(self) -> int:
        """About as many bytes as it takes to keep it."""
        spec = 0 if self.spec is None else 16 * len(json.dumps(self.spec))
        return _COST + len(self.topic) + spec + len(self.payload)


class Mail:
    """What has arrived for one party.

    Attributes:
        announced: what every party said that it sends, once that is known.
    """

    def __init__(self, charter: Charter, me: Name) -> None:
        self.announced: dict[Name, Spec] = {}
        self._charter, self._me = charter, me
        self._opened: dict[Key, Opened] = {}
        self._seen: set[Key] = set()
        self._written: tuple[Message, tuple[str, int], bytes] | None = None
        self._waiting: dict[Attempt, dict[Key, _Letter]] = {}
        self._held: dict[Name, int] = dict.fromkeys(charter.parties, 0)

    def parcel(self, said: Said, attempt: Attempt) -> Parcel:
        """A message as it is posted."""
        header: dict[str, Any] = {
            "kind": said.key[0],
            "key": list(said.key[1:]),
            "attempt": list(attempt),
            "none": said.message is None,
        }
        if said.key[0] == SAY:
            header["topic"] = said.topic
            if said.spec != about(self.announced[said.key[3]], said.topic):
                header["spec"] = plain(said.spec)  # a method may announce anew in every round
        return pack(header, b"" if said.message is None else self._bytes(said.message, said.key))

    def _bytes(self, message: Message, key: Key) -> bytes:
        """The message as it crosses; one that goes to many in a tick is written once."""
        when = key[:2]
        if self._written is None or self._written[0] is not message or self._written[1] != when:
            self._written = (message, when, message.to_bytes())
        return self._written[2]

    def arrive(
        self,
        sender: Name,
        header: Header,
        payload: bytes,
        decision: Decision | None,
        is_current: bool,
    ) -> None:
        """Keep a message; raises MessageError for what is no good.

        Args:
            sender: as the network knows it.
            header: what the message says about itself.
            payload: its tensors.
            decision: the last that this party has accepted.
            is_current: whether that is being played.
        """
        key, attempt = _key(header), read_attempt(header.get("attempt"))
        if self._charter.plays(key[3]) != sender:
            raise MessageError(f"{sender} speaks as {key[3]}")
        if self._charter.plays(key[4]) != self._me:
            raise MessageError(f"{sender} speaks to {key[4]}")
        if decision is not None and attempt < decision.attempt:
            return  # of a round that is over, or begun again
        is_now = decision is not None and attempt == decision.attempt and is_current
        if key in (self._seen if is_now else self._waiting.get(attempt, {})):
            raise MessageError(f"message {key} came twice")
        letter = _Letter(
            bool(header.get("none")), str(header.get("topic", "")), header.get("spec"), payload
        )
        if self._held[sender] + letter.cost > 2 * self._charter.largest + _MOST * _COST:
            raise MessageError(f"{sender} has sent more than is ever waited for")
        self._held[sender] += letter.cost
        if is_now:
            self._seen.add(key)
            self._opened[key] = self._read(key, letter)
        else:
            self._waiting.setdefault(attempt, {})[key] = letter

    def open(self, attempt: Attempt) -> dict[Key, Opened]:
        """What has arrived for an attempt that begins; what comes later is put in there too."""
        early = self._waiting.pop(attempt, {})
        self._waiting = {a: held for a, held in self._waiting.items() if a > attempt}
        self._held = dict.fromkeys(self._held, 0)
        for letters in (early, *self._waiting.values()):
            for key, letter in letters.items():
                self._held[self._charter.plays(key[3])] += letter.cost
        self._seen, self._written = set(early), None
        self._opened = {key: self._read(key, letter) for key, letter in early.items()}
        return self._opened

    def _read(self, key: Key, letter: _Letter) -> Opened:
        if letter.is_none:
            return None
        try:
            message = Message.from_bytes(letter.payload)
            if letter.spec is not None:
                return message, read_spec(letter.spec)
            return message, about(self.announced.get(key[3], {}), letter.topic)
        except MessageError as error:
            return error


def _key(header: Header) -> Key:
    """Which message of its round this is; anything else is refused."""
    found = header.get("key")
    if not isinstance(found, list) or [type(each) for each in found] != [int, int, str, str]:
        raise MessageError(f"a message of no round: {found!r}")
    if header["kind"] not in (SAY, ANSWER):
        raise MessageError(f"not a message: {header['kind']!r}")
    return (str(header["kind"]), *found)

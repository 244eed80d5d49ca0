"""The messages of rounds, as parcels: sorted by the attempt they belong to until it is played.

A message says which attempt at which round it is for, from whom and to whom. Whoever sent it is
known from the network; who speaks for another is refused. It may come before the party has heard of
the attempt: then it waits, unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.core.message import Message, Spec, about
from polyfed.core.node import Name
from polyfed.engines.charter import Charter, plain, read_spec
from polyfed.engines.decision import Attempt, Decision
from polyfed.engines.player import ANSWER, SAY, Key, Said
from polyfed.engines.wire import Parcel, pack
from polyfed.errors import MessageError

Header = Mapping[str, Any]
Opened = tuple[Message, Spec] | MessageError | None
_MOST = 10_000  # messages of one attempt


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
        self._waiting: dict[Attempt, dict[Key, tuple[Header, bytes]]] = {}
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
        return pack(header, b"" if said.message is None else said.message.to_bytes())

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
        try:
            k, i, source, to = header["key"]
            key: Key = (str(header["kind"]), int(k), int(i), str(source), str(to))
            attempt: Attempt = (int(header["attempt"][0]), int(header["attempt"][1]))
        except (TypeError, ValueError, LookupError) as error:
            raise MessageError(f"a message of no round: {error!r}") from error
        if key[0] not in (SAY, ANSWER) or self._charter.plays(key[3]) != sender:
            raise MessageError(f"{sender} speaks as {key[3]}")
        if decision is not None and attempt < decision.attempt:
            return  # of a round that is over, or begun again
        is_now = decision is not None and attempt == decision.attempt and is_current
        known = self._seen if is_now else self._waiting.setdefault(attempt, {}).keys()
        if key in known:
            raise MessageError(f"message {key} came twice")
        if len(known) >= _MOST or len(self._waiting) > 100:
            raise MessageError("too many messages")
        self._held[sender] += len(payload)
        if self._held[sender] > 2 * self._charter.largest:
            self._held[sender] -= len(payload)
            raise MessageError(f"{sender} has sent more than is ever waited for")
        if is_now:
            self._seen.add(key)
            self._opened[key] = self._read(header, payload)
        else:
            self._waiting[attempt][key] = (header, payload)

    def open(self, attempt: Attempt) -> dict[Key, Opened]:
        """What has arrived for an attempt that begins; what comes later is put in there too."""
        early = self._waiting.pop(attempt, {})
        self._waiting = {a: held for a, held in self._waiting.items() if a > attempt}
        self._held = dict.fromkeys(self._held, 0)
        self._seen = set(early)
        self._opened = {key: self._read(*each) for key, each in early.items()}
        return self._opened

    def _read(self, header: Header, payload: bytes) -> Opened:
        if header.get("none"):
            return None
        try:
            message = Message.from_bytes(payload)
            if "spec" in header:
                return message, read_spec(header["spec"])
            announced = self.announced.get(str(header["key"][2]), {})
            return message, about(announced, str(header.get("topic", "")))
        except MessageError as error:
            return error

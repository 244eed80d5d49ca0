"""Ledger: every message that crossed, tensor by tensor, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyfed.core.message import Message
from polyfed.core.node import Name
from polyfed.record.log import Log


@dataclass(frozen=True)
class Crossing:
    """One message on its way: who said what to whom, when."""

    tick: int
    source: Name
    to: Name
    bytes: int
    tensors: list[dict[str, Any]]
    hops: int = 1


class Ledger:
    """The messages of a run, and sums over them."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def enter(self, tick: int, source: Name, to: Name, message: Message, hops: int = 1) -> None:
        """Write down a message that crosses from `source` to `to`, over so many links."""
        tensors = [
            {
                "name": name,
                "shape": list(t.shape),
                "dtype": str(t.dtype).removeprefix("torch."),
                "bytes": t.numel() * t.element_size(),
            }
            for name, t in message.tensors.items()
        ]
        crossing = Crossing(tick, source, to, message.nbytes, tensors, hops)
        self._log.append(dict(vars(crossing)))

    def __len__(self) -> int:
        return len(self._log.records)

    def crossings(self) -> list[Crossing]:
        """Every message, in the order it crossed."""
        return [Crossing(**record) for record in self._log.records]

    def bytes_sent(self, node: Name | None = None) -> int:
        """Bytes that left a node (of all, if none is named)."""
        return sum(r["bytes"] for r in self._log.records if node in (None, r["source"]))

    def bytes_received(self, node: Name) -> int:
        """Bytes that reached a node."""
        return sum(r["bytes"] for r in self._log.records if r["to"] == node)

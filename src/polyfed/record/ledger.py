"""Ledger: every message that crossed, tensor by tensor, byte by byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from polyfed.core.message import Message
from polyfed.core.node import Name
from polyfed.errors import UnknownNameError
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


@lru_cache(maxsize=4096)
def _described(
    kinds: tuple[tuple[str, torch.Size, torch.dtype], ...],
) -> tuple[list[dict[str, Any]], str, int]:
    """Tensors as the ledger lists them, the same as JSON, and their bytes: messages repeat."""
    tensors = [
        {
            "name": name,
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": shape.numel() * dtype.itemsize,
        }
        for name, shape, dtype in kinds
    ]
    return tensors, json.dumps(tensors), sum(shape.numel() * d.itemsize for _, shape, d in kinds)


class Ledger:
    """The messages of a run, and sums over them.

    Attributes:
        names: who took part, whether they said anything or not; empty where nobody has said so.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.names: frozenset[Name] = frozenset()

    def enter(self, tick: int, source: Name, to: Name, message: Message, hops: int = 1) -> None:
        """Write down a message that crosses from `source` to `to`, over so many links."""
        kinds = tuple((name, t.shape, t.dtype) for name, t in message.tensors.items())
        tensors, written, count = _described(kinds)
        record = {
            "tick": tick,
            "source": source,
            "to": to,
            "bytes": count,
            "tensors": tensors,
            "hops": hops,
        }

        def text() -> str:
            names = f'"source": {json.dumps(source)}, "to": {json.dumps(to)}'
            return (
                f'{{"tick": {tick}, {names}, "bytes": {count}, "tensors": {written}, '
                f'"hops": {hops}}}'
            )

        self._log.add(record, text)

    def __len__(self) -> int:
        return len(self._log.records)

    def crossings(self) -> list[Crossing]:
        """Every message, in the order it crossed."""
        return [Crossing(**record) for record in self._log.records]

    def bytes_sent(self, node: Name | None = None) -> int:
        """Bytes that left a node (of all, if none is named)."""
        found = sum(r["bytes"] for r in self._log.records if node in (None, r["source"]))
        return found or self._nothing(node)

    def bytes_received(self, node: Name) -> int:
        """Bytes that reached a node."""
        return sum(r["bytes"] for r in self._log.records if r["to"] == node) or self._nothing(node)

    def _nothing(self, node: Name | None) -> int:
        """No bytes, unless there is no such node."""
        known = {*self.names, *(name for r in self._log.records for name in (r["source"], r["to"]))}
        if self.names and node is not None and node not in known:
            raise UnknownNameError("node", node, known)
        return 0

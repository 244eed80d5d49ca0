"""What crossed: the ledger of a run, small enough for a page.

Rounds in which the same messages crossed are one pattern: a star of 100 nodes and 500 rounds has
100,000 messages, and one pattern of 200. A message is `[from, to, tensors, hops]`, its members
numbers of names and of lists of tensors that are written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed.record.ledger import Crossing

MESSAGES = 150_000  # written out in a page; of more, only sums by sender, receiver and content


class _Numbered(dict[Any, int]):
    """Gives every new key the next number."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def traffic(crossings: Sequence[Crossing], most: int = MESSAGES) -> dict[str, Any]:
    """The ledger as patterns; as sums, where its patterns hold more than `most` messages."""
    names, contents = _Numbered(), _Numbered()
    rounds: dict[int, list[tuple[int, ...]]] = {}
    for c in crossings:
        content = tuple((t["name"], tuple(t["shape"]), t["dtype"], t["bytes"]) for t in c.tensors)
        row = (names[c.source], names[c.to], contents[content], c.hops)
        rounds.setdefault(c.tick, []).append(row)
    patterns = _Numbered()
    order = [[tick, patterns[tuple(rows)]] for tick, rows in sorted(rounds.items())]
    found = {
        "messages": len(crossings),
        "names": list(names),
        "contents": [
            {"bytes": sum(t[3] for t in content), "tensors": [_tensor(t) for t in content]}
            for content in contents
        ],
    }
    if sum(map(len, patterns)) > most:
        return {**found, "sums": _sums(rounds)}
    return {**found, "rounds": order, "patterns": [[list(r) for r in p] for p in patterns]}


def _tensor(t: tuple[Any, ...]) -> list[Any]:
    return [t[0], list(t[1]), t[2], t[3]]


def _sums(rounds: Mapping[int, Sequence[tuple[int, ...]]]) -> list[list[int]]:
    """[from, to, tensors, messages, first round, last round] of everything alike."""
    found: dict[tuple[int, ...], list[int]] = {}
    for tick, rows in sorted(rounds.items()):
        for row in rows:
            entry = found.setdefault(row[:3], [*row[:3], 0, tick, tick])
            entry[3], entry[5] = entry[3] + 1, tick
    return list(found.values())


def totals(crossings: Iterable[Crossing]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that left everybody, and bytes that reached everybody."""
    sent, received = Counter[str](), Counter[str]()
    for crossing in crossings:
        sent[crossing.source] += crossing.bytes
        received[crossing.to] += crossing.bytes
    return sent, received


def bytes_by_round(crossings: Sequence[Crossing], ticks: Sequence[int]) -> list[int]:
    """Bytes that crossed in every round, in all directions together."""
    spent = dict.fromkeys(ticks, 0)
    for crossing in crossings:
        if crossing.tick in spent:
            spent[crossing.tick] += crossing.bytes
    return list(spent.values())

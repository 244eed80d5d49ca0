"""A ledger as patterns says what the ledger says, message by message."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyfed.record.ledger import Crossing
from polyfed.report.traffic import bytes_by_round, totals, traffic

NAMES = ("M0", "M1", "hub")


def content(size: int) -> list[dict[str, Any]]:
    return [
        {"name": "w", "shape": [size], "dtype": "float32", "bytes": 4 * size},
        {"name": "b", "shape": [], "dtype": "int64", "bytes": 8},
    ]


Row = tuple[int, str, str, int, int]
name, small = st.sampled_from(NAMES), st.integers(1, 2)
ROWS = st.lists(st.tuples(st.integers(1, 4), name, name, small, small), max_size=24)


def ledger_of(rows: list[Row]) -> list[Crossing]:
    """Messages in the order of their rounds."""
    rows = sorted(rows, key=lambda row: row[0])
    return [Crossing(t, a, b, 4 * s + 8, content(s), hops) for t, a, b, s, hops in rows]


def expanded(book: dict[str, Any]) -> list[Crossing]:
    found = []
    for tick, pattern in book["rounds"]:
        for source, to, number, hops in book["patterns"][pattern]:
            said = book["contents"][number]
            keys = ("name", "shape", "dtype", "bytes")
            tensors = [dict(zip(keys, t, strict=True)) for t in said["tensors"]]
            names = book["names"]
            found.append(Crossing(tick, names[source], names[to], said["bytes"], tensors, hops))
    return found


@given(ROWS)
def test_patterns_are_the_ledger(rows: list[Row]) -> None:
    ledger = ledger_of(rows)
    book = traffic(ledger)
    assert expanded(book) == ledger
    assert book["messages"] == len(ledger)


@given(ROWS)
def test_sums_are_the_ledger_s(rows: list[Row]) -> None:
    ledger = ledger_of(rows)
    book = traffic(ledger, most=-1)
    names, contents = book["names"], book["contents"]
    for source, to, number, times, first, last in book["sums"]:
        alike = [
            c
            for c in ledger
            if (c.source, c.to) == (names[source], names[to])
            and c.bytes == contents[number]["bytes"]
        ]
        assert (len(alike), alike[0].tick, alike[-1].tick) == (times, first, last)
    assert sum(entry[3] for entry in book["sums"]) == len(ledger)


@given(ROWS)
def test_totals(rows: list[Row]) -> None:
    ledger = ledger_of(rows)
    sent, received = totals(ledger)
    for name in NAMES:
        assert sent[name] == sum(c.bytes for c in ledger if c.source == name)
        assert received[name] == sum(c.bytes for c in ledger if c.to == name)
    by_round = bytes_by_round(ledger, [0, 1, 2, 3, 4])
    assert sum(by_round) == sum(sent.values())
    assert by_round[2] == sum(c.bytes for c in ledger if c.tick == 2)


def test_equal_rounds_are_one_pattern() -> None:
    ledger = [Crossing(t, f"M{i}", "hub", 12, content(1)) for t in range(60) for i in range(20)]
    book = traffic(ledger)
    assert len(book["patterns"]) == 1
    assert len(book["rounds"]) == 60
    assert traffic(ledger, most=20) == book
    assert "sums" in traffic(ledger, most=19)

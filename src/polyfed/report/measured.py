"""What was measured: the metrics of a run as figures by round, matrices by round, last figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed.engines.local import FINAL

ACCURACY = "test_accuracy"
NUMBERS = 150_000  # of all matrices in a page; rounds are left out above it
FIGURES = 300_000  # numbers of all curves in a page; rounds are left out above it
CURVE = 20  # rounds that every curve keeps
Metric = Mapping[str, Any]
Figures = dict[str, dict[str, list[Any]]]
_KEYS = ("tick", "node", "seconds")


def short(value: Any, digits: int = 5) -> Any:
    """A figure with so many digits that count; anything else as it is.

    >>> short(0.123456789), short(12), short(None), short(0.123456789, 3)
    (0.12346, 12, None, 0.123)
    """
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def ticks_of(metrics: Iterable[Metric]) -> list[int]:
    """The rounds that are over, from 0, the state before the first."""
    return sorted({m["tick"] for m in metrics if "seconds" in m})


def series(metrics: Sequence[Metric]) -> Figures:
    """Every figure that nodes noted: `{figure: {node: [value of every round]}}`.

    The accuracy comes first, then losses, then the others, each group in the order of the notes.
    """
    place = {tick: i for i, tick in enumerate(ticks_of(metrics))}
    found: dict[str, dict[str, list[Any]]] = {}
    for metric in metrics:
        if metric["tick"] not in place or "node" not in metric:
            continue
        for name, value in _figures(metric).items():
            row = found.setdefault(name, {}).setdefault(metric["node"], [None] * len(place))
            row[place[metric["tick"]]] = short(value)
    return dict(sorted(found.items(), key=lambda item: _kind(item[0])))


def kept_rounds(figures: Figures, most: int) -> list[int] | None:
    """The rounds to keep of all figures, by their places, so that few numbers are left; None: all.

    Args:
        figures: by name and node.
        most: numbers that may be left, but for the least rounds that make a curve.
    """
    rows = [row for nodes in figures.values() for row in nodes.values()]
    length = max(map(len, rows), default=0)
    room = max(CURVE, most // max(1, len(rows)))
    return None if length <= room else [0, *spaced(range(1, length), room - 1)]


def only(figures: Figures, kept: Sequence[int] | None) -> Figures:
    """The figures of these rounds."""
    if kept is None:
        return figures
    return {
        name: {node: [row[i] for i in kept] for node, row in nodes.items()}
        for name, nodes in figures.items()
    }


def final(metrics: Iterable[Metric]) -> dict[str, dict[str, Any]]:
    """The figures that were noted when all rounds were over: `{figure: {node: value}}`."""
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        if metric["tick"] == FINAL:
            for name, value in _figures(metric).items():
                found.setdefault(name, {})[metric["node"]] = short(value)
    return found


def matrices(metrics: Iterable[Metric], most: int = NUMBERS) -> list[dict[str, Any]]:
    """Matrices between nodes that a place noted, such as FedLinked's utilities, by round.

    Where they hold more than `most` numbers, evenly spaced rounds are kept, the last among them.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for metric in metrics:
        for name, value in metric.items():
            if isinstance(value, dict) and {"nodes", "rows"} <= value.keys():
                found.setdefault(name, []).append({"tick": metric["tick"], **value})
    room = max(1, most // max(1, len(found)))
    return [_matrix(name, entries, room) for name, entries in found.items()]


def _matrix(name: str, entries: Sequence[dict[str, Any]], room: int) -> dict[str, Any]:
    each = max(len(e["nodes"]) ** 2 for e in entries)
    kept = spaced(entries, max(1, room // each))
    for entry in kept:
        entry["rows"] = [[short(v, 4) for v in row] for row in entry["rows"]]
    return {"name": name, "rounds": kept, "of": len(entries)}


def spaced(entries: Sequence[Any], most: int) -> list[Any]:
    """At most so many entries, evenly spaced, the last among them.

    >>> spaced([1, 2, 3, 4, 5, 6], 3), spaced([1, 2], 3)
    ([2, 4, 6], [1, 2])
    """
    n = len(entries)
    return [entries[(i + 1) * n // most - 1] for i in range(most)] if n > most else list(entries)


def by_round(metrics: Iterable[Metric]) -> list[float]:
    """Seconds of every round."""
    spent = {m["tick"]: m["seconds"] for m in metrics if "seconds" in m}
    return [spent[tick] for tick in sorted(spent)]


def _figures(metric: Metric) -> dict[str, float]:
    return {
        name: value
        for name, value in metric.items()
        if name not in _KEYS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _kind(name: str) -> int:
    return 0 if name == ACCURACY else 1 if name.endswith("_loss") else 2

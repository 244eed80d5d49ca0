"""Metrics become figures by round, matrices by round and last figures; nothing is lost or moved."""

from itertools import pairwise
from typing import Any

import pytest

from polyfed.report import measured

METRICS: list[dict[str, Any]] = [
    {"tick": 0, "node": "M0", "test_accuracy": 0.123456789},
    {"tick": 0, "seconds": 2.0},
    {"tick": 1, "node": "M0", "note": 7, "is_own": True, "word": "x", "local_loss": 0.5},
    {"tick": 1, "node": "hub", "utilities": {"nodes": ["M0", "M1"], "rows": [[0, 2], [3, 0]]}},
    {"tick": 1, "node": "M1", "test_accuracy": 0.5},
    {"tick": 1, "seconds": 3.0},
    {"tick": 2, "node": "M0", "local_loss": 0.25},  # a round that is not over yet
    {"tick": "final", "node": "M0", "probe": 0.75, "test_accuracy": 0.9},
]


def test_figures_by_node_and_round() -> None:
    assert measured.ticks_of(METRICS) == [0, 1]
    assert measured.by_round(METRICS) == [2.0, 3.0]
    found = measured.series(METRICS)
    assert found == {
        "test_accuracy": {"M0": [0.12346, None], "M1": [None, 0.5]},
        "local_loss": {"M0": [None, 0.5]},
        "note": {"M0": [None, 7]},
    }
    assert list(found) == ["test_accuracy", "local_loss", "note"]


def test_last_figures() -> None:
    assert measured.final(METRICS) == {"probe": {"M0": 0.75}, "test_accuracy": {"M0": 0.9}}


def test_matrices() -> None:
    (found,) = measured.matrices(METRICS)
    assert found["name"] == "utilities"
    assert found["rounds"] == [{"tick": 1, "nodes": ["M0", "M1"], "rows": [[0, 2], [3, 0]]}]


@pytest.mark.parametrize(("most", "kept"), [(400, 100), (40, 10), (4, 1), (1, 1)])
def test_matrices_leave_rounds_out_but_not_the_last(most: int, kept: int) -> None:
    metrics = [
        {"tick": t, "node": "hub", "d": {"nodes": ["a", "b"], "rows": [[0, t], [t, 0]]}}
        for t in range(1, 101)
    ]
    (found,) = measured.matrices(metrics, most)
    ticks = [entry["tick"] for entry in found["rounds"]]
    assert (len(ticks), ticks[-1], found["of"]) == (kept, 100, 100)
    gaps = {b - a for a, b in pairwise(ticks)}
    assert len(gaps) <= 1


def test_long_curves_keep_their_ends() -> None:
    figures = {"a": {"M0": list(range(501)), "M1": list(range(501))}}
    assert measured.kept_rounds(figures, 1002) is None
    kept = measured.kept_rounds(figures, 200)
    assert kept is not None
    assert (len(kept), kept[0], kept[-1]) == (100, 0, 500)
    assert len(measured.kept_rounds(figures, 1) or ()) == measured.CURVE
    assert measured.only(figures, kept)["a"]["M1"] == kept
    assert measured.only(figures, None) is figures
    assert measured.kept_rounds({}, 10) is None

"""What partial averaging's text says of its figures, put to the test with made-up ones.

Its figures have no numbers in the text. Here are some that fit it, section by section: of a level,
or a scheme, at a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from polyfed import experiments

EVERY = {
    name.removeprefix("partial-averaging-"): experiment
    for name, experiment in experiments.every().items()
    if name.startswith("partial-averaging-")
}
LEVEL = (0, 15, 30, 60, 80, 100)


def by_level(at: Mapping[Any, Sequence[float]], levels: Sequence[int] = LEVEL) -> Any:
    """A value for every level at each point; where a section has moments, they are its points."""

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        point = x if x is not None else int(figure)
        known = point if point in at else max((p for p in at if p <= point), default=min(at))
        return at[known][levels.index(int(series.removeprefix("level ")))]

    return value


def by_scheme(at: Mapping[str, Sequence[float]], points: Sequence[Any]) -> Any:
    """A line of values for every scheme."""

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        return at[series][points.index(x if x is not None else int(figure))]

    return value


def of_peers(panel: str, series: str, x: Any, figure: str) -> float:
    """V.2.c: everything shared loses, at first most; level 80 gains; none has nothing to do."""
    full = {2: 0.70, 4: 0.65, 8: 0.60, 16: 0.58, 32: 0.56, 64: 0.55}
    partly = {2: 0.72, 4: 0.73, 8: 0.74, 16: 0.75, 32: 0.76, 64: 0.77}
    return {"level 100": full, "level 80": partly}.get(series, dict.fromkeys(full, 0.71))[x]


_WHOLE = {"784-300-100-0": 0.7, "784-300-0-0": 0.6, "0-300-100-0": 0.5, "0-0-100-k": 0.4}
_HIDDEN = (0, 100, 200, 300, 350, 400)
PAPER: dict[str, Any] = {
    "V.2.a": by_level({30: (0.5, 0.6, 0.65, 0.7, 0.8, 0.55)}),
    "V.2.b": by_scheme({"784-250-80-k": (0.8,) * 4} | {k: (v,) * 4 for k, v in _WHOLE.items()},
                       (30, 50, 100, 200)),
    "V.2.c": of_peers,
    "V.3.a": by_level({50: (0.5, 0.6, 0.9, 0.8, 0.7, 0.4), 500: (0.5, 0.6, 0.7, 0.8, 0.9, 0.4)}),
    "V.3.b": by_level({10: (0.510, 0.500, 0.505), 20: (0.510, 0.510, 0.510),
                       30: (0.610, 0.615, 0.600)}, (0, 80, 100)),
    "V.3.c": by_level({4: (0.7, 0.71, 0.72, 0.74, 0.75, 0.5), 8: (0.7, 0.71, 0.72, 0.78, 0.8, 0.5),
                       16: (0.7, 0.72, 0.73, 0.8, 0.82, 0.6)}),
    "V.3.d": by_scheme({
        "no averaging": (0.4, 0.4, 0.4, 0.4), "full": (0.5, 0.5, 0.5, 0.5),
        "full per class": (0.6, 0.6, 0.6, 0.6), "80": (0.7, 0.7, 0.7, 0.7),
        "80 + 20": (0.75, 0.75, 0.75, 0.75), "80 + 20, dependent": (0.76, 0.78, 0.85, 0.9),
    }, (25, 50, 100, 150)),
    "V.3.e": by_scheme({
        "full": (0.4, 0.4, 0.4, 0.4), "no averaging": (0.5, 0.5, 0.5, 0.5),
        "80": (0.6, 0.6, 0.6, 0.6), "full per class": (0.5, 0.55, 0.7, 0.75),
        "70 + 30 or 15": (0.8, 0.8, 0.8, 0.8), "70 + 30 or 15, dependent": (0.9, 0.9, 0.9, 0.9),
    }, (100, 200, 400, 800)),
    "V.3.f": by_level({
        0: (0.8, 0.81, 0.82, 0.88, 0.89, 0.9), 2: (0.8, 0.81, 0.82, 0.88, 0.89, 0.7),
        10: (0.8, 0.81, 0.82, 0.83, 0.801, 0.4),
    }),
    "V.3.g": by_level({
        0: (0.7, 0.75, 0.8, 0.85, 0.86, 0.9), 2: (0.7, 0.75, 0.79, 0.84, 0.85, 0.83),
        4: (0.7, 0.75, 0.78, 0.83, 0.84, 0.65), 6: (0.7, 0.75, 0.78, 0.83, 0.84, 0.6),
        8: (0.7, 0.75, 0.77, 0.82, 0.83, 0.5),
    }),
    "V.3.h": by_level({
        250: (0.5, 0.54, 0.6, 0.68, 0.72, 0.8), 500: (0.6, 0.66, 0.7, 0.8, 0.9, 0.75),
        1000: (0.75, 0.8, 0.83, 0.85, 0.9, 0.78), 2000: (0.84, 0.85, 0.86, 0.87, 0.9, 0.79),
        3500: (0.85, 0.86, 0.87, 0.9, 0.91, 0.8),
    }),
    "V.3.i": by_scheme({
        "no averaging": (0.8,) * 6, "full": (0.93, 0.8, 0.7, 0.6, 0.5, 0.4),
        "784-250-80-10": (0.9, 0.89, 0.88, 0.87, 0.83, 0.82),
        "784-300-100-0": (0.92, 0.92, 0.92, 0.91, 0.91, 0.91),
        "no averaging, 5 layers": (0.75,) * 6,
        "full, 5 layers": (0.9, 0.75, 0.65, 0.55, 0.45, 0.35),
        "784-250-80-8-10": (0.77, 0.76, 0.76, 0.76, 0.74, 0.73),
        "784-300-100-10-0": (0.87, 0.87, 0.87, 0.86, 0.85, 0.84),
    }, (0, 2, 4, 6, 8, 10)),
    "V.4": by_level({100: (0.5, 0.6, 0.65, 0.7, 0.8, 0.55)}, (0, 7, 15, 30, 40, 50)),
    "V.5": by_level({10: (0.5, 0.6, 0.7, 0.9, 0.8, 0.4), 30: (0.5, 0.6, 0.7, 0.8, 0.9, 0.4),
                     40: (0.5, 0.55, 0.6, 0.65, 0.9, 0.8)}, _HIDDEN),
}  # fmt: skip
CLAIMS = {
    "V.2.a": (60, 0), "V.2.b": (32, 0), "V.2.c": (10, 0), "V.3.a": (21, 0), "V.3.b": (6, 9),
    "V.3.c": (15, 1), "V.3.d": (14, 0), "V.3.e": (12, 0), "V.3.f": (31, 1), "V.3.g": (36, 2),
    "V.3.h": (58, 0), "V.3.i": (57, 1), "V.4": (20, 0), "V.5": (88, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_orderings_hold_of_figures_that_fit_the_text_and_not_of_their_opposites(
    name: str, judged: Any
) -> None:
    above, close = CLAIMS[name]
    said = judged(EVERY[name], PAPER[name])
    assert {claim: word for claim, word in said.items() if word != "holds"} == {}
    assert (sum("within" not in c for c in said), sum("within" in c for c in said)) == (
        above,
        close,
    )
    opposite = judged(EVERY[name], PAPER[name], turned=True)
    wrong = {c: word for c, word in opposite.items() if "within" not in c}
    assert {claim: word for claim, word in wrong.items() if word != "does not hold"} == {}


CHANGES: list[tuple[str, tuple[str, Any], float, set[str]]] = [
    # section, series and point or moment that have another figure, what then does not hold
    ("V.3.b", ("level 100", "30"), 0.58, {
        "30: level 80 within 0.02 of level 100", "30: level 100 within 0.02 of level 0",
        "30: level 100 within 0.02 of level 80",
    }),
    ("V.3.f", ("level 100", 10), 0.46, {"level 100: at 0, times 0.5 above at 10"}),
    ("V.3.g", ("level 15", 8), 0.73, {"level 15: at 8 within 0.01 of at 0"}),
    ("V.3.h", ("level 0", 250), 0.55, {
        "at 3500: level 0, less level 0 at 250 above level 15, less level 15 at 250"
    }),
    ("V.3.d", ("80 + 20, dependent", 25), 0.91, {
        "at 150, less 80 + 20 at 150 above at 25, less 80 + 20 at 25"
    }),
    ("V.5", ("level 100", "30"), 0.45, {
        f"{panel}, 30: level 100 above level 0"
        for panel in ("each starts in its own way", "all start alike")
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "figure", "failing"), CHANGES)
def test_what_the_text_denies_does_not_hold(
    name: str, where: tuple[str, Any], figure: float, failing: set[str], judged: Any
) -> None:
    def value(panel: str, series: str, x: Any, moment: str) -> float:
        changed = (series, moment if x is None else x) == where
        return figure if changed else PAPER[name](panel, series, x, moment)

    said = judged(EVERY[name], value)
    found = {claim for claim, word in said.items() if word == "does not hold"}
    assert found
    assert all(any(claim.endswith(text) for text in failing) for claim in found)

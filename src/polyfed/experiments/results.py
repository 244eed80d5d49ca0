"""Results: the figures of an experiment that was run, and its verdicts, all from `summary.json`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed import experiments
from polyfed.experiments.experiment import Claim, Experiment, Ref, label
from polyfed.experiments.verdict import (
    Comparison,
    Ordering,
    Spread,
    Statistic,
    Word,
    compare,
    order,
    summarise,
)
from polyfed.record.files import read_summary

FORMAT = 1
Point = float | str


@dataclass(frozen=True)
class Grid:
    """Figures in rows and columns: `rows[point][series]` are the values of a cell's seeds."""

    panel: str
    figure: str
    series: Sequence[str]
    rows: Mapping[Point, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Results:
    """An experiment and its summary."""

    experiment: Experiment
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a `summary.json`."""
        summary = read_summary(path, "the summary of an experiment", FORMAT)
        return cls(experiments.load(summary["experiment"]), summary)

    @property
    def panels(self) -> list[str]:
        """The panels that were run."""
        return list(dict.fromkeys(cell["panel"] for cell in self.summary["cells"]))

    def values(self, ref: Ref) -> list[float] | None:
        """The figure with every seed that it has, in their order; None if it was not run."""
        return list(self.by_seed(ref).values()) or None

    def by_seed(self, ref: Ref, points: Set[Point] | None = None) -> dict[int, float]:
        """The figure by seed, the mean over points without x; empty if it was not run.

        A mean over points, and a figure less another, has the seeds that all of them have.

        Args:
            ref: which figure.
            points: if given, the mean is over these alone.
        """
        if ref.less is not None:
            own, other = self.by_seed(replace(ref, less=None)), self.by_seed(ref.less)
            return {seed: own[seed] - other[seed] for seed in _common(own, other)}
        if ref.times != 1:
            whole = self.by_seed(replace(ref, times=1.0), points)
            return {seed: ref.times * value for seed, value in whole.items()}
        here = [
            dict(zip(seeds_of(self.summary, cell), cell["figures"][ref.figure], strict=True))
            for cell in self.summary["cells"]
            if (cell["panel"], cell["series"]) == (ref.panel, ref.series)
            and ref.x in (None, cell["x"])
            and (points is None or cell["x"] in points)
            and ref.figure in cell["figures"]
        ]
        return {seed: statistics.fmean(each[seed] for each in here) for seed in _common(*here)}

    def spread(self, values: Sequence[float]) -> Spread:
        """Centre and spread over seeds, by the experiment's statistic."""
        return summarise(values, self.experiment.statistic)

    def comparisons(self) -> dict[Ref, Comparison]:
        """Our numbers beside the paper's, those that were run."""
        ours = {ref: self.values(ref) for ref in self.experiment.published}
        published = self.experiment.published
        return {ref: compare(v, published[ref]) for ref, v in ours.items() if v is not None}

    def orderings(self) -> dict[Claim, Ordering]:
        """The paper's orderings put to the test."""
        return {claim: self._order(claim) for claim in self.experiment.claims}

    def _order(self, claim: Claim) -> Ordering:
        one, other = self._points(claim.left), self._points(claim.right)
        points = one & other if one and other else None
        left, right = self.by_seed(claim.left, points), self.by_seed(claim.right, points)
        seeds = _common(left, right)
        if not seeds:
            return Ordering("not run")
        pair = [left[seed] for seed in seeds], [right[seed] for seed in seeds]
        return order(*pair, claim.relation, claim.margin)

    def _points(self, ref: Ref) -> set[Point]:
        """Where a series was run, if the mean over its points is wanted."""
        return {
            cell["x"]
            for cell in self.summary["cells"]
            if (cell["panel"], cell["series"]) == (ref.panel, ref.series)
            and ref.x is None
            and ref.less is None
            and cell["x"] is not None
        }

    def words(self) -> list[Word]:
        """All verdicts."""
        numbers = [each.word for each in self.comparisons().values()]
        return numbers + [each.word for each in self.orderings().values()]

    @property
    def state(self) -> str:
        """The experiment in a word: reproduced, differs, undecided, measured, or partly (why).

        Partly goes before the others: a smaller setting cannot reproduce or refute the paper.
        """
        if self.summary["changed"]:
            return f"partly ({'; '.join(self.summary['changed'])})"
        words = set(self.words())
        if words & {"differs", "does not hold"}:
            return "differs"
        if not words:
            return "measured"
        return "reproduced" if words <= {"agrees", "holds"} else "undecided"

    def tally(self) -> str:
        """How many verdicts of each kind."""
        words = self.words()
        kinds: list[Word] = [
            "agrees",
            "holds",
            "undecided",
            "differs",
            "does not hold",
            "not run",
        ]
        return ", ".join(f"{w} {words.count(w)}" for w in kinds if w in words) or "nothing to judge"

    def faults(self) -> list[str]:
        """What went wrong in runs, by cell: a network of NaN has figures, too."""
        told = []
        for cell in self.summary["cells"]:
            by_seed = dict(zip(seeds_of(self.summary, cell), cell.get("faults", ()), strict=False))
            for kind in dict.fromkeys(kind for found in by_seed.values() for kind in found):
                seeds = ", ".join(str(seed) for seed, found in by_seed.items() if kind in found)
                name = label(cell["panel"], cell["series"], cell["x"])
                told.append(f"{name}: {kind} (with seed {seeds})")
        return told

    def as_dict(self) -> dict[str, Any]:
        """The summary and the verdicts, for machines."""
        published = self.experiment.published
        numbers = [
            {"figure": str(ref), "paper": published[ref], **_finite(asdict(each))}
            for ref, each in self.comparisons().items()
        ]
        orderings = [
            {"claim": str(claim), **_finite(asdict(each))}
            for claim, each in self.orderings().items()
        ]
        return {**self.summary, "state": self.state, "numbers": numbers, "orderings": orderings}

    def grids(self) -> list[Grid]:
        """Everything that was measured: one grid a panel, or a panel and figure of a sweep.

        In a sweep the points are rows, and a cell without a point is a row of its own; elsewhere
        the figures are.
        """
        cells = self.summary["cells"]
        is_sweep = any(cell["x"] is not None for cell in cells)
        figures = list(dict.fromkeys(name for cell in cells for name in cell["figures"]))
        return [
            self._grid(panel, figure)
            for panel in self.panels
            for figure in (figures if is_sweep else [""])
        ]

    def _grid(self, panel: str, figure: str) -> Grid:
        """The grid of a figure of a sweep, or, without one, of all figures."""
        rows: dict[Point, dict[str, Sequence[float]]] = {}
        here = [cell for cell in self.summary["cells"] if cell["panel"] == panel]
        for cell in here:
            for name, values in cell["figures"].items():
                if figure in ("", name):
                    x = ("all" if cell["x"] is None else cell["x"]) if figure else name
                    rows.setdefault(x, {})[cell["series"]] = values
        series = list(dict.fromkeys(cell["series"] for cell in here))
        return Grid(panel, figure, series, rows)


def seeds_of(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> list[int]:
    """The seeds of a cell in a summary: its own, if it names some, else the summary's.

    >>> seeds_of({"seeds": [0, 1, 2]}, {"seeds": [0, 2]}), seeds_of({"seeds": [0, 1, 2]}, {})
    ([0, 2], [0, 1, 2])
    """
    return list(entry.get("seeds", summary["seeds"]))


def _common(*figures: Mapping[int, float]) -> list[int]:
    """The seeds that all of them have."""
    return [seed for seed in figures[0] if all(seed in each for each in figures)] if figures else []


def folder_of(
    experiment: Experiment,
    out: Path,
    quick: bool = False,
    reading: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Where the summary, page and plots of an experiment are."""
    other = "".join(f"-{name}={value}" for name, value in sorted(reading.items()))
    plain = other.replace("/", "_").replace(":", "-")  # so that every system can store it
    return out / (experiment.name + plain + "-quick" * quick)


def readings_of(experiment: Experiment, out: Path) -> list[Path]:
    """The folders with other readings of an experiment, in a folder of results."""
    found = out.glob(f"{experiment.name}-*=*/summary.json")
    return sorted(path.parent for path in found if not path.parent.name.endswith("-quick"))


def summaries_of(experiment: Experiment, out: Path) -> list[Path]:
    """The summaries of an experiment in a folder of results: its own first, then other readings."""
    folders = (folder_of(experiment, out), *readings_of(experiment, out))
    return [path for folder in folders if (path := folder / "summary.json").exists()]


def state_of(experiment: Experiment, out: Path) -> str:
    """Where an experiment stands in a folder of results: as judged, not run, or cannot (why)."""
    path = folder_of(experiment, out) / "summary.json"
    if path.exists():
        return Results.read(path).state
    if readings_of(experiment, out):
        return "partly (with other options only)"
    return f"cannot ({experiment.cannot.rstrip('.')})" if experiment.cannot else "not run"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity: they become null."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }


def shown(values: Sequence[float], statistic: Statistic, digits: int = 3) -> str:
    """A figure over seeds as a person reads it; a single one has no spread.

    >>> shown([0.4, 0.5, 0.6], "mean"), shown([0.4, 0.5, 0.6], "median", 2), shown([0.5], "mean")
    ('0.500 ± 0.100', '0.50 (0.48–0.52)', '0.500')
    """
    spread = summarise(values, statistic)
    centre, low, high = (f"{v:.{digits}f}" for v in (spread.centre, spread.low, spread.high))
    if len(values) == 1:
        return centre
    if statistic == "median":
        return f"{centre} ({low}–{high})"
    return f"{centre} ± {spread.high - spread.centre:.{digits}f}"

"""Plots for papers: a figure by round of one run or of several, as SVG or PNG by matplotlib.

matplotlib is an extra: `pip install polyfed[plots]`. Lines are means over nodes and seeds, shades a
standard deviation over seeds; a single run also shows its nodes, thin.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.engines.run import Run
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.experiments.plot import COLOURS, save, styled
from polyfed.record.files import write_atomically
from polyfed.report.measured import ACCURACY, by_round, series, ticks_of
from polyfed.report.traffic import bytes_by_round

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png")
_MOST_NODES = 20  # drawn one by one
Labelled = Mapping[str, Sequence[Run]]
Curve = list[float | None]


def plot(runs: Labelled, what: str, path: str | Path) -> Path:
    """Draw a figure by round into a file; where it is.

    Args:
        runs: by label; those of one label are seeds of the same.
        what: accuracy, loss, seconds, bytes, or any figure that the method noted.
        path: its suffix, .svg or .png, says how.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"plot {path}: the name must end in {' or '.join(_SUFFIXES)}.")
    with styled():
        write_atomically(path, partial(save, _figure(runs, what), path.suffix[1:]))
    return path


def svg(runs: Labelled, what: str) -> str:
    """The same plot as text, for a page."""
    out = io.StringIO()
    with styled():
        save(_figure(runs, what), "svg", out)
    return out.getvalue()[out.getvalue().index("<svg") :]


def _figure(runs: Labelled, what: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    name = ""
    for i, (label, seeds) in enumerate(runs.items()):
        found = [curves(run, what) for run in seeds]
        name = found[0][0]
        is_alone = len(runs) == 1 and len(seeds) == 1
        if is_alone:
            _nodes(axes, seeds[0], found[0][1])
        means = [_mean(rows.values()) for _, rows in found]
        colour = COLOURS[6] if is_alone else COLOURS[i % len(COLOURS)]
        longest = max((ticks_of(run.metrics) for run in seeds), key=len)
        _line(axes, longest, means, "mean" if is_alone else label, colour)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(name.replace("_", " "))
    axes.grid(axis="y")
    axes.legend(loc="best")
    return figure


def curves(run: Run, what: str) -> tuple[str, dict[str, Curve]]:
    """The full name of a figure, and its values by node and round.

    Args:
        run: finished or not.
        what: accuracy, loss, seconds, bytes, or any figure that the method noted.
    """
    if what == "seconds":
        return "seconds", {"all": list(by_round(run.metrics))}
    if what == "bytes":
        sent = bytes_by_round(run.ledger.crossings(), ticks_of(run.metrics))
        return "bytes", {"all": list(map(float, sent))}
    found = series(run.metrics)
    losses = [name for name in found if name.endswith("_loss")]
    known = {"accuracy": ACCURACY, "loss": "local_loss" if "local_loss" in found else ""}
    name = known.get(what, what) or next(iter(losses), what)
    if name not in found:
        raise UnknownNameError("figure", what, [*found, *known, "seconds", "bytes"])
    return name, found[name]


def _nodes(axes: Axes, run: Run, rows: Mapping[str, Curve]) -> None:
    if 1 < len(rows) <= _MOST_NODES:
        for i, (node, row) in enumerate(rows.items()):
            x, y = _there(ticks_of(run.metrics), row)
            axes.plot(x, y, color=COLOURS[i % 6], linewidth=1, alpha=0.7, label=node)


def _line(
    axes: Axes, ticks: Sequence[int], means: Sequence[Curve], label: str, colour: str
) -> None:
    """The mean of seeds, and where there are several, a standard deviation to both sides."""
    x, y = _there(ticks, _mean(means))
    axes.plot(x, y, color=colour, linewidth=2, label=label, marker="o" if len(x) == 1 else None)
    several = [(t, c) for t, c in zip(ticks, _columns(means), strict=False) if len(c) > 1]
    ends = [(statistics.fmean(c), statistics.stdev(c)) for _, c in several]
    low, high = [m - s for m, s in ends], [m + s for m, s in ends]
    axes.fill_between([t for t, _ in several], low, high, color=colour, alpha=0.15, linewidth=0)


def _columns(rows: Iterable[Curve]) -> list[list[float]]:
    """The values of every round that are there."""
    columns = zip_longest(*rows)
    return [[value for value in column if value is not None] for column in columns]


def _mean(rows: Iterable[Curve]) -> Curve:
    """Over rows, of every round that has a value in one of them."""
    return [statistics.fmean(column) if column else None for column in _columns(rows)]


def _there(ticks: Sequence[int], row: Sequence[float | None]) -> tuple[list[int], list[float]]:
    pairs = [(t, v) for t, v in zip(ticks, row, strict=False) if v is not None]
    return [t for t, _ in pairs], [v for _, v in pairs]

"""The plot of an experiment, as the papers draw theirs: lines with error bars, or dots in rows.

matplotlib is an extra: `pip install polyfed[plots]`. Ours are filled marks with bars (standard
deviation, or 40th to 60th percentile); the paper's numbers are hollow ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.errors import ConfigError
from polyfed.experiments.experiment import Dots, Lines, Picture, Ref, number
from polyfed.experiments.results import Point, Results
from polyfed.experiments.verdict import printed
from polyfed.record.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito: told apart also by the colour-blind; the last two are grey and brown.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#999999", "#7A4B26"),
)
MARKS = "osD^vP*Xh"
_STYLE: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "polyfed",
}
_ACROSS = 3  # panels side by side that a page has room for; more are in rows of two
_BAR: Mapping[str, Any] = {"capsize": 2.5, "elinewidth": 1.3, "capthick": 1.3}


def is_available() -> bool:
    """Whether plots can be drawn here."""
    return find_spec("matplotlib") is not None


@contextmanager
def styled() -> Iterator[None]:
    """The style of all plots, whatever a person's own settings are."""
    if not is_available():
        raise ConfigError("plots need matplotlib: pip install polyfed[plots].")
    import matplotlib as mpl

    plain = {k: v for k, v in mpl.rcParamsDefault.items() if "backend" not in k}
    style: Any = {**plain, **_STYLE}  # a backend would outlive the context
    with mpl.rc_context(style):
        yield


def draw(results: Results, *paths: Path) -> None:
    """Draw the experiment into files; their suffixes, .svg or .png, say how."""
    with styled():
        for path in paths:
            write_atomically(path, partial(save, _figure(results), path.suffix[1:]))


def save(figure: Figure, kind: str, file: Path | StringIO) -> None:
    """Write a figure as svg or png; the same figure gives the same bytes."""
    more: Mapping[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    figure.savefig(file, format=kind, bbox_inches="tight", pad_inches=0.15, **more)


def _figure(results: Results) -> Figure:
    from matplotlib.figure import Figure

    spec, panels = results.experiment.plot, results.panels
    if isinstance(spec, Picture):
        drawn: Figure = spec.draw(results.summary["cells"])
        return drawn
    rows = len(_rows(results, spec)) if isinstance(spec, Dots) else 0
    each = max(0.34, 0.1 * len(_series(results)))
    height = 1.1 + max(0.8, each * rows) if rows else 3.8
    width = 4.6 if len(panels) > 1 else 6.4
    across = len(panels) if len(panels) <= _ACROSS else 2
    down = -(-len(panels) // across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False, sharey=bool(rows)).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid, panels, strict=False):
        if isinstance(spec, Lines):
            _lines(axes, results, panel, spec)
        else:
            _dots(axes, results, panel, spec)
        axes.set_title(panel, loc="left")
    if isinstance(spec, Dots):
        figure.supxlabel(spec.y, size="medium", color="#333333")
    _legend(figure, grid[: len(panels)], results)
    return figure


def _legend(figure: Figure, grid: Sequence[Axes], results: Results) -> None:
    """One legend for all panels, above them; none for a single nameless series."""
    known: dict[str, Any] = {}
    for axes in grid:
        drawn, names = axes.get_legend_handles_labels()
        known |= dict(zip(names, drawn, strict=True))
    wanted = ["ours", "paper", *(n for s in _series(results) for n in (s, f"{s}, paper"))]
    labels = [name for name in wanted if name and name in known]
    if labels:
        handles = [known[name] for name in labels]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(labels)))


def _series(results: Results) -> list[str]:
    return list(dict.fromkeys(cell["series"] for cell in results.summary["cells"]))


def _style(results: Results, series: str) -> tuple[str, str]:
    """The colour and the mark of a series, the same in all panels."""
    i = min(_series(results).index(series), len(COLOURS) - 1)
    return COLOURS[i], MARKS[i]


# ---- lines ---------------------------------------------------------------------------------------


def _lines(axes: Axes, results: Results, panel: str, spec: Lines) -> None:
    lines, levels = _points(results, panel, spec)
    planned = list(dict.fromkeys(cell.x for cell in results.experiment.cells))
    every = list(dict.fromkeys(x for line in lines.values() for x in line))
    every.sort(key=lambda x: planned.index(x) if x in planned else len(planned))
    is_even = spec.scale == "even" or any(isinstance(x, str) for x in every)
    where = {x: float(i) if is_even else float(x) for i, x in enumerate(every)}
    for i, (series, line) in enumerate(lines.items()):
        colour, mark = _style(results, series)
        spreads = {where[x]: results.spread(v) for x, v in line.items()}
        xs = sorted(spreads)
        centres = [spreads[x].centre for x in xs]
        bars = [
            [spreads[x].centre - spreads[x].low for x in xs],
            [spreads[x].high - spreads[x].centre for x in xs],
        ]
        axes.errorbar(
            xs, centres, bars, color=colour, marker=mark, ms=5.5, lw=1.8,
            zorder=3 + i, label=series, **_BAR,
        )  # fmt: skip
    for series, values in levels.items():
        colour, _ = _style(results, series)
        spread = results.spread(values)
        axes.axhline(spread.centre, color=colour, lw=1.6, ls=(0, (5, 2)), label=series)
        axes.axhspan(spread.low, spread.high, color=colour, alpha=0.1, lw=0)
    axes.grid(True)
    axes.set(xlabel=spec.x, ylabel=spec.y)
    if is_even:
        axes.set_xticks(list(where.values()), [number(x) for x in every])
    elif spec.scale == "log":
        axes.set_xscale("log")
        axes.set_xticks(list(where.values()), [number(x) for x in every])
        axes.minorticks_off()
    elif all(x == round(x) for x in where.values()):
        axes.locator_params(axis="x", integer=True)


def _points(
    results: Results, panel: str, spec: Lines
) -> tuple[dict[str, dict[Point, Sequence[float]]], dict[str, Sequence[float]]]:
    """For each series its points; and series without any, in a sweep, as levels across it."""
    lines: dict[str, dict[Point, Sequence[float]]] = {}
    levels: dict[str, Sequence[float]] = {}
    is_sweep = any(cell.x is not None for cell in results.experiment.cells)
    for cell in results.summary["cells"]:
        if cell["panel"] != panel:
            continue
        if not is_sweep:
            figures = cell["figures"].items()
            lines[cell["series"]] = {float(name): values for name, values in figures}
        elif cell["x"] is None:
            levels[cell["series"]] = cell["figures"][spec.figure]
        else:
            line = lines.setdefault(cell["series"], {})
            line[cell["x"]] = cell["figures"][spec.figure]
    return lines, levels


# ---- dots ----------------------------------------------------------------------------------------


def _rows(results: Results, spec: Dots) -> list[str]:
    """The figures that all panels show, from top to bottom."""
    every = dict.fromkeys(name for cell in results.summary["cells"] for name in cell["figures"])
    return [name for name in spec.figures or every if name in every]


def _dots(axes: Axes, results: Results, panel: str, spec: Dots) -> None:
    from matplotlib.ticker import LogLocator

    names = _rows(results, spec)
    cells = [cell for cell in results.summary["cells"] if cell["panel"] == panel]
    published = results.experiment.published
    for k, cell in enumerate(cells):
        colour, mark = _style(results, cell["series"])
        shift = 0.36 * (k / (len(cells) - 1) - 0.5) if len(cells) > 1 else 0.0
        for row, name in enumerate(names):
            if name not in cell["figures"]:
                continue
            spread = results.spread(cell["figures"][name])
            bars = [[spread.centre - spread.low], [spread.high - spread.centre]]
            said = cell["series"] if cell["series"] or not published else "ours"
            axes.errorbar(
                spread.centre, row + shift, xerr=bars, fmt=mark, color=colour, ms=6, zorder=4,
                label=said, **_BAR,
            )  # fmt: skip
            paper = published.get(Ref(cell["series"], name, panel, cell["x"]))
            if paper:
                said = ", ".join(filter(None, [cell["series"], "paper"]))
                _paper(axes, paper, row + shift - 0.08, colour, mark, said)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(True, axis="x")
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color="#EEEEEE", lw=1, zorder=0)
    axes.locator_params(axis="x", nbins=5)
    if spec.scale == "log":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def _paper(axes: Axes, text: str, row: float, colour: str, mark: str, label: str) -> None:
    number = printed(text)
    axes.errorbar(
        number.value, row, xerr=number.spread, fmt=mark, color=colour, mfc="white", ms=6, mew=1.3,
        alpha=0.75, zorder=3, label=label, capsize=2.5, elinewidth=0.9,
    )  # fmt: skip

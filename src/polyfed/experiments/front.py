"""The front of several objectives, drawn: figures of an experiment against one of them.

A row for each figure, over the first; a column a panel. Marks are means over seeds with their
standard deviations, numbers beside them are points of a sweep. A ring marks what nothing else beats
in both directions: of the means, so of these seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.experiments.experiment import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = Sequence[Mapping[str, Any]]


def undominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is on the front: no other is as low in both and lower in one.

    >>> undominated([(1, 3), (2, 2), (3, 3), (2, 2)])
    [True, True, False, True]
    """
    return [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]


def front(cells: Cells, across: str, *up: str) -> Figure:
    """The picture.

    Args:
        cells: of a summary.
        across: the figure along.
        up: those upwards, a row each.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(cell["panel"] for cell in cells))
    figure = Figure(figsize=(4.8 * len(panels), 3.4 * len(up)), layout="constrained")
    grid = figure.subplots(len(up), len(panels), squeeze=False)
    for row, name in zip(grid, up, strict=True):
        for axes, panel in zip(row, panels, strict=True):
            _draw(axes, [cell for cell in cells if cell["panel"] == panel], across, name)
            axes.set_title(panel, loc="left")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _draw(axes: Axes, cells: Cells, across: str, up: str) -> None:
    from polyfed.experiments.plot import COLOURS, MARKS

    xs, ys = ([statistics.fmean(cell["figures"][f]) for cell in cells] for f in (across, up))
    for k, series in enumerate(dict.fromkeys(cell["series"] for cell in cells)):
        own = [i for i, cell in enumerate(cells) if cell["series"] == series]
        bars = [[_sd(cells[i]["figures"][f]) for i in own] for f in (across, up)]
        axes.errorbar(
            [xs[i] for i in own], [ys[i] for i in own], xerr=bars[0], yerr=bars[1],
            color=COLOURS[k], marker=MARKS[k], ms=5.5, lw=1.2, elinewidth=0.6, label=series,
            zorder=3 + k,
        )  # fmt: skip
        for i in own:
            if cells[i]["x"] is not None:
                axes.annotate(
                    number(cells[i]["x"]), (xs[i], ys[i]), (4, 4), textcoords="offset points",
                    fontsize=8, color=COLOURS[k],
                )  # fmt: skip
    on_front = [i for i, is_on in enumerate(undominated(list(zip(xs, ys, strict=True)))) if is_on]
    axes.scatter(
        [xs[i] for i in on_front], [ys[i] for i in on_front], s=130, facecolors="none",
        edgecolors="#333333", linewidths=1.0, label="on the front", zorder=9,
    )  # fmt: skip
    axes.grid(True)
    axes.set(xlabel=across, ylabel=up)


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0

"""Pictures that are neither lines nor dots: heat maps of distances, and samples in the plane.

All are drawn from what an experiment keeps of the first run of every cell (`Picture.keep`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.experiments.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kept = Mapping[str, Any]  # a cell of a summary, with what was kept of it
_TEN = (*COLOURS[:6], "#F0E442", "#8C564B", "#999999", "#000000")
_MANY = 1000  # points of a map: more are drawn smaller


def heat_maps(cells: Sequence[Kept]) -> Figure:
    """The matrices {title: {nodes, rows}} of every cell, all in the same colours."""
    from matplotlib.figure import Figure

    maps = [(title, m) for cell in cells for title, m in cell["kept"].items()]
    most = max(value for _, m in maps for row in m["rows"] for value in row)
    figure = Figure(figsize=(3.4 * len(maps), 3.6), layout="constrained")
    grid = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (title, matrix) in zip(grid, maps, strict=True):
        _heat(axes, matrix["nodes"], matrix["rows"], most)
        axes.set_title(title, loc="left")
    figure.colorbar(grid[0].images[0], ax=list(grid), shrink=0.8, label="distance")
    return figure


def _heat(axes: Axes, nodes: Sequence[str], rows: Sequence[Sequence[float]], most: float) -> None:
    axes.imshow(rows, cmap="Blues", vmin=0, vmax=most)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            colour = "white" if value > 0.6 * most else "#333333"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(nodes)), nodes, rotation=30, ha="right")
    axes.set_yticks(range(len(nodes)), nodes)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def class_maps(cells: Sequence[Kept]) -> Figure:
    """The maps {title: {mark: {class: "x,y x,y ..."}}} of every cell, a row a cell.

    A class is a colour and a mark a shape, the same in all maps. Cells have equally many maps;
    where each has one, all are in one row.
    """
    from matplotlib.figure import Figure

    maps = [groups for cell in cells for groups in cell["kept"].values()]
    marks = dict(zip(dict.fromkeys(mark for groups in maps for mark in groups), "ox", strict=False))
    classes = sorted({c for groups in maps for group in groups.values() for c in group})
    colours = dict(zip(classes, _TEN, strict=False))
    rows, columns = len(cells), len(maps) // len(cells)
    rows, columns = (rows, columns) if columns > 1 else (columns, rows)
    figure = Figure(figsize=(3.6 * columns, 3.7 * rows + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(len(cells), -1)
    for row, cell in zip(grid, cells, strict=True):
        for axes, (title, groups) in zip(row, cell["kept"].items(), strict=True):
            _class_map(axes, groups, marks, colours)
            axes.set_title(f"{cell['series']}: {title}", loc="left")
    _class_keys(figure, marks, colours)
    return figure


def _class_map(
    axes: Axes,
    groups: Mapping[str, Mapping[str, str]],
    marks: Mapping[str, str],
    colours: Mapping[str, str],
) -> None:
    many = sum(len(text.split()) for group in groups.values() for text in group.values()) > _MANY
    for mark, group in groups.items():
        for c, text in group.items():
            x, y = zip(*(map(int, point.split(",")) for point in text.split()), strict=True)
            axes.scatter(
                x, y, s=3 if many else 9, color=colours[c], marker=marks[mark], linewidths=0.8
            )
    axes.set(xticks=[], yticks=[], xlim=(-40, 1039), ylim=(-40, 1039), aspect="equal")
    axes.spines[:].set(visible=True, color="#DDDDDD")


def _class_keys(figure: Figure, marks: Mapping[str, str], colours: Mapping[str, str]) -> None:
    """What the colours mean, below; what the shapes mean, above, where there is more than one."""
    from matplotlib.lines import Line2D

    def key(label: str, marker: str, colour: str) -> Line2D:
        return Line2D([], [], ls="", ms=5, label=label, marker=marker, color=colour)

    handles = [key(c, "o", colour) for c, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, handletextpad=0.1)
    if len(marks) > 1:
        handles = [key(name, marker, "#555555") for name, marker in marks.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=2, handletextpad=0.1)

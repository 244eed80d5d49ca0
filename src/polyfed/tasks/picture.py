"""Who holds what: samples by node and class, as text for a terminal and as SVG for a page.

as_text   one row a node, one column a class: ░ up to a quarter of the largest count, ▒ up to a
          half, ▓ up to three quarters, █ above, · for none; the count beside it where it fits
as_svg    the same grid with circles: area proportional to the count (but never invisible)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.errors import DataError

Counts = Int64[Tensor, "nodes classes"]

SHADES = "░▒▓█"
WIDTH = 100


def holdings(y_by_node: Mapping[str, Tensor], num_classes: int) -> Counts:
    """Count the samples of each class (column) at each node (row)."""
    rows = []
    for node, y in y_by_node.items():
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
            raise DataError(
                f"node {node} has labels from {int(y.min())} to {int(y.max())}, expected 0 to "
                f"{num_classes - 1}. Fix: give num_classes of the whole set."
            )
        rows.append(torch.bincount(y.long(), minlength=num_classes))
    return torch.stack(rows) if rows else torch.zeros(0, num_classes, dtype=torch.int64)


def _check(counts: Counts, nodes: Sequence[str], classes: Sequence[str]) -> None:
    if counts.shape != (len(nodes), len(classes)) or not counts.numel():
        raise DataError(
            f"counts are {tuple(counts.shape)}, expected one row for each of {len(nodes)} nodes "
            f"and one column for each of {len(classes)} classes, at least one of both."
        )


# ---- text ----------------------------------------------------------------------------------------


def as_text(
    counts: Counts, nodes: Sequence[str], classes: Sequence[str], width: int = WIDTH
) -> str:
    """A grid for the terminal, at most so many columns wide.

    >>> print(as_text(torch.tensor([[4, 0], [1, 3]]), ["M0", "M1"], ["cat", "dog"]))
           cat  dog  total
    M0     █ 4  ·        4
    M1     ░ 1  ▓ 3      4
    total    5    3      8
    """
    _check(counts, nodes, classes)
    names = [_shorten(name, 14) for name in (*nodes, "total")]
    left = max(map(len, names))
    right = max(len(f"{int(counts.sum()):,}"), len("total"))
    room = width - left - right - 2
    body = _numbered(counts, classes, room) or _shaded(counts, classes, room)
    totals = [f"{int(n):,}" for n in (*counts.sum(1), counts.sum())]
    lines = [f"{'':{left}}{body[0]}  {'total':>{right}}"]
    for name, cells, total in zip(names, body[1:], totals, strict=True):
        lines.append(f"{name:{left}}{cells}  {total:>{right}}")
    return "\n".join(line.rstrip() for line in lines)


def _shorten(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _shade(count: int, largest: int) -> str:
    return SHADES[min(3, math.ceil(4 * count / largest) - 1)] if count else "·"


def _numbered(counts: Counts, classes: Sequence[str], room: int) -> list[str]:
    """Header, nodes and class totals with shade and number in each cell; nothing if too wide."""
    largest, sums = int(counts.max()), counts.sum(0).tolist()
    digits = len(str(largest))
    cell = max(2 + digits, len(str(max(sums))))
    fit = next((gap for gap in (2, 1) if len(classes) * (cell + gap) <= room), 0)
    if not fit:
        return []
    spare = room // len(classes) - fit
    names = [_shorten(name, max(cell, spare)) for name in classes]
    rows: list[list[str]] = [names]
    rows += [[f"{_shade(n, largest)} {n or '':>{digits}}" for n in row] for row in counts.tolist()]
    rows.append([str(n) for n in sums])
    widths = [max(cell, len(name)) for name in names]
    return [
        "".join(f"{'':{fit}}{text:>{w}}" for text, w in zip(row, widths, strict=True))
        for row in rows
    ]


def _shaded(counts: Counts, classes: Sequence[str], room: int) -> list[str]:
    """The same without numbers: a column for each class, or for several where there are many."""
    step = math.ceil(len(classes) / (room - 2))
    starts = list(range(0, len(classes), step))
    table = torch.stack([part.sum(1) for part in counts.tensor_split(starts[1:], 1)], 1)
    largest = int(table.max())
    if step == 1 and all(len(name) == 1 for name in classes):
        ruler = "".join(classes)
    else:
        ruler = "".join(f"{start:<10}" for start in starts[::10])[: max(len(starts), 4)]
    rows = ["".join(_shade(n, largest) for n in row) for row in table.tolist()]
    note = f"{len(classes)} classes" + (f", {step} to a column" if step > 1 else "")
    width = max(len(starts), len(ruler), len(note))
    return [f"  {row:{width}}" for row in (ruler, *rows, note)]


# ---- SVG -----------------------------------------------------------------------------------------

_STYLE = """
.holdings text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }
.holdings .title { font-size: 15px; font-weight: 600 }
.holdings .quiet { fill: #616e7c }
.holdings .end { text-anchor: end }
.holdings .middle { text-anchor: middle }
.holdings circle { fill: #2f6fb0; fill-opacity: .85 }
.holdings line { stroke: #e4e7eb }
.holdings .bar { fill: #c3d5e8 }
"""
_LETTER = 7.0  # width of a letter of 12 px, on the safe side
_BAR = 90.0
_DOT = 0.8  # the smallest circle drawn: one sample among thousands still shows


@dataclass(frozen=True)
class _Grid:
    """Where things are: the grid's corner, the size of a cell, its number of rows and columns."""

    left: float
    top: float
    wide: float
    high: float
    rows: int
    columns: int
    slant: bool

    @property
    def right(self) -> float:
        return self.left + self.columns * self.wide

    @property
    def bottom(self) -> float:
        return self.top + self.rows * self.high

    @property
    def radius(self) -> float:
        """Of the largest circle; where cells are narrow it may reach into its neighbours."""
        return max(6.5, min(self.wide, self.high) / 2 - 1)

    @property
    def step(self) -> int:
        """Every so many columns have a name and a line."""
        return math.ceil((22 if self.slant else 1) / self.wide)

    def x(self, column: int) -> float:
        return self.left + (column + 0.5) * self.wide

    def y(self, row: int) -> float:
        return self.top + (row + 0.5) * self.high


def as_svg(counts: Counts, nodes: Sequence[str], classes: Sequence[str], title: str) -> str:
    """A self-contained picture: nodes down, classes across, circle area proportional to count."""
    _check(counts, nodes, classes)
    nodes = [_shorten(name, 24) for name in nodes]
    classes = [_shorten(name, 16) for name in classes]
    grid = _grid(nodes, classes)
    largest = int(counts.max())
    legend = sum(_legend_item(grid, n) for n in _round_counts(largest))
    width = max(grid.right + _BAR + 90, grid.left + legend, 32 + 9 * len(title))
    height = grid.bottom + 72
    said = f"{title}: {len(nodes)} nodes, {len(classes)} classes, {int(counts.sum()):,} samples"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" '
            'class="holdings" role="img">',
            f"<title>{escape(said)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            _text(16.0, 26.0, title, "title"),
            *_lines(grid),
            *_class_names(grid, classes),
            *_circles(grid, counts, nodes, classes),
            *_node_totals(grid, counts, nodes),
            *_class_totals(grid, counts),
            *_legend(grid, largest),
            "</svg>\n",
        )
    )


def _grid(nodes: Sequence[str], classes: Sequence[str]) -> _Grid:
    longest = max(map(len, classes)) * _LETTER
    wide = max(10.0, min(920 / len(classes), max(46.0, min(80.0, longest + 8))))
    high = max(15.0, min(900 / len(nodes), 34.0 if wide > 22 else 20.0))
    slant = longest + 4 > wide
    return _Grid(
        left=26 + max(5, *map(len, nodes)) * _LETTER,
        top=44 + (longest * 0.71 + 14 if slant else 18.0),
        wide=wide,
        high=high,
        rows=len(nodes),
        columns=len(classes),
        slant=slant,
    )


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(text)}</text>'


def _lines(grid: _Grid) -> list[str]:
    across = [
        f'<line x1="{grid.left:.1f}" x2="{grid.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in map(grid.y, range(grid.rows))
    ]
    down = [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{grid.top:.1f}" y2="{grid.bottom:.1f}"/>'
        for x in map(grid.x, range(0, grid.columns, grid.step))
    ]
    return across + down


def _class_names(grid: _Grid, classes: Sequence[str]) -> list[str]:
    """Level where they fit, else slanted; every so many where even that is too dense."""
    texts = []
    for column in range(0, len(classes), grid.step):
        x, y = grid.x(column), grid.top - 6
        turn = f' transform="rotate(-45 {x:.1f} {y:.1f})"' if grid.slant else ""
        texts.append(_text(x, y, classes[column], "" if grid.slant else "middle", turn))
    return texts


def _circles(
    grid: _Grid, counts: Counts, nodes: Sequence[str], classes: Sequence[str]
) -> list[str]:
    largest = int(counts.max())
    return [
        f'<circle cx="{grid.x(j):.1f}" cy="{grid.y(i):.1f}" '
        f'r="{max(_DOT, grid.radius * math.sqrt(n / largest)):.2f}">'
        f"<title>{escape(f'{nodes[i]}, {classes[j]}: {n:,}')}</title></circle>"
        for i, row in enumerate(counts.tolist())
        for j, n in enumerate(row)
        if n
    ]


def _node_totals(grid: _Grid, counts: Counts, nodes: Sequence[str]) -> list[str]:
    """Names on the left; on the right a bar and a number."""
    totals = counts.sum(1).tolist()
    scale = _BAR / max(1, *totals)
    shapes = [_text(grid.right + 14, grid.top - 6, "samples", "quiet")]
    for i, (name, total) in enumerate(zip(nodes, totals, strict=True)):
        y, long = grid.y(i), scale * total
        thick = min(14.0, grid.high - 3)
        shapes += [
            _text(grid.left - 10, y + 4, name, "end"),
            f'<rect class="bar" x="{grid.right + 14:.1f}" y="{y - thick / 2:.1f}" '
            f'width="{long:.1f}" height="{thick:.1f}" rx="2"/>',
            _text(grid.right + 20 + long, y + 4, f"{total:,}"),
        ]
    return shapes


def _class_totals(grid: _Grid, counts: Counts) -> list[str]:
    """Below each class its sum, where there is room for it; the sum of all at the right."""
    sums = [f"{n:,}" for n in counts.sum(0).tolist()]
    y = grid.bottom + 18
    texts = [
        _text(grid.left - 10, y, "total", "quiet end"),
        _text(grid.right + 14, y, f"{int(counts.sum()):,}", "quiet"),
    ]
    if max(map(len, sums)) * _LETTER <= grid.wide:
        texts += [_text(grid.x(j), y, text, "quiet middle") for j, text in enumerate(sums)]
    return texts


def _legend(grid: _Grid, largest: int) -> list[str]:
    """Circles of a few round counts."""
    x, y = grid.left, grid.bottom + 48
    shapes = [_text(grid.left - 10, y + 4, "area", "quiet end")]
    for n in _round_counts(largest):
        shapes.append(
            f'<circle cx="{x + grid.radius:.1f}" cy="{y:.1f}" '
            f'r="{grid.radius * math.sqrt(n / largest):.2f}"/>'
        )
        shapes.append(_text(x + 2 * grid.radius + 4, y + 4, f"{n:,}", "quiet"))
        x += _legend_item(grid, n)
    return shapes


def _legend_item(grid: _Grid, n: int) -> float:
    """Width of a circle with its count."""
    return 2 * grid.radius + 20 + len(f"{n:,}") * _LETTER


def _round_counts(largest: int) -> list[int]:
    """The largest 1, 2 or 5 times a power of ten that occurs, a fifth and a twenty-fifth of it.

    >>> _round_counts(6742)
    [5000, 1000, 200]
    """
    power = 10 ** (len(str(largest)) - 1)
    top = max((m * power for m in (1, 2, 5) if m * power <= largest), default=0)
    return [n for n in (top, top // 5, top // 25) if n]

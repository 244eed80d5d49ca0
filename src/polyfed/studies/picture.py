"""The picture of a search: parallel coordinates, and how much each option mattered.

One line a trial, across an axis an option, the first axis the validation accuracy; the higher a
trial's accuracy the darker its line, the best in red (Kadar 2021, Figures 4.2 and 4.3). Below each
axis the share of the differences that its option explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.experiments.plot import save, styled
from polyfed.record.files import write_atomically
from polyfed.studies.outcome import Step, Tried, figure
from polyfed.studies.space import Choice, Dimension, Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEST = "#C0392B"
_TICKS = 5


def draw(step: Step, *paths: Path) -> None:
    """Draw a step of a search into files; their suffixes, .svg or .png, say how."""
    from matplotlib.figure import Figure

    with styled():
        for path in paths:
            width = 1.6 + 1.25 * len(step.space)
            drawn = Figure(figsize=(width, 3.6), layout="constrained")
            _fill(drawn.subplots(), step)
            write_atomically(path, partial(save, drawn, path.suffix[1:]))


def position(dimension: Dimension, value: Any) -> float:
    """Where a value lies on its axis, from 0 to 1.

    >>> position(Range(0.01, 1, log=True), 0.1), position(Choice(("sgd", "adam")), "adam")
    (0.5, 1.0)
    """
    if isinstance(dimension, Choice):
        return dimension.values.index(value) / (len(dimension.values) - 1)
    low, high, at = float(dimension.low), float(dimension.high), float(value)
    if dimension.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return (at - low) / (high - low)


def _fill(axes: Axes, step: Step) -> None:
    complete = [t for t in step.trials if t.is_complete]
    best, shares = step.best, step.importance()
    values = [t.value or 0.0 for t in complete]
    scale = _scale(values)
    places = range(len(step.space) + 1)
    for t in sorted(complete, key=lambda t: t.value or 0.0):
        height = [position(scale, t.value)]
        height += [position(d, t.params[name]) for name, d in step.space.items()]
        is_best = t is best
        colour = _BEST if is_best else str(0.85 - 0.75 * height[0])
        axes.plot(
            places, height, color=colour, linewidth=2.2 if is_best else 1.1, zorder=2 + is_best
        )
    for place, dimension in zip(places, [scale, *step.space.values()], strict=True):
        _axis(axes, place, dimension)
    names = ["validation\naccuracy"]
    names += [f"{n}\n{shares[n]:.0%}" if n in shares else n for n in step.space]
    axes.set_xticks(places, [name.replace("_", " ") for name in names])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlim(-0.2, len(step.space) + 0.45)
    explained = " (percent: importance)" if shares else ""
    axes.set_title(f"{step.name}: {_told(complete)}, best in red{explained}", loc="left")


def _told(trials: Sequence[Tried]) -> str:
    return f"{len(trials)} complete trial{'s' if len(trials) != 1 else ''}"


def _scale(values: Sequence[float]) -> Range:
    low, high = min(values), max(values)
    return Range(low, high) if low < high else Range(low - 0.01, high + 0.01)


def _axis(axes: Axes, place: int, dimension: Dimension) -> None:
    axes.plot([place, place], [0, 1], color="#888888", linewidth=0.8, zorder=1)
    for value in _marks(dimension):
        height = position(dimension, value)
        axes.plot([place, place + 0.04], [height, height], color="#888888", linewidth=0.8)
        axes.text(place + 0.07, height, figure(value), fontsize=7, va="center", color="#555555")


def _marks(dimension: Dimension) -> list[Any]:
    if isinstance(dimension, Choice):
        return list(dimension.values)
    low, high = dimension.low, dimension.high
    shares = [i / (_TICKS - 1) for i in range(_TICKS)]
    if dimension.log:
        found = [low * (high / low) ** share for share in shares]
    else:
        found = [low + (high - low) * share for share in shares]
    return sorted({round(x) for x in found}) if dimension.whole else found

"""Experiment: a published table or figure as data: what to run, what the paper printed and claims.

    panel    a data set, a variant: a plot of its own
    series   a line of the figure or a column of the table: a method, a level of averaging
    x        a point on the line: block size, share of public data; None in tables

A `Cell` is one setting (panel, series, x), run with every seed. A run gives figures, numbers with
a name; what is published and claimed refers to them by `Ref`. See `polyfed.experiments` for how to
write one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from polyfed import methods, tasks
from polyfed.core.method import Method
from polyfed.engines.run import Run, plain
from polyfed.errors import ConfigError
from polyfed.experiments.verdict import Relation, Statistic, printed
from polyfed.options import as_text, fields_of
from polyfed.tasks import Task

ACCURACY = "accuracy"
Rounds = int | float  # so many; a float is the share of those that an experiment asks for


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting: a method on a task; what is not set is the task's recipe for the method.

    Attributes:
        method: name of the method.
        task: name of the task.
        options: options of the method.
        task_options: options of the task.
        panel: data set or variant.
        series: line or column.
        x: point of the line, a number or a word.
        after: more figures, and what pictures need, from the trained nodes of a run.
    """

    method: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    task_options: Mapping[str, Any] = field(default_factory=dict)
    panel: str = ""
    series: str = ""
    x: float | str | None = None
    after: Callable[[Run], Mapping[str, Any]] | None = None

    @property
    def label(self) -> str:
        """What to call it."""
        return label(self.panel, self.series, self.x)

    def make(self, data: Path | None = None) -> tuple[Method, Task]:
        """The method and the task; `data` is for tasks that read files."""
        needs = tasks.load(self.task).needs_data and data is not None
        task = tasks.make(self.task, {**self.task_options, **({"data": data} if needs else {})})
        return methods.make(self.method, self.options, task), task


@dataclass(frozen=True)
class Ref:
    """A figure of the cells of a series; without x the mean over its points.

    Attributes:
        series: line or column.
        figure: name of the figure.
        panel: data set or variant.
        x: point of the line.
        less: another figure that is taken off it, for what is claimed of a gain.
        times: what it is multiplied by before that, for what is claimed of a share.
    """

    series: str = ""
    figure: str = ACCURACY
    panel: str = ""
    x: float | str | None = None
    less: Ref | None = None
    times: float = 1.0

    def fits(self, cell: Cell) -> bool:
        """Whether this is about that cell."""
        here = (cell.panel, cell.series) == (self.panel, self.series)
        return here and self.x in (None, cell.x)

    def parts(self) -> tuple[str, ...]:
        """Panel, series, point, figure, factor and what it is less; empty where there is none."""
        figure = "" if self.figure == ACCURACY else self.figure
        times = "" if self.times == 1 else f"times {self.times:g}"
        less = "" if self.less is None else f"less {_joined(self.less.parts()[1:])}"
        return self.panel, self.series, _at(self.x), figure, times, less

    def __str__(self) -> str:
        return _joined(self.parts()) or ACCURACY


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts)).replace(", at ", " at ")


def label(panel: str, series: str, x: float | str | None) -> str:
    """What to call a cell.

    >>> label("CIFAR-10", "FedLinked", None), label("", "level 80", 500.0)
    ('CIFAR-10, FedLinked', 'level 80 at 500')
    """
    return _joined([panel, series, _at(x)]) or "all"


def _at(x: float | str | None) -> str:
    return "" if x is None else f"at {number(x)}"


def number(x: float | str) -> str:
    """A point as a person reads it."""
    return x if isinstance(x, str) else f"{x:g}"


@dataclass(frozen=True)
class Claim:
    """What the paper says: left is above right (>), or as good as it within the margin (~).

    Attributes:
        left: one side.
        relation: above, or as good.
        right: the other side.
        margin: how far apart is still as good.
    """

    left: Ref
    relation: Relation
    right: Ref
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.left == self.right:
            raise ConfigError(f"claim: '{self.left}' stands on both sides.")
        if (self.margin > 0) != (self.relation == "~"):
            raise ConfigError(f"claim '{self}': a margin above 0 belongs to ~ and only to it.")

    def __str__(self) -> str:
        """What both sides have in common, then what they do not."""
        word = "above" if self.relation == ">" else f"within {self.margin:g} of"
        pairs = list(zip(self.left.parts(), self.right.parts(), strict=True))
        common = _joined(a for a, b in pairs if a == b)
        own = zip(*(pair for pair in pairs if pair[0] != pair[1]), strict=True)
        left, right = (_joined(side) or "all" for side in own)
        return f"{common}: {left} {word} {right}" if common else f"{left} {word} {right}"


@dataclass(frozen=True)
class Lines:
    """A line plot: x along, a line a series.

    Attributes:
        x: what the points are.
        y: what the figure is.
        figure: which figure; where no cell has an x, all of them, and their names are the points.
        scale: of the points; even for words and for numbers far apart.
    """

    x: str
    y: str = "mean test accuracy"
    figure: str = ACCURACY
    scale: Literal["linear", "log", "even"] = "linear"


@dataclass(frozen=True)
class Dots:
    """A dot plot: a row a figure, a dot a series, the paper's number beside it.

    Attributes:
        y: what the figures are.
        figures: which of them; none means all.
        scale: of their axis.
    """

    y: str = "test accuracy"
    figures: tuple[str, ...] = ()
    scale: Literal["linear", "log"] = "linear"


@dataclass(frozen=True)
class Picture:
    """A picture of its own kind: see `polyfed.experiments.pictures`.

    Attributes:
        draw: makes the figure from the cells of a summary, each with what was kept of it.
        keep: what it needs of a run; it is asked for the first seed's, and goes into the summary.
    """

    draw: Callable[[Sequence[Mapping[str, Any]]], Any]
    keep: Callable[[Run], Any]


@dataclass(frozen=True, kw_only=True)
class Quick:
    """How an experiment is made small enough for a laptop.

    Attributes:
        says: what it changes of the task, in words; options of methods are listed by themselves.
        seeds: how many.
        options: of every method that has them.
        task_options: of every task that has them.
        points: the points that are kept; none means all.
    """

    says: str
    seeds: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    task_options: Mapping[str, Any] = field(default_factory=lambda: {"quick": True})
    points: tuple[float | str, ...] = ()


def mean_accuracy(run: Run) -> dict[str, float]:
    """The figure of most experiments: mean over nodes of the final test accuracy."""
    return {ACCURACY: run.mean_accuracy}


def by_round(run: Run) -> dict[int, float]:
    """Mean accuracy after each round that was evaluated."""
    found: dict[int, list[float]] = {}
    for m in run.metrics:
        if "test_accuracy" in m and isinstance(m["tick"], int) and m["tick"] > 0:
            found.setdefault(m["tick"], []).append(m["test_accuracy"])
    return {tick: statistics.fmean(values) for tick, values in sorted(found.items())}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A published table or figure.

    Attributes:
        name: what a person types.
        title: what it shows, in a line.
        paper: where it is published.
        cells: what to run, in the paper's setting.
        quick: how to make it small.
        figures: the numbers of a run, by name.
        published: the paper's numbers, as printed.
        claims: the paper's orderings.
        seeds: how many runs of each cell; five is the least that can decide an ordering.
        statistic: mean and standard deviation, or median and 40th and 60th percentiles.
        plot: how to draw it.
        evaluate_every: rounds between evaluations; the last is always evaluated.
        instead: what data stand in for the paper's where those are not at hand, in a few words.
        notes: how the paper was read where it leaves something open, a sentence each.
        cannot: why we could not run it, if so; whoever has what it needs can.
    """

    name: str
    title: str
    paper: str
    cells: Sequence[Cell]
    quick: Quick
    figures: Callable[[Run], Mapping[str, float]] = mean_accuracy
    published: Mapping[Ref, str] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    seeds: int = 5
    statistic: Statistic = "mean"
    plot: Lines | Dots | Picture = field(default_factory=Dots)
    evaluate_every: int = 1
    instead: str = ""
    notes: Sequence[str] = ()
    cannot: str = ""

    def __post_init__(self) -> None:
        labels = [cell.label for cell in self.cells]
        twice = sorted({text for text in labels if labels.count(text) > 1})
        if twice or not labels:
            said = f"two cells are called '{twice[0]}'" if twice else "it has no cells"
            raise ConfigError(f"experiment {self.name}: {said}.")
        refs = [*self.published, *(r for c in self.claims for r in (c.left, c.right))]
        for ref in [*refs, *(ref.less for ref in refs if ref.less is not None)]:
            if not any(ref.fits(cell) for cell in self.cells):
                raise ConfigError(f"experiment {self.name}: no cell is called '{ref}'.")
        for text in self.published.values():
            printed(text)

    @property
    def needs(self) -> list[str]:
        """The tasks whose published files it reads."""
        return sorted({c.task for c in self.cells if tasks.load(c.task).needs_data})

    def scaled(
        self,
        *,
        quick: bool = False,
        rounds: Rounds | None = None,
        reading: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Cell]:
        """The cells to run: the paper's, or changed.

        Args:
            quick: the small ones.
            rounds: so many for every method, or a share of its own.
            reading: options of methods and tasks that have them, read in another way.
        """
        cells = list(self.cells)
        if quick:
            points = self.quick.points
            kept = [c for c in cells if not points or c.x is None or c.x in points]
            cells = [_with(c, self.quick.options, self.quick.task_options) for c in kept]
        changed = [_with(c, {**_rounds(c, rounds), **reading}, reading) for c in cells]
        for name, value in reading.items():
            if not any(name in c.options or name in c.task_options for c in changed):
                raise ConfigError(
                    f"{name}={value}: no method and no task of {self.name} has that option."
                )
        return changed

    def changes(self, cells: Sequence[Cell], *seeds: int, quick: bool = False) -> list[str]:
        """What differs from the paper's setting, in words; fewer seeds do, more do not.

        Args:
            cells: that were run.
            seeds: how many the cells have; several numbers, if not all have as many.
            quick: whether they are the small ones.
        """
        said = [self.quick.says] if quick else []
        if min(seeds) < self.seeds:
            said.append(f"seeds: {self.seeds} → {_range(seeds)}")
        if len(cells) < len(self.cells):
            said.append(f"cells: {len(self.cells)} → {len(cells)}")
        original = {cell.label: cell for cell in self.cells}
        return said + _differences([(original[cell.label], cell) for cell in cells])


def _rounds(cell: Cell, rounds: Rounds | None) -> dict[str, int]:
    """The option that gives a cell so many rounds, or that share of its own, at least one."""
    if isinstance(rounds, float):
        return {"rounds": max(1, round(rounds * cell.make()[0].rounds))}
    return {} if rounds is None else {"rounds": rounds}


def _with(cell: Cell, options: Mapping[str, Any], task_options: Mapping[str, Any]) -> Cell:
    """The cell with these options, of those that its method and its task have."""
    known, of_task = fields_of(methods.load(cell.method)), fields_of(tasks.load(cell.task))
    own = {name: value for name, value in options.items() if name in known}
    fewer = {name: value for name, value in task_options.items() if name in of_task}
    return replace(
        cell, options={**cell.options, **own}, task_options={**cell.task_options, **fewer}
    )


def _differences(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """A line for each method and task: the options that changed, with old and new values."""
    found: dict[str, dict[str, list[tuple[Any, Any]]]] = {}
    for before, after in pairs:
        (old, old_task), (new, new_task) = before.make(), after.make()
        named = {
            f"{old.name} on {old_task.name}": (plain(old), plain(new)),
            f"task {old_task.name}": (plain(old_task), plain(new_task)),
        }
        for name, (was, now) in named.items():
            for option, value in was.items():
                if option != "quick" and value != now[option]:
                    changed = found.setdefault(name, {}).setdefault(option, [])
                    changed.append((value, now[option]))
    return [
        f"{name}: " + ", ".join(f"{option} {_arrow(each)}" for option, each in changed.items())
        for name, changed in found.items()
    ]


def _arrow(pairs: Sequence[tuple[Any, Any]]) -> str:
    return " → ".join(_range(side) for side in zip(*pairs, strict=True))


def _range(values: Sequence[Any]) -> str:
    """One value, or the least and the most of several."""
    if all(value == values[0] for value in values):
        return _text(values[0])
    return f"{_text(min(values))} to {_text(max(values))}"


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else as_text(value)

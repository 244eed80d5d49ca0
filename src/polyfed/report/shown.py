"""What people call: `run`, `resume` and `compare`, whose results can be looked at.

The engines know nothing of reports. Their functions are wrapped here, once: a run or comparison
that has a folder gets its `report.html` when it ends, and what comes back can plot itself, write a
report, and show itself in a notebook.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from html import escape
from pathlib import Path
from typing import ParamSpec

from polyfed.engines import compare as comparing
from polyfed.engines import run as running
from polyfed.engines.table import Text
from polyfed.errors import PolyfedError
from polyfed.experiments.plot import is_available
from polyfed.record.files import write_text
from polyfed.report.collect import Source, about
from polyfed.report.page import html, write_report
from polyfed.report.plot import plot, svg

P = ParamSpec("P")
_BOX = '<div class="polyfed"><pre style="line-height:1.35">{}</pre>{}</div>'


class Run(running.Run):
    """A finished run that can be looked at."""

    def plot(self, what: str = "accuracy", path: str | Path = "accuracy.svg") -> Path:
        """Draw a figure by round, for a paper.

        Args:
            what: accuracy, loss, seconds, bytes, or any figure that the method noted.
            path: where; .svg or .png.
        """
        return plot({self.method: [self]}, what, path)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report; where it is.

        Args:
            path: where; None is `report.html` in the run's folder, or here if it has none.
        """
        return _report({self.method: [self]}, self.folder, path)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return _notebook(self.table(), {self.method: [self]})


class Comparison(comparing.Comparison):
    """A finished comparison that can be looked at."""

    def plot(self, what: str = "accuracy", path: str | Path = "accuracy.svg") -> Path:
        """Draw a figure by round, a line a method.

        Args:
            what: accuracy, loss, seconds, bytes, or any figure that all methods noted.
            path: where; .svg or .png.
        """
        return plot(self.runs, what, path)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report; where it is.

        Args:
            path: where; None is `report.html` in the comparison's folder, or here if it has none.
        """
        return _report(self.runs, self.folder, path)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return _notebook(self.table(), self.runs)


def _report(
    runs: Mapping[str, Sequence[running.Run]], folder: Path | None, path: str | Path | None
) -> Path:
    if folder is not None:
        return write_report([folder], path)
    where = Path(path or "report.html")
    write_text(where, html(about([Source(run, name) for name in runs for run in runs[name]])))
    return where


def _notebook(table: Text, runs: Mapping[str, Sequence[running.Run]]) -> str:
    """The table, and where matplotlib is installed and anything was evaluated, the curves."""
    has_curves = is_available() and all(run.accuracy for name in runs for run in runs[name])
    return _BOX.format(escape(table), svg(runs, "accuracy") if has_curves else "")


# ---- the engines' functions, and a report at their end -------------------------------------------


def _shown(run: running.Run) -> Run:
    return Run(**{field.name: getattr(run, field.name) for field in fields(run)})


def _reported(folder: Path | None) -> None:
    """A report that cannot be written is told, and is no reason to lose what was trained."""
    if folder is not None:
        try:
            write_report([folder])
        except PolyfedError as error:
            warnings.warn(f"no report: {error}", stacklevel=3)


def _one(function: Callable[P, running.Run]) -> Callable[P, Run]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Run:
        done = _shown(function(*args, **kwargs))
        _reported(done.folder)
        return done

    return wrapped


def _several(function: Callable[P, comparing.Comparison]) -> Callable[P, Comparison]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Comparison:
        done = function(*args, **kwargs)
        runs = {label: [_shown(run) for run in each] for label, each in done.runs.items()}
        _reported(done.folder)
        return Comparison(runs, done.seeds, done.folder)

    return wrapped


run = _one(running.run)
resume = _one(running.resume)
compare = _several(comparing.compare)

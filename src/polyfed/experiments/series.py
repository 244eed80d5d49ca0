"""`reproduce_all`: experiment after experiment; what is absent is skipped, what fails is noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyfed.engines.table import Text, render
from polyfed.errors import DataError, PolyfedError
from polyfed.experiments.experiment import Experiment
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.results import Results, folder_of

State = Literal["done", "finished before", "skipped", "failed"]


@dataclass(frozen=True)
class Attempt:
    """What came of an experiment in a series.

    Attributes:
        experiment: its name.
        state: done, finished before, skipped or failed.
        seconds: how long it took, by the clock.
        verdicts: how many of each kind.
        why: why it was skipped, how it failed, or which files it was done without.
    """

    experiment: str
    state: State
    seconds: float = 0.0
    verdicts: str = ""
    why: str = ""

    def __str__(self) -> str:
        """One line.

        >>> print(Attempt("tiny", "skipped", why="no files"))
        tiny: skipped (no files)
        """
        done = f"{self.seconds:.0f} s; {self.verdicts}" if self.verdicts else ""
        return f"{self.experiment}: {self.state} ({'; '.join(filter(None, (done, self.why)))})"


def reproduce_all(
    experiments: Iterable[Experiment],
    *,
    data: Path | None = None,
    out: Path = Path("results"),
    quick: bool = False,
    resume: bool = False,
    shown: Callable[[Attempt], None] = lambda attempt: None,
    **settings: Any,
) -> list[Attempt]:
    """Reproduce every experiment with the data that are there, whatever comes of the others.

    Of an experiment some of whose data are there, those cells are run, and its page says so.

    Args:
        experiments: which, one after the other.
        data: folder with the published files.
        out: where to write.
        quick: the small versions.
        resume: leave out those whose summary is there already, and whole.
        shown: hears of each when it is over.
        settings: what `reproduce` takes besides: seeds, rounds, device, progress.
    """
    attempts = []
    for experiment in experiments:
        begun = time.monotonic()
        try:
            made = _attempt(experiment, data, out, quick, resume, settings)
        except Exception as error:  # noqa: BLE001 - one that fails must not take the others with it
            kind = "" if isinstance(error, PolyfedError) else f"{type(error).__name__}: "
            made = Attempt(experiment.name, "failed", why=kind + _line(error))
        seconds = 0.0 if made.state == "skipped" else time.monotonic() - begun
        attempts.append(Attempt(made.experiment, made.state, seconds, made.verdicts, made.why))
        shown(attempts[-1])
    return attempts


def _attempt(
    experiment: Experiment,
    data: Path | None,
    out: Path,
    quick: bool,
    resume: bool,
    settings: dict[str, Any],
) -> Attempt:
    summary = folder_of(experiment, out, quick) / "summary.json"
    if resume and summary.exists():
        known = Results.read(summary)
        if not known.summary.get("left_out"):
            return Attempt(experiment.name, "finished before", verdicts=known.tally())
    missing = absent(experiment, data, quick)
    why = "; ".join(f"{task}: {said}" for task, said in missing.items())
    if missing and all(cell.task in missing for cell in experiment.cells):
        return Attempt(experiment.name, "skipped", why=why)
    results = reproduce(
        experiment, data=data, out=out, quick=quick, left_out=list(missing), **settings
    )
    return Attempt(experiment.name, "done", verdicts=results.tally(), why=why)


def absent(experiment: Experiment, data: Path | None, quick: bool = False) -> dict[str, str]:
    """The tasks of an experiment that do not find their files, and what they say of them."""
    cells = {cell.task: cell for cell in experiment.scaled(quick=quick)}
    found = {}
    for name in experiment.needs:
        try:
            cells[name].make(data)[1].nodes(0)
        except DataError as error:
            found[name] = _line(error)
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def table(attempts: Sequence[Attempt]) -> Text:
    """All of them to read, and a line that counts them."""
    rows = [
        [each.experiment, each.state, f"{each.seconds:.0f}" if each.seconds else "", each.verdicts]
        for each in attempts
    ]
    text = render("Experiments", ["experiment", "state", "seconds", "verdicts"], rows)
    states = [each.state for each in attempts]
    counted = ", ".join(f"{state} {states.count(state)}" for state in dict.fromkeys(states))
    whys = [f"{each.experiment}: {each.why}" for each in attempts if each.why]
    said = "\n".join(["", *whys]) if whys else ""
    return Text(f"{text}\n{counted}; {sum(each.seconds for each in attempts):.0f} s{said}")

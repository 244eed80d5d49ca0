"""`reproduce`: run an experiment, judge it, write it down.

OUT/runs/                          the run folders, shared by experiments (see `runner`)
OUT/NAME/summary.json              the figures of every cell and seed, and how they came about
OUT/NAME/page.md, plot.svg, .png   made from the summary; --quick has NAME-quick, and another
                                   reading NAME-OPTION=VALUE
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.core.model import Precision
from polyfed.engines.run import Run, plain
from polyfed.errors import ConfigError, RunError
from polyfed.experiments import plot
from polyfed.experiments.experiment import Cell, Experiment, Picture, Rounds
from polyfed.experiments.join import COMPUTES, earlier, joined, label_of, lent
from polyfed.experiments.page import page
from polyfed.experiments.results import FORMAT, Results, folder_of, seeds_of
from polyfed.experiments.runner import (
    ORIGIN,
    Batch,
    do_batches,
    options_of,
    run_cells,
    shortfall,
)
from polyfed.record.files import write_text


def reproduce(
    experiment: Experiment,
    *,
    data: Path | None = None,
    out: Path = Path("results"),
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    rounds: Rounds | None = None,
    reading: Mapping[str, Any] = MappingProxyType({}),
    only: Sequence[str] = (),
    left_out: Sequence[str] = (),
    join: bool = False,
    device: str = "cpu",
    precision: Precision = "float32",
    jobs: int = 1,
    progress: bool | None = None,
) -> Results:
    """Run an experiment, judge it, and write its summary, page and plot.

    Args:
        experiment: which.
        data: folder with the published files.
        out: where to write.
        quick: the small version, which says what it scaled.
        seeds: which; None takes as many as the experiment asks for.
        rounds: so many for every method, or below 1 the share of the paper's.
        reading: options of methods and tasks, where the paper can be read in another way.
        only: cells with these names, or whose names begin so; none means all.
        left_out: tasks whose files are absent: their cells are not run, and the summary says so.
        join: keep the cells and seeds of the summary that is there, whose runs may be gone, and
            take cells that are missing from summaries beside it that have them.
        device: cpu, cuda, cuda:0, ...
        precision: what networks compute in; bfloat16 is for GPUs.
        jobs: in how many processes.
        progress: True, False, None for terminals only.
    """
    folder = folder_of(experiment, out, quick, reading)
    wished, chosen = plan(experiment, quick, seeds, rounds, reading, only)
    cells = [cell for cell in wished if cell.task not in left_out]
    every = plan(experiment, quick, seeds, rounds, reading)[0]
    before = earlier(folder, every, precision) if join else None
    runs = run_cells(
        cells,
        chosen,
        out / "runs",
        data=data,
        device=device,
        precision=precision,
        evaluate_every=experiment.evaluate_every,
        jobs=jobs,
        progress=progress,
    )
    each_run = [r for each in runs for r in each]
    summary: dict[str, Any] = {
        "format": FORMAT,
        "experiment": experiment.name,
        "command": _command(experiment.name, cells, chosen, quick, rounds, reading, only, device)
        + (f" --precision {precision}" if precision != "float32" else "")
        + " --join" * join,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": "unknown",
        "device": device,
        **_together(each_run, ORIGIN),
        "environment": _together(each_run, "environment.json"),
        "quick": quick,
        "changed": [],
        **({"left_out": list(left_out)} if left_out else {}),
        "seeds": chosen,
        "cells": [_entry(experiment, c, each) for c, each in zip(cells, runs, strict=True)],
    }
    if before is not None:
        summary = joined(before, summary)
    if join:
        have = {label_of(entry) for entry in summary["cells"]}
        missing = [cell for cell in every if cell.label not in have]
        for other in lent(experiment, folder, missing, summary, precision):
            summary = joined(other, summary)
    there = {label_of(entry): entry for entry in summary["cells"]}
    present = [cell for cell in every if cell.label in there]
    summary["cells"] = [there[cell.label] for cell in present]
    parts = [f"task {e['task']}: {e['shortfall']}" for e in summary["cells"] if "shortfall" in e]
    counts = [len(seeds_of(summary, entry)) for entry in summary["cells"]]
    summary["changed"] = [
        *([f"data: {experiment.instead}"] if experiment.instead else []),
        *dict.fromkeys(parts),
        *experiment.changes(present, *counts, quick=quick),
        *([] if precision == "float32" else [f"{COMPUTES}{precision}"]),
        *(f"not run, for want of files: {_rows(every, t)}" for t in summary.get("left_out", ())),
    ]
    return write(Results(experiment, summary), folder)


def plan(
    experiment: Experiment,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    rounds: Rounds | None = None,
    reading: Mapping[str, Any] = MappingProxyType({}),
    only: Sequence[str] = (),
) -> tuple[list[Cell], list[int]]:
    """The cells that `reproduce` with these arguments would run, and the seeds."""
    fits = rounds is None or (0 < rounds <= 1 if isinstance(rounds, float) else rounds >= 1)
    if not fits:
        raise ConfigError(f"rounds must be >= 1, or a share of the paper's, got {rounds}.")
    wanted = experiment.quick.seeds if quick else experiment.seeds
    chosen = list(range(wanted)) if seeds is None else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError("seeds: name at least one, and none twice.")
    return _chosen(experiment.scaled(quick=quick, rounds=rounds, reading=reading), only), chosen


def run_together(
    experiments: Sequence[Experiment],
    *,
    out: Path = Path("results"),
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    rounds: Rounds | None = None,
    reading: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> None:
    """Make the runs of several experiments as one piece of work; `reproduce` then only reads them.

    It takes what `reproduce` takes; `settings` are those of `do_batches`.
    """
    asked = (quick, seeds, rounds, reading)
    batches = [Batch(*plan(each, *asked), each.evaluate_every) for each in experiments]
    do_batches(batches, out / "runs", **settings)


def _chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells with these names; of a text that is no cell's name, those that begin so."""
    labels = dict.fromkeys(cell.label for cell in cells)
    wanted = set[str]()
    for text in only:
        begins = re.compile(re.escape(text) + r"(?![\w.-])")  # CIFAR-10 does not begin CIFAR-100
        found = {text} & labels.keys() or set(filter(begins.match, labels))
        if not found:
            names = "; ".join(labels)  # they have commas in them
            raise ConfigError(f"only {text!r}: no cell's name begins so. There are: {names}.")
        wanted |= found
    return [cell for cell in cells if not only or cell.label in wanted]


def _rows(cells: Sequence[Cell], task: str) -> str:
    """The task's rows, by their panels where they have some."""
    names = dict.fromkeys(cell.panel or cell.label for cell in cells if cell.task == task)
    return f"{task} ({'; '.join(names)})"


def write(results: Results, folder: Path) -> Results:
    """Write the summary, the page and, where matplotlib is installed, the plots."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"could not make {folder}: {error.strerror or error}.") from error
    text = json.dumps(results.summary, indent=1, ensure_ascii=False)
    write_text(folder / "summary.json", text + "\n")
    write_text(folder / "page.md", page(results))
    if plot.is_available():
        plot.draw(results, folder / "plot.svg", folder / "plot.png")
    return results


def _entry(experiment: Experiment, cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    method, task = cell.make()
    by_seed = [experiment.figures(r) for r in runs]
    spec = experiment.plot
    kept = {"kept": spec.keep(runs[0])} if isinstance(spec, Picture) else {}
    short = " and ".join(dict.fromkeys(filter(None, map(shortfall, runs))))
    faults = [dict(Counter(fault["fault"] for fault in r.faults)) for r in runs]
    return {
        "panel": cell.panel,
        "series": cell.series,
        "x": cell.x,
        "method": method.name,
        "options": plain(method),
        "task": task.name,
        "task_options": options_of(task),
        "figures": {name: [f[name] for f in by_seed] for name in by_seed[0]},
        "seconds": [round(r.seconds, 2) for r in runs],
        "bytes_sent_per_node": [
            statistics.fmean([r.ledger.bytes_sent(n) for n in r.accuracy] or [0]) for r in runs
        ],
        **({"shortfall": short} if short else {}),
        **({"faults": faults} if any(faults) else {}),
        **kept,
    }


def _command(
    name: str,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    quick: bool,
    rounds: Rounds | None,
    reading: Mapping[str, Any],
    only: Sequence[str],
    device: str,
) -> str:
    needs_data = any(cell.make()[1].needs_data for cell in cells)
    which = ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
    counted = seeds == list(range(len(seeds)))
    parts = [
        f"polyfed reproduce {name}",
        "--data DIR" * needs_data,
        "--quick" * quick,
        f"--seeds {len(seeds) if counted else which}",
        f"--rounds {rounds if isinstance(rounds, int) else f'{100 * rounds:g}%'}" if rounds else "",
        *(f"--with {shlex.quote(f'{name}={value}')}" for name, value in reading.items()),
        *(f"--only {shlex.quote(text)}" for text in only),
        f"--device {device}",
    ]
    return " ".join(filter(None, parts))


def _together(runs: Sequence[Run], name: str) -> dict[str, str]:
    """A small JSON file of the runs; where they differ, all that it says."""
    found: dict[str, dict[str, None]] = {}
    for each in runs:
        path = (each.folder or Path()) / name
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for key, value in said.items():
            found.setdefault(key, {})[value] = None
    return {key: " and ".join(values) for key, values in found.items()}

"""Pieces of one experiment as one summary: other cells, or other seeds, of another day or machine.

What is joined was run with the same settings: a piece with others is refused before anything runs.
Cells may have different seeds; one that has not all of the summary's names its own.
A cell that nobody ran for this experiment may have been run for another, in the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.engines.run import plain
from polyfed.errors import ConfigError, PolyfedError
from polyfed.experiments.experiment import Cell, Experiment, label
from polyfed.experiments.results import Results, seeds_of
from polyfed.experiments.runner import options_of

Summary = Mapping[str, Any]
Entry = Mapping[str, Any]  # a cell in a summary
COMPUTES = "networks compute in "  # how `changed` tells a precision
_BY_SEED = ("seconds", "bytes_sent_per_node")
_TOLD = {"command": "; ", "date": " and ", "commit": " and ", "device": " and "}


def earlier(folder: Path, every: Sequence[Cell], precision: str) -> Summary | None:
    """The summary in a folder, if there is one, to which a piece can be joined.

    Args:
        folder: of an experiment.
        every: all cells that the experiment has, as they would be run now.
        precision: what networks would compute in now.

    Raises:
        ConfigError: it has other settings.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary = Results.read(path).summary
    planned = {cell.label: cell for cell in every}
    for entry in summary["cells"]:
        cell = planned.get(label_of(entry))
        said = "is no part of this one" if cell is None else _other(entry, cell)
        if said:
            raise ConfigError(f"{path} cannot be joined: its cell '{label_of(entry)}' {said}.")
    was = _precision(summary)
    if was != precision:
        raise ConfigError(f"{path} cannot be joined: it is of {was}, not {precision}.")
    return summary


def joined(old: Summary, new: Summary) -> dict[str, Any]:
    """Both as one, as `earlier` allows; where both have a cell with a seed, the new one stands."""
    found: dict[str, dict[int, Entry]] = {}
    for summary in (old, new):
        for entry in summary["cells"]:
            found.setdefault(label_of(entry), {}).update(_apart(summary, entry))
    seeds = sorted({seed for each in found.values() for seed in each})
    cells = [
        _of_seeds([each[seed] for seed in sorted(each)])
        | ({} if sorted(each) == seeds else {"seeds": sorted(each)})
        for each in found.values()
    ]
    ran = {cell["task"] for cell in cells}
    absent = [*old.get("left_out", ()), *new.get("left_out", ())]
    left_out = [task for task in dict.fromkeys(absent) if task not in ran]
    return {
        **{name: value for name, value in new.items() if name != "left_out"},
        **{name: _both(old[name], new[name], between) for name, between in _TOLD.items()},
        "environment": {
            name: _both(old["environment"].get(name, "unknown"), value)
            for name, value in new["environment"].items()
        },
        **({"left_out": left_out} if left_out else {}),
        "seeds": seeds,
        "cells": cells,
    }


def lent(
    experiment: Experiment, folder: Path, missing: Sequence[Cell], summary: Summary, precision: str
) -> Iterator[Summary]:
    """What other experiments' summaries, beside this one's, have of missing cells.

    Their figures must be computed alike: figures of the same name may mean something else.

    Args:
        experiment: which has the cells.
        folder: where its summary is.
        missing: its cells that were not run, as they would be run now.
        summary: of those that were, whose seeds are wanted.
        precision: what networks compute in.
    """
    for path in sorted(folder.parent.glob("*/summary.json")) if missing else ():
        try:
            results = Results.read(path)
        except PolyfedError:  # of an experiment that is not known here
            continue
        lender, other = results.experiment, results.summary
        if path.parent == folder or other["quick"] or _precision(other) != precision:
            continue
        alike = lender.figures is experiment.figures
        if not alike or lender.evaluate_every != experiment.evaluate_every:
            continue
        wanted = summary["seeds"]
        whole = [e for e in other["cells"] if set(wanted) <= set(seeds_of(other, e))]
        for cell in list(missing):
            entry = next((e for e in whole if _serves(e, cell)), None)
            if entry is None:
                continue
            missing = [each for each in missing if each is not cell]
            apart = _apart(other, entry)
            own = _of_seeds([apart[seed] for seed in wanted])
            own |= {"panel": cell.panel, "series": cell.series, "x": cell.x}
            own.pop("kept", None)
            yield {**other, "seeds": wanted, "cells": [own]}


def _serves(entry: Entry, cell: Cell) -> bool:
    """Whether what was run for an entry is what would be run for a cell."""
    named = (entry["method"], entry["task"]) == (cell.method, cell.task)  # others are not made
    return named and not _other(entry, cell)


def label_of(entry: Entry) -> str:
    """What the cell of an entry is called."""
    return label(entry["panel"], entry["series"], entry["x"])


def _other(entry: Entry, cell: Cell) -> str:
    """What of a cell that was run is not as it would be run now, in words; empty if all is.

    An option that there was not then does not count.
    """
    method, task = cell.make()
    if (entry["method"], entry["task"]) != (method.name, task.name):
        return "is of another method or task"
    pairs = (entry["options"], plain(method)), (entry["task_options"], options_of(task))
    said = [
        f"{name} {was[name]!r}, not {now!r}"
        for was, current in pairs
        for name, now in current.items()
        if name in was and was[name] != now
    ]
    return f"has {', '.join(said)}" if said else ""


def _precision(summary: Summary) -> str:
    said = [text.removeprefix(COMPUTES) for text in summary["changed"] if text.startswith(COMPUTES)]
    return said[0] if said else "float32"


def _apart(summary: Summary, entry: Entry) -> dict[int, Entry]:
    """A cell with each of its seeds alone."""
    return {seed: _of_seed(entry, i) for i, seed in enumerate(seeds_of(summary, entry))}


def _of_seed(entry: Entry, i: int) -> Entry:
    """A cell with its i-th seed alone; what is kept for a picture is of the first."""
    own: dict[str, Any] = {n: value for n, value in entry.items() if n not in ("kept", "seeds")}
    own["figures"] = {name: values[i] for name, values in entry["figures"].items()}
    own |= {name: entry[name][i] for name in (*_BY_SEED, "faults") if name in entry}
    return own | {"kept": entry["kept"]} if "kept" in entry and i == 0 else own


def _of_seeds(entries: Sequence[Entry]) -> dict[str, Any]:
    """The same cell with several seeds."""
    found = {**entries[0]}
    names = [n for n in found["figures"] if all(n in e["figures"] for e in entries)]
    found["figures"] = {name: [e["figures"][name] for e in entries] for name in names}
    found |= {name: [e[name] for e in entries] for name in _BY_SEED}
    if any("faults" in e for e in entries):
        found["faults"] = [e.get("faults", {}) for e in entries]
    short = dict.fromkeys(e["shortfall"] for e in entries if "shortfall" in e)
    found |= {"shortfall": " and ".join(short)} if short else {}
    kept = [e["kept"] for e in entries if "kept" in e]
    return found | {"kept": kept[0]} if kept else found


def _both(old: str, new: str, between: str = " and ") -> str:
    """What both say, each once."""
    return between.join(dict.fromkeys([*old.split(between), *new.split(between)]))

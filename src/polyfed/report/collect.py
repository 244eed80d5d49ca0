"""From run folders to everything that a page shows, as one JSON value.

The same folders give the same value, on any day: nothing of the machine that writes the page and no
time of writing is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed import __version__, methods
from polyfed.core.node import Node
from polyfed.engines.compare import folders_of
from polyfed.engines.run import Run
from polyfed.engines.table import quick_line, rounds_done
from polyfed.errors import PolyfedError, RunError
from polyfed.options import as_text
from polyfed.record.ledger import Crossing
from polyfed.record.recorder import environment, read_config, read_result
from polyfed.report import headline, measured, pictures
from polyfed.report.again import Again, command, make_again
from polyfed.report.maps import maps
from polyfed.report.replay import ENTRIES, UNTOLD, explains, replay
from polyfed.report.traffic import MESSAGES, bytes_by_round, totals, traffic

MOST_RUNS = 60  # in a page
FAULTS = 500  # of a run in a page


@dataclass(frozen=True)
class Source:
    """A run to show, and what it is called."""

    run: Run
    label: str

    @property
    def config(self) -> Mapping[str, Any]:
        """Enough to run it again."""
        return self.run.config

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.config["settings"]["seed"])


def collect(folders: Sequence[Path], *, with_maps: bool = False) -> dict[str, Any]:
    """Everything that a page about these runs and comparisons shows.

    Args:
        folders: of runs and of comparisons, finished or not.
        with_maps: also maps of representations, which take seconds each.
    """
    sources = [source for folder in folders for source in _sources(folder)]
    if not sources:
        raise RunError(f"{folders[0]}: none of its runs has begun. Look again in a moment.")
    lines = [command(read_config(folder)) for folder in folders]
    return about(sources, [line for line in lines if line], with_maps=with_maps)


def about(
    sources: Sequence[Source], commands: Sequence[str] = (), *, with_maps: bool = False
) -> dict[str, Any]:
    """Everything that a page about these runs shows.

    Args:
        sources: the runs.
        commands: the lines that repeat all of them.
        with_maps: also maps of representations, of the first seed of every label.
    """
    sources, again = _once(_told_apart(sources))
    found, sources = len(sources), sources[:MOST_RUNS]
    groups: dict[str, dict[int, Run]] = {}
    on_task: dict[str, dict[str, dict[int, Run]]] = {}  # only runs of one task can be compared
    for source in sources:
        groups.setdefault(source.label, {})[source.seed] = source.run
        task = json.dumps([source.config[k] for k in ("task", "task_options")], sort_keys=True)
        on_task.setdefault(task, {})[source.label] = groups[source.label]
    verdicts = [verdict for alike in on_task.values() for verdict in headline.verdicts(alike)]
    federations, share = _Federations(), 1 / len(sources)
    firsts = {label: next(iter(runs)) for label, runs in groups.items()} if with_maps else {}
    return {
        "version": __version__,
        "title": _title(sources),
        "notes": [
            *filter(None, [quick_line([source.config for source in sources])]),
            *again,
            *([f"The first {MOST_RUNS} of {found} runs are shown."] if found > MOST_RUNS else []),
        ],
        "headline": {"rows": headline.rows(groups), "verdicts": verdicts},
        "runs": [_run(s, federations, share, firsts.get(s.label) == s.seed) for s in sources],
        "tasks": federations.shown,
        "commands": list(commands),
    }


# ---- which runs ----------------------------------------------------------------------------------


def _sources(folder: Path) -> Iterator[Source]:
    config = read_config(folder)
    if "methods" not in config:
        yield Source(Run.open(folder), config["method"])
        return
    for label in config["methods"]:
        for path in folders_of(folder, label, config["seeds"]):
            if (path / "config.yaml").exists():
                yield Source(Run.open(path), label)


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Runs that share a label have one configuration but for the seed; else their labels say it."""
    tasks: dict[str, set[str]] = {}
    for source in sources:
        tasks.setdefault(source.label, set()).add(_task(source.config))
    named = [
        Source(s.run, f"{s.label} on {_task(s.config)}" if len(tasks[s.label]) > 1 else s.label)
        for s in sources
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for source in named:
        kinds.setdefault(source.label, []).append(_kind(source.config))
    return [Source(s.run, _own_label(s, kinds[s.label])) for s in named]


def _once(sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
    """Runs of one label and seed are the same run: the first of them, and a note on the others."""
    kept: dict[tuple[str, int], Source] = {}
    notes = []
    for source in sources:
        first = kept.setdefault((source.label, source.seed), source)
        if first is not source:
            one, other = first.run.folder, source.run.folder
            notes.append(f"{other} is not counted: {one} has its settings and its seed.")
    return list(kept.values()), notes


def _own_label(source: Source, alike: Sequence[Mapping[str, Any]]) -> str:
    kind = _kind(source.config)
    differing = [n for n in kind if any(other.get(n) != kind[n] for other in alike)]
    own = ", ".join(f"{n} {as_text(kind[n])}" for n in differing)
    return f"{source.label} ({own})" if own else source.label


def _task(config: Mapping[str, Any]) -> str:
    return str(config["task"] or "own nodes")


def _kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes runs on one task differ besides their seed."""
    settings = {n: config["settings"].get(n) for n in ("fail", "absent", "precision")}
    options = {**config["task_options"], **config["options"]}
    return {"topology": config["topology"], **options, **settings}


def _title(sources: Sequence[Source]) -> dict[str, Any]:
    labels = list(dict.fromkeys(source.label for source in sources))
    names = list(dict.fromkeys(_task(source.config) for source in sources))
    several = f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else labels[0]
    what = several if len(labels) <= 4 else f"{len(labels)} methods"
    seeds = list(dict.fromkeys(source.seed for source in sources))
    return {"what": what, "task": ", ".join(names), "seeds": seeds, "labels": labels}


# ---- one run -------------------------------------------------------------------------------------


class _Federations:
    """Every federation is made again once, and shown once for all seeds and methods."""

    def __init__(self) -> None:
        self._nodes: dict[str, Sequence[Node]] = {}
        self._made: dict[str, Again | str] = {}
        self._shown: dict[str, int] = {}
        self.shown: list[dict[str, Any]] = []

    def of(self, run: Run) -> Again | str:
        """The federation of a run, or of another seed: names, slices and topics are the same."""
        key = json.dumps({**run.config, "settings": None}, sort_keys=True)
        if key not in self._made or run.config["task"] is None:
            self._made = {key: make_again(run, self._nodes)}
        return self._made[key]

    def picture(self, config: Mapping[str, Any], made: Again | str) -> int:
        """The number of the picture of who holds what."""
        key = json.dumps([config["task"], config["task_options"]], sort_keys=True)
        if key not in self._shown:
            self._shown[key] = len(self.shown)
            found = {"svg": "", "said": made} if isinstance(made, str) else pictures.holdings(made)
            name, seed = _task(config), config["settings"]["seed"]
            self.shown.append({"name": name, "seed": seed, **found})
        return self._shown[key]


def _run(source: Source, federations: _Federations, share: float, mapped: bool) -> dict[str, Any]:
    """Everything about one run, which may take this share of a page."""
    run, config = source.run, source.config
    made, crossings = federations.of(run), run.ledger.crossings()
    return {
        "label": source.label,
        "seed": source.seed,
        "method": run.method,
        "about": methods.load(run.method).title if run.method in methods.METHODS else "",
        "task": federations.picture(config, made),
        "folder": str(run.folder or "in memory"),
        "finished": run.folder is None or read_result(run.folder) is not None,
        "planned": config["options"].get("rounds"),
        "rounds": rounds_done(run),
        "topology": config["topology"],
        **_measured(run, share),
        **_crossed(run, crossings, share),
        "faults": [dict(fault) for fault in run.faults[:FAULTS]],
        "all_faults": len(run.faults),
        "work": _work(run, made, crossings, share),
        "network": "" if isinstance(made, str) else pictures.network(made),
        "maps": maps(made, run) if mapped else None,
        "settings": _settings(config),
        "environment": _environment(run.folder),
        "command": command(config),
    }


def _measured(run: Run, share: float) -> dict[str, Any]:
    figures = measured.series(run.metrics)
    kept = measured.kept_rounds(figures, int(share * measured.FIGURES))
    return {
        "accuracy": {n: measured.short(v) for n, v in run.accuracy.items()},
        "ticks": measured.ticks_of(run.metrics),
        "kept": kept,
        "series": measured.only(figures, kept),
        "final": measured.final(run.metrics),
        "matrices": measured.matrices(run.metrics, int(share * measured.NUMBERS)),
        "seconds": measured.by_round(run.metrics),
    }


def _crossed(run: Run, crossings: Sequence[Crossing], share: float) -> dict[str, Any]:
    sent, received = totals(crossings)
    nodes = list(run.accuracy) or sorted({m["node"] for m in run.metrics if "node" in m})
    return {
        "nodes": nodes,
        "bytes": bytes_by_round(crossings, measured.ticks_of(run.metrics)),
        "sent": {n: sent[n] for n in nodes},
        "received": {n: received[n] for n in nodes},
        "ledger": traffic(crossings, int(share * MESSAGES)),
    }


def _work(
    run: Run, made: Again | str, crossings: Sequence[Crossing], share: float
) -> dict[str, Any]:
    """Who worked when, or why that cannot be told."""
    parties = () if isinstance(made, str) else made.parties
    names = sorted([node.name for node in parties] or run.accuracy)
    try:
        work = replay(run.config, parties, names, rounds_done(run), int(share * ENTRIES))
        return work if explains(work, crossings) else {"said": UNTOLD}
    except PolyfedError as error:
        return {"said": f"Who worked when cannot be told: {error}"}


def _settings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    run = {"topology": config["topology"], **config["settings"]}
    groups = (
        (f"method {config['method']}", config["options"]),
        (f"task {config['task'] or 'own nodes'}", config["task_options"]),
        ("run", run),
    )
    return [
        {"name": name, "values": [[n, as_text(v) or "–"] for n, v in values.items() if v != {}]}
        for name, values in groups
    ]


def _environment(folder: Path | None) -> list[list[str]]:
    if folder is None:
        return [list(pair) for pair in environment().items()]
    path = folder / "environment.json"
    try:
        return [[k, str(v)] for k, v in json.loads(path.read_text(encoding="utf-8")).items()]
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error

"""`compare`: several methods on one task, over several seeds, in one table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyfed import methods, tasks, topologies
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.topology import Topology
from polyfed.engines.gate import check_is_method, federation, plain_seed
from polyfed.engines.local import LocalEngine, Settings
from polyfed.engines.progress import shares
from polyfed.engines.run import Run, begin, check_run, finish_together, plain, simple
from polyfed.engines.table import Text, quick_line, render, size, spread
from polyfed.errors import ConfigError, RunError, UnknownNameError
from polyfed.options import fields_of
from polyfed.record.checkpoint import Checkpoint
from polyfed.record.files import write_text
from polyfed.record.recorder import FORMAT, read_config, read_result
from polyfed.tasks import Task


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over the same seeds: `runs[label][i]` has seed `seeds[i]`."""

    runs: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]
    folder: Path | None = None

    def table(self, width: int | None = None) -> Text:
        """A row a method: accuracy of every node and their mean, over seeds; bytes; time.

        Args:
            width: leave the nodes out where the table would be wider than this.
        """
        nodes = list(next(iter(self.runs.values()))[0].accuracy)
        whole = self._table(nodes if len(nodes) <= 5 else [])
        is_wide = width is not None and max(map(len, whole.splitlines())) > width
        return self._table([]) if is_wide else whole

    def _table(self, shown: Sequence[Name]) -> Text:
        columns = ["method", *shown, "mean accuracy", "sent per node", "seconds"]
        rows = [
            [
                label,
                *(spread([r.accuracy[n] for r in runs]) for n in shown),
                spread([r.mean_accuracy for r in runs]),
                size(_sent_per_node(runs)),
                f"{statistics.fmean(r.seconds for r in runs):.1f}",
            ]
            for label, runs in self.runs.items()
        ]
        low, high = min(map(len, self.runs.values())), max(map(len, self.runs.values()))
        what = "mean ± standard deviation over" if high > 1 else "from"
        count = f"{high}" if low == high else f"{low} to {high}"
        title = f"Test accuracy, {what} {count} seed{'s' if high > 1 else ''}"
        every = [run.config for runs in self.runs.values() for run in runs]
        return render(title, columns, rows, note=quick_line(every))

    def as_dict(self) -> dict[str, Any]:
        """Everything the table says, and each seed's figures, for machines."""
        return {
            "seeds": list(self.seeds),
            "folder": None if self.folder is None else str(self.folder),
            "methods": {label: self._entry(runs) for label, runs in self.runs.items()},
        }

    def _entry(self, runs: Sequence[Run]) -> dict[str, Any]:
        means = [r.mean_accuracy for r in runs]
        return {
            "mean_accuracy": statistics.fmean(means),
            "standard_deviation": statistics.stdev(means) if len(means) > 1 else None,
            "mean_accuracy_by_seed": means,
            "accuracy_by_node": {n: [r.accuracy[n] for r in runs] for n in runs[0].accuracy},
            "bytes_sent_per_node": _sent_per_node(runs),
            "faults": sum(len(r.faults) for r in runs),
            "seconds": [r.seconds for r in runs],
        }


def compare(
    methods: Method | Sequence[Method] | Mapping[str, Method],
    task: Task | Sequence[Node],
    *,
    seeds: int | Sequence[int] = 5,
    folder: str | Path | None = None,
    **settings: Any,
) -> Comparison:
    """Run several methods over the same seeds.

    Args:
        methods: one or several, or methods by the label they shall have in the table.
        task: a ready-made task, or your own nodes.
        seeds: how many (0, 1, ...), or which.
        folder: where to write the runs, `LABEL/seed-N` each; None keeps them in memory.
        settings: what `run` takes besides: device, evaluate_every, progress, ... A topology is
            for the methods that have it, the others keep their own. With `stack="always"`, or on
            a GPU, all runs go on in step and equal networks train as one.
    """
    labelled = dict(methods) if isinstance(methods, Mapping) else _label(methods)
    for method in labelled.values():
        check_is_method(method)
    named = seeds if isinstance(seeds, Iterable) else range(plain_seed(seeds))
    chosen = [plain_seed(seed) for seed in named]
    if not labelled or not chosen:
        raise ConfigError("compare needs at least one method and one seed.")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds {', '.join(map(str, chosen))}: a seed is named twice.")
    known = {*fields_of(Settings), "topology", "progress"} - {"seed"}
    for name in settings.keys() - known:
        raise UnknownNameError("setting of compare", name, {*known, "seeds", "folder"})
    first = federation(task, chosen[0])
    kept = {name: value for name, value in settings.items() if name != "progress"}
    _check_topology(labelled.values(), kept.get("topology"))
    for method in labelled.values():
        check_run(method, first, **_own(method, kept))
    base = None if folder is None else Path(folder)
    if base is not None:
        _create(base, labelled, task, chosen, kept)
    return _run_all(labelled, task, chosen, base, settings, first)


def resume_comparison(folder: str | Path, *, progress: bool | None = None) -> Comparison:
    """Continue a comparison that was interrupted: finished runs are read, the others run."""
    folder = Path(folder)
    config = _read(folder)
    if config["task"] is None:
        raise RunError(f"{folder} compared methods on your own nodes: call compare again instead.")
    task = tasks.make(config["task"], config["task_options"])
    labelled = {
        label: methods.make(m["method"], m["options"]) for label, m in config["methods"].items()
    }
    settings = config["settings"] | {"progress": progress}
    return _run_all(labelled, task, config["seeds"], folder, settings)


def is_comparison(folder: str | Path) -> bool:
    """Whether a run folder holds a comparison."""
    return "methods" in read_config(Path(folder))


def open_comparison(folder: str | Path) -> Comparison:
    """Read a comparison; runs that are not finished are left out."""
    folder = Path(folder)
    config = _read(folder)
    found = {
        label: [Run.open(p) for p in folders_of(folder, label, config["seeds"]) if _is_done(p)]
        for label in config["methods"]
    }
    runs = {label: each for label, each in found.items() if each}
    if not runs:
        raise RunError(
            f"{folder}: none of its runs is finished. Continue with `polyfed resume {folder}`."
        )
    return Comparison(runs, config["seeds"], folder)


def progress_of(folder: str | Path) -> tuple[int, int]:
    """How many runs of a comparison are finished, of how many."""
    folder = Path(folder)
    config = read_config(folder)
    every = [p for label in config["methods"] for p in folders_of(folder, label, config["seeds"])]
    return sum(map(_is_done, every)), len(every)


def _read(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if "methods" not in config:
        raise RunError(f"{folder} holds a single run, not a comparison.")
    return config


def _is_done(folder: Path) -> bool:
    return (folder / "config.yaml").exists() and read_result(folder) is not None


def _run_all(
    labelled: Mapping[str, Method],
    task: Task | Sequence[Node],
    seeds: Sequence[int],
    folder: Path | None,
    settings: Mapping[str, Any],
    first: Sequence[Node] | None = None,
) -> Comparison:
    """Every method with every seed: in step, so that equal networks train as one, or in turn."""
    federations: dict[int, Sequence[Node]] = {} if first is None else {seeds[0]: first}
    runs: dict[str, list[Run]] = {label: [] for label in labelled}
    cells = [(label, seed) for seed in seeds for label in labelled]
    in_turn = _in_turn(settings.get("stack", "auto"), settings.get("device", "cpu"))
    for group in [[cell] for cell in cells] if in_turn else [cells]:
        shown = shares(settings.get("progress"), len(group))
        moved: dict[int, Any] = {}
        begun: dict[tuple[str, int], tuple[LocalEngine, Checkpoint | None]] = {}
        finished: dict[tuple[str, int], Run] = {}
        for (label, seed), progress in zip(group, shown, strict=True):
            where = None if folder is None else folders_of(folder, label, [seed])[0]
            if where is not None and _is_done(where):
                finished[label, seed] = Run.open(where)
                continue
            if seed not in federations:
                federations = federations if len(group) > 1 else {}
                federations[seed] = federation(task, seed)
            place = f"{cells.index((label, seed)) + 1}/{len(cells)}"
            progress.title = f"{place} {label} seed {seed}"
            each = _own(labelled[label], {k: v for k, v in settings.items() if k != "progress"})
            begun[label, seed] = begin(
                labelled[label],
                task,
                nodes=federations[seed],
                seed=seed,
                folder=where,
                progress=progress,
                moved=moved,
                **each,
            )
        if begun:
            finished |= dict(zip(begun, finish_together(list(begun.values())), strict=True))
        for label, seed in group:
            runs[label].append(finished[label, seed])
    return Comparison(runs, seeds, folder)


def _own(method: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one method: without a topology that it does not have."""
    lacks = _topology_name(settings.get("topology")) not in method.topologies
    return {k: v for k, v in settings.items() if not (lacks and k == "topology")}


def _check_topology(chosen: Iterable[Method], wanted: str | Topology | None) -> None:
    known = {method.name: method.topologies for method in chosen}
    if wanted is not None and not any(_topology_name(wanted) in each for each in known.values()):
        there = "; ".join(f"{name}: {', '.join(each)}" for name, each in known.items())
        raise ConfigError(f"none of the methods runs on {_topology_name(wanted)} ({there}).")


def _topology_name(wanted: str | Topology | None) -> str:
    return wanted.name if isinstance(wanted, Topology) else (wanted or "").partition(":")[0]


def _in_turn(stack: str, device: str) -> bool:
    """On a CPU the nodes of one run are rows enough; in turn, the first result comes sooner."""
    return stack == "never" or (stack == "auto" and device == "cpu")


def _create(
    folder: Path,
    labelled: Mapping[str, Method],
    task: Task | Sequence[Node],
    seeds: Sequence[int],
    settings: Mapping[str, Any],
) -> None:
    _check_labels(labelled)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RunError(f"{folder} exists and is not empty. Choose another folder.")
    except OSError as error:
        raise RunError(f"could not make {folder}: {error.strerror or error}.") from error
    config = {
        "format": FORMAT,
        "methods": {k: {"method": m.name, "options": plain(m)} for k, m in labelled.items()},
        "task": task.name if isinstance(task, Task) else None,
        "task_options": plain(task) if isinstance(task, Task) else {},
        "seeds": list(seeds),
        "settings": simple(
            {k: topologies.label(v) if isinstance(v, Topology) else v for k, v in settings.items()}
        ),
    }
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def folders_of(folder: Path, label: str, seeds: Sequence[int]) -> list[Path]:
    """Where a comparison keeps the runs of a label, a folder a seed."""
    name = "".join(c if c.isalnum() or c in "._-=," else "-" for c in label)
    return [folder / name / f"seed-{seed}" for seed in seeds]


def _check_labels(labels: Iterable[str]) -> None:
    """Labels name folders: two that give the same one would read each other's runs."""
    owner: dict[str, str] = {}
    for label in labels:
        name = folders_of(Path(), label, [0])[0].parent.name
        if name in ("", "..") or name in owner:
            raise ConfigError(
                f"label {label!r} cannot name a folder"
                + (f" beside {owner[name]!r}" if name in owner else "")
                + ": use other letters or digits."
            )
        owner[name] = label


def _label(methods: Method | Sequence[Method]) -> dict[str, Method]:
    labelled: dict[str, Method] = {}
    for method in map(
        check_is_method, methods if isinstance(methods, (list, tuple)) else [methods]
    ):
        label, number = method.name, 2
        while label in labelled:
            label, number = f"{method.name}-{number}", number + 1
        labelled[label] = method
    return labelled


def _sent_per_node(runs: Sequence[Run]) -> float:
    def each(r: Run) -> float:
        return statistics.fmean([r.ledger.bytes_sent(Name(n)) for n in r.accuracy] or [0])

    return statistics.fmean(each(r) for r in runs)

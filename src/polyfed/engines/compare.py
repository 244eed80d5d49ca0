"""`compare`: several methods on one task, over several seeds, in one table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyfed import methods, options, tasks
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.engines.run import Run, plain, resume, run
from polyfed.engines.table import Text, render, size, spread
from polyfed.errors import ConfigError, RunError
from polyfed.record.files import write_text
from polyfed.record.recorder import FORMAT, read_config
from polyfed.tasks import Task


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over the same seeds: `runs[label][i]` has seed `seeds[i]`."""

    runs: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]
    folder: Path | None = None

    def table(self) -> Text:
        """A row a method: accuracy of every node and their mean, over seeds; bytes; time."""
        nodes = list(next(iter(self.runs.values()))[0].accuracy)
        shown = nodes if len(nodes) <= 5 else []
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
        count = len(self.seeds)
        what = "mean ± standard deviation over" if count > 1 else "from"
        title = f"Test accuracy, {what} {count} seed{'s' if count > 1 else ''}"
        return render(title, columns, rows)

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
    methods: Sequence[Method] | Mapping[str, Method],
    task: Task | Sequence[Node],
    *,
    seeds: int | Sequence[int] = 5,
    folder: str | Path | None = None,
    **settings: Any,
) -> Comparison:
    """Run several methods over the same seeds.

    Args:
        methods: methods, or methods by the label they shall have in the table.
        task: a ready-made task, or your own nodes.
        seeds: how many (0, 1, ...), or which.
        folder: where to write the runs, `LABEL/seed-N` each; None keeps them in memory.
        settings: what `run` takes besides: device, evaluate_every, progress, ...
    """
    labelled = dict(methods) if isinstance(methods, Mapping) else _label(methods)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not labelled or not chosen:
        raise ConfigError("compare needs at least one method and one seed.")
    base = None if folder is None else Path(folder)
    if base is not None:
        _create(base, labelled, task, chosen, settings)
    return _run_all(labelled, task, chosen, base, settings)


def resume_comparison(folder: str | Path, *, progress: bool | None = None) -> Comparison:
    """Continue a comparison that was interrupted: finished runs are read, the others run."""
    folder = Path(folder)
    config = read_config(folder)
    if "methods" not in config:
        raise RunError(f"{folder} holds a single run, not a comparison.")
    if config["task"] is None:
        raise RunError(f"{folder} compared methods on your own nodes: call compare again instead.")
    task = tasks.make(config["task"], config["task_options"])
    labelled = {
        label: options.build(methods.load(m["method"]), m["options"], f"method {m['method']}")
        for label, m in config["methods"].items()
    }
    settings = config["settings"] | {"progress": progress}
    return _run_all(labelled, task, config["seeds"], folder, settings)


def is_comparison(folder: str | Path) -> bool:
    """Whether a run folder holds a comparison."""
    return "methods" in read_config(Path(folder))


def open_comparison(folder: str | Path) -> Comparison:
    """Read a comparison; runs that have not begun are left out."""
    folder = Path(folder)
    config = read_config(folder)
    found = {
        label: [Run.open(p) for p in _folders(folder, label, config["seeds"]) if p.exists()]
        for label in config["methods"]
    }
    runs = {label: each for label, each in found.items() if each}
    if not runs:
        raise RunError(f"{folder}: none of its runs has begun.")
    return Comparison(runs, config["seeds"], folder)


def _run_all(
    labelled: Mapping[str, Method],
    task: Task | Sequence[Node],
    seeds: Sequence[int],
    folder: Path | None,
    settings: Mapping[str, Any],
) -> Comparison:
    runs: dict[str, list[Run]] = {label: [] for label in labelled}
    for seed in seeds:
        federation = task.nodes(seed) if isinstance(task, Task) else task
        for label, method in labelled.items():
            where = None if folder is None else _folders(folder, label, [seed])[0]
            runs[label].append(_one(method, task, federation, seed, where, settings))
    return Comparison(runs, seeds, folder)


def _one(
    method: Method,
    task: Task | Sequence[Node],
    federation: Sequence[Node],
    seed: int,
    folder: Path | None,
    settings: Mapping[str, Any],
) -> Run:
    if folder is not None and (folder / "config.yaml").exists():
        return resume(folder, method=method, nodes=federation, progress=settings.get("progress"))
    return run(method, task, nodes=federation, seed=seed, folder=folder, **settings)


def _create(
    folder: Path,
    labelled: Mapping[str, Method],
    task: Task | Sequence[Node],
    seeds: Sequence[int],
    settings: Mapping[str, Any],
) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} exists and is not empty. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "methods": {k: {"method": m.name, "options": plain(m)} for k, m in labelled.items()},
        "task": task.name if isinstance(task, Task) else None,
        "task_options": plain(task) if isinstance(task, Task) else {},
        "seeds": list(seeds),
        "settings": {k: v for k, v in settings.items() if k != "progress"},
    }
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def _folders(folder: Path, label: str, seeds: Sequence[int]) -> list[Path]:
    name = "".join(c if c.isalnum() or c in "._-=," else "-" for c in label)
    return [folder / name / f"seed-{seed}" for seed in seeds]


def _label(methods: Sequence[Method]) -> dict[str, Method]:
    labelled: dict[str, Method] = {}
    for method in methods:
        label, number = method.name, 2
        while label in labelled:
            label, number = f"{method.name}-{number}", number + 1
        labelled[label] = method
    return labelled


def _sent_per_node(runs: Sequence[Run]) -> float:
    def each(r: Run) -> float:
        return statistics.fmean(r.ledger.bytes_sent(Name(n)) for n in r.accuracy)

    return statistics.fmean(each(r) for r in runs)

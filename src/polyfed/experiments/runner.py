"""`run_cells`: all cells of an experiment with all seeds, each in a run folder.

`run_batches` does so for several experiments at once, `do_batches` without reading the runs.

    FOLDER/TASK-METHOD-KEY/seed-N

The key is a digest of the settings: equal settings share their runs, whichever experiment asks for
them, and other settings never meet. What was interrupted goes on when it is asked for again:
finished runs are read, a run in the middle goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from polyfed.core.method import Method
from polyfed.core.model import Precision
from polyfed.core.node import Node
from polyfed.core.phase import Phase, cross_entropy
from polyfed.engines.progress import Progress, shares, suited
from polyfed.engines.run import Run, begin, check_run, finish_together, plain
from polyfed.errors import ConfigError
from polyfed.experiments.experiment import Cell
from polyfed.experiments.parallel import Piece, in_processes
from polyfed.record.files import write_text
from polyfed.record.recorder import read_result
from polyfed.tasks import Task
from polyfed.train.alike import structure
from polyfed.train.columns import Columns
from polyfed.train.loop import moves_batchnorm
from polyfed.train.track import Job

COMMIT_VARIABLE = "POLYFED_COMMIT"  # names the commit where there is a copy of its files
_IN_STEP = 48  # runs in step on a GPU: more fill its memory and not its time
_APART = {True: 10.0, False: 60.0}  # seconds between checkpoints, on a CPU: rounds may be short
AFTER = "after.json"  # in a run folder: figures of its trained nodes
ORIGIN = "origin.json"  # in a run folder: by which commit and on which device it was run
SHORTFALL = "shortfall.txt"  # in a run folder: what part of the published set there was, if not all


@dataclass(frozen=True)
class _Job:
    label: str
    method: Method
    task: Task
    seed: int
    evaluate_every: int
    folder: Path
    after: Callable[[Run], Mapping[str, Any]] | None = None

    @property
    def is_done(self) -> bool:
        is_whole = self.after is None or (self.folder / AFTER).exists()
        return is_whole and read_result(self.folder) is not None


@dataclass(frozen=True)
class Batch:
    """What one experiment asks for.

    Attributes:
        cells: what to run.
        seeds: each with which seeds.
        evaluate_every: rounds between evaluations.
    """

    cells: Sequence[Cell]
    seeds: Sequence[int]
    evaluate_every: int = 1


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    folder: Path,
    *,
    evaluate_every: int = 1,
    **settings: Any,
) -> list[list[Run]]:
    """Run every cell with every seed: `found[i][j]` is of cells[i] with seeds[j].

    Args:
        cells: what to run.
        seeds: with which seeds.
        folder: where the run folders are.
        evaluate_every: rounds between evaluations.
        settings: what `run_batches` takes besides.
    """
    return run_batches([Batch(cells, seeds, evaluate_every)], folder, **settings)[0]


def run_batches(batches: Sequence[Batch], folder: Path, **settings: Any) -> list[list[list[Run]]]:
    """Run what several experiments ask for, as `do_batches` does, and read it.

    Args:
        batches: of each experiment; `found[i]` is of batches[i], as `run_cells` has it.
        folder: where the run folders are.
        settings: what `do_batches` takes besides.
    """
    asked = do_batches(batches, folder, **settings)
    return [_found(every, len(batch.seeds)) for every, batch in zip(asked, batches, strict=True)]


def do_batches(
    batches: Sequence[Batch],
    folder: Path,
    *,
    data: Path | None = None,
    device: str = "cpu",
    precision: Precision = "float32",
    jobs: int = 1,
    progress: bool | None = None,
) -> list[list[_Job]]:
    """Run what several experiments ask for as one piece of work; equal runs are one.

    Finished runs are only read, without the task's files; everything else is checked before the
    first step of training.

    Args:
        batches: of each experiment.
        folder: where the run folders are.
        data: folder with published files, for tasks that read them.
        device: cpu, cuda, cuda:0, ...
        precision: what networks compute in; bfloat16 is for GPUs.
        jobs: in how many processes.
        progress: True, False, None for terminals only.

    Returns:
        What each batch asked for, all of it done.
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be >= 1, got {jobs}.")
    settings: dict[str, Any] = {"device": device, "precision": precision}
    asked = [_jobs(batch, folder, data, settings) for batch in batches]
    left = {j.folder: j for job in asked for j in job if not j.is_done}  # equal cells are one
    apart = _check(list(left.values()), settings)
    most = 1 if device == "cpu" else max(1, min(_IN_STEP, -(-len(left) // jobs)))
    groups = list(_groups(list(left.values()), most=most, apart=apart))
    if jobs > 1 and len(groups) > 1:
        work = partial(_run_group, settings=settings, share=1 / min(jobs, len(groups)))
        in_processes(list(map(_piece, groups)), work, jobs, suited(progress))
    else:
        done = 0
        for group in groups:
            place = f"{done + 1}-{done + len(group)}" if len(group) > 1 else f"{done + 1}"
            _run_group(group, progress, settings, f"{place}/{len(left)} ")
            done += len(group)
    return asked


def _found(jobs: Sequence[_Job], seeds: int) -> list[list[Run]]:
    found = [Run.open(job.folder) for job in jobs]
    return [found[i : i + seeds] for i in range(0, len(found), seeds)]


def _groups(jobs: Sequence[_Job], *, most: int, apart: Set[str]) -> Iterator[list[_Job]]:
    """Runs that go on in step, so that equal networks train as one; on a CPU, one at a time.

    Runs of like numbers (rounds, samples, nodes) are in one group, and the largest come first. Runs
    of the tasks in `apart` would gain nothing.
    """
    yield from ([job] for job in jobs if repr(job.task) in apart)
    others = [job for job in jobs if repr(job.task) not in apart]
    if most > 1:
        others.sort(key=_numbers, reverse=True)
    yield from (others[i : i + most] for i in range(0, len(others), most))


def _numbers(job: _Job) -> list[int]:
    """The whole numbers among the settings: what the length of a phase depends on."""
    settings = [*plain(job.method).values(), *plain(job.task).values()]
    return [value for value in settings if type(value) is int]


def _piece(jobs: Sequence[_Job]) -> Piece:
    """A group, as work for another process."""
    others = f" or one of {len(jobs) - 1} beside it" if len(jobs) > 1 else ""
    title = f"{jobs[0].label} seed {jobs[0].seed}{others}"
    return Piece(title, max(job.method.rounds for job in jobs), jobs)


def _run_group(
    jobs: Sequence[_Job],
    progress: bool | Progress | None,
    settings: dict[str, Any],
    place: str = "",
    share: float = 1.0,
) -> None:
    apart = _APART[settings["device"] == "cpu"]
    federations: dict[tuple[int, str], Sequence[Node]] = {}
    shortfalls: dict[tuple[int, str], str] = {}
    moved: dict[int, Any] = {}
    begun = []
    for job, shown in zip(jobs, shares(progress, len(jobs)), strict=True):
        if _federation(job) not in federations:
            federations[_federation(job)] = job.task.nodes(job.seed)
            shortfalls[_federation(job)] = job.task.shortfall()
        shown.title = f"{place}{job.label} seed {job.seed}"
        begun.append(
            begin(
                job.method,
                job.task,
                nodes=federations[_federation(job)],
                seed=job.seed,
                folder=job.folder,
                progress=shown,
                moved=moved,
                checkpoint_seconds=apart,
                evaluate_every=job.evaluate_every,
                **settings,
            )
        )
        if short := shortfalls[_federation(job)]:
            write_text(job.folder / SHORTFALL, short + "\n")
    origin = {"commit": commit(), "device": _device(str(settings["device"]))}
    for job, done in zip(jobs, finish_together(begun, share), strict=True):
        if job.after is not None:
            write_text(job.folder / AFTER, json.dumps(dict(job.after(done))) + "\n")
        _close(job, origin)


def figures_after(run: Run) -> dict[str, float]:
    """What was computed from the trained nodes of a run; nothing where that was not asked for."""
    path = (run.folder or Path()) / AFTER
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shortfall(run: Run) -> str:
    """What part of the published set a run had; empty if all of it."""
    path = (run.folder or Path()) / SHORTFALL
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _jobs(batch: Batch, folder: Path, data: Path | None, settings: dict[str, Any]) -> list[_Job]:
    jobs, every = [], batch.evaluate_every
    for cell in batch.cells:
        method, task = cell.make(data)
        place = folder / _key(method, task, every, settings, cell.after)
        jobs += [
            _Job(cell.label, method, task, s, every, place / f"seed-{s}", cell.after)
            for s in batch.seeds
        ]
    return jobs


def _key(
    method: Method,
    task: Task,
    every: int,
    settings: dict[str, Any],
    after: Callable[..., Any] | None = None,
) -> str:
    """A folder name for everything that has a bearing on the numbers but the seed."""
    kind = str(settings["device"]).partition(":")[0]
    more = [] if after is None else [after.__qualname__]
    more += [] if settings["precision"] == "float32" else [settings["precision"]]
    options = {n: v for n, v in plain(method).items() if n != "guard" or v}
    said = json.dumps([options, options_of(task), kind, every, *more], sort_keys=True)
    digest = hashlib.blake2b(said.encode(), digest_size=5).hexdigest()
    return f"{task.name}-{method.name}-{digest}"


def options_of(task: Task) -> dict[str, Any]:
    """The task's options, without the folder where its files happen to be."""
    return {name: value for name, value in plain(task).items() if name != "data"}


def _federation(job: _Job) -> tuple[int, str]:
    return job.seed, repr(job.task)


def _check(jobs: Sequence[_Job], settings: dict[str, Any]) -> set[str]:
    """Raise what a run of any setting would raise before it trains.

    Returns:
        Tasks with networks that are not stacked: BatchNorm keeps statistics in them, and their
        convolutions are large.
    """
    apart, columns = set(), Columns()
    settings_once = {job.folder.parent: job for job in reversed(jobs)}.values()
    for _, group in groupby(sorted(settings_once, key=_federation), key=_federation):
        alike = list(group)
        nodes = alike[0].task.nodes(alike[0].seed)
        for job in alike:
            check_run(job.method, nodes, evaluate_every=job.evaluate_every, **settings)
        own = next((node for node in nodes if moves_batchnorm(node.model, ())), None)
        is_plain = settings["precision"] == "float32"
        if own and not all(is_plain and _are_small(own, job.method, columns) for job in alike):
            apart.add(repr(alike[0].task))
    return apart


def _are_small(node: Node, method: Method, columns: Columns) -> bool:
    """Whether convolutions are small, with the batches of a method; see `train.columns`."""
    if not {"train", "batch"} <= {*node.data, *plain(method)}:
        return False
    batch = plain(method)["batch"]
    phase = Phase(label="local", objective=cross_entropy, epochs=1, batch=batch)
    return columns.are_few(Job(node, phase, ()), structure(node.model.net))


def _close(job: _Job, origin: Mapping[str, str]) -> None:
    """Note where a finished run comes from; its checkpoints have served, and hundreds are large."""
    write_text(job.folder / ORIGIN, json.dumps(origin) + "\n")
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)


def _device(name: str) -> str:
    """The device, with the name its maker gives it where it has one."""
    import torch

    return f"{name}, {torch.cuda.get_device_name(name)}" if name.startswith("cuda") else name


def commit() -> str:
    """The commit of this polyfed, marked if files were changed since; unknown outside git.

    A copy of a working tree may have another history than the files in it: the variable goes first.
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    ask = ["git", "-C", str(Path(__file__).parents[1])]
    known = _said([*ask, "ls-files", "--error-unmatch", "__init__.py"])  # ours, not one around us
    said = _said([*ask, "describe", "--always", "--dirty", "--exclude=*"]) if known else ""
    return said or "unknown"


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""`contest`: tune every method of a contest with the same budget, then test them all alike.

    tune    `trials` settings of each method (`sweep`), one training each, judged by validation data
            of one federation, TUNED_WITH
    test    the best setting of each method on the federations of other seeds, the same for all

FOLDER/CONTEST/METHOD-KEY/       the search, as `polyfed sweep` leaves it
FOLDER/CONTEST/METHOD-KEY.json   what it found and what came of it; who has one is not run again

The key is a digest of the settings and the budget: what was done with others is left alone.

Where a task deals the same pool of images out anew with every seed, an image that one search was
judged by may be a test image of another seed. That holds for all methods alike.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from polyfed import methods
from polyfed.core.method import Method
from polyfed.engines.progress import Progress
from polyfed.engines.run import Run, begin, check_run, finish_together, plain
from polyfed.errors import ConfigError, DataError, PolyfedError
from polyfed.experiments.runner import commit
from polyfed.record.files import write_text
from polyfed.record.recorder import environment
from polyfed.studies.contest import Contest
from polyfed.studies.contests import CONTESTS
from polyfed.studies.spaces import space_of
from polyfed.studies.sweep import sweep
from polyfed.tasks import Task
from polyfed.train.together import Stack, StackWarning

FORMAT = 1
TUNED_WITH = 1000  # the seed of the searches; tests have 0, 1, 2, ...
SUMMARY = "which_wins.json"
_SAME = ("rounds", "batch", "representation")  # alike for all methods of a contest: not searched

Shown = Callable[[str], None]


def hold(
    folder: Path,
    *,
    data: Path | None = None,
    trials: int = 8,
    seeds: int = 10,
    contests: Sequence[Contest] = CONTESTS,
    shown: Shown = lambda text: None,
) -> dict[str, Any]:
    """Hold contests, and write what came of each; the same call goes on where it stopped.

    Args:
        folder: where searches and results are kept.
        data: folder with published files; contests that need them are left out without.
        trials: settings tried for each method.
        seeds: federations that each is tested on.
        contests: which.
        shown: hears a line a method.
    """
    found: list[dict[str, Any]] = []
    for contest in contests:
        try:
            found.append(_held(contest, folder / contest.name, data, trials, seeds, shown))
        except DataError as error:
            shown(f"{contest.name}: left out. {error}")
        else:
            text = json.dumps(_summary(found, trials, seeds), indent=1, ensure_ascii=False)
            write_text(folder / SUMMARY, text + "\n")
    return _summary(found, trials, seeds)


def _summary(found: Sequence[dict[str, Any]], trials: int, seeds: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "command": f"polyfed contests --data DIR --trials {trials} --seeds {seeds}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "environment": environment(),
        "trials": trials,
        "tuned_with": TUNED_WITH,
        "seeds": list(range(seeds)),
        "contests": list(found),
    }


def _held(
    contest: Contest, folder: Path, data: Path | None, trials: int, seeds: int, shown: Shown
) -> dict[str, Any]:
    contest.federation(contest.methods[0], data).nodes(0)  # are its files there?
    entries = {}
    for method in contest.methods:
        place = folder / f"{method}-{_key(contest, method, trials, seeds)}"
        path = place.with_name(place.name + ".json")
        if not path.exists():
            entry = one(contest, method, place, data, trials, range(seeds))
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(entry, indent=1) + "\n")
        entries[method] = json.loads(path.read_text(encoding="utf-8"))
        accuracy = statistics.fmean(entries[method]["accuracy"])
        shown(f"{contest.name}: {method} {accuracy:.3f}")
    return {
        "name": contest.name,
        "group": contest.group,
        "asks": contest.asks,
        "task": contest.task,
        "task_options": dict(contest.task_options),
        "options": dict(contest.options),
        "hold_out": contest.hold_out,
        "methods": entries,
        "not_there": misfits(contest, data),
    }


def _key(contest: Contest, method: str, trials: int, seeds: int) -> str:
    """A digest of all that has a bearing on what comes of a method."""
    its = plain(contest.federation(method))
    own = [contest.settled(method), contest.begun(method), contest.hold_out]
    said = json.dumps([contest.task, its, own, trials, seeds], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=5).hexdigest()


def one(
    contest: Contest,
    method: str,
    folder: Path,
    data: Path | None,
    trials: int,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Tune a method, then test it."""
    task, settled = contest.federation(method, data), contest.settled(method)
    base = contest.begun(method)
    space = {n: d for n, d in space_of(method, task, base | settled).items() if n not in _SAME}
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StackWarning)  # then they train one by one
        study = sweep(
            method,
            task,
            folder=folder,
            trials=trials,
            space={n: d for n, d in space.items() if n not in settled},
            options={**{n: v for n, v in base.items() if n not in space}, **settled},
            runs=1,
            seed=TUNED_WITH,
            hold_out=contest.hold_out,
            stack=contest.stack,
        )
        tuned = time.process_time()
        made = methods.make(method, {**base, **settled, **study.best}, task)
        runs = _tested(made, task, seeds, contest.stack)
    return {
        "commit": commit(),
        "space": {name: str(dimension) for name, dimension in study.steps[-1].space.items()},
        "best": study.best,
        "validation": study.value,
        "accuracy": [run.mean_accuracy for run in runs],
        "bytes_sent_per_node": [
            statistics.fmean(run.ledger.bytes_sent(name) for name in run.accuracy) for run in runs
        ],
        "cpu_seconds_tuning": round(tuned - begun, 1),
        "cpu_seconds_a_run": round((time.process_time() - tuned) / len(runs), 2),
    }


def _tested(method: Method, task: Task, seeds: Sequence[int], stack: Stack) -> list[Run]:
    begun = [
        begin(
            method,
            task,
            nodes=task.nodes(seed),
            seed=seed,
            folder=None,
            progress=Progress(),
            moved={},
            stack=stack,
            evaluate_every=method.rounds,
        )
        for seed in seeds
    ]
    return finish_together(begun)


def misfits(contest: Contest, data: Path | None = None) -> dict[str, str]:
    """Every method that does not take part, and why: ours, or its own check's first sentence."""
    found = {}
    for method in methods.METHODS:
        if method in contest.methods:
            continue
        if method in contest.left_out:
            found[method] = contest.left_out[method]
            continue
        task = contest.federation(method, data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_run(methods.make(method, {}, task), task.nodes(0))
        except PolyfedError as error:
            said = " ".join(str(error).split()).partition(". ")[0].partition(": ")[0].rstrip(".")
            found[method] = said.replace(f"{method} ", "it ", 1)
        else:
            raise ConfigError(
                f"contest {contest.name}: {method} could take part. Name it, or say why it is "
                "left out."
            )
    return found

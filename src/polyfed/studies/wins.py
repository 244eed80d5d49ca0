"""`contest`: tune every method of a contest with the same budget, then test them all alike.

    tune    `trials` settings of each method (`sweep`), one training each, judged by validation data
            of one federation, TUNED_WITH
    test    the best setting of each method on the federations of other seeds, the same for all

FOLDER/CONTEST/METHOD-KEY/       the search, as `polyfed sweep` leaves it
FOLDER/CONTEST/METHOD-KEY.json   what it found and what came of it; who has one is not run again
FOLDER/which_wins.json           all contests held there: enough to go on, without the folders

The key is a digest of the settings and the budget: what was done with others is left alone. A
summary is of one budget; contests that are not asked for stay in it as they are.

Where a task deals the same pool of images out anew with every seed, an image that one search was
judged by may be a test image of another seed. That holds for all methods alike.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from polyfed import methods
from polyfed.core.method import Method
from polyfed.engines.progress import Progress
from polyfed.engines.run import Run, begin, check_run, finish_together, plain
from polyfed.errors import ConfigError, DataError, PolyfedError, RunError
from polyfed.experiments.runner import commit
from polyfed.record.files import read_summary, write_text
from polyfed.record.recorder import environment
from polyfed.studies.contest import Contest
from polyfed.studies.contests import CONTESTS
from polyfed.studies.spaces import space_of
from polyfed.studies.sweep import sweep
from polyfed.tasks import Task
from polyfed.train.together import Stack, StackWarning

FORMAT = 2
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

    So does one in a folder that has nothing but a summary: methods that it has with the same
    settings are not run again.

    Args:
        folder: where searches and results are kept.
        data: folder with published files; contests that need them are left out without.
        trials: settings tried for each method.
        seeds: federations that each is tested on.
        contests: which.
        shown: hears a line a method.
    """
    summary = {
        "format": FORMAT,
        "command": f"polyfed contests --data DIR --trials {trials} --seeds {seeds}",
        "trials": trials,
        "tuned_with": TUNED_WITH,
        "seeds": list(range(seeds)),
    }
    found = _there(folder / SUMMARY, summary)
    for contest in contests:
        before = found.get(contest.name, {"methods": {}})
        try:
            held = _held(contest, folder / contest.name, data, trials, seeds, before, shown)
        except DataError as error:
            shown(f"{contest.name}: left out. {error}")
        else:
            found[contest.name] = held
            text = json.dumps(_ordered(summary, found), indent=1, ensure_ascii=False)
            write_text(folder / SUMMARY, text + "\n")
    return _ordered(summary, found)


def read(path: Path) -> dict[str, Any]:
    """Read a summary of contests."""
    return read_summary(path, "a summary of contests", FORMAT)


def _there(path: Path, wanted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The contests of a summary, by name; one of another budget is refused."""
    if not path.exists():
        return {}
    summary = read(path)
    for name in ("trials", "seeds"):
        if summary[name] != wanted[name]:
            raise RunError(
                f"{path} has {name} {summary[name]}, but {wanted[name]} are wanted, and contests "
                "beside each other have one budget. Choose another folder."
            )
    return {contest["name"]: contest for contest in summary["contests"]}


def _ordered(summary: Mapping[str, Any], found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The summary with its contests in the order of ours."""
    places = {contest.name: place for place, contest in enumerate(CONTESTS)}
    names = sorted(found, key=lambda name: places.get(name, len(places)))
    return {**summary, "contests": [found[name] for name in names]}


def _held(
    contest: Contest,
    folder: Path,
    data: Path | None,
    trials: int,
    seeds: int,
    before: Mapping[str, Any],
    shown: Shown,
) -> dict[str, Any]:
    contest.federation(contest.methods[0], data).nodes(0)  # are its files there?
    entries, is_new = {}, False
    for method in contest.methods:
        key = _key(contest, method, trials, seeds)
        entry = before["methods"].get(method, {})
        if entry.get("key") != key:
            entry = _finished(contest, method, folder / f"{method}-{key}", data, trials, seeds)
            is_new = True
        entries[method] = {"key": key, **entry}
        shown(f"{contest.name}: {method} {statistics.fmean(entry['accuracy']):.3f}")
    today = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "environment": environment()}
    return {
        "name": contest.name,
        "group": contest.group,
        "asks": contest.asks,
        "judged_by": contest.judged_by,
        **(today if is_new else {name: before[name] for name in today}),
        "task": contest.task,
        "task_options": dict(contest.task_options),
        "options": dict(contest.options),
        "hold_out": contest.hold_out,
        "methods": entries,
        "not_there": misfits(contest, data),
    }


def _finished(
    contest: Contest, method: str, place: Path, data: Path | None, trials: int, seeds: int
) -> dict[str, Any]:
    """What came of a method, from its file if there is one."""
    path = place.with_name(place.name + ".json")
    if not path.exists():
        entry = one(contest, method, place, data, trials, range(seeds))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(entry, indent=1) + "\n")
    done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return done


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

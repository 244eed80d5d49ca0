"""`sweep`: search the settings of a method on a task, in a folder that can be continued.

    step 1   options of the task that shape its network, where it has some; training as its recipe
    step 2   options of the method, with the best network             (Kadar 2021, section 4.3)

STUDY/study.yaml      what is searched, enough to go on
STUDY/journal.log     every trial, as Optuna keeps it (optuna-dashboard reads it)
STUDY/best.yaml       the best settings, for `polyfed run STUDY/best.yaml`
STUDY/trials.csv      a line a trial
STUDY/summary.json    best settings, importance, trials
STUDY/report.html     all of it to look at
STUDY/*.svg           parallel coordinates of each step, where matplotlib is installed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polyfed import methods, options, tasks
from polyfed.core.node import Node
from polyfed.engines.local import Steps
from polyfed.engines.progress import Progress
from polyfed.engines.run import begin, plain
from polyfed.errors import ConfigError, RunError
from polyfed.record.files import write_text
from polyfed.studies import search as step
from polyfed.studies.outcome import Outcome, Step, line, tried, write
from polyfed.studies.space import Dimension, Space
from polyfed.studies.spaces import space_of
from polyfed.studies.validation import judged
from polyfed.tasks import Task

if TYPE_CHECKING:
    import optuna

ARCHITECTURE, TRAINING = "architecture", "training"
FORMAT = 1
_SHARE = 3  # one trial in so many is for the architecture
_ON_GPU = 8  # trials at a time, where their networks train as one
_FILE, _JOURNAL = "study.yaml", "journal.log"

Shown = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is searched.

    Attributes:
        method: name of the method.
        task: the federation.
        options: options of the method that are not searched.
        space: what is tried for the others, of the method and of the task.
        runs: trainings of each setting; the worst counts.
        seed: of the study: who holds what, and what is tried.
        hold_out: share of the training data to judge by; 0 takes validation splits.
        settings: what `run` takes besides: topology, device, stack, precision.
    """

    method: str
    task: Task
    options: Mapping[str, Any]
    space: Space
    runs: int
    seed: int
    hold_out: float
    settings: Mapping[str, Any]

    def spaces(self) -> dict[str, dict[str, Dimension]]:
        """The space of each step; an option that both have is the method's."""
        mine = options.fields_of(methods.load(self.method))
        network = {n: d for n, d in self.space.items() if n not in mine}
        training = {n: d for n, d in self.space.items() if n in mine}
        return {n: s for n, s in ((ARCHITECTURE, network), (TRAINING, training)) if s}

    def recipe(self) -> dict[str, Any]:
        """What the searched options would be without a search, brought into the space."""
        made = methods.make(self.method, self.options, self.task)
        known = plain(self.task) | plain(made)
        return {name: d.nearest(known[name]) for name, d in self.space.items()}

    def task_of(self, params: Mapping[str, Any]) -> Task:
        """The task with a trial's options for its network."""
        own = {n: v for n, v in params.items() if n in self.spaces().get(ARCHITECTURE, {})}
        return tasks.make(self.task.name, plain(self.task) | own)

    def options_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the method in a trial; the task's recipe still holds for the rest."""
        own = {n: v for n, v in params.items() if n in self.spaces().get(TRAINING, {})}
        return {**self.options, **own}

    def as_dict(self) -> dict[str, Any]:
        """The same as YAML and JSON can hold it."""
        return {
            "format": FORMAT,
            "method": self.method,
            "options": dict(self.options),
            "task": self.task.name,
            "task_options": plain(self.task),
            "space": {name: str(dimension) for name, dimension in self.space.items()},
            "runs": self.runs,
            "seed": self.seed,
            "hold_out": self.hold_out,
            "settings": dict(self.settings),
        }


def sweep(
    method: str,
    task: Task,
    *,
    folder: str | Path,
    trials: int = 30,
    timeout: float | None = None,
    space: Mapping[str, Dimension] | None = None,
    options: Mapping[str, Any] | None = None,
    fixed: Sequence[str] = (),
    runs: int = 3,
    seed: int = 0,
    hold_out: float = 0.0,
    together: int | None = None,
    shown: Shown = lambda text: None,
    **settings: Any,
) -> Outcome:
    """Search the settings of a method on a task; the same call again goes on where it stopped.

    Args:
        method: name of the method.
        task: the federation.
        folder: where to keep the study.
        trials: settings to try in all.
        timeout: seconds after which no further trial begins.
        space: what to try; None is the method's own space.
        options: options of the method that are not searched.
        fixed: options of the method's own space, or of the task, that are not searched.
        runs: trainings of each setting, of which the worst counts.
        seed: decides who holds what, and what is tried.
        hold_out: share of the training data to judge by, for tasks without validation data.
        together: trials that run at the same time; None is one on a CPU, more on a GPU.
        shown: hears a line a trial.
        settings: what `run` takes besides: topology, device, stack, precision.
    """
    if find_spec("optuna") is None:
        raise ConfigError("a sweep needs Optuna: pip install polyfed[sweep].")
    for name, number in (("trials", trials), ("runs", runs)):
        if number < 1:
            raise ConfigError(f"{name} must be >= 1, got {number}.")
    made = plain(methods.make(method, options or {}, task))
    given, left_out = {n: made[n] for n in options or {}}, {*(options or {}), *fixed}
    own = space_of(method, task) if space is None else dict(space)
    searched = {n: d for n, d in own.items() if n not in left_out}
    if not searched:
        raise ConfigError(
            "nothing is left to search: name an option, as in --space lr=1e-4:1e-1:log."
        )
    plan = Plan(method, task, given, searched, runs, seed, hold_out, settings)
    folder = Path(folder)
    _keep(folder, plan)
    if together is None:
        together = _ON_GPU if settings.get("device", "cpu") != "cpu" else 1
    begun = time.monotonic()
    steps = _search(plan, folder, trials, together, shown, lambda: _is_late(begun, timeout))
    outcome = Outcome(plan.as_dict(), steps, folder)
    write(outcome)
    return outcome


def _is_late(begun: float, timeout: float | None) -> bool:
    return timeout is not None and time.monotonic() - begun >= timeout


def _keep(folder: Path, plan: Plan) -> None:
    """Write what is searched; a folder that holds another study is refused."""
    path, text = folder / _FILE, yaml.safe_dump(plan.as_dict(), sort_keys=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise RunError(
                f"{folder} holds a study with other settings (see {path}). Choose another folder."
            )
        if not path.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} exists and is not a study. Choose another folder.")
    except OSError as error:
        raise RunError(f"could not make {folder}: {error.strerror or error}.") from error
    write_text(path, text)


def _search(
    plan: Plan,
    folder: Path,
    trials: int,
    together: int,
    shown: Shown,
    is_late: Callable[[], bool],
) -> list[Step]:
    """The steps one after the other; training begins from the network that was found best."""
    spaces, best = plan.spaces(), plan.recipe()
    make = _maker(plan)
    make(best, plan.seed, Progress())  # what cannot run at all is said before anything is trained
    studies = {name: _study(plan, folder, name) for name in spaces}
    wanted = _wanted(trials, studies)
    steps: list[Step] = []
    for name, study in studies.items():
        first = {n: best[n] for n in spaces[name]}
        if not step.ended(study) and steps:
            _add_known(study, spaces[name], first, steps[-1])
        elif not step.ended(study):
            study.enqueue_trial(first)
        base = best

        def begin_one(
            params: step.Params, seed: int, listener: Progress, base: step.Params = base
        ) -> Steps[step.Accuracies]:
            return make({**base, **params}, seed, listener)

        step.search(
            study,
            spaces[name],
            begin_one,
            trials=wanted[name],
            seeds=[plan.seed + i for i in range(plan.runs)],
            together=together,
            stack=plan.settings.get("stack", "auto"),
            is_late=is_late,
            told=lambda trial, name=name: shown(line(name, tried(trial), wanted[name])),  # type: ignore[misc]
        )
        steps.append(Step(name, spaces[name], base, [tried(t) for t in step.ended(study)]))
        if len(steps[-1].trials) < wanted[name]:
            break  # late: the next step would begin from a network that is not the best yet
        best = {**best, **steps[-1].best.params}
    return steps


def _wanted(trials: int, studies: Mapping[str, optuna.Study]) -> dict[str, int]:
    """Trials of each step; an architecture that training has begun with stays."""
    if len(studies) == 1:
        return dict.fromkeys(studies, trials)
    network, training = studies.values()
    aside = len(step.ended(network)) if step.ended(training) else max(1, trials // _SHARE)
    return {ARCHITECTURE: aside, TRAINING: max(1, trials - aside) + 1}  # one is known


def _study(plan: Plan, folder: Path, name: str) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    step.quiet()
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / _JOURNAL))),
        study_name=name,
        direction="maximize",
        pruner=step.pruner(),
        load_if_exists=True,
    )
    study.set_user_attr("seed", plan.seed)
    study.set_user_attr("runs", plan.runs)
    return study


def _add_known(study: optuna.Study, space: Space, params: step.Params, before: Step) -> None:
    """The best trial of the step before is also one of this step: it need not run again."""
    from optuna.trial import create_trial

    known = before.best
    study.add_trial(
        create_trial(
            params=params,
            distributions={name: d.distribution() for name, d in space.items()},
            value=known.value,
            intermediate_values=dict(known.by_round),
            user_attrs={step.PLACE: 0, "by_run": list(known.by_run), "known": True},
        )
    )


def _maker(plan: Plan) -> step.Begin:
    @lru_cache(maxsize=_ON_GPU * plan.runs)
    def nodes(task: Task, run_seed: int) -> list[Node]:
        return judged(task, plan.seed, run_seed, plan.hold_out)

    def make(params: step.Params, run_seed: int, listener: Progress) -> Steps[step.Accuracies]:
        task = plan.task_of(params)
        method = methods.make(plan.method, plan.options_of(params), task)
        engine, _ = begin(
            method,
            task,
            nodes=nodes(task, run_seed),
            seed=run_seed,
            folder=None,
            progress=listener,
            moved={},
            **plan.settings,
        )
        return engine.steps()

    return make

"""One step of a search: trials are asked, run in step, pruned and told.

A trial is a setting; it is worth the *worst* of its runs, each judged by the mean over nodes of
validation accuracy (Kadar 2021, section 4.3: three trainings for each setting, the lowest counts).
All runs of all trials that are asked together go on in step, so that equal networks can train as
one. After every round a trial reports the worst of its runs so far; Optuna may end it there.

What is asked depends only on the study's seed and on the trials before: a search that was
interrupted goes on as if it had not been.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.core.node import Name
from polyfed.engines.local import Steps, drive
from polyfed.engines.progress import Progress
from polyfed.errors import PolyfedError
from polyfed.studies.space import Space
from polyfed.train.together import Stack, Trainer

if TYPE_CHECKING:
    import optuna

PLACE, WHY = "place", "why"  # of a trial: its number among those that came to an end; its error
_STARTUP = 5  # trials before TPE and pruning have anything to go by
_WARM_UP = 1  # rounds before a trial can be pruned

Params = dict[str, Any]
Accuracies = dict[Name, float]
Begin = Callable[[Params, int, Progress], Steps[Accuracies]]  # a setting, a seed, who listens
Told = Callable[["optuna.trial.FrozenTrial"], None]


@dataclass
class _Trial:
    """A setting that is being tried."""

    asked: optuna.Trial
    runs: int
    at: dict[int, list[float]] = field(default_factory=dict)
    is_pruned: bool = False

    def hear(self, tick: int, mean: float, *, is_last: bool) -> None:
        """A run has come to the end of a round; the last of them decides."""
        means = self.at.setdefault(tick, [])
        means.append(mean)
        if len(means) == self.runs and not is_last:
            self.asked.report(min(means), tick)
            self.is_pruned = self.asked.should_prune()


class _Listener(Progress):
    """Passes the rounds of one run on to its trial."""

    def __init__(self, trial: _Trial) -> None:
        self._trial, self._rounds = trial, 0

    def begin(self, title: str, rounds: int) -> None:
        """Remember how many rounds there are."""
        self._rounds = rounds

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Report the mean over nodes."""
        if accuracies:
            mean = statistics.fmean(accuracies.values())
            self._trial.hear(tick, mean, is_last=tick == self._rounds)


def search(
    study: optuna.Study,
    space: Space,
    begin: Begin,
    *,
    trials: int,
    seeds: Sequence[int],
    together: int = 1,
    stack: Stack = "auto",
    is_late: Callable[[], bool] = lambda: False,
    told: Told = lambda trial: None,
) -> None:
    """Try settings until so many trials have come to an end, those of before included.

    Args:
        study: Optuna's.
        space: what to try.
        begin: makes the run of a setting.
        trials: how many in all.
        seeds: of the runs of each trial.
        together: trials that are asked at the same time.
        stack: train equal networks as one computation.
        is_late: whether to stop before the next trials are asked.
        told: hears of every trial that has come to an end.
    """
    _close_interrupted(study)
    while (done := len(ended(study))) < trials and not is_late():
        asked = _ask(study, space, range(done, min(done + together, trials)))
        begun: list[tuple[int, Steps[float | None]]] = []
        failed: dict[int, PolyfedError] = {}
        for i, trial in enumerate(asked):
            try:
                params = dict(trial.asked.params)
                runs = [begin(params, seed, _Listener(trial)) for seed in seeds]
                begun += [(i, _run(steps, trial)) for steps in runs]
            except PolyfedError as error:
                failed[i] = error
        worth: dict[int, list[float | None]] = {i: [] for i in range(len(asked))}
        finals = drive([steps for _, steps in begun], Trainer(stack)) if begun else []
        for (i, _), final in zip(begun, finals, strict=True):
            worth[i].append(final)
        for i, trial in enumerate(asked):
            told(_tell(study, trial, done + i, worth[i], failed.get(i)))


def ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials that came to an end, in order; interrupted ones are left out."""
    return [t for t in study.get_trials(deepcopy=False) if PLACE in t.user_attrs]


def quiet() -> None:
    """Let Optuna say nothing by itself."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)


def sampler(seed: int, place: int) -> optuna.samplers.BaseSampler:
    """What asks for the trial at a place: a function of the seed, the place and the past."""
    import optuna

    return optuna.samplers.TPESampler(
        seed=(seed * 1_000_003 + place) % 2**32, n_startup_trials=_STARTUP, constant_liar=True
    )


def pruner() -> optuna.pruners.BasePruner:
    """Ends a trial whose worst run is below the median of the trials before, at the same round."""
    import optuna

    return optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=_WARM_UP)


def _close_interrupted(study: optuna.Study) -> None:
    import optuna

    running = optuna.trial.TrialState.RUNNING
    for trial in study.get_trials(deepcopy=False, states=(running,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _ask(study: optuna.Study, space: Space, places: Iterator[int] | range) -> list[_Trial]:
    distributions = {name: dimension.distribution() for name, dimension in space.items()}
    asked = []
    for place in places:
        study.sampler = sampler(int(study.user_attrs["seed"]), place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fixed setting that is outside by rounding
            trial = study.ask(distributions)
        asked.append(_Trial(trial, int(study.user_attrs["runs"])))
    return asked


def _run(steps: Steps[Accuracies], trial: _Trial) -> Steps[float | None]:
    """A run; in the end the mean over nodes, or None if its trial was pruned."""
    done = None
    while not trial.is_pruned:
        try:
            work = next(steps) if done is None else steps.send(done)
        except StopIteration as end:
            return statistics.fmean(end.value.values())
        if not trial.is_pruned:
            done = yield work
    return None


def _tell(
    study: optuna.Study,
    trial: _Trial,
    place: int,
    finals: Sequence[float | None],
    failed: PolyfedError | None,
) -> optuna.trial.FrozenTrial:
    import optuna

    states = optuna.trial.TrialState
    values = [final for final in finals if final is not None]
    trial.asked.set_user_attr(PLACE, place)
    trial.asked.set_user_attr("by_run", values)
    if failed is not None:
        trial.asked.set_user_attr(WHY, str(failed))
        return study.tell(trial.asked, state=states.FAIL)
    if len(values) < trial.runs:
        return study.tell(trial.asked, state=states.PRUNED)
    return study.tell(trial.asked, min(values))

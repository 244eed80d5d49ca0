"""What a search came to: best settings, a table, what mattered; for people and as files."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polyfed import methods, tasks
from polyfed.engines.run import plain
from polyfed.engines.table import Text, count, render
from polyfed.errors import ConfigError
from polyfed.experiments import plot
from polyfed.record.files import write_text
from polyfed.studies.search import quiet
from polyfed.studies.space import Space

if TYPE_CHECKING:
    import optuna

BEST, TRIALS, SUMMARY, REPORT = "best.yaml", "trials.csv", "summary.json", "report.html"
_SHOWN = 10  # trials in a table
_FEWEST = 3  # complete trials to say what mattered


@dataclass(frozen=True)
class Tried:
    """A setting that was tried.

    Attributes:
        number: which trial of its step.
        state: complete, pruned, failed, or known from the step before.
        params: the setting.
        value: worst of its runs; of a pruned trial, at the round it came to; None if it failed.
        by_run: mean validation accuracy of each run.
        by_round: worst of the runs after each round.
        why: what went wrong.
    """

    number: int
    state: str
    params: Mapping[str, Any]
    value: float | None
    by_run: Sequence[float]
    by_round: Mapping[int, float]
    why: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all its runs came to their ends."""
        return self.state in ("complete", "known")


def tried(trial: optuna.trial.FrozenTrial) -> Tried:
    """The same from what Optuna keeps."""
    attrs, by_round = trial.user_attrs, dict(trial.intermediate_values)
    state = "known" if attrs.get("known") else trial.state.name.lower().replace("fail", "failed")
    last = by_round[max(by_round)] if by_round else None
    value = trial.value if state in ("complete", "known") else last
    return Tried(
        attrs["place"], state, trial.params, value, attrs["by_run"], by_round, attrs.get("why", "")
    )


@dataclass(frozen=True)
class Step:
    """One step of a search.

    Attributes:
        name: architecture or training.
        space: what was searched.
        base: what the options of all steps were where this one did not search them.
        trials: in order.
    """

    name: str
    space: Space
    base: Mapping[str, Any]
    trials: Sequence[Tried]

    @property
    def best(self) -> Tried:
        """The complete trial with the highest value; of equal ones the first."""
        complete = [t for t in self.trials if t.is_complete]
        if not complete:
            whys = list(dict.fromkeys(t.why for t in self.trials if t.why))
            more = f" The first error: {whys[0]}" if whys else ""
            raise ConfigError(f"no trial of the step '{self.name}' came to its end.{more}")
        return max(complete, key=lambda t: t.value or 0.0)

    def importance(self) -> dict[str, float]:
        """How much of the differences in value each option explains (fANOVA); sums to 1."""
        import optuna

        complete = [t for t in self.trials if t.is_complete]
        if len(complete) < _FEWEST or len({t.value for t in complete}) < 2:
            return {}
        quiet()
        study = optuna.create_study(direction="maximize")
        distributions = {name: d.distribution() for name, d in self.space.items()}
        for t in complete:
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(t.params), distributions=distributions, value=t.value
                )
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


@dataclass(frozen=True)
class Outcome:
    """A search, finished or not.

    Attributes:
        plan: what was searched, as `study.yaml` holds it.
        steps: architecture, training, or one of them.
        folder: where it is kept.
    """

    plan: Mapping[str, Any]
    steps: Sequence[Step]
    folder: Path

    @property
    def best(self) -> dict[str, Any]:
        """The searched options as they were in the best trial of the last step."""
        last = self.steps[-1]
        return {**last.base, **last.best.params}

    @property
    def value(self) -> float:
        """What that trial is worth: validation accuracy of the worst of its runs."""
        return float(self.steps[-1].best.value or 0.0)

    def config(self) -> dict[str, Any]:
        """The best settings as a configuration that `polyfed run` takes."""
        plan, best = self.plan, self.best
        task = tasks.load(plan["task"])
        its = {n: v for n, v in best.items() if n in plan["task_options"]}
        mine = {n: v for n, v in best.items() if n not in its}
        chosen = tasks.make(task.name, {**plan["task_options"], **its})
        method = methods.make(plan["method"], {**plan["options"], **mine}, chosen)
        settings = {k: v for k, v in plan["settings"].items() if k != "topology"}
        topology = plan["settings"].get("topology")
        return {
            "method": method.name,
            "options": plain(method),
            "task": task.name,
            "task_options": plain(chosen),
            **({"topology": topology} if topology else {}),
            "settings": {"seed": plan["seed"], **settings},
        }

    def table(self) -> Text:
        """The best trials of every step, what mattered, and the best settings."""
        return Text("\n\n".join(_step_table(s) for s in self.steps))

    def as_dict(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "folder": str(self.folder),
            "study": dict(self.plan),
            "value": self.value,
            "best": self.best,
            "steps": [
                {
                    "name": s.name,
                    "importance": s.importance(),
                    "trials": [vars(t) for t in s.trials],
                }
                for s in self.steps
            ],
        }


def line(step: str, trial: Tried, wanted: int) -> str:
    """A trial that has just ended, as one line."""
    worth = "-" if trial.value is None else f"{trial.value:.4f}"
    setting = ", ".join(f"{n}={figure(v)}" for n, v in trial.params.items())
    more = f" ({trial.why})" if trial.why else ""
    return f"{step} {trial.number + 1}/{wanted}: {worth} {trial.state}{more}  {setting}"


def figure(value: Any) -> str:
    """A value of a setting, short.

    >>> figure(0.00123456), figure(7), figure("adam")
    ('0.00123', '7', 'adam')
    """
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _step_table(step: Step) -> str:
    names = list(step.space)
    ranked = sorted(step.trials, key=lambda t: (not t.is_complete, -(t.value or 0.0)))
    rows = [
        [
            str(t.number + 1),
            "-" if t.value is None else f"{t.value:.4f}",
            f"{statistics.fmean(t.by_run):.4f}" if t.is_complete else "-",
            t.state,
            *(figure(t.params[n]) for n in names),
        ]
        for t in ranked[:_SHOWN]
    ]
    title = f"Step {step.name}: validation accuracy, {count(len(step.trials), 'trial')}"
    best = render(title, ["trial", "worst run", "mean", "state", *names], rows)
    parts = step.importance()
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    return best + (f"\nimportance: {shares}" if parts else "")


def write(outcome: Outcome) -> dict[str, Path]:
    """Write the files of a search into its folder; what they are and where."""
    folder = outcome.folder
    files = {"best": folder / BEST, "trials": folder / TRIALS, "summary": folder / SUMMARY}
    write_text(files["best"], yaml.safe_dump(outcome.config(), sort_keys=False))
    write_text(files["trials"], _csv(outcome))
    write_text(files["summary"], json.dumps(outcome.as_dict(), indent=2) + "\n")
    from polyfed.studies import page, picture  # they show what this module defines

    drawn = {step.name: folder / f"{step.name}.svg" for step in outcome.steps}
    if plot.is_available():
        for step in outcome.steps:
            picture.draw(step, drawn[step.name])
    files |= {name: path for name, path in drawn.items() if path.exists()}
    files["report"] = folder / REPORT
    write_text(files["report"], page.html(outcome, {n: p for n, p in drawn.items() if p.exists()}))
    return files


def _csv(outcome: Outcome) -> str:
    names = list(dict.fromkeys(n for s in outcome.steps for n in (*s.base, *s.space)))
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["step", "trial", "state", "value", *names])
    for step in outcome.steps:
        for t in step.trials:
            params = {**step.base, **t.params}
            value = "" if t.value is None else t.value
            rows.writerow([step.name, t.number + 1, t.state, value, *(params[n] for n in names)])
    return text.getvalue()

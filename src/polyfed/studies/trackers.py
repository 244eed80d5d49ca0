"""Trackers: what other people's boards show of a run, each a few lines behind one interface.

    on_start(config, folder)     before training: the settings
    on_round(tick, figures)      after every round: accuracy and losses, by node and in the mean
    on_end(accuracy)             after the last; empty if the run did not come to its end

Everything stays in the run's folder: TensorBoard's and MLflow's files, and Weights & Biases in its
offline mode (`wandb sync` uploads it, if somebody wants to). The packages are extras:
`pip install polyfed[track]`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyfed.core.method import Method
from polyfed.core.node import Name
from polyfed.engines.progress import Progress, suited
from polyfed.engines.run import Run, begin, finish_together
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.record.log import Log
from polyfed.tasks import Task


class Tracker:
    """Hears of one run; the base says nothing to anybody."""

    package = ""  # what must be installed

    def on_start(self, config: Mapping[str, Any], folder: Path) -> None:
        """A run with these settings begins; its folder."""

    def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
        """A round is over; what was measured in it."""

    def on_end(self, accuracy: Mapping[Name, float]) -> None:
        """The run is over: the final accuracy of every node, nothing if it was cut short."""


class TensorBoard(Tracker):
    """Events in FOLDER/tensorboard; see them with `tensorboard --logdir FOLDER`."""

    package = "tensorboard"

    def on_start(self, config: Mapping[str, Any], folder: Path) -> None:
        """Open the events file and write the settings as text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        text = "\n".join(f"    {name}: {value}" for name, value in flat(config).items())
        self._writer.add_text("config", text)

    def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
        """One scalar a figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, tick)

    def on_end(self, accuracy: Mapping[Name, float]) -> None:
        """Close the file."""
        for name, value in accuracy.items():
            self._writer.add_scalar(f"final/{name}", value)
        self._writer.close()


class MLflow(Tracker):
    """A run in FOLDER/mlruns; see it with `mlflow ui --backend-store-uri FOLDER/mlruns`."""

    package = "mlflow"

    def on_start(self, config: Mapping[str, Any], folder: Path) -> None:
        """Create the run and log the settings."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=(folder / "mlruns").resolve().as_uri())
        experiment = self._client.create_experiment("polyfed")
        self._run = self._client.create_run(experiment).info.run_id
        for name, value in flat(config).items():
            self._client.log_param(self._run, name, value)

    def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
        """One metric a figure."""
        for name, value in figures.items():
            self._client.log_metric(self._run, name, value, step=tick)

    def on_end(self, accuracy: Mapping[Name, float]) -> None:
        """End the run."""
        for name, value in accuracy.items():
            self._client.log_metric(self._run, f"final/{name}", value)
        self._client.set_terminated(self._run, "FINISHED" if accuracy else "FAILED")


class WandB(Tracker):
    """An offline run in FOLDER/wandb; upload it with `wandb sync FOLDER/wandb/offline-run-*`."""

    package = "wandb"

    def on_start(self, config: Mapping[str, Any], folder: Path) -> None:
        """Begin an offline run."""
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(
            project="polyfed", dir=str(folder), config=flat(config), mode="offline", settings=quiet
        )

    def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
        """One line of the history."""
        self._run.log(dict(figures), step=tick)

    def on_end(self, accuracy: Mapping[Name, float]) -> None:
        """Write the summary and finish."""
        self._run.summary.update({f"final/{name}": value for name, value in accuracy.items()})
        self._run.finish(exit_code=0 if accuracy else 1)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def trackers_of(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names, if their packages are here."""
    found = []
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS)
        if find_spec(TRACKERS[name].package) is None:
            raise ConfigError(
                f"tracker {name}: its package is missing. pip install polyfed[track]."
            )
        found.append(TRACKERS[name]())
    return found


def tracked_run(
    method: Method,
    task: Task,
    trackers: Sequence[Tracker],
    *,
    folder: Path,
    seed: int = 0,
    progress: bool | Progress | None = None,
    **settings: Any,
) -> Run:
    """`run` with trackers.

    Args:
        method: the method with its hyper-parameters.
        task: a ready-made task.
        trackers: who hears of it.
        folder: where to write the run, and what the trackers keep.
        seed: same seed, same numbers.
        progress: True, False, None for terminals only, or how to show it.
        settings: what `run` takes besides.
    """
    watch = _Watch(suited(progress), trackers)
    engine, point = begin(
        method,
        task,
        nodes=task.nodes(seed),
        seed=seed,
        folder=folder,
        progress=watch,
        moved={},
        **settings,
    )
    watch.metrics = engine.recorder.metrics
    accuracy: Mapping[Name, float] = {}
    for tracker in trackers:
        tracker.on_start(engine.config, folder)
    try:
        done = finish_together([(engine, point)])[0]
        accuracy = done.accuracy
    finally:
        for tracker in trackers:
            tracker.on_end(accuracy)
    return done


class _Watch(Progress):
    """Shows progress, and tells the trackers what each round brought."""

    def __init__(self, shown: Progress, trackers: Sequence[Tracker]) -> None:
        self._shown, self._trackers = shown, trackers
        self.metrics, self._told = Log(), 0

    def begin(self, title: str, rounds: int) -> None:
        """Pass it on."""
        self._shown.begin(title, rounds)

    def skip(self, rounds: int) -> None:
        """Pass it on."""
        self._shown.skip(rounds)

    def working(self, node: Name, phase: str) -> None:
        """Pass it on."""
        self._shown.working(node, phase)

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Tell what has been measured since the last round."""
        new, self._told = self.metrics.records[self._told :], len(self.metrics.records)
        figures = figures_of(new)
        if accuracies:
            figures["mean/test_accuracy"] = statistics.fmean(accuracies.values())
        for tracker in self._trackers:
            tracker.on_round(tick, figures)
        self._shown.round_done(tick, accuracies)

    def end(self) -> None:
        """Pass it on."""
        self._shown.end()


def figures_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of metrics by `node/name`; what belongs to no node is called `run/name`.

    >>> figures_of([{"tick": 1, "node": "M0", "local_loss": 0.5}, {"tick": 1, "seconds": 2.0}])
    {'M0/local_loss': 0.5, 'run/seconds': 2.0}
    """
    return {
        f"{record.get('node', 'run')}/{name}": float(value)
        for record in records
        for name, value in record.items()
        if name != "tick" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as one level of names.

    >>> flat({"method": "fedavg", "options": {"lr": 0.1, "batch": None}})
    {'method': 'fedavg', 'options.lr': 0.1, 'options.batch': 'None'}
    """
    found: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            is_plain = isinstance(value, (str, int, float, bool))
            found[f"{above}{name}"] = value if is_plain else str(value)
    return found

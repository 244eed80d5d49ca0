import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed import tasks
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.studies import trackers
from polyfed.studies.trackers import Tracker, tracked_run, trackers_of

TASK = tasks.digits(labels=3, representation=4)
METHOD = pf.FedAvg(rounds=2, batch=0.5, lr=1e-2, local_epochs=1)


class Notebook(Tracker):
    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def on_start(self, config: Mapping[str, Any], folder: Path) -> None:
        self.said.append(("start", config["method"]))

    def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
        self.said.append((f"round {tick}", dict(figures)))

    def on_end(self, accuracy: Mapping[str, float]) -> None:
        self.said.append(("end", dict(accuracy)))


def go(folder: Path, *given: Tracker, progress: Any = False) -> pf.Run:
    return tracked_run(METHOD, TASK, given, folder=folder, stack="never", progress=progress)


def test_what_a_tracker_hears(tmp_path: Path) -> None:
    notebook = Notebook()
    run = go(tmp_path / "run", notebook)
    assert [what for what, _ in notebook.said] == ["start", "round 0", "round 1", "round 2", "end"]
    assert notebook.said[-1][1] == run.accuracy
    last = notebook.said[3][1]
    assert last["mean/test_accuracy"] == run.mean_accuracy
    assert {f"{n}/test_accuracy" for n in run.accuracy} <= set(last)
    assert last["M0/local_loss"] > 0
    losses = [m["local_loss"] for m in run.metrics if m.get("node") == "M0" and "local_loss" in m]
    assert [notebook.said[i][1]["M0/local_loss"] for i in (2, 3)] == losses


def test_a_round_tells_only_what_is_new() -> None:
    notebook = Notebook()
    watch = trackers._Watch(Progress(), [notebook])
    watch.metrics.append({"tick": 0, "node": "M0", "init_loss": 1.0})
    watch.round_done(0, {"M0": 0.5})
    watch.metrics.append({"tick": 1, "node": "M0", "local_loss": 2.0})
    watch.round_done(1, {})
    assert notebook.said == [
        ("round 0", {"M0/init_loss": 1.0, "mean/test_accuracy": 0.5}),
        ("round 1", {"M0/local_loss": 2.0}),
    ]


def test_tracking_changes_nothing(tmp_path: Path) -> None:
    tracked = go(tmp_path / "a", Notebook())
    plain = pf.run(METHOD, TASK, folder=tmp_path / "b", stack="never")
    assert tracked.accuracy == plain.accuracy
    assert tracked.config == plain.config


def test_progress_is_still_shown(tmp_path: Path) -> None:
    class Shown(Progress):
        ticks: list[int] = []  # noqa: RUF012

        def round_done(self, tick: int, accuracies: Mapping[str, float]) -> None:
            self.ticks.append(tick)

    go(tmp_path / "run", Notebook(), progress=Shown())
    assert Shown.ticks == [0, 1, 2]


def test_a_run_that_is_cut_short_is_closed(tmp_path: Path) -> None:
    class Stops(Notebook):
        def on_round(self, tick: int, figures: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    stops = Stops()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", stops)
    assert stops.said[-1] == ("end", {})


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = go(tmp_path / "run", *trackers_of(["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    means = events.Scalars("mean/test_accuracy")
    assert [e.step for e in means] == [0, 1, 2]
    assert means[-1].value == pytest.approx(run.mean_accuracy)
    assert "M0/local_loss" in events.Tags()["scalars"]
    assert events.Scalars("final/M0")[0].value == pytest.approx(run.accuracy["M0"])


@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = go(tmp_path / "run", *trackers_of(["mlflow"]))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "polyfed"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["options.rounds"] == "2"
    assert found.data.metrics["mean/test_accuracy"] == pytest.approx(run.mean_accuracy)
    history = client.get_metric_history(found.info.run_id, "mean/test_accuracy")
    assert [m.step for m in history] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")  # its own
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    go(tmp_path / "run", *trackers_of(["wandb"]))
    wandb.teardown()  # as at the end of a process: its service writes behind our back until then
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    raw = kept.read_bytes()
    assert b"mean/test_accuracy" in raw
    assert b"final/M0" in raw


def test_names() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'tensorboard'"):
        trackers_of(["tensorbord"])


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install polyfed\[track\]"):
        trackers_of(["wandb"])


def test_flat_is_json() -> None:
    said = trackers.flat({"a": {"b": (1, 2)}, "c": None, "d": True})
    assert json.loads(json.dumps(said)) == {"a.b": "(1, 2)", "c": "None", "d": True}

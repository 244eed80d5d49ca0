"""All experiments one after the other: nothing stops the others, and nothing is passed over."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed import experiments
from polyfed.experiments import reproduce as reproducing
from polyfed.experiments import series
from polyfed.experiments.experiment import Cell, Experiment, Quick
from polyfed.experiments.results import Results
from polyfed.experiments.series import Attempt, absent, reproduce_all


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing.plot, "is_available", lambda: False)


@pytest.fixture
def files(table: Experiment) -> Experiment:
    """An experiment that needs files."""
    cells = [Cell(method="local", task="cifar10", series="files")]
    return replace(table, name="files", cells=cells, published={}, claims=(), quick=Quick(says="q"))


@pytest.fixture
def wrong(table: Experiment) -> Experiment:
    """One that the gate refuses."""
    cells = [Cell(method="fedavg", task="digits", task_options={"heads": "own"})]
    return replace(table, name="wrong", cells=cells, published={}, claims=())


def test_every_experiment_has_its_turn(
    tmp_path: Path, table: Experiment, files: Experiment, wrong: Experiment
) -> None:
    heard: list[Attempt] = []
    all_of_them = [wrong, files, table]
    found = reproduce_all(all_of_them, out=tmp_path, quick=True, shown=heard.append)
    assert found == heard
    assert [(a.experiment, a.state) for a in found] == [
        ("wrong", "failed"),
        ("files", "skipped"),
        ("tiny-table", "done"),
    ]
    assert found[0].why.startswith("fedavg averages whole networks")
    assert found[1].why.startswith("cifar10: task cifar10 reads published files: say where")
    assert found[2].verdicts == "undecided 1, differs 1"
    assert found[2].seconds > found[1].seconds == 0
    assert (tmp_path / "tiny-table-quick" / "summary.json").exists()


def test_a_mistake_of_ours_stops_nobody(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(experiment: Experiment, **settings: object) -> None:
        raise ZeroDivisionError("division\n by zero")

    monkeypatch.setattr(series, "reproduce", breaks)
    first, second = reproduce_all([table, replace(table, name="other")], out=tmp_path)
    assert (first.state, first.why) == ("failed", "ZeroDivisionError: division by zero")
    assert second.state == "failed"


def test_an_interruption_stops_all(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(experiment: Experiment, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(series, "reproduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce_all([table], out=tmp_path)


def test_what_is_finished_is_left_out(
    tmp_path: Path, table: Experiment, sweep: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"out": tmp_path, "quick": True, "seeds": [0]}
    (first,) = reproduce_all([table], **settings)
    called: list[str] = []
    real = series.reproduce

    def noted(experiment: Experiment, **more: Any) -> Results:
        called.append(experiment.name)
        return real(experiment, **more)

    monkeypatch.setattr(series, "reproduce", noted)
    again, new = reproduce_all([table, sweep], resume=True, **settings)
    assert (again.state, again.verdicts) == ("finished before", first.verdicts)
    assert (new.state, called) == ("done", ["tiny-sweep"])
    reproduce_all([table], **settings)
    assert called[1:] == ["tiny-table"]  # only --resume leaves it out
    paper, _ = reproduce_all([table, sweep], out=tmp_path, resume=True, seeds=[0], rounds=1)
    assert paper.state == "done"  # what is finished there is the quick one


def test_files_that_are_there(tmp_path: Path, files: Experiment, table: Experiment) -> None:
    assert absent(table, None) == {}
    assert "the data folder" in absent(files, tmp_path / "nowhere")["cifar10"]
    assert absent(files, tmp_path).keys() == {"cifar10"}


def test_what_there_are_files_for_is_run(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of three cells each lack their files; the page names them, and --resume tries."""
    more = [
        Cell(method=method, task=task, panel=f"on {task}", series=method)
        for task in ("svhn", "cifar10")
        for method in ("local", "fedper", "fedlinked")
    ]
    both = replace(table, cells=[*table.cells, *more])
    settings: Any = {"data": tmp_path, "out": tmp_path, "quick": True, "seeds": [0]}
    (found,) = reproduce_all([both], **settings)
    assert (found.state, found.verdicts) == ("done", "undecided 2")
    assert found.why.startswith("cifar10: CIFAR-10 was not found")
    assert "; svhn: SVHN" in found.why
    assert str(found).endswith(f" s; {found.verdicts}; {found.why})")
    folder = tmp_path / "tiny-table-quick"
    summary = json.loads((folder / "summary.json").read_text())
    assert [cell["task"] for cell in summary["cells"]] == ["digits", "digits"]
    page = (folder / "page.md").read_text()
    for task in ("cifar10", "svhn"):
        assert f"- not run, for want of files: {task} (on {task})\n" in page
    monkeypatch.setattr(experiments, "load", lambda name: both)
    (again,) = reproduce_all([both], resume=True, **settings)
    assert again.state == "done"
    asked: list[Any] = []

    def noted(experiment: Experiment, *, left_out: Any, **settings: Any) -> Results:
        asked.append(left_out)
        return Results(experiment, summary)

    monkeypatch.setattr(series, "reproduce", noted)
    monkeypatch.setattr(series, "absent", lambda *about: {})
    (whole,) = reproduce_all([both], resume=True, **settings)
    assert (whole.state, whole.why, asked) == ("done", "", [[]])


def test_the_table_tells_all() -> None:
    attempts = [
        Attempt("a", "done", 2.4, "holds 3"),
        Attempt("b", "skipped", why="cifar10: no files"),
        Attempt("c", "failed", 1.0, why="it broke"),
    ]
    text = str(series.table(attempts))
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "done", "2", "holds", "3"] in rows
    assert ["b", "skipped"] in rows
    assert "done 1, skipped 1, failed 1; 3 s\nb: cifar10: no files\nc: it broke" in text


def test_a_real_one(tmp_path: Path) -> None:
    """A cheap one of the papers' own, by its registered quick setting."""
    real = experiments.load("li-figure-7")
    (done,) = reproduce_all([real], out=tmp_path, quick=True, seeds=[0], rounds=1)
    assert (done.state, done.why) == ("done", "")
    assert "undecided" in done.verdicts


def test_every_quick_setting_says_what_it_scales() -> None:
    for experiment in experiments.every().values():
        assert isinstance(experiment.quick, Quick)
        assert experiment.quick.says
        assert 1 <= experiment.quick.seeds <= experiment.seeds
        cells = experiment.scaled(quick=True)
        assert experiment.changes(cells, experiment.quick.seeds, quick=True)

"""Running: nothing twice, nothing lost, nothing begun that cannot end."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed import Run
from polyfed.errors import ConfigError, DataError
from polyfed.experiments import reproduce as reproducing
from polyfed.experiments import runner
from polyfed.experiments.experiment import Cell, Experiment
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.results import Results
from polyfed.experiments.runner import COMMIT_VARIABLE, Batch, commit, run_batches, run_cells
from polyfed.record import Ledger, Log, checkpoint
from polyfed.record.recorder import read_config
from polyfed.tasks.embedded import Digits
from polyfed.train import columns


def read(out: Path, name: str = "tiny-table") -> Any:
    return json.loads((out / name / "summary.json").read_text())


def figures(summary: Any) -> list[Any]:
    return [(c["series"], c["x"], c["figures"], c["bytes_sent_per_node"]) for c in summary["cells"]]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing.plot, "is_available", lambda: False)


@pytest.fixture
def alone(table: Experiment) -> Experiment:
    """The first cell only."""
    return replace(table, cells=table.cells[:1], claims=())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The method and seed of every run that is begun or continued."""
    seen: list[tuple[str, int]] = []
    begin = runner.begin

    def noted(method: Any, *rest: Any, seed: int, **settings: Any) -> Any:
        seen.append((method.name, seed))
        return begin(method, *rest, seed=seed, **settings)

    monkeypatch.setattr(runner, "begin", noted)
    return seen


def test_runs_of_cells_and_seeds(tmp_path: Path, table: Experiment) -> None:
    found = run_cells(table.cells, [3, 1], tmp_path)
    assert [[r.method for r in each] for each in found] == [["local"] * 2, ["fedavg-trunk"] * 2]
    for each in found:
        assert [r.folder.name for r in each if r.folder] == ["seed-3", "seed-1"]
        assert [len(r.accuracy) for r in each] == [3, 3]
    method, task = table.cells[0].make()
    assert found[0][0].accuracy == pf.run(method, task, seed=3).accuracy
    assert found[0][1].accuracy == pf.run(method, task, seed=1).accuracy
    assert [read_config(r.folder)["settings"]["seed"] for r in found[1] if r.folder] == [3, 1]
    assert found[0][0].folder.parent.name.startswith("digits-local-")  # type: ignore[union-attr]


def test_equal_runs_of_several_experiments_are_one(
    tmp_path: Path, table: Experiment, begun: list[tuple[str, int]]
) -> None:
    first, second = Batch(table.cells, [3, 1]), Batch(table.cells[:1], [1, 2])
    found = run_batches([first, second], tmp_path)
    assert sorted(begun) == [
        ("fedavg-trunk", 1),
        ("fedavg-trunk", 3),
        ("local", 1),
        ("local", 2),
        ("local", 3),
    ]
    assert [[[r.folder.name for r in each] for each in cells] for cells in found] == [  # type: ignore[union-attr]
        [["seed-3", "seed-1"]] * 2,
        [["seed-1", "seed-2"]],
    ]
    run_batches([Batch(table.cells[:1], [1], evaluate_every=2)], tmp_path)
    assert begun[-1] == ("local", 1)  # another schedule is another run
    assert len(begun) == 6


def test_runs_in_step_come_to_the_same(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_step(jobs: Any, **_: Any) -> Any:
        yield list(jobs)

    alone = run_cells(table.cells, [3, 1], tmp_path / "alone")
    monkeypatch.setattr(runner, "_groups", in_step)
    together = run_cells(table.cells, [3, 1], tmp_path / "together")
    for one, other in zip(alone, together, strict=True):
        assert [r.accuracy for r in one] == [r.accuracy for r in other]
    kept = [p for p in (tmp_path / "together").rglob("checkpoints") if p.exists()]
    assert kept == []


def test_runs_whose_networks_are_not_stacked_go_alone(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm keeps statistics in the encoders; stacks are for small convolutions."""
    cells = [Cell(method="fedfoa", task="digits-encoders", series="encoders"), *table.cells]
    settings: dict[str, Any] = {"device": "cpu", "precision": "float32"}
    jobs = runner._jobs(Batch(cells, [0, 1]), tmp_path, None, settings)
    assert runner._check(jobs, settings) == set()
    narrow = settings | {"precision": "bfloat16"}
    assert runner._check(jobs, narrow) == {repr(jobs[0].task)}
    monkeypatch.setattr(columns, "_LIMIT", 0)
    apart = runner._check(jobs, settings)
    assert apart == {repr(jobs[0].task)}
    groups = list(runner._groups(jobs, most=3, apart=apart))
    assert [[job.label for job in group] for group in groups] == [
        [jobs[0].label],
        [jobs[0].label],
        [jobs[2].label, jobs[2].label, jobs[4].label],
        [jobs[4].label],
    ]
    assert list(runner._groups(jobs, most=6, apart=set())) == [jobs]


def test_runs_of_like_numbers_are_in_step_and_the_longest_come_first(tmp_path: Path) -> None:
    cells = [
        Cell(method="local", task="digits", options={"rounds": rounds, "lr": lr}, series="a")
        for lr in (0.1, 0.2)
        for rounds in (2, 30, 4)
    ]
    settings: dict[str, Any] = {"device": "cpu", "precision": "float32"}
    jobs = runner._jobs(Batch(cells, [0, 1]), tmp_path, None, settings)
    groups = list(runner._groups(jobs, most=4, apart=set()))
    assert [[(j.method.rounds, j.method.lr, j.seed) for j in group] for group in groups] == [
        [(rounds, lr, seed) for lr in (0.1, 0.2) for seed in (0, 1)] for rounds in (30, 4, 2)
    ]
    assert [g[0] for g in runner._groups(jobs, most=1, apart=set())] == jobs  # on a CPU as asked


@pytest.mark.parametrize(
    ("count", "device", "apart"), [(1, "cpu", 10.0), (1, "cuda:0", 60.0), (2, "cuda", 60.0)]
)
def test_how_often_a_run_is_kept(
    tmp_path: Path,
    table: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    device: str,
    apart: float,
) -> None:
    """Not every round, which may be short; seldom on a GPU, where hundreds may be in step."""
    settings: dict[str, Any] = {"device": device, "precision": "float32"}
    jobs = runner._jobs(Batch(table.cells[:1], [0, 1]), tmp_path, None, settings)[:count]
    seen: list[float] = []

    def noted(*_: Any, checkpoint_seconds: float, **__: Any) -> Any:
        seen.append(checkpoint_seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "begin", noted)
    with pytest.raises(KeyboardInterrupt):
        runner._run_group(jobs, None, settings)
    assert seen == [apart]


def test_processes_share_a_gpu(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def finished(begun: Any, share: float) -> Any:
        seen.append(share)
        for engine, _ in begun:
            engine.recorder.close()
        raise KeyboardInterrupt

    def one(pieces: Any, work: Any, count: int, shown: Any) -> None:
        work(pieces[0].what, shown)

    monkeypatch.setattr(runner, "finish_together", finished)
    monkeypatch.setattr(runner, "in_processes", one)
    for jobs in (1, 3, 9):  # there are four runs
        with pytest.raises(KeyboardInterrupt):
            run_cells(table.cells, [3, 1], tmp_path / str(jobs), jobs=jobs, progress=False)
    assert seen == [1, 1 / 3, 1 / 4]


def test_a_key_is_of_all_that_matters_and_of_nothing_else(tmp_path: Path) -> None:
    def key(
        device: str = "cpu",
        data: Path | None = None,
        precision: str = "float32",
        every: int = 1,
        **options: Any,
    ) -> str:
        made = Cell(method="local", task="cifar10", options=options).make(data)
        return runner._key(*made, every, {"device": device, "precision": precision})

    assert key() == key(data=tmp_path)
    assert key("cuda") == key("cuda:1") != key()
    assert key(lr=0.5) != key()
    assert len({key(), key(every=2), key(precision="bfloat16")}) == 3
    made = Cell(method="local", task="cifar10", task_options={"relu": True}).make()
    assert runner._key(*made, 1, {"device": "cpu", "precision": "float32"}) != key()
    assert "data" not in runner.options_of(made[1])


def test_bytes_and_seconds_are_of_their_seeds(alone: Experiment) -> None:
    def run_of(sent: int) -> Run:
        log = Log()
        log.append({"tick": 1, "source": "M0", "to": "hub", "bytes": sent, "tensors": []})
        accuracy = {"M0": 0.5, "M1": sent / 100}
        return Run("local", accuracy, [{"tick": 1, "seconds": sent / 10}], Ledger(log), [])

    entry = reproducing._entry(alone, alone.cells[0], [run_of(10), run_of(30)])
    assert entry["bytes_sent_per_node"] == [5, 15]
    assert entry["seconds"] == [1, 3]
    assert entry["figures"] == {"accuracy": [pytest.approx(0.3), pytest.approx(0.4)]}


def test_faults_are_of_their_seeds(alone: Experiment) -> None:
    def run_of(*faults: str) -> Run:
        told = [{"tick": 1, "node": "M0", "fault": fault} for fault in faults]
        return Run("local", {"M0": 0.5}, [{"tick": 1, "seconds": 1.0}], Ledger(Log()), told)

    entry = reproducing._entry(alone, alone.cells[0], [run_of(), run_of("training diverged")])
    assert entry["faults"] == [{}, {"training diverged": 1}]
    assert "faults" not in reproducing._entry(alone, alone.cells[0], [run_of()])


def test_the_summary_says_how_it_came_about(whole: Path) -> None:
    summary = read(whole)
    assert summary["command"] == "polyfed reproduce tiny-table --seeds 2 --device cpu"
    assert summary["commit"] == commit()
    assert summary["device"] == "cpu"
    assert summary["seeds"] == [0, 1]
    assert summary["environment"].keys() >= {"polyfed", "torch", "python", "platform"}
    assert (summary["quick"], summary["changed"]) == (False, [])
    alone, averaged = summary["cells"]
    assert (alone["method"], alone["options"]["rounds"], alone["task"]) == ("local", 2, "digits")
    assert "data" not in alone["task_options"]
    assert len(alone["seconds"]) == 2
    assert alone["bytes_sent_per_node"] == [0, 0]
    assert averaged["bytes_sent_per_node"][0] > 0


def test_figures_are_those_of_the_runs(whole: Path) -> None:
    alone = read(whole)["cells"][0]["figures"]["accuracy"]
    folder = next((whole / "runs").glob("digits-local-*"))
    runs = [Run.open(folder / f"seed-{s}") for s in (0, 1)]
    assert alone == [r.mean_accuracy for r in runs]
    assert alone[0] != alone[1]


def test_checkpoints_of_finished_runs_are_dropped(whole: Path) -> None:
    assert list((whole / "runs").glob("*/*/result.json"))
    assert list((whole / "runs").glob("*/*/checkpoints")) == []


@pytest.mark.parametrize("in_step", [False, True], ids=["alone", "in step"])
def test_an_interrupted_experiment_goes_on(
    tmp_path: Path,
    table: Experiment,
    whole: Path,
    begun: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    in_step: bool,
) -> None:
    """In step, some runs have come further than others."""
    save, saved = checkpoint.save, 0
    monkeypatch.setitem(runner._APART, True, 0.0)
    if in_step:
        monkeypatch.setattr(runner, "_groups", lambda jobs, **_: [list(jobs)])

    def dies(folder: Path, *args: Any) -> None:
        nonlocal saved
        save(folder, *args)
        saved += 1
        if saved == 5:  # three checkpoints a run: in the middle of the second
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            reproduce(table, out=tmp_path)
    assert not (tmp_path / "tiny-table").exists()
    assert len(list(tmp_path.glob("runs/*/*/result.json"))) == (0 if in_step else 1)
    kept = [len(list(p.iterdir())) for p in tmp_path.glob("runs/*/*/checkpoints")]
    assert sorted(kept) == ([1, 1, 1, 2] if in_step else [2])
    begun.clear()
    reproduce(table, out=tmp_path)
    every = [(method, seed) for method in ("local", "fedavg-trunk") for seed in (0, 1)]
    assert begun == (every if in_step else every[1:])
    assert figures(read(tmp_path)) == figures(read(whole))


def test_nothing_is_run_twice(
    tmp_path: Path, table: Experiment, whole: Path, begun: list[tuple[str, int]]
) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    reproduce(table, out=tmp_path)
    assert begun == []
    assert figures(read(tmp_path)) == figures(read(whole))
    reproduce(table, out=tmp_path, seeds=[0, 4])
    assert begun == [("local", 4), ("fedavg-trunk", 4)]
    assert read(tmp_path)["command"].endswith("--seeds 0,4 --device cpu")
    begun.clear()
    other = replace(table, name="other", cells=[replace(c, panel="P") for c in table.cells],
                    published={}, claims=())  # fmt: skip
    reproduce(other, out=tmp_path)
    assert begun == []  # equal settings share their runs


def test_other_settings_are_other_runs(
    tmp_path: Path, alone: Experiment, begun: list[tuple[str, int]]
) -> None:
    for experiment in (alone, replace(alone, evaluate_every=2), replace(alone, seeds=1)):
        reproduce(experiment, out=tmp_path, seeds=[0], rounds=1)
    assert len(begun) == 2


def test_equal_cells_are_run_once(
    tmp_path: Path, table: Experiment, begun: list[tuple[str, int]]
) -> None:
    cells = [replace(table.cells[0], series=s) for s in ("a", "b")]
    first, second = run_cells(cells, [0], tmp_path)
    assert len(begun) == 1
    assert first[0].accuracy == second[0].accuracy


def test_quick_has_its_own_place(tmp_path: Path, alone: Experiment) -> None:
    reproduce(alone, out=tmp_path, quick=True, seeds=[2])
    summary = read(tmp_path, "tiny-table-quick")
    assert summary["quick"]
    assert summary["changed"][:2] == ["labels: 5 a digit", "seeds: 2 → 1"]
    assert summary["command"] == "polyfed reproduce tiny-table --quick --seeds 2, --device cpu"
    assert [c["options"]["rounds"] for c in summary["cells"]] == [1]
    assert not (tmp_path / "tiny-table").exists()


def test_rounds(tmp_path: Path, alone: Experiment) -> None:
    reproduce(alone, out=tmp_path, rounds=1, seeds=[0])
    summary = read(tmp_path)
    assert summary["command"] == "polyfed reproduce tiny-table --seeds 1 --rounds 1 --device cpu"
    assert "local on digits: rounds 2 → 1" in summary["changed"]


def test_runs_of_several_commits_are_all_named(
    tmp_path: Path, alone: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "aaaaaaa")
    reproduce(alone, out=tmp_path, seeds=[0])
    monkeypatch.setattr(runner, "commit", lambda: "bbbbbbb")
    reproduce(alone, out=tmp_path, seeds=[0, 1])
    assert read(tmp_path)["commit"] == "aaaaaaa and bbbbbbb"
    for origin in tmp_path.glob("runs/*/*/origin.json"):
        origin.unlink()  # killed between the end of a run and its note
    reproduce(alone, out=tmp_path, seeds=[0, 1])
    assert (read(tmp_path)["commit"], read(tmp_path)["device"]) == ("unknown", "cpu")


def test_a_part_of_a_published_set_is_a_change(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.setattr(Digits, "shortfall", lambda task: "12 of 60 digits")
        reproduce(table, out=tmp_path, seeds=[0, 1])
    for origin in tmp_path.glob("runs/*/*/origin.json"):
        origin.unlink()  # killed between the end of a run and its note
    reproduce(table, out=tmp_path, seeds=[0, 1])  # finished runs are read, not their files
    summary = read(tmp_path)
    assert summary["changed"] == ["task digits: 12 of 60 digits"]
    assert [cell["shortfall"] for cell in summary["cells"]] == ["12 of 60 digits"] * 2
    page = (tmp_path / "tiny-table" / "page.md").read_text()
    assert "Changed from the paper's setting:\n\n- task digits: 12 of 60 digits\n" in page
    assert Results.read(tmp_path / "tiny-table" / "summary.json").state.startswith("partly (task")


# ---- the gate ------------------------------------------------------------------------------------


def test_all_cells_are_checked_before_the_first_trains(
    tmp_path: Path, table: Experiment, begun: list[tuple[str, int]]
) -> None:
    own = Cell(method="fedavg", task="digits", task_options={"heads": "own"}, series="whole")
    wrong = replace(table, cells=[*table.cells, own])
    with pytest.raises(ConfigError, match="fedavg averages whole networks"):
        reproduce(wrong, out=tmp_path)
    assert begun == []
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_said_before_the_first_trains(
    tmp_path: Path, table: Experiment, begun: list[tuple[str, int]]
) -> None:
    files = Cell(method="local", task="cifar10", series="files")
    needs = replace(table, cells=[*table.cells, files])
    with pytest.raises(DataError, match="task cifar10 reads published files: say where"):
        reproduce(needs, out=tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        reproduce(needs, out=tmp_path, data=tmp_path / "nowhere")
    assert begun == []


def test_finished_runs_need_no_data(
    tmp_path: Path, table: Experiment, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")

    def gone(task: Any, seed: int) -> Any:
        raise DataError("the files are gone")

    monkeypatch.setattr("polyfed.tasks.embedded.Digits.nodes", gone)
    reproduce(table, out=tmp_path)
    assert figures(read(tmp_path)) == figures(read(whole))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rounds": 0}, "rounds must be >= 1, or a share of the paper's, got 0"),
        ({"seeds": []}, "name at least one, and none twice"),
        ({"seeds": [1, 1]}, "name at least one, and none twice"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_settings(tmp_path: Path, table: Experiment, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        reproduce(table, out=tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


# ---- commit --------------------------------------------------------------------------------------


def test_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def said(command: Sequence[str]) -> str:
        asked.append(command)
        return "" if "ls-files" in command else "abc1234"

    monkeypatch.setattr(runner, "_said", said)
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert commit() == "unknown"  # a repository around an installed polyfed is not its own
    assert len(asked) == 1
    monkeypatch.setenv(COMMIT_VARIABLE, "def5678")
    assert commit() == "def5678"
    monkeypatch.setattr(runner, "_said", lambda command: "abc1234")
    assert commit() == "def5678"  # whoever copied the files knows better
    monkeypatch.delenv(COMMIT_VARIABLE)
    assert commit() == "abc1234"


def test_without_git() -> None:
    assert runner._said(["no-such-program-anywhere"]) == ""
    assert runner._said(["git", "no-such-command"]) == ""


def test_a_page_without_a_plot(tmp_path: Path, whole: Path) -> None:
    results = Results.read(whole / "tiny-table" / "summary.json")
    reproducing.write(results, tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["page.md", "summary.json"]

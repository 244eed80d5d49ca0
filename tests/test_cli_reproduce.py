import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from polyfed import cli, experiments
from polyfed.experiments import plot, runner, series
from polyfed.experiments.experiment import Cell, Claim, Experiment, Quick, Ref
from polyfed.record import checkpoint
from polyfed.studies import wins

OPTIONS = {"rounds": 2, "init_epochs": 0, "local_epochs": 1, "finetune_epochs": 1}


def cell(series: str, method: str, task: str = "digits") -> Cell:
    known = {k: v for k, v in OPTIONS.items() if method != "local" or k != "finetune_epochs"}
    return Cell(method=method, task=task, series=series, options=known)


TINY = Experiment(
    name="tiny-table",
    title="Averaging and separated learning",
    paper="Nobody 2026, Table 1",
    cells=[cell("alone", "local"), cell("averaged", "fedavg-trunk")],
    quick=Quick(says="images: fewer", seeds=1, options={"rounds": 1}),
    published={Ref("alone"): "0.50 ± 0.02"},
    claims=[Claim(Ref("averaged"), ">", Ref("alone"))],
    seeds=2,
)
FILES = Experiment(
    name="files-table",
    title="Needs files",
    paper="Nobody 2026, Table 2",
    cells=[cell("alone", "local", "cifar10")],
    quick=Quick(says="q"),
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("polyfed.experiments.tiny")
    module.EXPERIMENTS = [TINY, FILES]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(experiments, "FAMILIES", ("tiny",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(plot, "is_available", lambda: False)


def call(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(args), prog_name="polyfed")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def fails(*args: str) -> str:
    result = call(*args, code=2)
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_help() -> None:
    listed = call("--help").stdout
    for command in ("reproduce", "experiments", "contests"):
        assert command in listed
        assert "Example: polyfed" in call(command, "--help").stdout


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from polyfed import cli
try:
    cli.app(["reproduce", "--help"], prog_name="polyfed")
except SystemExit as done:
    assert not done.code, done.code
sys.exit(", ".join(sorted({"torch", "numpy", "matplotlib", "polyfed.core"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_options_are_frozen() -> None:
    """A change here is a change of what people type: say so in the news."""
    text = call("reproduce", "--help").stdout
    options = ["all", "data", "quick", "seeds", "rounds", "with", "resume", "device", "out", "json"]
    for name in [*options, "[no-]progress"]:
        assert f"--{name} " in text


def test_reproduce_prints_tables_verdicts_and_paths() -> None:
    text = call("reproduce", "tiny-table", "--quick").stdout
    assert "Ours beside the paper's numbers" in text
    assert "averaged above alone  undecided" in text
    assert "- images: fewer\n- seeds: 2 → 1\n- local on digits: rounds 2 → 1" in text
    assert "tiny-table: partly; undecided 2." in text
    assert "its figures and verdicts mean nothing" in text
    *_, page, summary, no_plot = text.splitlines()
    assert page == "page: results/tiny-table-quick/page.md"
    assert summary == "summary: results/tiny-table-quick/summary.json"
    assert no_plot == "no plot: pip install polyfed[plots], then run it again"
    assert Path("results/tiny-table-quick/page.md").exists()
    assert len(list(Path("results/runs").glob("*/seed-0/result.json"))) == 2


def test_reproduce_as_json_with_a_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "is_available", lambda: True)
    args = ("--seeds", "3,", "--rounds", "1", "--out", "here", "--device", "cpu", "--json")
    said = json.loads(call("reproduce", "tiny-table", *args).stdout)
    assert (said["experiment"], said["seeds"]) == ("tiny-table", [3])
    assert said["state"].startswith("partly (seeds: 2 → 1; local on digits: rounds 2 → 1")
    assert [n["figure"] for n in said["numbers"]] == ["alone"]
    assert [o["word"] for o in said["orderings"]] == ["undecided"]
    assert said["files"] == {
        "page": "here/tiny-table/page.md",
        "summary": "here/tiny-table/summary.json",
        "plot": "here/tiny-table/plot.svg",
        "picture": "here/tiny-table/plot.png",
    }
    assert all(Path(path).stat().st_size for path in said["files"].values())


def test_another_reading_of_the_paper() -> None:
    args = ("tiny-table", "--rounds", "1", "--seeds", "1", "--with", "lr=0.5", "--with", "labels=5")
    text = call("reproduce", *args).stdout
    assert re.search(r"lr [\d.e-]+ → 0\.5", text)
    assert "task digits: labels 15 → 5" in text
    folder = Path("results/tiny-table-labels=5-lr=0.5")
    command = json.loads((folder / "summary.json").read_text())["command"]
    assert "--rounds 1 --with lr=0.5 --with labels=5 --device cpu" in command
    assert not Path("results/tiny-table").exists()  # the paper's setting has its own place


def test_progress_says_which_run_of_how_many() -> None:
    shown = call("reproduce", "tiny-table", "--quick", "--progress").stderr
    assert "1/2 alone seed 0  round 1/1" in shown
    assert "2/2 averaged seed 0  round 1/1" in shown


def test_interrupted_and_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint.save

    def dies(folder: Path, *args: Any) -> None:
        save(folder, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dies)
        patch.setitem(runner._APART, True, 0.0)
        result = call("reproduce", "tiny-table", "--quick", code=130)
    assert result.stderr == "interrupted; the same command goes on from here\n"
    assert "partly" in call("reproduce", "tiny-table", "--quick").stdout


def test_runs_of_another_commit_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "aaaaaaa")
    assert call("reproduce", "tiny-table", "--quick").stderr == ""
    monkeypatch.setattr(runner, "commit", lambda: "bbbbbbb")
    noted = call("reproduce", "tiny-table", "--quick").stderr
    assert "runs by commit aaaaaaa were kept, this is bbbbbbb" in noted


# ---- all of them ---------------------------------------------------------------------------------


def test_all() -> None:
    result = call("reproduce", "--all", "--quick")
    assert result.stderr.splitlines()[0].startswith("tiny-table: done (")
    skipped = "files-table: skipped (cifar10: task cifar10 reads published files: say where"
    assert result.stderr.splitlines()[1].startswith(skipped)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert any(row[:2] == ["tiny-table", "done"] and row[3:] == ["undecided", "2"] for row in rows)
    assert ["files-table", "skipped"] in rows
    assert "done 1, skipped 1; " in result.stdout
    assert Path("results/tiny-table-quick/page.md").exists()
    again = json.loads(call("reproduce", "--all", "--quick", "--resume", "--json").stdout)
    assert [each["state"] for each in again] == ["finished before", "skipped"]


def test_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(experiment: Experiment, **settings: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(series, "reproduce", breaks)
    result = call("reproduce", "--all", "--quick", code=1)
    assert "tiny-table: failed (OSError: the disk is full)" in result.stderr
    assert "failed 1, skipped 1" in result.stdout


def test_all_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(experiment: Experiment, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(series, "reproduce", interrupted)
    result = call("reproduce", "--all", "--quick", code=130)
    assert result.stderr == "interrupted; the same command goes on from here\n"


def test_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {}
    monkeypatch.setattr(wins, "hold", lambda out, **settings: held.update(out=out, **settings))
    call("contests", "no-skew", "--trials", "2", "--seeds", "3", "--out", "here")
    assert (held["out"], held["trials"], held["seeds"]) == (Path("here"), 2, 3)
    assert [contest.name for contest in held["contests"]] == ["no-skew"]
    call("contests")
    assert len(held["contests"]) > 1
    assert "unknown contest 'no-skwe'. Did you mean 'no-skew'?" in fails("contests", "no-skwe")

    def interrupted(out: Path, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wins, "hold", interrupted)
    assert "goes on from here" in call("contests", code=130).stderr


def test_pages_of_contests() -> None:
    source = Path(__file__).parents[1] / "docs" / "results" / wins.SUMMARY
    Path(wins.SUMMARY).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    assert "which_wins.md" in call("experiments", "--out", ".", "--pages").stderr
    assert Path("which_wins.md").read_text("utf-8").startswith("# When does which method win?")


def test_list() -> None:
    text = call("experiments").stdout
    assert "tiny-table" in text
    assert "not run" in text
    said = json.loads(call("experiments", "--json").stdout)
    assert said[1] == {
        "name": "files-table",
        "paper": "Nobody 2026, Table 2",
        "what_it_shows": "Needs files",
        "data": ["cifar10"],
        "state": "not run",
    }
    call("reproduce", "tiny-table", "--rounds", "1", "--seeds", "1", "--out", "here")
    state = json.loads(call("experiments", "--out", "here", "--json").stdout)[0]["state"]
    assert state.startswith("partly (seeds: 2 → 1")
    text = call("experiments", "--out", "here").stdout
    assert "partly" in text
    assert "(seeds: 2 → 1" in text
    assert "In here." in text


def test_a_checkout_lists_what_came_out_there_until_there_are_results_of_ones_own() -> None:
    short = ("--rounds", "1", "--seeds", "1")
    call("reproduce", "tiny-table", *short, "--out", "docs/results")
    text = call("experiments").stdout
    assert "partly" in text
    assert "In docs/results." in text
    Path("results").mkdir()
    text = call("experiments").stdout
    assert "partly" not in text
    assert "In results." in text


def test_several_are_run_as_one_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    again = replace(TINY, name="tiny-figure")
    monkeypatch.setattr(sys.modules["polyfed.experiments.tiny"], "EXPERIMENTS", [TINY, again])
    short = ("--rounds", "1", "--seeds", "1", "--out", "here")
    said = call("reproduce", "tiny-table", "tiny-figure", *short).stdout
    assert said.count("summary: here") == 2
    assert len(list(Path("here/runs").glob("*/seed-0"))) == 2
    told = json.loads(call("reproduce", "tiny-table", "tiny-figure", "--json", *short).stdout)
    assert [each["experiment"] for each in told] == ["tiny-table", "tiny-figure"]


def test_a_share_of_the_rounds_is_said() -> None:
    call("reproduce", "tiny-table", "--rounds", "50%", "--seeds", "1", "--out", "here")
    summary = json.loads(Path("here/tiny-table/summary.json").read_text())
    assert " --rounds 50% " in summary["command"]
    assert {cell["options"]["rounds"] for cell in summary["cells"]} == {1}


def test_another_precision_is_another_run_and_said() -> None:
    short = ("--rounds", "1", "--seeds", "1", "--out", "here")
    call("reproduce", "tiny-table", *short)
    call("reproduce", "tiny-table", "--precision", "bfloat16", *short)
    assert len(list(Path("here/runs").glob("*/seed-0"))) == 4
    summary = json.loads(Path("here/tiny-table/summary.json").read_text())
    assert summary["command"].endswith("--device cpu --precision bfloat16")
    assert "networks compute in bfloat16" in summary["changed"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["tiny-tabel"], "unknown experiment 'tiny-tabel'. Did you mean 'tiny-table'?"),
        (["files-table"], "task cifar10 reads published files: say where they are with --data DIR"),
        (["files-table", "--data", "nowhere"], "the data folder nowhere does not exist"),
        (["tiny-table", "--seeds", "many"], "seeds many: say how many (5), or which (3,7,9)"),
        (["tiny-table", "--seeds", "0"], "seeds: name at least one, and none twice"),
        (["tiny-table", "--rounds", "0"], "rounds must be >= 1, or a share of the paper's, got 0"),
        (["tiny-table", "--rounds", "101%"], "or a share of the paper's, got 1.01"),
        (["tiny-table", "--rounds", "few"], "--rounds few: write 20, or 20% for a share of them"),
        (["tiny-table", "--jobs", "0"], "jobs must be >= 1, got 0"),
        (["tiny-table", "--device", "gpu"], "unknown device 'gpu'"),
        ([], "reproduce: name an experiment (see: polyfed experiments), or --all"),
        (["tiny-table", "--all"], "reproduce: name an experiment"),
        (["--all", "--only", "alone"], "--only chooses cells of one experiment"),
        (["tiny-table", "files-table", "--only", "a"], "--only chooses cells of one experiment"),
        (["--all", "--with", "lr=1"], "--with reads one experiment in another way"),
        (["tiny-table", "--with", "lrr=1"], "lrr=1: no method and no task of tiny-table has that"),
        (["tiny-table", "--with", "lr"], "--with lr: write OPTION=VALUE"),
        (["tiny-table", "--with", "=1"], "--with =1: write OPTION=VALUE"),
        (["tiny-table", "--with", "lr=1,2"], "lr: '1,2' does not fit"),
        (["tiny-table", "--resume"], "--resume belongs to --all"),
        (["tiny-table", "--qick"], "unknown option of polyfed reproduce 'qick'"),
    ],
)
def test_errors(args: list[str], text: str) -> None:
    assert text in fails("reproduce", *args)
    assert not Path("results").exists()

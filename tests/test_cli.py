import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed import __version__, cli
from polyfed.cli import commands, dynamic
from polyfed.errors import RunError
from polyfed.methods import METHODS
from polyfed.methods.fedavg import FedAvg
from polyfed.record.recorder import read_config
from polyfed.tasks import TASKS
from polyfed.topologies import TOPOLOGIES
from typed import call

TINY = ("--rounds", "2", "--init-epochs", "1", "--local-epochs", "1")
LINKED = ("fedlinked", *TINY, "--distil-epochs", "1", "--finetune-epochs", "1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def as_json(*args: str) -> Any:
    return json.loads(call(*args, "--json").stdout)


def fails(*args: str) -> str:
    result = call(*args, code=2)
    assert result.stdout == ""
    return " ".join(result.stderr.replace("│", " ").split())


def results(folder: Path) -> dict[str, bytes]:
    names = ("ledger.jsonl", "faults.jsonl", "result.json")
    return {name: (folder / name).read_bytes() for name in names}


def metrics(folder: Path) -> list[Mapping[str, Any]]:
    """Everything measured except wall-clock time."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "seconds" not in line]


# ---- help ----------------------------------------------------------------------------------------


QUICKLY = (
    "--help", "--version", "run --help", "methods", "tasks", "topologies", "run fedlinkd",
    "compare FedAvg", "methods fedlinkd", "tasks digts", "run local --task digts",
)  # fmt: skip


@pytest.mark.parametrize("line", QUICKLY)
def test_help_lists_and_misspelt_names_import_nothing_heavy(line: str) -> None:
    wanted = 2 if re.search("fedlinkd|FedAvg|digts", line) else 0
    code = f"""
import sys
from polyfed import cli
try:
    cli.app({line.split()!r}, prog_name="polyfed")
except SystemExit as done:
    assert (done.code or 0) == {wanted}, done.code
heavy = {{"torch", "numpy", "sklearn", "polyfed.core"}}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_s_idle_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all cores are busy, threads that spin while they wait take hundredfold as long."""
    found: dict[str, str] = {}
    monkeypatch.setattr(commands, "app", lambda **_: found.update(os.environ))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    commands.main()
    assert found["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    commands.main()
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"


def test_version() -> None:
    assert call("--version").stdout == f"polyfed {__version__}\n"


def test_every_command_teaches_by_an_example() -> None:
    listed = call("--help").stdout
    commands = ["run", "compare", "resume", "show", "methods", "tasks", "topologies"]
    for command in commands:
        assert command in listed
        assert "Example: polyfed" in call(command, "--help").stdout


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a paragraph that is too long is wrapped, and the next one begins in its middle."""
    for command in commands.typer.main.get_command(cli.app).commands.values():  # type: ignore[attr-defined]
        for paragraph in (command.help or "").split("\n\n")[1:]:
            *lines, _ = paragraph.split("\n")
            assert max(map(len, lines), default=0) <= 78, command.name


def test_help_without_a_method_says_how_to_see_its_options() -> None:
    text = call("run", "--help").stdout
    assert "polyfed run fedlinked --task digits --help" in text
    for option in ("--rounds", "--data", "--[no-]quick", "--seed", "--folder", "--evaluate-every"):
        assert option in text
    assert "--distil-epochs" not in text


def test_help_shows_the_defaults_that_the_task_sets() -> None:
    text = " ".join(call("run", "fedlinked", "--help").stdout.split())
    assert "Method fedlinked" in text
    assert "Task digits" in text
    assert "learning rate [default: 0.003]" in text  # its class says 0.0002
    assert "--[no-]transform" in text
    cifar = " ".join(call("run", "fedlinked", "--task", "cifar10", "--help").stdout.split())
    assert "learning rate [default: 0.0002]" in cifar


def test_help_lists_the_choices_of_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = call("run", "fedavg", "--task", "mnist", "--help").stdout
    assert "own|cnn|resnet18" in text
    assert "sgd|adam|adamw" in text


def fixed_flags(command: str) -> list[str]:
    found = commands.typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    return [p.opts[0] for p in found.params if p.param_type_name == "option"]


def test_options_of_run_fedlinked_are_frozen() -> None:
    """A change here is a change of what people type: say so in the news."""
    fixed = "task seed topology device evaluate-every stack precision fail track"
    fixed += " folder json progress"
    own = (
        "rounds batch lr optimiser momentum weight-decay guard eta init-epochs distil-epochs "
        "finetune-epochs local-epochs transform normalise normalise-rows strength "
        "secret-rotation patience rollback init quick labels heads representation"
    )
    assert fixed_flags("run") == [f"--{name}" for name in fixed.split()]
    found = dynamic.options_for(["fedlinked"], "digits")
    assert [dynamic.flag(option) for option in found] == [f"--{name}" for name in own.split()]
    assert all(option.help for option in found)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_no_option_has_two_meanings(method: str, task: str) -> None:
    flags = [dynamic.flag(option) for option in dynamic.options_for([method], task)]
    for command in ("run", "compare"):
        every = [*flags, *fixed_flags(command)]
        assert len(set(every)) == len(every)
    call("run", method, "--task", task, "--help")


# ---- run -----------------------------------------------------------------------------------------


def test_run_as_json_is_what_the_folder_holds() -> None:
    said = as_json("run", *LINKED, "--seed", "3", "--folder", "here")
    assert list(said) == [
        "method",
        "task",
        "seed",
        "accuracy",
        "mean_accuracy",
        "bytes_sent",
        "seconds",
        "faults",
        "folder",
    ]
    assert (said["method"], said["task"], said["seed"]) == ("fedlinked", "digits", 3)
    assert said["folder"] == "here"
    assert said["accuracy"] == json.loads(Path("here/result.json").read_text())["accuracy"]
    assert said["mean_accuracy"] == pytest.approx(sum(said["accuracy"].values()) / 3)
    public = 1797 // 2 - 1  # half of each digit, rounded down
    ledger = [json.loads(line) for line in Path("here/ledger.jsonl").read_text().splitlines()]
    assert said["bytes_sent"]["M0"] == sum(r["bytes"] for r in ledger if r["source"] == "M0")
    assert said["bytes_sent"]["M0"] == pytest.approx(2 * public * 32 * 4, rel=0.01)


def test_run_prints_tables_and_the_folder() -> None:
    text = call("run", *LINKED).stdout
    folder = Path(text.splitlines()[-1].removeprefix("run folder: "))
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-fedlinked-digits-s0")
    assert (folder / "result.json").exists()
    assert text.startswith("fedlinked on digits, seed 0: 3 nodes, 2 rounds in ")
    assert "test accuracy" in text
    assert "receiver     M0     M1     M2" in text


def test_quick_figures_are_marked() -> None:
    said = "--quick only shows the way; its figures mean nothing."
    assert call("run", "local", "--quick", *TINY, "--folder", "one").stdout.count(said) == 1
    assert call("show", "one").stdout.count(said) == 1
    call("compare", "local", "--quick", *TINY, "--seeds", "1", "--folder", "two")
    for style in ((), ("--latex",), ("--markdown",)):
        assert call("show", "two", *style).stdout.count(said) == 1
    assert said not in call("run", "local", *TINY).stdout
    for folder in ("one", "two"):
        assert json.dumps(said) in Path(folder, "report.html").read_text()
    assert "mean nothing" not in call("run", "local", *TINY).stdout


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "polyfed", "--version"], capture_output=True)
    assert done.stdout.decode() == f"polyfed {__version__}\n"


def test_same_seed_same_json() -> None:
    first, second = (as_json("run", *LINKED, "--seed", "1") for _ in range(2))
    assert first["folder"] != second["folder"]
    assert first["accuracy"] == second["accuracy"]


def test_what_is_typed_reaches_method_and_task() -> None:
    as_json(
        *("run", *LINKED, "--folder", "here", "--no-transform", "--eta=2", "--optimiser", "sgd"),
        *("--labels", "4", "--heads", "own"),
    )
    config = as_json("show", "here")["config"]
    assert config["options"]["transform"] is False
    assert config["options"]["eta"] == 2.0
    assert config["options"]["optimiser"] == "sgd"
    assert config["options"]["lr"] == 3e-3, "the task's recipe"
    assert config["options"]["weight_decay"] == 0, "the method's default"
    assert config["task_options"]["labels"] == 4
    assert config["task_options"]["heads"] == "own"


WITH_HUB = ("--task", "digits-encoders", "--hub")
ELSEWHERE = {"feddf": WITH_HUB, "feddf-ssl": WITH_HUB}


@pytest.mark.parametrize("method", METHODS)
def test_quick_runs_every_method(method: str) -> None:
    said = as_json("run", "--quick", method, "--rounds", "1", *ELSEWHERE.get(method, ()))
    assert [name[:2] for name in said["accuracy"]][:3] == ["M0", "M1", "M2"]
    assert said["faults"] == 0


@pytest.mark.parametrize(
    "line",
    [
        ("run", "fedul-m1", "--task", "digits", "--rounds", "1", "--no-iid"),
        ("run", "fedul-m1", "--rounds", "1", "--task=digits", "--no-iid"),
        ("run", "fedul-m1", "--no-iid", "--rounds", "1"),
        ("run", "fedul-m1", "--task", "digits-sets", "--rounds", "1", "--no-iid"),
    ],
)
def test_methods_with_a_task_of_their_own_take_it(line: tuple[str, ...]) -> None:
    result = call(*line, "--json")
    said = "fedul-m1 has a task for digits: digits-sets." if "digits-sets" not in line else ""
    assert said in result.stderr
    assert ("has a task" in result.stderr) == bool(said)
    config = read_config(Path(json.loads(result.stdout)["folder"]))
    assert config["task"] == "digits-sets"
    assert config["task_options"]["iid"] is False


def test_only_if_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "compare", "fedul", "fedul-m2", "--rounds", "1", "--seeds", "1", "--folder", "f"
    assert "fedul, fedul-m2 have a task for digits: digits-sets." in call(*both).stderr
    assert "node M0 knows no sets" in fails("compare", "fedul", "fedavg", "--rounds", "1")
    assert "fedul has a task for mnist: mnist-sets." in fails("run", "fedul", "--task", "mnist")
    monkeypatch.setattr(FedAvg, "own_tasks", {"digits": "heart"})
    said = fails("compare", "fedul", "fedavg", "--rounds", "1")
    assert "have a task" not in said
    assert "node M0 knows no sets" in said


def test_default_folders_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.time, "strftime", lambda _: "now")
    folders = [as_json("run", "local", *TINY)["folder"] for _ in range(3)]
    assert folders == [f"runs/now-local-digits-s0{end}" for end in ("", "-2", "-3")]


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("run", "fedlinkd"), "error: unknown method 'fedlinkd'. Did you mean 'fedlinked'?"),
        (("run", "--eta", "2", "fedlinkd"), "Did you mean 'fedlinked'?"),
        (
            ("run", "local", "--task", "digts"),
            "error: unknown task 'digts'. Did you mean 'digits'?",
        ),
        (("run", "fedlinked", "--topology", "strr"), "Did you mean 'star'?"),
        (
            ("run", "fedlinked", "--topology", "alone"),
            "error: fedlinked runs on star, not on alone.",
        ),
        (
            ("run", "fedlinked", "--etaa", "1"),
            "error: unknown option of polyfed run fedlinked 'etaa'. Did you mean 'eta'?",
        ),
        (("run", "fedlinked", "--no-transfrm"), "Did you mean 'transform'?"),
        (("run", "local", "--eta=1"), "error: unknown option of polyfed run local 'eta'."),
        (("run", "local", "-x"), "error: unknown option of polyfed run local 'x'."),
        (("run", "local", "--data", "x"), "error: task digits reads no files: leave --data out."),
        (("tasks", "digits", "--data=x"), "error: task digits reads no files: leave --data out."),
        (("show", "--data", "x"), "error: unknown option of polyfed show 'data'."),
        (("run",), "error: Missing argument 'METHOD'. See: polyfed run --help"),
        (("rn",), "error: No such command 'rn'. Did you mean 'run'?"),
        (("run", "fedlinked", "--eta", "abc"), "error: method fedlinked, eta: 'abc' does not fit."),
        (("run", "fedlinked", "--eta", "0"), "error: FedLinked.eta must be > 0, got 0.0."),
        (("run", "local", "--labels", "x"), "error: task digits, labels: 'x' does not fit."),
        (("run", "local", "--device", "gpu"), "error: unknown device 'gpu'."),
        (("run", "local", "--evaluate-every", "0"), "error: evaluate_every must be >= 1"),
        (("run", "local", "--task", "mnist"), "error: task mnist reads published files"),
        (("run", "fedavg", "--heads", "own"), "error: fedavg averages whole networks"),
        (("compare", "local", "fedavg", "--heads", "own"), "error: fedavg averages"),
        (("compare", "local", "fedlinkd"), "Did you mean 'fedlinked'?"),
        (("run", "LI"), "error: unknown method 'LI'. Did you mean 'li'?"),
        (("contests", "--seeds", "0"), "Invalid value for '--seeds': 0 is not in the range x>=1"),
        (("simulate", "--count", "0"), "Invalid value for '--count'"),
        (("compare", "fedlinked:etaa=1"), "Did you mean 'eta'?"),
        (("compare", "fedlinked:eta"), "Write name=value after the colon"),
        (("compare", "local", "local"), "a method is named twice"),
        (("compare", "local", "--seeds", "x"), "say how many (5), or which (3,7,9)"),
        (("compare", "local", "--seeds", "1,1"), "a seed is named twice"),
        (("compare", "local", "--seeds", "0"), "at least one method and one seed"),
        (("methods", "fedlinkd"), "Did you mean 'fedlinked'?"),
        (("tasks", "digts"), "Did you mean 'digits'?"),
        (("tasks", "digits", "--labls", "4"), "Did you mean 'labels'?"),
        (("tasks", "--quick"), "name one, as in `polyfed tasks digits`"),
        (("tasks", "digits", "--picture", "x.png"), "the picture is SVG. Call it NAME.svg."),
        (("run", "local", "--rounds", "2.5"), "error: method local, rounds: '2.5' does not fit."),
        (("compare", "local:rounds=2.5"), "error: method local, rounds: '2.5' does not fit."),
        (
            ("run", "li", "--fail", "cut 0-1 @30", "--rounds", "20"),
            "error: fault 'cut 0-1 @30' never happens: the last round is 20.",
        ),
        (("show", "nowhere"), "error: nowhere is not a run folder"),
        (("resume", "nowhere"), "error: nowhere is not a run folder"),
    ],
)
def test_errors_name_the_cure_and_leave_nothing_behind(
    args: tuple[str, ...], expected: str
) -> None:
    assert expected in fails(*args)
    assert not list(Path().iterdir())


def test_an_error_that_nobody_meant_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("polyfed.engines.run.run", broken)
    with pytest.raises(ZeroDivisionError):
        call("run", "local")


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RunError("first\n  second")

    monkeypatch.setattr("polyfed.engines.run.run", refused)
    assert call("run", "local", code=2).stderr == "error: first second\n"


# ---- compare -------------------------------------------------------------------------------------


def test_compare_with_an_ablation() -> None:
    own = "fedlinked:transform=false,eta=1"
    args = ("compare", *LINKED, own, "local", "--seeds", "3,5", "--folder", "here")
    result = call(*args, "--progress")
    assert result.stdout.splitlines()[-1] == "run folder: here"
    assert "over 2 seeds" in result.stdout
    assert f"2/6 {own} seed 3  round 1/2" in result.stderr
    assert "6/6 local seed 5  round 2/2" in result.stderr
    said = as_json("show", "here")
    assert list(said["methods"]) == ["fedlinked", own, "local"]
    assert said["seeds"] == [3, 5]
    options = as_json("show", "here/fedlinked-transform=false,eta=1/seed-5")["config"]["options"]
    assert (options["transform"], options["eta"], options["distil_epochs"]) == (False, 1.0, 1)
    alone = as_json("run", "local", *TINY, "--seed", "5")
    assert said["methods"]["local"]["mean_accuracy_by_seed"][1] == alone["mean_accuracy"]


def test_a_task_that_is_named_twice_is_one() -> None:
    args = ("compare", "local", *TINY, "--task", "digits,digits", "--seeds", "1")
    assert list(as_json(*args)["methods"]) == ["local"]


def test_a_number_of_seeds_counts_from_zero() -> None:
    assert as_json("compare", "local", *TINY, "--seeds", "2")["seeds"] == [0, 1]
    assert as_json("compare", "local", *TINY, "--seeds", "2,")["seeds"] == [2]


def test_a_wide_table_leaves_the_nodes_out() -> None:
    call("compare", "local", *TINY, "--seeds", "2", "--folder", "here")
    from polyfed.engines.compare import open_comparison

    found = open_comparison("here")
    assert "M0" in found.table()
    assert "M0" not in found.table(width=60)


def test_a_comparison_without_a_finished_run_says_so() -> None:
    as_json("compare", "local", *TINY, "--seeds", "1", "--folder", "here")
    Path("here/local/seed-0/result.json").unlink()
    told = "not finished: 0 of 1 runs; continue with: polyfed resume here\n\n"
    assert call("show", "here").stdout == told
    assert "none of its runs is finished" in fails("show", "here", "--json")


def test_an_unfinished_comparison_is_shown_and_resumed() -> None:
    args = ("compare", "local", "fedavg", "--rounds", "2", "--local-epochs", "1", "--seeds", "2")
    whole = as_json(*args, "--folder", "here")
    Path("here/fedavg/seed-1/result.json").unlink()
    text = call("show", "here").stdout
    assert "not finished: 3 of 4 runs; continue with: polyfed resume here" in text
    assert "over 1 to 2 seeds" in text
    again = as_json("resume", "here")
    assert again["methods"].keys() == whole["methods"].keys()
    for label, entry in whole["methods"].items():
        assert again["methods"][label]["accuracy_by_node"] == entry["accuracy_by_node"]
    assert call("show", "here").stdout.startswith("finished: 4 of 4 runs\n")


# ---- resume and show -----------------------------------------------------------------------------


def test_resume_ends_where_an_uninterrupted_run_does() -> None:
    whole = as_json("run", *LINKED, "--folder", "here")
    wanted, measured = results(Path("here")), metrics(Path("here"))
    Path("here/result.json").unlink()
    sorted(Path("here/checkpoints").iterdir())[-1].unlink()
    text = call("show", "here").stdout
    assert "not finished" in text
    assert "polyfed resume here" in text
    again = as_json("resume", "here")
    assert again["accuracy"] == whole["accuracy"]
    assert again["bytes_sent"] == whole["bytes_sent"]
    assert results(Path("here")) == wanted
    assert metrics(Path("here")) == measured


def test_a_party_s_part_of_a_run_goes_on_at_its_site() -> None:
    as_json("run", "local", *TINY, "--folder", "here")
    Path("here/result.json").unlink()
    with Path("here/config.yaml").open("a") as config:
        config.write("party: M0\n")  # as the engines across machines do
    assert "continue with: polyfed peer SITE.yaml, at its site" in call("show", "here").stdout
    assert "one party's part of a run across machines" in fails("resume", "here")


def test_resume_of_a_finished_run_only_shows_it() -> None:
    whole = as_json("run", "local", *TINY, "--folder", "here")
    before = results(Path("here"))
    assert as_json("resume", "here") == whole
    assert results(Path("here")) == before


def test_show_tells_everything() -> None:
    as_json("run", *LINKED, "--folder", "here")
    text = call("show", "here").stdout
    assert text.startswith("finished: 2 of 2 rounds\n")
    for expected in ("rounds=2", "labels=15", "topology=star", "receiver", "representations"):
        assert expected in text
    said = as_json("show", "here")
    assert said["finished"] is True
    assert said["rounds"] == 2
    assert said["sent"]["M1"]["messages"] == 2
    assert said["sent"]["M1"]["bytes"] == said["bytes_sent"]["M1"]
    assert said["sent"]["hub"]["tensors"] == ["regulariser"]


def test_show_before_anything_is_known() -> None:
    as_json("run", "local", *TINY, "--folder", "here")
    for name in ("result.json", "metrics.jsonl"):
        Path("here", name).unlink()
    assert "No accuracy yet." in call("show", "here").stdout
    said = as_json("show", "here")
    assert said["finished"] is False
    assert said["mean_accuracy"] is None


def test_faults_are_counted_and_pointed_at() -> None:
    as_json("run", "local", *TINY, "--folder", "here")
    fault = {"tick": 1, "node": "M1", "fault": "absent"}
    Path("here/faults.jsonl").write_text(2 * (json.dumps(fault) + "\n"))
    assert "2 faults: M1 absent (2); see here/faults.jsonl" in call("show", "here").stdout
    assert as_json("show", "here")["faults"] == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nAnd more."),
            1,
            "error: the GPU's memory is full (CUDA out of memory.)",
        ),
    ],
)
def test_an_end_in_between_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    whole = as_json("run", "local", *TINY, "--folder", "whole")
    rounds = []

    def round_then_end(self: Any, t: int, **rest: Any) -> Any:
        if t == 2 and not rounds:
            rounds.append(t)
            raise error
        return original(self, t, **rest)

    from polyfed.engines.local import LocalEngine

    original = LocalEngine._round
    monkeypatch.setattr(LocalEngine, "_round", round_then_end)
    result = call("run", "local", *TINY, "--folder", "here", code=code)
    assert result.stderr == f"{said}; continue with: polyfed resume here\n"
    assert as_json("resume", "here")["accuracy"] == whole["accuracy"]


# ---- lists ---------------------------------------------------------------------------------------


def test_methods() -> None:
    assert [entry["name"] for entry in as_json("methods")] == list(METHODS)
    one = as_json("methods", "fedlinked")
    assert one["topologies"] == ["star"]
    options = {entry["option"]: entry for entry in one["options"]}
    assert options["--eta"]["default"] == 2.97
    text = call("methods", "fedlinked").stdout
    assert "norm of a receiver's utilities" in text
    assert all(name in call("methods").stdout for name in METHODS)


def test_topologies() -> None:
    assert [entry["name"] for entry in as_json("topologies")] == list(TOPOLOGIES)
    assert "One hub" in call("topologies").stdout


def test_tasks() -> None:
    embedded = {name for name in TASKS if name.startswith("digits")} | {"attributes", "associative"}
    assert {e["name"]: e["needs_data"] for e in as_json("tasks")} == {
        name: name not in embedded for name in TASKS
    }
    assert "No node has labels for training." in call("tasks", "associative").stdout
    assert "polyfed tasks mnist --data DIR" in call("tasks", "mnist").stdout
    assert as_json("tasks", "mnist")["holds"] == {}
    flags = [entry["option"] for entry in as_json("tasks", "mnist")["options"]]
    assert "--nodes" in flags
    assert "--num-nodes" not in flags


@pytest.mark.parametrize("heads", ["own", "all"])
def test_who_holds_what(heads: str) -> None:
    """With heads of their own nodes number their classes from 0: the names must not change."""
    args = ("tasks", "digits", "--labels", "4", "--heads", heads)
    held = as_json(*args, "--picture", "digits.svg")["holds"]
    groups = {"M0": "01234", "M1": "23456", "M2": "67890"}
    for node, digits in groups.items():
        assert held[node] == {str(c): 4 * (str(c) in digits) for c in range(10)}
    assert Path("digits.svg").read_text().startswith("<svg")
    assert "M2     █ 4  ·" in call(*args).stdout

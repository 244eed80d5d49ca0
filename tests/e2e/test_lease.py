"""Commands on a lent machine: what is done in which order, what ends, what comes back."""

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

LEASE = Path(__file__).parents[2] / "benchmarks" / "lease.py"
RUN = "mkdir -p $RESULTS/runs/{0} && touch $RESULTS/runs/{0}/config.yaml"
DONE = RUN + " && echo {{}} > $RESULTS/runs/{0}/result.json"


def lease(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LEASE), *map(str, arguments)]
    kept = {name: value for name, value in os.environ.items() if name != "OUT"}
    return subprocess.run(command, capture_output=True, text=True, env=kept | more, timeout=60)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return tmp_path / "plan"


def begin(plan: Path, *lines: str, seconds: float = 30, slots: int = 1) -> Path:
    plan.write_text("\n".join(lines))
    state = plan.parent / "state"
    started = lease("start", plan, "--state", state, "--seconds", seconds, "--slots", slots)
    assert started.returncode == 0, started.stderr
    return state


def order(state: Path, word: str) -> list[int]:
    lines = (state / "log").read_text().splitlines()
    return [int(line.split()[-1]) for line in lines if word in line]


def packed(out: Path, into: Path) -> set[str]:
    whole = into / "whole.tgz"
    whole.write_bytes(b"".join(p.read_bytes() for p in sorted(out.glob("runs.tar.gz.*"))))
    with tarfile.open(whole) as archive:
        return {m.name for m in archive.getmembers() if m.isfile()}


def test_the_most_wanted_first_and_what_is_finished_comes_back(plan: Path, tmp_path: Path) -> None:
    state = begin(
        plan,
        "# runs of today",
        "polyfed --version",
        f"{DONE.format('a')} && mkdir $RESULTS/runs/a/checkpoints && "
        "touch $RESULTS/runs/a/checkpoints/1.safetensors",
        "false  # fails, and the others go on",
        RUN.format("unfinished"),
    )
    found = lease("wait", "--state", state, "--seconds", 40, "--out", tmp_path / "out")
    assert found.returncode == 0, found.stderr
    assert "all is over" in found.stdout
    assert "1 runs packed" in found.stdout
    assert order(state, "begun") == [1, 2, 3, 4]
    assert order(state, "failed 1") == [3]
    assert (state / "logs" / "1").read_text().startswith("polyfed ")
    assert (state / "tree" / "src" / "polyfed" / "__init__.py").exists()
    names = packed(tmp_path / "out", tmp_path)
    assert {name for name in names if name.startswith("runs/")} == {
        "runs/a/config.yaml",
        "runs/a/result.json",
    }
    assert {"logs/1", "logs/2", "logs/3", "logs/4"} <= names
    whole = lease("wait", "--state", state, "--seconds", 0, "--out", tmp_path / "out", "--all")
    assert "2 runs packed" in whole.stdout
    assert "runs/a/checkpoints/1.safetensors" in packed(tmp_path / "out", tmp_path)


def test_a_command_waits_for_its_file_and_holds_up_nobody(plan: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    state = begin(plan, f"[{data}] {DONE.format('late')}", f"{DONE.format('early')}; touch {data}")
    found = lease("wait", "--state", state, "--seconds", 30, "--out", tmp_path / "out")
    assert "2 runs packed" in found.stdout
    assert order(state, "begun") == [2, 1]


def test_what_runs_when_the_time_is_over_is_ended(plan: Path, tmp_path: Path) -> None:
    state = begin(plan, "sleep 60", "sleep 60", "touch $RESULTS/never", seconds=1, slots=2)
    found = lease("wait", "--state", state, "--seconds", 30, "--out", tmp_path / "out")
    assert "all is over" in found.stdout
    assert order(state, "begun") == [1, 2]
    assert order(state, "failed -15") == [1, 2]
    assert not (state / "results" / "never").exists()


def test_what_goes_on_is_told(plan: Path, tmp_path: Path) -> None:
    told = f"{RUN.format('a')}; echo 'loss is NaN' > $RESULTS/runs/a/faults.jsonl"
    state = begin(plan, f"{told}; echo round 7; sleep 60", seconds=4)
    found = lease("wait", "--state", state, "--seconds", 2.5, "--out", tmp_path / "out")
    assert "it goes on" in found.stdout
    assert "round 7" in found.stdout
    assert f"FAULTS in {state}/results/runs/a: loss is NaN" in found.stdout


def test_another_machine_is_told_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = lease("wait", "--state", tmp_path / "state", "--seconds", 50, "--out", out)
    assert found.returncode == 1
    assert "this is another machine, or nothing was started" in found.stderr


def test_a_folder_that_is_emptied_is_no_place_for_results(plan: Path, tmp_path: Path) -> None:
    plan.write_text("true")
    state = tmp_path / "out" / "state"
    found = lease("start", plan, "--state", state, "--seconds", 5, OUT=str(tmp_path / "out"))
    assert found.returncode == 1
    assert "which is emptied: choose another --state" in found.stderr
    assert not state.exists()


def test_one_plan_in_one_place(plan: Path) -> None:
    state = begin(plan, "true")
    found = lease("start", plan, "--state", state, "--seconds", 5)
    assert found.returncode == 1
    assert "has a plan already" in found.stderr


def test_what_does_not_heed_the_end_is_killed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("lease", LEASE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["lease"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GRACE = 0.5
    for name in ("logs", "tree"):
        (tmp_path / name).mkdir()
    (tmp_path / "plan").write_text("trap '' TERM; echo here; sleep 60")
    module.drive(tmp_path, 1.0, 1)
    assert (tmp_path / "logs" / "1").read_text() == "here\n"
    assert order(tmp_path, "failed -9") == [1]
    assert (tmp_path / "over").exists()


def test_a_comment_stands_apart_and_a_place_may_be_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan").write_text("# first\necho one#two > $RESULTS/said  # why\n")
    assert lease("start", "plan", "--state", "state", "--seconds", 20).returncode == 0
    assert lease("wait", "--state", "state", "--seconds", 20, "--out", "out").returncode == 0
    assert Path("state/results/said").read_text() == "one#two\n"

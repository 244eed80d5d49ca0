import json
from pathlib import Path

import pytest
import yaml

from typed import call

pytest.importorskip("optuna")

TINY = ("local", "--rounds", "1", "--init-epochs", "1", "--local-epochs", "1", "--labels", "2")
SWEEP = ("sweep", *TINY, "--runs", "1", "--space", "lr=1e-3:1e-1:log", "--stack", "never")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_sweep_then_go_on(tmp_path: Path) -> None:
    first = call(*SWEEP, "--trials", "2")
    folder = tmp_path / "studies" / "local-digits"
    assert "Step training: validation accuracy, 2 trials" in first.stdout
    assert "Test it with: polyfed run studies/local-digits/best.yaml" in first.stdout
    assert "picture: studies/local-digits/training.svg" in first.stdout
    assert len(first.stderr.splitlines()) == 2
    more = json.loads(call(*SWEEP, "--trials", "3", "--no-progress", "--json").stdout)
    assert len(more["steps"][0]["trials"]) == 3
    assert more["study"]["options"] == {"rounds": 1, "init_epochs": 1, "local_epochs": 1}
    tested = json.loads(call("run", str(folder / "best.yaml"), "--json").stdout)
    assert tested["seed"] == 0
    config = yaml.safe_load((Path(tested["folder"]) / "config.yaml").read_text())
    assert config["options"]["lr"] == more["best"]["lr"]
    assert config["task_options"]["labels"] == 2


def test_a_quick_search_says_so() -> None:
    said = "--quick only shows the way; its figures mean nothing."
    assert call(*SWEEP, "--quick", "--trials", "1").stdout.count(said) == 1
    assert said in Path("studies/local-digits/report.html").read_text()


def test_what_is_wrong_is_one_line() -> None:
    failed = call(*SWEEP, "--trials", "0", code=2)
    assert failed.stderr.startswith("error: trials must be >= 1")
    failed = call("sweep", *TINY, "--space", "lrr=1:2", code=2)
    assert "Did you mean 'lr'" in failed.stderr
    failed = call("sweep", "fedavg", "--task", "digits-permuted", code=2)
    assert "must not steer a search" in failed.stderr


def test_interrupted_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyfed.studies.search.drive", stop)
    assert "the same command goes on" in call(*SWEEP, code=130).stderr


def test_help_teaches_by_an_example() -> None:
    assert (
        "Example: polyfed sweep fedlinked --task digits --trials 10"
        in call("sweep", "--help").stdout
    )

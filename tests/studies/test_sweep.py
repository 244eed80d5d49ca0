import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import polyfed as pf
from polyfed import tasks
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError, RunError
from polyfed.studies import sweep as module
from polyfed.studies.outcome import Outcome
from polyfed.studies.space import Range
from polyfed.studies.sweep import sweep

pytest.importorskip("optuna")

TASK = tasks.digits(labels=3, representation=4)
TINY = {"rounds": 1, "init_epochs": 1, "local_epochs": 1, "rollback": False}
SPACE = {"lr": Range(1e-3, 1e-1, log=True)}
TWO_STEPS = {**SPACE, "representation": Range(2, 6, whole=True)}


def go(folder: Path, trials: int = 2, space: Any = SPACE, **more: Any) -> Outcome:
    given: dict[str, Any] = {"options": TINY, "runs": 2, "stack": "never"}
    return sweep("local", TASK, folder=folder, trials=trials, space=space, **(given | more))


def found(outcome: Outcome) -> list[Any]:
    return [(s.name, [(t.params, t.value, t.state) for t in s.trials]) for s in outcome.steps]


def test_a_trial_is_what_run_gives(tmp_path: Path) -> None:
    """The value of a trial, computed the long way round: literal runs on validation data."""
    outcome = go(tmp_path)
    for trial in outcome.steps[0].trials:
        means = []
        for seed in (0, 1):
            real, fresh = TASK.nodes(0), TASK.nodes(seed)
            nodes = []
            for node, other in zip(real, fresh, strict=True):
                es, rb = node.data["val_es"], node.data["val_rb"]
                x, y = (torch.cat([a, b]) for a, b in ((es.x, rb.x), (es.y, rb.y)))
                data = Data(train=node.data["train"], val_es=es, val_rb=rb, test=(x, y))
                nodes.append(Node(node.name, data, other.model, node.classes))
            method = pf.Local(**{"batch": 0.2, "patience": 10, **TINY, **trial.params})
            means.append(pf.run(method, nodes, seed=seed, stack="never").mean_accuracy)
        assert trial.by_run == pytest.approx(means)
        assert trial.value == min(trial.by_run)


def test_the_test_data_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = found(go(tmp_path / "a"))
    cls = type(TASK)
    make = cls.nodes

    def without(self: Any, seed: int) -> list[Node]:
        nodes = make(self, seed)
        for node in nodes:
            node.data = Data(**{n: s for n, s in node.data.items() if n != "test"})
        return nodes

    monkeypatch.setattr(cls, "nodes", without)
    assert found(go(tmp_path / "b")) == before


def test_two_steps(tmp_path: Path) -> None:
    narrow = tasks.digits(labels=3, representation=1)
    space = {**SPACE, "representation": Range(1, 32, whole=True)}
    options = {**TINY, "init_epochs": 4}
    given: Any = {"trials": 6, "runs": 1, "stack": "never", "options": options, "space": space}
    outcome = sweep("local", narrow, folder=tmp_path, **given)
    network, training = outcome.steps
    assert (network.name, training.name) == ("architecture", "training")
    assert (len(network.trials), len(training.trials)) == (2, 5)  # 6, and one that is known
    assert list(network.space) == ["representation"]
    assert network.base["lr"] == 3e-3  # the recipe's
    assert network.trials[0].params == {"representation": 1}  # the task's own
    assert network.best.number == 1  # or this test would say nothing
    assert training.base["representation"] == network.best.params["representation"]
    known = training.trials[0]
    assert (known.state, known.value) == ("known", network.best.value)
    assert known.params == {"lr": network.base["lr"]}
    assert outcome.value >= float(network.best.value or 0)
    assert set(outcome.best) == {"lr", "representation"}
    assert outcome.config()["task_options"]["representation"] == outcome.best["representation"]


def test_stopped_and_continued_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = go(tmp_path / "a", 6, TWO_STEPS, runs=1)
    clock = iter([False, True])  # asked before every trial
    with monkeypatch.context() as patch:
        patch.setattr(module, "_is_late", lambda *_: next(clock))
        part = go(tmp_path / "b", 6, TWO_STEPS, runs=1)
    assert [len(s.trials) for s in part.steps] == [1]
    assert part.best["representation"] == 4
    assert found(go(tmp_path / "b", 6, TWO_STEPS, runs=1)) == found(whole)


def test_more_trials_keep_the_network(tmp_path: Path) -> None:
    first = go(tmp_path, 3, TWO_STEPS, runs=1)
    more = go(tmp_path, 7, TWO_STEPS, runs=1)
    assert found(more)[0] == found(first)[0]
    assert len(more.steps[1].trials) == 7
    assert found(more)[1][1][: len(first.steps[1].trials)] == found(first)[1][1]


def test_a_finished_study_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(tmp_path)
    monkeypatch.setattr("polyfed.studies.search.drive", None)
    assert found(go(tmp_path)) == found(first)


def test_files(tmp_path: Path) -> None:
    outcome = go(tmp_path, 6, TWO_STEPS, runs=1)
    config = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert config["method"] == "local"
    assert config["task_options"]["representation"] == outcome.best["representation"]
    assert config["options"]["lr"] == outcome.best["lr"]
    assert config["options"]["rounds"] == 1
    assert config["options"]["batch"] == 0.2  # the task's recipe holds where nothing is said
    assert config["settings"]["seed"] == 0
    rows = list(csv.DictReader((tmp_path / "trials.csv").read_text().splitlines()))
    assert len(rows) == 7
    assert {r["step"] for r in rows} == {"architecture", "training"}
    assert float(rows[0]["value"]) == outcome.steps[0].trials[0].value
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"] == outcome.best
    assert summary["steps"][0]["name"] == "architecture"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert page.count("class=best") == 2
    assert not re.search(r"(src|href)=\"?https?:|url\(\W?https?:", page)  # nothing is fetched
    for name in ("architecture.svg", "training.svg"):
        assert "<svg" in (tmp_path / name).read_text()


def test_what_is_typed_is_not_searched(tmp_path: Path) -> None:
    given = {**TINY, "lr": 0.01}
    outcome = go(tmp_path, 1, None, options=given, fixed=["representation"], runs=1)
    assert outcome.steps[0].name == "training"
    assert set(outcome.best).isdisjoint({*given, "representation"})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"trials": 0}, "trials must be >= 1"),
        ({"runs": 0}, "runs must be >= 1"),
        ({"options": {"lr": 0.1}}, "nothing is left"),
        ({"topology": "ring"}, "not on ring"),
    ],
)
def test_said_before_anything_is_trained(tmp_path: Path, more: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        go(tmp_path, **more)


def test_another_study_is_not_overwritten(tmp_path: Path) -> None:
    go(tmp_path / "a", 1)
    with pytest.raises(RunError, match="other settings"):
        go(tmp_path / "a", 1, runs=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="not a study"):
        go(tmp_path / "b", 1)


def test_lines_and_table(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = go(tmp_path, 3, shown=lines.append)
    assert len(lines) == 3
    assert lines[0].startswith("training 1/3: ")
    assert "lr=0.003" in lines[0]
    text = str(outcome.table())
    assert "Step training: validation accuracy, 3 trials" in text
    assert "importance: lr 100%" in text
    best = outcome.steps[0].best
    assert text.splitlines()[4].startswith(str(best.number + 1))


def test_in_batches_and_stacked(tmp_path: Path) -> None:
    outcome = go(tmp_path, 4, together=2, stack="always")
    assert len(outcome.steps[0].trials) == 4

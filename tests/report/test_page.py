"""One file, with everything in it, the same for the same folders."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed as pf
from polyfed.errors import RunError
from polyfed.report.collect import collect
from polyfed.report.page import as_json, html, write_report
from polyfed.testing.federations import tiny


def data_of(path: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_same_folder_gives_the_same_file(make: Any, tmp_path: Path) -> None:
    folder = make(task="digits")
    path = write_report([folder])
    assert path == folder / "report.html"
    first = path.read_bytes()
    assert write_report([folder], tmp_path / "other.html").read_bytes() == first


def test_what_is_in_it(make: Any) -> None:
    folder = make(task="digits", faults=[{"tick": 2, "node": "M1", "fault": "absent"}])
    data = data_of(write_report([folder]))
    (run,) = data["runs"]
    assert data["title"] == {"what": "fedavg", "task": "digits", "seeds": [0], "labels": ["fedavg"]}
    assert data["commands"] == ["polyfed run fedavg --task digits --rounds 4"]
    assert run["series"]["local_loss"]["M1"] == [None, 2.0, 1.0, 0.66667, 0.5]
    assert run["accuracy"] == {"M0": 0.5, "M1": 0.501, "M2": 0.502}
    assert (run["seconds"], run["bytes"]) == ([1, 2, 3, 4, 5], [0, 216, 216, 216, 216])
    assert (run["sent"]["M2"], run["received"]["M2"]) == (144, 144)
    assert (run["ledger"]["messages"], len(run["ledger"]["patterns"])) == (24, 1)
    assert run["faults"] == [{"tick": 2, "node": "M1", "fault": "absent"}]
    assert (run["finished"], run["rounds"], run["planned"]) == (True, 4, 4)
    assert ["rounds", "4"] in run["settings"][0]["values"]
    assert run["environment"] == [["polyfed", "0.1.0"]]
    assert run["work"]["names"] == ["M0", "M1", "M2", "hub"]
    (task,) = data["tasks"]
    assert task["svg"].startswith("<svg")


def test_nothing_comes_from_elsewhere(make: Any) -> None:
    text = write_report([make(task="digits")]).read_text()
    outside = re.sub(r"http://www\.w3\.org/\d+/svg", "", text)  # a name, nothing is fetched
    assert "http" not in outside.replace('fetch("data.json"', "")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", outside)
    assert "@import" not in outside
    assert "url(" not in outside


def test_texts_cannot_become_markup(make: Any) -> None:
    evil = "</script><script>alert(1)</script><!--data--><!--script-->"
    folder = make(faults=[{"tick": 1, "node": evil, "fault": "killed"}])
    path = write_report([folder])
    assert data_of(path)["runs"][0]["faults"][0]["node"] == evil
    assert "alert(1)</script>" not in path.read_text()
    assert as_json("<&>") == '"\\u003c&>"'


def test_several_runs_are_told_apart(make: Any) -> None:
    folders = [
        make("a", seed=0), make("b", seed=1), make("c", options={"local_epochs": 7}),
        make("d", method="local", topology="alone"),
    ]  # fmt: skip
    data = collect(folders)
    labels = ["fedavg (local_epochs 1)", "fedavg (local_epochs 7)", "local"]
    assert data["title"]["labels"] == labels
    assert [run["label"] for run in data["runs"]] == [labels[0], labels[0], labels[1], labels[2]]
    assert [len(row["mean"]) for row in data["headline"]["rows"]] == [2, 1, 1]


def test_a_seed_counts_once(make: Any) -> None:
    first, again = make("a", seed=0), make("b", seed=0)
    data = collect([first, again, make("c", seed=1), first])
    assert [run["seed"] for run in data["runs"]] == [0, 1]
    said = f"is not counted: {first} has its settings and its seed."
    assert data["notes"] == [f"{again} {said}", f"{first} {said}"]


def test_what_is_left_out_is_said(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.report.collect.MOST_RUNS", 2)
    data = collect([make(str(seed), seed=seed) for seed in range(3)])
    assert (len(data["runs"]), data["notes"]) == (2, ["The first 2 of 3 runs are shown."])


def test_only_runs_of_one_task_are_compared(make: Any) -> None:
    made = [
        make(f"{task}-{method}-{s}", task=task, method=method, seed=s, lift=lift)
        for task in ("digits", "digits-permuted")
        for method, lift in (("fedavg", 0.1), ("local", 0.0))
        for s in range(5)
    ]
    texts = [verdict["text"].split(" by ")[0] for verdict in collect(made)["headline"]["verdicts"]]
    assert texts == [
        f"fedavg on {task} is 0.100 above local on {task}" for task in ("digits", "digits-permuted")
    ]


def test_a_comparison_and_its_runs_so_far(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    make("both/fedavg/seed-0")
    make("both/fedavg/seed-1", seed=1, finished=False)
    config = {
        "format": 1, "task": None, "task_options": {}, "seeds": [0, 1], "settings": {},
        "methods": {"fedavg": {"method": "fedavg", "options": {}}, "local": {"method": "local"}},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    data = collect([folder])
    assert [run["finished"] for run in data["runs"]] == [True, False]
    for name in ("seed-0", "seed-1"):
        (folder / "fedavg" / name / "config.yaml").unlink()
    with pytest.raises(RunError, match="none of its runs has begun"):
        collect([folder])


def test_a_run_that_has_just_begun(make: Any) -> None:
    folder = make(rounds=0, finished=False)
    for name in ("metrics", "ledger"):
        (folder / f"{name}.jsonl").write_text("")
    data = collect([folder])
    assert data["headline"]["verdicts"][0]["text"] == "Nothing has been evaluated yet."
    assert data["runs"][0]["ticks"] == []
    html(data)


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        write_report([tmp_path])


def test_damaged_environment(make: Any) -> None:
    folder = make()
    (folder / "environment.json").write_text("{")
    with pytest.raises(RunError, match=r"environment\.json cannot be read"):
        collect([folder])


def test_fedlinked_s_utilities_by_round(tmp_path: Path) -> None:
    epochs = dict.fromkeys(("init_epochs", "distil_epochs", "finetune_epochs", "local_epochs"), 1)
    linked = pf.run(pf.FedLinked(rounds=2, batch=8, **epochs), tiny())
    data = data_of(linked.report(tmp_path / "linked.html"))
    (matrix,) = data["runs"][0]["matrices"]
    assert matrix["name"] == "utilities"
    assert [entry["tick"] for entry in matrix["rounds"]] == [1, 2]
    assert data["runs"][0]["folder"] == "in memory"


@pytest.mark.slow
def test_a_large_run_stays_small(large: Path) -> None:
    assert large.stat().st_size < 2_000_000


def test_many_large_runs_share_a_page(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are of the page, not of a run."""
    for name, most in (("FIGURES", 240), ("NUMBERS", 40)):
        monkeypatch.setattr(f"polyfed.report.measured.{name}", most)
    noted = [
        {"tick": t, "node": "hub", "d": {"nodes": ["M0", "M1"], "rows": [[0, t], [t, 0]]}}
        for t in range(1, 41)
    ]
    folders = [make(f"r{s}", seed=s, rounds=40, nodes=2, metrics=noted) for s in range(2)]
    for run in collect(folders)["runs"]:
        assert len(run["ticks"]) == len(run["seconds"]) == 41
        assert len(run["kept"]) == 120 // 4  # a half of all numbers, two figures of two nodes
        assert len(run["series"]["test_accuracy"]["M0"]) == len(run["kept"])
        assert len(run["matrices"][0]["rounds"]) == 5

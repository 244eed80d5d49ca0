import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed as pf
from polyfed import topologies
from polyfed.engines.compare import Comparison, is_comparison, open_comparison, resume_comparison
from polyfed.engines.run import Run
from polyfed.errors import ConfigError, RunError, UnknownNameError
from polyfed.record import checkpoint
from polyfed.testing.federations import tiny

FEDAVG, LOCAL = pf.FedAvg(rounds=2, batch=16), pf.Local(rounds=2, batch=16, local_epochs=1)
TASK = pf.tasks.digits(labels=2)


def figures(comparison: Comparison) -> dict[str, Any]:
    """Everything but time and place."""
    found = comparison.as_dict()
    for entry in found["methods"].values():
        del entry["seconds"]
    return found | {"folder": None}


@pytest.fixture(scope="module")
def whole() -> Comparison:
    return pf.compare([FEDAVG, LOCAL], TASK, seeds=2)


def test_shape(whole: Comparison) -> None:
    assert {label: len(runs) for label, runs in whole.runs.items()} == {"fedavg": 2, "local": 2}
    for i, seed in enumerate(whole.seeds):
        alone = pf.run(FEDAVG, TASK, seed=seed)
        assert whole.runs["fedavg"][i].accuracy == alone.accuracy
    assert whole.runs["fedavg"][0].accuracy != whole.runs["fedavg"][1].accuracy
    assert json.loads(json.dumps(whole.as_dict())) == whole.as_dict()


def test_labels_and_seeds() -> None:
    idle = pf.Local(rounds=0)
    found = pf.compare([idle, pf.Joint(rounds=0), idle, idle], tiny(), seeds=[5, 2])
    assert (list(found.runs), found.seeds) == (["local", "joint", "local-2", "local-3"], [5, 2])
    named = pf.compare({"eta = 1": idle, "eta = 2": idle}, tiny(), seeds=1)
    assert (list(named.runs), named.seeds) == (["eta = 1", "eta = 2"], [0])


def test_folder(tmp_path: Path) -> None:
    written = pf.compare({"a b": FEDAVG, "local": LOCAL}, TASK, seeds=2, folder=tmp_path / "c",
                         evaluate_every=2, absent={1: ("M1",)})  # fmt: skip
    base = tmp_path / "c"
    assert sorted(str(p.parent.relative_to(base)) for p in base.glob("*/*/result.json")) == [
        "a-b/seed-0", "a-b/seed-1", "local/seed-0", "local/seed-1",
    ]  # fmt: skip
    assert is_comparison(base)
    assert not is_comparison(base / "local" / "seed-0")
    assert figures(open_comparison(base)) == figures(written)
    assert Run.open(base / "local" / "seed-1").accuracy == written.runs["local"][1].accuracy
    settings = yaml.safe_load((base / "config.yaml").read_text())["settings"]
    assert settings == {"evaluate_every": 2, "absent": {1: ["M1"]}}
    assert figures(resume_comparison(base)) == figures(written)


def test_resume_runs_what_is_missing_and_reads_the_rest(tmp_path: Path, whole: Comparison) -> None:
    base, save = tmp_path / "c", checkpoint.save
    saved: list[Path] = []

    def dies(folder: Path, *args: Any) -> None:
        save(folder, *args)
        saved.append(folder.parent)
        if folder.parent == base / "fedavg" / "seed-1" and args[0] == 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            pf.compare([FEDAVG, LOCAL], TASK, seeds=2, folder=base)
    assert not (base / "local" / "seed-1").exists()
    shutil.rmtree(base / "local" / "seed-0")
    seen = open_comparison(base)
    assert {label: len(runs) for label, runs in seen.runs.items()} == {"fedavg": 1}
    assert "fedavg" in seen.table()

    saved.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda f, *a: (saved.append(f.parent), save(f, *a)))
        again = resume_comparison(base)
    assert figures(again) == figures(whole)
    assert figures(open_comparison(base)) == figures(whole)
    ticks = {str(p.relative_to(base)): saved.count(p) for p in saved}
    assert ticks == {"local/seed-0": 3, "fedavg/seed-1": 1, "local/seed-1": 3}


def test_nothing_finished(tmp_path: Path) -> None:
    pf.compare([pf.Local(rounds=0)], TASK, seeds=1, folder=tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "local")
    (tmp_path / "c" / "local" / "seed-0").mkdir(parents=True)  # killed before it wrote anything
    with pytest.raises(RunError, match="none of its runs is finished"):
        open_comparison(tmp_path / "c")
    assert resume_comparison(tmp_path / "c").runs["local"][0].accuracy


@pytest.mark.parametrize(
    ("methods", "settings", "error", "text"),
    [
        ([], {}, ConfigError, "at least one method and one seed"),
        ([LOCAL], {"seeds": 0}, ConfigError, "at least one method and one seed"),
        ([LOCAL], {"seeds": []}, ConfigError, "at least one method and one seed"),
        ([LOCAL], {"topology": "star"}, ConfigError, "none of the methods runs on star"),
        ([LOCAL], {"device": "gpu"}, ConfigError, "unknown device 'gpu'"),
        ([LOCAL], {"evaluate_every": 0}, ConfigError, "evaluate_every must be >= 1"),
        ([LOCAL], {"absent": {1: ["M9"]}}, UnknownNameError, "unknown absent node 'M9'"),
        ([LOCAL], {"evalute_every": 2}, UnknownNameError, "evalute_every"),
        ({"a b": LOCAL, "a-b": FEDAVG}, {}, ConfigError, "'a-b' cannot name a folder beside 'a b'"),
        ({"..": LOCAL}, {}, ConfigError, r"label '\.\.' cannot name a folder"),
        ({"": LOCAL}, {}, ConfigError, "label '' cannot name a folder"),
    ],
)
def test_nothing_begins_when_something_is_wrong(
    tmp_path: Path, methods: Any, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pf.compare(methods, TASK, folder=tmp_path / "c", **({"seeds": 1} | settings))
    assert not (tmp_path / "c").exists()


def test_the_last_method_is_checked_before_the_first_trains(tmp_path: Path) -> None:
    own = pf.tasks.digits(heads="own")
    with pytest.raises(ConfigError, match="fedavg averages whole networks"):
        pf.compare([LOCAL, FEDAVG], own, seeds=1, folder=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(RunError, match="exists and is not empty"):
        pf.compare([LOCAL], tiny(), seeds=1, folder=tmp_path)
    with pytest.raises(RunError, match="could not make"):
        pf.compare([LOCAL], tiny(), seeds=1, folder=tmp_path / "note")
    pf.run(pf.Local(rounds=0), tiny(), folder=tmp_path / "run")
    with pytest.raises(RunError, match="holds a single run, not a comparison"):
        resume_comparison(tmp_path / "run")
    with pytest.raises(RunError, match="holds a single run, not a comparison"):
        open_comparison(tmp_path / "run")
    pf.compare([pf.Local(rounds=0)], tiny(), seeds=1, folder=tmp_path / "own")
    with pytest.raises(RunError, match="your own nodes: call compare again"):
        resume_comparison(tmp_path / "own")
    with pytest.raises(RunError, match="holds a comparison, not a single run"):
        pf.resume(tmp_path / "own")


def test_nobody_has_test_data() -> None:
    nodes = tiny()
    for node in nodes:
        node.data = pf.Data(**{n: s for n, s in node.data.items() if n != "test"})
    found = pf.compare([FEDAVG, LOCAL, pf.Joint(rounds=1, local_epochs=1)], nodes, seeds=1)
    assert "joint" in found.table()


def test_a_topology_is_for_the_methods_that_have_it(tmp_path: Path) -> None:
    ring, folder = pf.LI(rounds=3, batch=4, lr=0.01), tmp_path / "c"
    wanted = topologies.make("pipeline:merge=replace")
    done = pf.compare([ring, FEDAVG], TASK, seeds=1, topology=wanted, folder=folder)
    alone = pf.run(ring, TASK, topology="pipeline:merge=replace")
    assert done.runs["li"][0].accuracy == alone.accuracy != pf.run(ring, TASK).accuracy
    used = {
        label: yaml.safe_load((folder / label / "seed-0" / "config.yaml").read_text())["topology"]
        for label in ("li", "fedavg")
    }
    assert used == {"li": "pipeline:merge=replace", "fedavg": "star"}
    shutil.rmtree(folder / "li")
    assert figures(resume_comparison(folder)) == figures(done)


def test_a_topology_that_no_method_has() -> None:
    with pytest.raises(ConfigError, match=r"none of the methods runs on ring \(fedavg: star; loc"):
        pf.compare([FEDAVG, LOCAL], TASK, seeds=1, topology="ring")

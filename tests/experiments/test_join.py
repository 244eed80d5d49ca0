"""Pieces of an experiment, run apart, make the summary of one that was run whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyfed.cli import app
from polyfed.errors import ConfigError
from polyfed.experiments.experiment import Cell, Experiment
from polyfed.experiments.join import joined
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.results import Results
from polyfed.tasks.embedded import Digits

OWN = ("command", "date", "cells")  # of a piece


def piece(experiment: Experiment, out: Path, **settings: Any) -> dict[str, Any]:
    """Run a piece where no earlier run is at hand."""
    shutil.rmtree(out / "runs", ignore_errors=True)
    return dict(reproduce(experiment, out=out, **settings).summary)


def figures(summary: dict[str, Any]) -> list[Any]:
    return [
        {name: value for name, value in cell.items() if name != "seconds"}
        for cell in summary["cells"]
    ]


def assert_same(found: dict[str, Any], out: Path, table: Experiment) -> None:
    text = (out / table.name / "summary.json").read_text(encoding="utf-8")
    wanted = json.loads(text)
    assert figures(found) == figures(wanted)
    assert found.keys() == wanted.keys()
    assert {n: v for n, v in found.items() if n not in OWN} == {
        n: v for n, v in wanted.items() if n not in OWN
    }


def test_cells_that_were_run_apart(tmp_path: Path, whole: Path, table: Experiment) -> None:
    last, *others = (cell.label for cell in reversed(table.cells))
    first = piece(table, tmp_path, only=[last])
    assert first["changed"] == [f"cells: {len(table.cells)} → 1"]
    found = piece(table, tmp_path, only=others, join=True)
    assert_same(found, whole, table)
    assert found["command"].startswith(f"{first['command']}; polyfed reproduce {table.name}")
    assert found["command"].endswith(" --join")
    page = (tmp_path / table.name / "page.md").read_text(encoding="utf-8")
    assert "In the paper's setting." in page


def test_seeds_that_were_run_apart(tmp_path: Path, whole: Path, table: Experiment) -> None:
    piece(table, tmp_path, seeds=range(1, table.seeds))
    assert_same(piece(table, tmp_path, seeds=[0], join=True), whole, table)


def test_cells_with_different_seeds(tmp_path: Path, whole: Path, table: Experiment) -> None:
    first, second = (cell.label for cell in table.cells)
    piece(table, tmp_path, only=[first])
    found = piece(table, tmp_path, only=[second], seeds=[0], join=True)
    assert found["seeds"] == [0, 1]
    assert [cell.get("seeds") for cell in found["cells"]] == [None, [0]]
    assert [len(cell["figures"]["accuracy"]) for cell in found["cells"]] == [2, 1]
    assert found["changed"] == ["seeds: 2 → 1 to 2"]
    page = (tmp_path / table.name / "page.md").read_text(encoding="utf-8")
    assert "- 2 seeds: 0, 1; averaged: 0\n" in page
    assert " of 1 |" in page  # the ordering, over the seed that both have
    filled = piece(table, tmp_path, only=[second], seeds=[1], join=True)
    assert_same(filled, whole, table)


def test_a_piece_that_had_a_part_of_the_data_says_so(
    tmp_path: Path, table: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (cell.label for cell in table.cells)
    for seed, held in ((1, "9 of 10 digits"), (0, "")):
        monkeypatch.setattr(Digits, "shortfall", lambda task, held=held: held)
        found = piece(table, tmp_path, only=[first], seeds=[seed], join=True)
    found = piece(table, tmp_path, only=[second], join=True)
    assert [cell.get("shortfall") for cell in found["cells"]] == ["9 of 10 digits", None]
    assert found["changed"] == ["task digits: 9 of 10 digits"]
    monkeypatch.setattr(Digits, "shortfall", lambda task: "8 of 10 digits")
    found = piece(table, tmp_path, only=[first], seeds=[0], join=True)
    assert found["cells"][0]["shortfall"] == "8 of 10 digits and 9 of 10 digits"


def test_a_sweep_whose_points_have_different_seeds(tmp_path: Path, sweep: Experiment) -> None:
    piece(sweep, tmp_path, only=["alone at 0.01", "flat"], seeds=[1, 2])
    piece(sweep, tmp_path, only=["alone at 0.001"], seeds=[0, 1], join=True)
    results = Results.read(tmp_path / sweep.name / "summary.json")
    assert results.summary["seeds"] == [0, 1, 2]
    assert [cell["seeds"] for cell in results.summary["cells"]] == [[0, 1], [1, 2], [1, 2]]
    assert [each.seeds for each in results.orderings().values()] == [1]
    alone = piece(sweep, tmp_path / "apart", seeds=[1])["cells"]
    low, high, flat = (cell["figures"]["accuracy"] for cell in results.summary["cells"])
    assert [[low[1]], high[:1], flat[:1]] == [cell["figures"]["accuracy"] for cell in alone]


def test_the_new_stands_where_both_have_a_cell(tmp_path: Path, table: Experiment) -> None:
    piece(table, tmp_path)
    path = tmp_path / table.name / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    (name, *_) = summary["cells"][0]["figures"]
    for cell in summary["cells"][:2]:
        cell["figures"][name][0] = 7.0
    path.write_text(json.dumps(summary), encoding="utf-8")
    found = piece(table, tmp_path, only=[table.cells[0].label], join=True)
    assert found["cells"][0]["figures"][name][0] != 7
    assert found["cells"][1]["figures"][name][0] == 7


def test_without_a_summary_there_is_nothing_to_join(
    tmp_path: Path, whole: Path, table: Experiment
) -> None:
    assert_same(piece(table, tmp_path, join=True), whole, table)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": 3}, "its cell '.*' has rounds 2, not 3"),
        ({"precision": "bfloat16"}, "it is of float32, not bfloat16"),
    ],
    ids=["rounds", "precision"],
)
def test_other_settings_are_refused_before_anything_runs(
    settings: dict[str, Any], said: str, tmp_path: Path, table: Experiment
) -> None:
    first, second, *_ = (cell.label for cell in table.cells)
    piece(table, tmp_path, only=[first])
    path = tmp_path / table.name / "summary.json"
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"cannot be joined: (.*){said}"):
        piece(table, tmp_path, only=[second], join=True, **settings)
    assert path.read_bytes() == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("method", "is of another method or task"), ("series", "is no part of this one")],
)
def test_cells_that_the_experiment_does_not_have_are_refused(
    name: str, said: str, tmp_path: Path, table: Experiment
) -> None:
    piece(table, tmp_path)
    path = tmp_path / table.name / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary["cells"][0][name] = "other"
    path.write_text(json.dumps(summary), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"its cell '.*' {said}"):
        piece(table, tmp_path, join=True)


def _beside(table: Experiment, alone: Cell | None = None) -> Experiment:
    """An experiment with a cell of the table's, under another name."""
    first, second = table.cells
    cells = [replace(alone or first, series="by itself"), second]
    return replace(table, name="tiny-other", cells=cells, claims=(), published={})


def test_a_cell_that_was_run_for_another_experiment(
    tmp_path: Path, whole: Path, table: Experiment
) -> None:
    (tmp_path / table.name).mkdir()
    shutil.copy(whole / table.name / "summary.json", tmp_path / table.name)
    text = (whole / table.name / "summary.json").read_text(encoding="utf-8")
    lender = json.loads(text)
    other = _beside(table)
    apart = replace(other, name="tiny-apart")
    assert len(piece(apart, tmp_path, only=["averaged"])["cells"]) == 1  # only if it is asked for
    found = piece(other, tmp_path, only=["averaged"], join=True)
    assert [cell["series"] for cell in found["cells"]] == ["by itself", "averaged"]
    assert found["cells"][0]["figures"] == lender["cells"][0]["figures"]
    assert found["seeds"] == lender["seeds"]
    assert found["changed"] == []
    assert lender["command"] in found["command"]
    fewer = replace(other, name="tiny-fewer")
    by_itself, _ = piece(fewer, tmp_path, only=["averaged"], join=True, seeds=[1])["cells"]
    assert by_itself["figures"]["accuracy"] == lender["cells"][0]["figures"]["accuracy"][1:]


@pytest.mark.parametrize("why", ["setting", "seed", "meaning", "rhythm", "quick", "precision"])
def test_a_cell_of_another_experiment_that_does_not_fit(
    why: str, tmp_path: Path, whole: Path, table: Experiment
) -> None:
    lender = json.loads((whole / table.name / "summary.json").read_text(encoding="utf-8"))
    seeds, alone = [0, 1], table.cells[0]
    if why == "setting":
        alone = replace(alone, options={**alone.options, "lr": 0.05})
    elif why == "seed":
        seeds = [0, 2]
    elif why == "quick":
        lender["quick"] = True
    elif why == "precision":
        lender["changed"] = ["networks compute in bfloat16"]
    (tmp_path / table.name).mkdir()
    path = tmp_path / table.name / "summary.json"
    path.write_text(json.dumps(lender), encoding="utf-8")
    other = _beside(table, alone)
    if why == "meaning":  # of a figure of the same name
        other = replace(other, figures=lambda run: {"accuracy": 1 - run.mean_accuracy})
    elif why == "rhythm":
        other = replace(other, evaluate_every=2)
    found = piece(other, tmp_path, only=["averaged"], join=True, seeds=seeds)
    assert [cell["series"] for cell in found["cells"]] == ["averaged"]


def test_a_lender_whose_cells_have_different_seeds(
    tmp_path: Path, whole: Path, table: Experiment
) -> None:
    lender = json.loads((whole / table.name / "summary.json").read_text(encoding="utf-8"))
    alone = lender["cells"][0]
    every = alone["figures"]["accuracy"]
    alone["seeds"], alone["figures"] = [1], {"accuracy": every[1:]}
    alone |= {name: alone[name][1:] for name in ("seconds", "bytes_sent_per_node")}
    (tmp_path / table.name).mkdir()
    path = tmp_path / table.name / "summary.json"
    path.write_text(json.dumps(lender), encoding="utf-8")
    asked: dict[str, Any] = {"only": ["averaged"], "join": True}
    one = piece(_beside(table), tmp_path, **asked, seeds=[1])
    assert [cell["series"] for cell in one["cells"]] == ["by itself", "averaged"]
    assert one["cells"][0]["figures"] == {"accuracy": every[1:]}
    assert (one["seeds"], [cell.get("seeds") for cell in one["cells"]]) == ([1], [None, None])
    both = piece(replace(_beside(table), name="tiny-both"), tmp_path, **asked, seeds=[0, 1])
    assert [cell["series"] for cell in both["cells"]] == ["averaged"]


def test_what_is_drawn_is_of_the_first_seed() -> None:
    def summary(seeds: list[int]) -> dict[str, Any]:
        cell = {"panel": "", "series": "", "x": None, "task": "digits", "kept": f"of {seeds[0]}"}
        numbers = {name: [float(s) for s in seeds] for name in ("seconds", "bytes_sent_per_node")}
        told = {"command": f"c{seeds}", "date": "today", "commit": f"{seeds[0]}", "device": "cpu"}
        versions = {"torch": "2"}
        cells = [cell | numbers | {"figures": {"accuracy": [s / 10 for s in seeds]}}]
        return {**told, "environment": versions, "seeds": seeds, "cells": cells}

    found = joined(summary([2, 3]), summary([0, 1]))
    assert found["seeds"] == [0, 1, 2, 3]
    (cell,) = found["cells"]
    assert cell["figures"] == {"accuracy": [0, 0.1, 0.2, 0.3]}
    assert cell["seconds"] == [0, 1, 2, 3]
    assert cell["kept"] == "of 0"
    assert (found["command"], found["commit"]) == ("c[2, 3]; c[0, 1]", "2 and 0")
    assert (found["date"], found["environment"]) == ("today", {"torch": "2"})


def test_what_went_wrong_stays_with_its_seed() -> None:
    def summary(seed: int, *faults: dict[str, int]) -> dict[str, Any]:
        cell = {"panel": "", "series": "", "x": None, "task": "digits", "figures": {"a": [1.0]}}
        numbers = {"seconds": [1.0], "bytes_sent_per_node": [1.0]}
        told = dict.fromkeys(("command", "date", "commit", "device"), "")
        went = {"faults": list(faults)} if faults else {}
        return {**told, "environment": {}, "seeds": [seed], "cells": [cell | numbers | went]}

    diverged = {"training diverged": 2}
    for old, new in (summary(0), summary(1, diverged)), (summary(1, diverged), summary(0)):
        assert joined(old, new)["cells"][0]["faults"] == [{}, diverged]
    again = joined(joined(summary(0), summary(1, diverged)), summary(2))
    assert again["cells"][0]["faults"] == [{}, diverged, {}]
    assert "faults" not in joined(summary(0), summary(1))["cells"][0]


def test_what_was_left_out_and_then_run_is_left_out_no_more(tmp_path: Path) -> None:
    def summary(task: str, *left_out: str) -> dict[str, Any]:
        cell = {"panel": task, "series": "", "x": None, "task": task, "figures": {"a": [1.0]}}
        numbers = {"seconds": [1.0], "bytes_sent_per_node": [1.0]}
        told = dict.fromkeys(("command", "date", "commit", "device"), "")
        return {**told, "environment": {}, "seeds": [0], "cells": [cell | numbers]} | (
            {"left_out": list(left_out)} if left_out else {}
        )

    assert "left_out" not in joined(summary("digits", "mnist"), summary("mnist"))
    both = joined(summary("digits", "mnist", "svhn"), summary("mnist", "svhn"))
    assert both["left_out"] == ["svhn"]


def test_from_a_terminal(tmp_path: Path, table: Experiment) -> None:
    labels = [cell.label for cell in table.cells]
    for i, text in enumerate(labels):
        more = ["--join"] if i else []
        done = CliRunner().invoke(
            app, ["reproduce", table.name, "--only", text, "--out", str(tmp_path), *more]
        )
        assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / table.name / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["cells"]) == len(labels)
    assert summary["changed"] == []


@pytest.mark.parametrize("what", [["--all"], ["tiny-table", "tiny-sweep"]], ids=["all", "two"])
def test_only_one_is_joined(what: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", *what, "--join", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--join adds to one experiment" in done.output
    assert not list(tmp_path.iterdir())

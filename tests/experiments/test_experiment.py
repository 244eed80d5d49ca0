"""An experiment as data: its cells, what refers to them, and how it is made small."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed import experiments, tasks
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.experiments.experiment import Cell, Claim, Experiment, Quick, Ref
from polyfed.experiments.reproduce import plan

CELL = Cell(method="fedlinked", task="digits")


def test_a_cell_is_the_tasks_recipe_and_its_own_options() -> None:
    method, task = Cell(
        method="local", task="digits", options={"rounds": 3}, task_options={"labels": 4}
    ).make()
    recipe = tasks.digits().recipe("local")
    assert (method.rounds, method.lr) == (3, recipe["lr"])
    assert task == tasks.digits(labels=4)


def test_data_is_for_tasks_that_read_files(tmp_path: Path) -> None:
    assert CELL.make(tmp_path)[1] == tasks.digits()
    cifar = Cell(method="local", task="cifar10")
    assert cifar.make(tmp_path)[1] == tasks.cifar10(data=tmp_path)
    assert cifar.make()[1] == tasks.cifar10()


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        (Ref(), "accuracy"),
        (Ref("level 80"), "level 80"),
        (Ref("level 80", x=500), "level 80 at 500"),
        (Ref("a", "M0 last", "SVHN"), "SVHN, a, M0 last"),
        (Ref(figure="M0 from M1"), "M0 from M1"),
    ],
)
def test_names_of_figures(ref: Ref, text: str) -> None:
    assert str(ref) == text


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        (Ref("a"), Ref("b"), "a above b"),
        (Ref("a", x=2), Ref("b", x=2), "at 2: a above b"),
        (Ref("a", x=2), Ref("b"), "a at 2 above b"),
        (Ref("a", x=2), Ref("a"), "a: at 2 above all"),
        (Ref("a", "M0", "S"), Ref("b", "M0", "S"), "S, M0: a above b"),
        (Ref(figure="M0"), Ref(figure="M1"), "M0 above M1"),
    ],
)
def test_a_claim_says_first_what_its_sides_share(left: Ref, right: Ref, text: str) -> None:
    assert str(Claim(left, ">", right)) == text


def test_a_margin_belongs_to_equality() -> None:
    assert str(Claim(Ref("a"), "~", Ref("b"), 0.01)) == "a within 0.01 of b"
    with pytest.raises(ConfigError, match="a margin above 0 belongs to ~"):
        Claim(Ref("a"), "~", Ref("b"))
    with pytest.raises(ConfigError, match="a margin above 0 belongs to ~"):
        Claim(Ref("a"), ">", Ref("b"), 0.01)
    with pytest.raises(ConfigError, match="'a' stands on both sides"):
        Claim(Ref("a"), ">", Ref("a"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cells": []}, "it has no cells"),
        ({"cells": [CELL, replace(CELL, options={"rounds": 1})]}, "two cells are called 'all'"),
        ({"published": {Ref("b"): "0.5"}}, "no cell is called 'b'"),
        ({"published": {Ref("alone", panel="C"): "0.5"}}, "no cell is called 'C, alone'"),
        ({"claims": [Claim(Ref("alone"), ">", Ref("b"))]}, "no cell is called 'b'"),
        ({"claims": [Claim(Ref("alone", x=1), ">", Ref("alone"))]}, "'alone at 1'"),
        ({"published": {Ref("alone"): "half"}}, "printed number 'half'"),
    ],
)
def test_what_refers_to_nothing_is_an_error(
    table: Experiment, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(table, **change)


def test_without_x_a_reference_is_to_all_points(sweep: Experiment) -> None:
    every = replace(sweep, claims=[Claim(Ref("alone"), ">", Ref("flat"))])
    left, right = every.claims[0].left, every.claims[0].right
    assert [left.fits(c) for c in every.cells] == [True, True, False]
    assert [right.fits(c) for c in every.cells] == [False, False, True]
    assert [Ref("alone", x=0.01).fits(c) for c in every.cells] == [False, True, False]


def test_needs(table: Experiment) -> None:
    assert table.needs == []
    more = [*table.cells, *(Cell(method="local", task=t, panel=t) for t in ("svhn", "cifar10"))]
    assert replace(table, cells=more).needs == ["cifar10", "svhn"]


# ---- scaling -------------------------------------------------------------------------------------


def test_the_papers_setting_changes_nothing(table: Experiment) -> None:
    cells = table.scaled()
    assert cells == list(table.cells)
    assert table.changes(cells, 2) == []
    assert table.changes(cells, 7) == []
    assert table.changes(cells, 2, 7) == []


def test_cells_with_fewer_seeds_than_others_are_a_change(table: Experiment) -> None:
    cells = table.scaled()
    assert table.changes(cells, 1, 1) == ["seeds: 2 → 1"]
    assert table.changes(cells, 2, 1) == ["seeds: 2 → 1 to 2"]
    assert table.changes(cells, 1, 7) == ["seeds: 2 → 1 to 7"]


def test_quick_says_what_it_scales(table: Experiment) -> None:
    cells = table.scaled(quick=True)
    assert [c.options["rounds"] for c in cells] == [1, 1]
    assert [c.task_options for c in cells] == [{"labels": 5}] * 2
    assert table.changes(cells, 1, quick=True) == [
        "labels: 5 a digit",
        "seeds: 2 → 1",
        "local on digits: rounds 2 → 1",
        "task digits: labels 15 → 5",
        "fedavg-trunk on digits: rounds 2 → 1",
    ]


def test_quick_keeps_some_points(sweep: Experiment) -> None:
    cells = sweep.scaled(quick=True)
    assert [(c.series, c.x) for c in cells] == [("alone", 0.01), ("flat", None)]
    assert sweep.changes(cells, 2, quick=True) == ["nothing", "cells: 3 → 2"]


def test_options_are_for_methods_and_tasks_that_have_them() -> None:
    experiment = Experiment(
        name="n",
        title="t",
        paper="p",
        cells=[CELL, Cell(method="local", task="digits", series="local")],
        quick=Quick(
            says="q", options={"distil_epochs": 1}, task_options={"quick": True, "num_nodes": 5}
        ),
    )
    linked, local = experiment.scaled(quick=True)
    assert (linked.options, local.options) == ({"distil_epochs": 1}, {})
    assert linked.task_options == {"quick": True}
    said = experiment.changes([linked, local], 5, quick=True)
    assert said[0] == "q"
    assert "distil_epochs 10 → 1" in said[1]
    assert not any("task digits" in text for text in said)  # `says` speaks for quick tasks


def test_rounds_are_for_all_and_changes_have_ranges(sweep: Experiment) -> None:
    cells = [replace(c, options={**c.options, "rounds": i}) for i, c in enumerate(sweep.cells, 5)]
    sweep = replace(sweep, cells=cells)
    fewer = sweep.scaled(rounds=2)
    assert [c.options["rounds"] for c in fewer] == [2, 2, 2]
    assert sweep.changes(fewer, 2) == ["local on digits: rounds 5 to 7 → 2"]


def test_a_share_of_each_cells_own_rounds(sweep: Experiment) -> None:
    pairs = zip((61, 121, 2), sweep.cells, strict=True)
    cells = [replace(c, options={**c.options, "rounds": n}) for n, c in pairs]
    fewer = replace(sweep, cells=cells).scaled(rounds=0.18)
    assert [c.options["rounds"] for c in fewer] == [11, 22, 1]


@pytest.mark.parametrize("rounds", [0, -1, 0.0, -0.5, 1.5])
def test_rounds_that_cannot_be(sweep: Experiment, rounds: float) -> None:
    with pytest.raises(ConfigError, match="rounds must be >= 1, or a share of the paper's"):
        plan(sweep, rounds=rounds)


def test_quick_then_rounds(table: Experiment) -> None:
    assert [c.options["rounds"] for c in table.scaled(quick=True, rounds=4)] == [4, 4]


# ---- names ---------------------------------------------------------------------------------------


def test_experiments_by_name(table: Experiment) -> None:
    assert experiments.load("tiny-table") is table
    with pytest.raises(UnknownNameError, match="Did you mean 'tiny-table'"):
        experiments.load("tiny-tabel")


def test_no_name_is_used_twice() -> None:
    listed = [
        experiment.name
        for family in experiments.FAMILIES
        for experiment in __import__(
            f"polyfed.experiments.{family}", fromlist=["EXPERIMENTS"]
        ).EXPERIMENTS
    ]
    assert list(experiments.every()) == listed

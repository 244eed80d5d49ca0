"""A tiny experiment, registered; and results made of given figures, without any run."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polyfed import experiments
from polyfed.experiments.experiment import Cell, Claim, Dots, Experiment, Lines, Quick, Ref
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.results import FORMAT, Results

QUICK = Quick(says="labels: 5 a digit", task_options={"labels": 5}, options={"rounds": 1})
Make = Callable[..., Results]
Value = Callable[[str, str, Any, str], float]  # of a panel, a series, a point and a figure
Judge = Callable[..., dict[str, str]]


def cell(series: str, method: str = "local", x: Any = None, **more: Any) -> Cell:
    options = {"rounds": 2, "init_epochs": 0, "local_epochs": 1}
    return Cell(method=method, task="digits", series=series, x=x, options={**options, **more})


TABLE = Experiment(
    name="tiny-table",
    title="Averaging and separated learning",
    paper="Nobody 2026, Table 1",
    cells=[cell("alone"), cell("averaged", "fedavg-trunk", finetune_epochs=1)],
    quick=QUICK,
    published={Ref("alone"): "0.50 ± 0.02"},
    claims=[Claim(Ref("averaged"), ">", Ref("alone"))],
    seeds=2,
    notes=("A note.",),
)
SWEEP = Experiment(
    name="tiny-sweep",
    title="Learning rates",
    paper="Nobody 2026, Figure 2",
    cells=[cell("alone", x=lr, lr=lr) for lr in (0.001, 0.01)] + [cell("flat", lr=0.003)],
    quick=Quick(says="nothing", task_options={}, points=(0.01,)),
    claims=[Claim(Ref("alone", x=0.01), ">", Ref("alone", x=0.001))],
    seeds=2,
    statistic="median",
    plot=Lines("learning rate", scale="log"),
    evaluate_every=10,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("polyfed.experiments.tiny")
    module.EXPERIMENTS = [TABLE, SWEEP]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(experiments, "FAMILIES", (*experiments.FAMILIES, "tiny"))
    monkeypatch.delenv("POLYFED_DATA", raising=False)


@pytest.fixture
def table() -> Experiment:
    return TABLE


@pytest.fixture
def sweep() -> Experiment:
    return SWEEP


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny table, run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    reproduce(TABLE, out=out)
    return out


@pytest.fixture
def results() -> Make:
    """Results of cells whose figures are given: {(panel, series, x): {figure: values}}."""

    def make(
        figures: Mapping[tuple[str, str, Any], Mapping[str, Sequence[float]]], **fields: Any
    ) -> Results:
        cells = [
            Cell(method="local", task="digits", panel=panel, series=series, x=x)
            for panel, series, x in figures
        ]
        own = {"title": "Made", "paper": "Nobody", "quick": QUICK, "plot": Dots(), **fields}
        experiment = Experiment(name="made", cells=cells, **own)
        count = len(next(iter(next(iter(figures.values())).values())))
        versions = ("polyfed", "torch", "python", "numpy", "platform", "threads")
        summary = {
            "format": FORMAT,
            "experiment": "made",
            "command": "polyfed reproduce made",
            "date": "2026-11-15",
            "commit": "abc1234",
            "device": "cpu",
            "environment": dict.fromkeys(versions, "1"),
            "quick": False,
            "changed": [],
            "seeds": list(range(count)),
            "cells": [
                {"panel": panel, "series": series, "x": x, "figures": dict(found)}
                | {"seconds": [1.0] * count, "bytes_sent_per_node": [2000.0] * count}
                for (panel, series, x), found in figures.items()
            ],
        }
        return Results(experiment, summary)

    return make


@pytest.fixture
def judged(results: Make) -> Judge:
    """The verdict of every ordering of an experiment if its figures, with five seeds, were these.

    Turned, every figure is 1 less the value, which turns all orderings round, of gains, too.
    """

    def judge(experiment: Experiment, value: Value, *, turned: bool = False) -> dict[str, str]:
        def figure_of(cell: Cell, name: str) -> float:
            found = value(cell.panel, cell.series, cell.x, name)
            return 1 - found if turned else found

        sides = [ref for claim in experiment.claims for ref in (claim.left, claim.right)]
        refs = [*sides, *(ref.less for ref in sides if ref.less is not None)]
        figures = {
            (c.panel, c.series, c.x): {
                ref.figure: [figure_of(c, ref.figure)] * 5 for ref in refs if ref.fits(c)
            }
            for c in experiment.cells
            if any(ref.fits(c) for ref in refs)
        }
        made = replace(results(figures), experiment=experiment)
        return {str(claim): each.word for claim, each in made.orderings().items()}

    return judge

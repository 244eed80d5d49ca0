"""FedUL's experiments: the paper's settings, what it prints and says, and the figures of a run."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed import Run
from polyfed.core.node import Node
from polyfed.engines.run import check_run
from polyfed.experiments import fedul
from polyfed.experiments.experiment import Cell, Experiment, Ref
from polyfed.experiments.fedul import ERROR, FEDUL, IID, LABELS_LOSS, M1, M2, NON_IID, SETS_LOSS
from polyfed.experiments.front import front, undominated
from polyfed.experiments.plot import draw
from polyfed.experiments.reproduce import reproduce
from polyfed.record import Ledger, Log
from polyfed.tasks import Task

EVERY = {e.name: e for e in fedul.EXPERIMENTS}
TABLE = EVERY["fedul-table-2"]


def cell_of(experiment: Experiment, panel: str, series: str) -> Cell:
    (found,) = [c for c in experiment.cells if (c.panel, c.series) == (panel, series)]
    return found


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60,000 and 600 images of noise whose mean brightness tells the digit."""
    folder = tmp_path_factory.mktemp("data") / "mnist"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train", 60_000), ("t10k", 600)):
        y = np.arange(count, dtype=np.uint8) % 10
        x = (generator.integers(0, 25, (count, 28, 28)) + 23 * y[:, None, None]).astype(np.uint8)
        images = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + x.tobytes()
        labels = struct.pack(">HBBI", 0, 8, 1, count) + y.tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder.parent


# ---- the paper's settings ------------------------------------------------------------------------


def test_the_papers_settings() -> None:
    """Table 1 of the paper, and SPEC 4.3."""
    for panel, iid in ((IID, True), (NON_IID, False)):
        for series in (FEDUL, M1, M2, fedul.MGDA, fedul.LLP, fedul.PL):
            method, task = cell_of(TABLE, panel, series).make()
            said = {**vars(task), **vars(method)}
            wanted = {"num_nodes": 5, "sets": 10, "iid": iid, "rounds": 100, "batch": 100}
            wanted |= {"lr": 1e-4, "local_epochs": 1, "l1": 1e-5, "rotate": 20.0, "labels": 0.0}
            assert {name: said[name] for name in wanted} == wanted
    assert cell_of(TABLE, IID, M2).make()[0].h == 0.5  # type: ignore[attr-defined]


def test_controls() -> None:
    for panel, iid in ((IID, True), (NON_IID, False)):
        for series, labels in ((fedul.SOME, 0.1), (fedul.ALL, 1.0)):
            method, task = cell_of(TABLE, panel, series).make()
            assert method.name == "fedavg"
            assert (task.labels, task.iid) == (labels, iid)  # type: ignore[attr-defined]
    once = {cell_of(TABLE, panel, fedul.HUB_ONLY).make() for panel in (IID, NON_IID)}
    assert len(once) == 1


def test_what_is_left_of_table_2() -> None:
    assert TABLE.published == {Ref(FEDUL, ERROR, IID): "0.78", Ref(FEDUL, ERROR, NON_IID): "2.98"}


# ---- what is claimed, put to the test with made-up figures ---------------------------------------

ERRORS = {
    (IID, FEDUL): 0.78, (IID, M2): 0.74, (IID, M1): 0.70,
    (NON_IID, FEDUL): 2.98, (NON_IID, M2): 1.5, (NON_IID, M1): 1.2,
}  # fmt: skip
CURVES = {  # at rounds 1, 5, 10, 20, 50 and 100
    FEDUL: (3.0, 2.6, 2.3, 2.1, 1.95, 1.88),
    M1: (2.9, 2.4, 2.2, 2.0, 1.90, 1.87),
    M2: (2.8, 2.2, 2.1, 1.9, 1.85, 1.84),
}
ROUNDS = ("1", "5", "10", "20", "50", "100")
CLAIMS = {"table-2": 8, "losses": 37, "supervised-losses": 22, "errors": 26}


def as_the_paper_has_it(panel: str, series: str, x: Any, figure: str) -> float:
    """Some figures that fit its text."""
    if figure == ERROR:
        return ERRORS[panel, series]
    return CURVES[series][ROUNDS.index(figure)]


@pytest.mark.parametrize("part", CLAIMS)
def test_orderings_hold_of_figures_that_fit_the_text_and_not_of_their_opposites(
    part: str, judged: Any
) -> None:
    experiment = EVERY[f"fedul-{part}"]
    said = judged(experiment, as_the_paper_has_it)
    assert list(said.values()) == ["holds"] * CLAIMS[part]
    opposite = judged(experiment, as_the_paper_has_it, turned=True)
    same = {f"{IID}, 100: {FEDUL} within 0.02 of {M1}"} if part == "losses" else set()
    assert {claim for claim, word in opposite.items() if word != "does not hold"} == same


def failing(judged: Any, part: str, **changed: float) -> set[str]:
    """What does not hold if a figure, named by its panel, series and figure, is another."""

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        usual = as_the_paper_has_it(panel, series, x, figure)
        return changed.get("|".join((panel, series, figure)), usual)

    said = judged(EVERY[f"fedul-{part}"], value)
    return {claim for claim, word in said.items() if word == "does not hold"}


def test_a_gain_that_is_no_larger_where_nodes_differ(judged: Any) -> None:
    said = failing(judged, "table-2", **{f"{NON_IID}|{FEDUL}|{ERROR}": 1.53})
    assert said == {f"{FEDUL}, {ERROR}, less {FEDUL} + M2, {ERROR}: {NON_IID} above {IID}"}


def test_an_error_that_is_not_consistently_lower(judged: Any) -> None:
    said = failing(judged, "errors", **{f"{IID}|{M1}|50": 2.0})
    assert said == {f"{IID}, 50: {FEDUL} above {M1}"}
    said = failing(judged, "errors", **{f"{NON_IID}|{M2}|5": 2.5})
    assert said == {f"{NON_IID}, 5: {M1} above {M2}"}


def test_a_loss_that_rises_or_ends_elsewhere(judged: Any) -> None:
    said = failing(judged, "losses", **{f"{IID}|{M1}|100": 1.91})
    assert said == {f"{IID}, 100: {FEDUL} within 0.02 of {M1}", f"{IID}, {M1}: 50 above 100"}


# ---- what belongs together -----------------------------------------------------------------------


def test_the_curves_share_the_runs_of_the_table() -> None:
    known = {cell.make() for cell in TABLE.cells}
    for name in ("fedul-losses", "fedul-supervised-losses", "fedul-errors"):
        experiment = EVERY[name]
        assert experiment.evaluate_every == TABLE.evaluate_every
        assert {cell.make() for cell in experiment.cells} <= known


def test_the_sweep_holds_what_wins_and_what_it_is_to_beat() -> None:
    sweep = EVERY["fedul-pareto"]
    assert {(c.panel, c.series) for c in sweep.cells} == {
        (panel, series)
        for panel in (IID, NON_IID)
        for series in (fedul.FIXED, fedul.WORK, fedul.AUTO, fedul.MGDA)
    }
    for cell in sweep.cells:
        method, task = cell.make()
        assert task.iid == (cell.panel == IID)  # type: ignore[attr-defined]
        if cell.x is not None:
            option = "h" if cell.series == fedul.FIXED else "hub_epochs"
            assert getattr(method, option) == cell.x


# ---- figures -------------------------------------------------------------------------------------


def run_with(*metrics: dict[str, object]) -> Run:
    accuracy = {"M0": 0.9, "M1": 0.7}
    return Run("fedul-m1", accuracy, list(metrics), Ledger(Log()), [])


def test_errors_are_in_percent() -> None:
    expected = {ERROR: 20.0, fedul.LOWEST: 10.0, fedul.HIGHEST: 30.0}
    assert fedul.errors(run_with()) == pytest.approx(expected)


def test_curves_are_means_over_nodes() -> None:
    said = run_with(
        {"tick": 1, "node": "M0", "local_loss": 2.0},
        {"tick": 1, "node": "M1", "local_loss": 3.0},
        {"tick": 4, "node": "M0", "local_loss": 9.0},
        {"tick": 7, "node": "M0", "local_loss": 1.0},
        {"tick": 7, "seconds": 1.0},
    )
    assert fedul.by_round("local_loss")(said) == {"1": 2.5, "7": 1.0}  # round 4 is no point
    assert fedul.by_round("local_loss", lambda v: 2 * v)(said)["1"] == 5.0


def test_objectives_are_those_of_the_network_that_is_kept() -> None:
    """Round 3 validates as well as round 2, and is the later one; round 1 has the lowest loss."""
    said = run_with(
        {"tick": 1, "node": "hub", "val_rb_accuracy": 0.5, "val_rb_loss": 0.1},
        {"tick": 2, "node": "hub", "val_rb_accuracy": 0.8, "val_rb_loss": 0.2},
        {"tick": 3, "node": "hub", "val_rb_accuracy": 0.8, "val_rb_loss": 0.3},
        {"tick": "final", "node": "M0", "surrogate_loss": 1.0},
        {"tick": "final", "node": "M1", "surrogate_loss": 2.0},
    )
    assert fedul.objectives(said) == {SETS_LOSS: 1.5, LABELS_LOSS: 0.3, ERROR: pytest.approx(20)}


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::polyfed.methods.fedul.IdentifiabilityWarning")
def test_every_cell_passes_its_checks(mnist: Path) -> None:
    """The federations of one split; the other differs in what is in them."""
    seen: dict[Task, list[Node]] = {}
    for cell in TABLE.scaled(quick=True):
        method, task = cell.make(mnist)
        if cell.panel == NON_IID:
            seen[task] = seen.get(task) or task.nodes(0)
            check_run(method, seen[task])


def test_a_quick_run_of_a_cell_gives_all_figures(mnist: Path, tmp_path: Path) -> None:
    small = {**vars(TABLE), "cells": [cell_of(TABLE, IID, M1)], "published": {}, "claims": []}
    found = reproduce(Experiment(**small), data=mnist, out=tmp_path, quick=True, progress=False)
    (cell,) = found.summary["cells"]
    assert 0 <= cell["figures"][ERROR][0] <= 100
    (run,) = [Run.open(p) for p in (tmp_path / "runs").glob("*/seed-0")]
    for name in ("fedul-losses", "fedul-supervised-losses", "fedul-errors"):
        assert set(EVERY[name].figures(run)) == {"1", "2"}
    assert set(EVERY["fedul-pareto"].figures(run)) == {SETS_LOSS, LABELS_LOSS, ERROR}


# ---- the front -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_the_front_holds_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    on_front = undominated(points)
    assert any(on_front)
    for (x, y), is_on in zip(points, on_front, strict=True):
        beaten = [(a, b) for a, b in points if a <= x and b <= y and (a < x or b < y)]
        assert is_on == (not beaten)


def test_the_front_is_drawn_from_the_summary(results: Any, tmp_path: Path) -> None:
    """Three points of a sweep, and one of another series that beats the one in the middle."""
    pytest.importorskip("matplotlib")
    figures = {(IID, fedul.FIXED, x): (x, 1 - x, 10.0) for x in (0.0, 0.5, 1.0)}
    figures |= {(IID, fedul.AUTO, None): (0.4, 0.4, 5.0)}
    cells = {
        key: {SETS_LOSS: [a, a], LABELS_LOSS: [b, b], ERROR: [c, c + 1]}
        for key, (a, b, c) in figures.items()
    }
    made = results(cells, plot=EVERY["fedul-pareto"].plot)
    draw(made, tmp_path / "front.svg")
    text = (tmp_path / "front.svg").read_text()
    for said in (SETS_LOSS, LABELS_LOSS, ERROR, fedul.FIXED, fedul.AUTO, "on the front", ">0.5<"):
        assert said in text
    (top, bottom) = front(made.summary["cells"], SETS_LOSS, LABELS_LOSS, ERROR).axes
    rings = [axes.collections[-1].get_offsets().tolist() for axes in (top, bottom)]
    assert rings == [[[0.0, 1.0], [1.0, 0.0], [0.4, 0.4]], [[0.0, 10.5], [0.4, 5.5]]]

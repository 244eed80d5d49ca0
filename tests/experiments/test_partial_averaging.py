"""Partial averaging's experiments: the paper's settings, its schemes, and what it says of them."""

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed import Run
from polyfed.core.node import Node
from polyfed.engines.run import check_run
from polyfed.experiments import (
    _levels,
    partial_averaging,
    partial_averaging_differences,
    partial_averaging_more,
)
from polyfed.experiments import reproduce as reproducing
from polyfed.experiments.experiment import Cell, Ref
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.runner import run_cells
from polyfed.methods.partial_averaging import PartialAveraging
from polyfed.record import Ledger, Log

MODULES = (partial_averaging, partial_averaging_differences, partial_averaging_more)
EVERY = {e.name.removeprefix("partial-averaging-"): e for m in MODULES for e in m.EXPERIMENTS}
CYCLES = ("cycle:0", "swap", *(f"cycle:{r}" for r in (4, 6, 8, 10)))
FIRST_HIDDEN = {0: 0, 15: 50, 30: 100, 60: 200, 80: 250, 100: 300}  # the paper's section V.1
POINTS: dict[str, Sequence[int]] = {  # of experiments whose points are moments of the same runs
    "V.3.b": range(1, 31),
    "V.2.a": (30, 50, 100, 200, 500, 1000),
    "V.2.b": (30, 50, 100, 200),
    "V.4": (100, 200, 300, 400),
    "V.5": (10, 20, 30, 40),
}
SMALL = {"train": 10, "test": 10}


def settings(name: str, *options: str) -> list[tuple[Any, ...]]:
    """The different values of options of method and task, in the order of the cells."""
    found = []
    for cell in EVERY[name].cells:
        method, task = cell.make()
        values = {**vars(task), **vars(method)}
        found.append(tuple(values[option] for option in options))
    return list(dict.fromkeys(found))


def cell_of(name: str, series: str, x: Any = None, panel: str = "") -> Cell:
    (found,) = [c for c in EVERY[name].cells if (c.series, c.x, c.panel) == (series, x, panel)]
    return found


# ---- the paper's settings ------------------------------------------------------------------------


def test_all_sections_are_there() -> None:
    found = [*(f"V.2.{x}" for x in "abc"), *(f"V.3.{x}" for x in "abcdefghi"), "V.4", "V.5"]
    assert sorted(EVERY) == found


@pytest.mark.parametrize("name", EVERY)
def test_runs_and_statistic(name: str) -> None:
    experiment = EVERY[name]
    assert experiment.seeds == {"V.3.d": 20, "V.3.e": 20, "V.3.g": 20, "V.5": 100}.get(name, 10)
    assert experiment.statistic == "median"
    assert f"section {name}, Figure" in experiment.paper


@pytest.mark.parametrize(
    ("name", "expected"),  # nodes, train, rounds, kind, permuted; blocks
    [
        ("V.3.a", ([(16, 3500, 30, "swap", 7)], [50, 100, 250, 500, 1000, 3000])),
        ("V.3.b", ([(16, 3500, 30, "swap", 7)], [100])),
        ("V.3.c", ([(n, 3500, 30, "swap", n // 4) for n in (4, 8, 12, 16)], [500])),
        ("V.3.d", ([(12, 200, 100, "s3", 7)], [25, 50, 100, 150])),
        ("V.3.e", ([(4, 1000, 50, "v3e", 2)], [100, 200, 400, 800])),
        ("V.3.f", ([(16, 3500, 30, k, 7) for k in CYCLES], [500])),
        ("V.3.g", ([(16, 3500, 30, "swap", n) for n in (0, 2, 4, 6, 8)], [500])),
        ("V.3.h", ([(16, n, 50, "swap", 7) for n in (250, 500, 1000, 2000, 3500)], [200])),
        ("V.3.i", ([(16, 3500, 50, k, 7) for k in CYCLES], [500])),
    ],
)  # fmt: skip
def test_mnist_settings(name: str, expected: tuple[list[tuple[Any, ...]], list[int]]) -> None:
    federations, blocks = expected
    assert settings(name, "num_nodes", "train", "rounds", "kind", "permuted") == federations
    assert [block for (block,) in settings(name, "block")] == blocks
    assert settings(name, "test", "batch", "lr", "optimiser", "momentum", "loss", "own_start") == [
        (1000, 1, 0.1, "sgd", 0.0, "squared", False)
    ]
    assert EVERY[name].evaluate_every == (1 if name == "V.3.b" else federations[0][2])
    assert {c.task for c in EVERY[name].cells} == {"mnist-permuted"}


@pytest.mark.parametrize("name", EVERY)
def test_pages_say_how_networks_start(name: str) -> None:
    """As the settings have it."""
    (said,) = [note for note in EVERY[name].notes if "How networks start is not said" in note]
    if name.startswith(("V.2", "V.3")):
        assert settings(name, "own_start", "weights") == [(False, "xavier:4")]
        assert "all peers start from one network" in said
        assert "four times Xavier's interval" in said
    elif name == "V.4":
        assert settings(name, "own_start") == [(True,)]
        assert "differently on every peer; Xavier's uniform weights" in said


def test_other_settings() -> None:
    writers = "num_nodes", "train", "test", "block", "rounds"
    assert settings("V.2.a", *writers) == [(16, 100, 30, 50, 1000), (16, 360, 60, 180, 1000)]
    assert settings("V.2.b", *writers) == [(16, 100, 30, 50, 200), (16, 360, 60, 180, 200)]
    assert settings("V.2.c", *writers) == [(64, 100, 27, 50, 200), (32, 350, 60, 175, 200)]
    sensors = "train", "test", "outputs", "block", "rounds", "batch", "lr", "loss", "own_start"
    assert settings("V.4", *sensors) == [(50, 200, 1, 25, 400, 1, 0.1, "squared", True)]
    memories = "num_nodes", "modified", "ones", "cells", "block", "rounds", "lr", "loss", "init"
    assert settings("V.5", *memories) == [
        (15, 2, 4, 400, 3, 40, 0.1, "hebbian", init) for init in ("own", "common")
    ]
    assert settings("V.5", "own_start") == [(False,)]  # the task alone decides how they start


@pytest.mark.parametrize("name", ["V.3.a", "V.3.c", "V.3.f", "V.3.g", "V.3.h", "V.2.a"])
def test_levels_are_schemes(name: str) -> None:
    for cell in EVERY[name].cells:
        level = int(cell.series.removeprefix("level "))
        outputs = 26 if cell.task == "letters-hands" else 10
        wanted = f"784-{FIRST_HIDDEN[level]}-{level}-{outputs}" if level else "0-0-0-0"
        assert cell.make()[0].scheme == wanted  # type: ignore[attr-defined]
    names = [f"level {level}" for level in FIRST_HIDDEN]
    assert list(dict.fromkeys(c.series for c in EVERY[name].cells)) == names


def test_levels_of_other_networks() -> None:
    assert [c.options["scheme"] for c in EVERY["V.4"].cells] == [
        "0%", "100-7-3-1", "100-15-6-1", "100-30-12-1", "100-40-16-1", "100-50-20-1",
    ]  # fmt: skip
    shared = ["0%", *(f"50-{n}-50" for n in (100, 200, 300, 350, 400))]
    assert [c.options["scheme"] for c in EVERY["V.5"].cells] == shared * 2
    cells = EVERY["V.3.i"].cells
    layouts = {c.series: (c.options["scheme"], c.task_options["hidden"]) for c in cells}
    assert list(layouts.values()) == [
        ("0-0-0-0", "300=100"), ("784-300-100-10", "300=100"), ("784-250-80-10", "300=100"),
        ("784-300-100-0", "300=100"), ("0%", "300=100=10"), ("784-300-100-10-10", "300=100=10"),
        ("784-250-80-8-10", "300=100=10"), ("784-300-100-10-0", "300=100=10"),
    ]  # fmt: skip


def test_whole_layers_by_task() -> None:
    schemes = [c.options["scheme"] for c in EVERY["V.2.b"].cells]
    assert schemes[0] == "784-250-80-10"
    assert schemes[4:6] == ["0-0-100-10", "784-250-80-26"]
    assert schemes[1] == schemes[6] == "784-300-100-0"
    assert len(schemes) == 10


def test_equal_settings_are_equal_cells() -> None:
    """What experiments have in common is run once."""
    swapped = cell_of("V.3.a", "level 80", 500).make()
    assert cell_of("V.3.f", "level 80", 2).make() == swapped
    assert cell_of("V.3.c", "level 60", 16).make() == cell_of("V.3.g", "level 60", 4).make()
    assert EVERY["V.3.a"].evaluate_every == EVERY["V.3.f"].evaluate_every
    flat = [c.make() for c in EVERY["V.2.c"].cells if c.series == "level 0"]
    assert len({repr(each) for each in flat}) == 2  # digits and letters


# ---- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_claims_are_of_figures_that_there_are(name: str) -> None:
    experiment = EVERY[name]
    points = POINTS.get(name)
    figures = {"accuracy"} if points is None else set(map(str, points))
    refs = [ref for claim in experiment.claims for ref in (claim.left, claim.right)]
    assert {ref.figure for ref in refs} <= figures
    assert len(set(experiment.claims)) == len(experiment.claims) > 0
    if points is not None:
        rounds = settings(name, "rounds")[-1][0]
        accuracy = dict.fromkeys(("M0", "M1"), 0.5)
        metrics = [
            {"tick": t, "node": n, "test_accuracy": (t + i) / 2000}
            for t in range(0, rounds + 1, experiment.evaluate_every)
            for i, n in enumerate(accuracy)
        ]
        run = Run("made", accuracy, [*metrics, {"tick": rounds, "seconds": 1.0}], Ledger(Log()), [])
        found = experiment.figures(run)
        assert found.keys() == figures
        assert found["30" if "30" in found else "100"] == pytest.approx(
            (30.5 if "30" in found else 100.5) / 2000
        )


def holds(name: str, left: str, right: str, x: Any = None, **where: str) -> bool:
    """Whether the paper is said to say so."""
    pairs = [(c.left, c.right) for c in EVERY[name].claims if c.relation == ">"]
    return (Ref(left, x=x, **where), Ref(right, x=x, **where)) in pairs


def test_orderings_of_the_text() -> None:
    """SPEC 2.8, a few that have no gain in them, and that none is the other way round too."""
    assert holds("V.3.a", "level 80", "level 60", 3000)
    assert not holds("V.3.a", "level 80", "level 60", 50)
    assert not holds("V.3.f", "level 80", "level 100", 2)  # "for other schemes"
    assert holds("V.3.i", "784-300-100-0", "full", 2)
    assert not holds("V.3.i", "784-300-100-0", "784-250-80-10", 0)
    here = [EVERY["V.3.d"].claims, ("80", "full per class")]
    assert not [c for c in here[0] if {c.left.series, c.right.series} == set(here[1])]
    for experiment in EVERY.values():
        pairs = {(c.left, c.right) for c in experiment.claims if c.relation == ">"}
        assert not {(b, a) for a, b in pairs} & pairs


# ---- schemes on networks -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST with 64 writers, letters and sensor nodes, all of them few and made of noise."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def images(name: str, split: str, labels: np.ndarray[Any, Any]) -> None:
        (folder / name).mkdir(exist_ok=True)
        for kind, a in (
            ("images-idx3", rng.integers(0, 256, (len(labels), 28, 28), np.uint8)),
            ("labels-idx1", labels.astype(np.uint8)),
        ):
            head = struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape)
            (folder / name / f"{split}-{kind}-ubyte").write_bytes(head + a.tobytes())

    for split, n in (("train", 1300), ("t10k", 50)):
        images("mnist", split, np.arange(n) % 10)
    owners, nobody = np.arange(1300) % 64, np.full(50, 64)
    np.savez(folder / "mnist" / "writers.npz", train_writer=owners, test_writer=nobody)
    for split in ("train", "test"):
        images("EMNIST-letters-subset", split, np.arange(700) % 26 + 1)
    node = np.repeat([0, 1, 2], [40, 60, 80])
    x = rng.normal(size=(len(node), 100)).astype(np.float32)
    np.savez(folder / "vehicle.npz", x=x, y=np.arange(len(node)) % 2 * 2 - 1, node=node)
    return folder


def made(cell: Cell, files: Path) -> tuple[PartialAveraging, list[Node]]:
    """The method of a cell, and its nodes with little data."""
    root = files / "mnist" if cell.task.startswith("mnist") else files
    fewer = {} if cell.task in ("vehicle", "associative") else SMALL
    method, task = replace(cell, task_options={**cell.task_options, **fewer}).make(root)
    assert isinstance(method, PartialAveraging)
    return method, task.nodes(0)


@pytest.mark.parametrize(
    "name", ["V.2.a", "V.2.b", "V.3.a", "V.3.b", "V.3.d", "V.3.e", "V.3.i", "V.4", "V.5"]
)  # V.3.c, f, g and h have the schemes and networks of V.3.a; V.2.c is below
def test_every_scheme_fits_its_networks(name: str, files: Path) -> None:
    lines = {(c.panel, c.series): c for c in EVERY[name].cells}  # the last point of each
    for cell in lines.values():
        method, nodes = made(cell, files)
        check_run(method, nodes, evaluate_every=EVERY[name].evaluate_every)
    assert len(lines) >= 3


def shared(cell: Cell, files: Path) -> dict[str, dict[str, int]]:
    """How many parameters of each topic every node shares."""
    method, nodes = made(cell, files)
    return {n.name: {t: s.shape[0] for t, s in method.sends(n).items()} for n in nodes}


GLOBAL_80 = 250 * 784 + 250 + 80 * 250 + 80 + 10 * 80 + 10  # 217,140 of 266,610 (SPEC 2.2)


def test_semi_local_schemes_share_what_the_paper_says(files: Path) -> None:
    inside = 50 + 20 * 50 + 20  # biases and the weights between its own cells
    between = 50 * 784 + 20 * 250 + 80 * 50 + 10 * 20
    without = shared(cell_of("V.3.d", "80 + 20", 25), files)
    assert without["M03"] == without["M09"] == {"global": GLOBAL_80, "p3": inside}
    topics = {topic for own in without.values() for topic in own}
    assert topics == {"global", *(f"p{k}" for k in range(6))}
    dependent = shared(cell_of("V.3.d", "80 + 20, dependent", 25), files)
    assert dependent["M11"] == {"global": GLOBAL_80, "p5": inside + between}
    assert sum(dependent["M11"].values()) == 266_610
    per_class = shared(cell_of("V.3.d", "full per class", 25), files)
    assert per_class["M00"] == per_class["M06"] == {"p0": 266_610}
    assert shared(cell_of("V.3.d", "80", 25), files)["M00"] == {"global": GLOBAL_80}
    assert shared(cell_of("V.3.d", "no averaging", 25), files)["M00"] == {}
    assert shared(cell_of("V.3.d", "full", 25), files)["M07"] == {"global": 266_610}


def test_those_who_share_a_model_have_the_same_permutation(files: Path) -> None:
    _, nodes = made(cell_of("V.3.d", "80 + 20", 25), files)
    tests = [n.data["test"].y.tolist() for n in nodes]  # type: ignore[union-attr]
    assert [tests.index(own) for own in tests] == [*range(6), *range(6)]


def test_semi_local_and_local_schemes(files: Path) -> None:
    own = shared(cell_of("V.3.e", "70 + 30 or 15", 100), files)
    common = 220 * 784 + 220 + 70 * 220 + 70 + 10 * 70 + 10
    assert own["M0"] == own["M1"] == {"global": common, "same": 80 + 30 * 80 + 30}
    assert own["M2"] == own["M3"] == {"global": common, "near": 40 + 15 * 40 + 15}
    dependent = shared(cell_of("V.3.e", "70 + 30 or 15, dependent", 100), files)
    assert sum(dependent["M0"].values()) == 266_610
    assert dependent["M3"]["near"] == own["M3"]["near"] + 40 * 784 + 15 * 220 + 70 * 40 + 10 * 15
    per_class = shared(cell_of("V.3.e", "full per class", 100), files)
    assert per_class == {"M0": {"same": 266_610}, "M1": {"same": 266_610}, "M2": {}, "M3": {}}


@pytest.mark.parametrize(
    ("panel", "peers"), [("digits by writer", 64), ("letters in made-up hands", 32)]
)
def test_groups_of_writers(panel: str, peers: int, files: Path) -> None:
    for size in (2, 16, peers):
        text = cell_of("V.2.c", "level 80", size, panel).options["groups"]
        groups = [set(part.split("@")[1].split("+")) for part in text.split(";")]
        assert [len(group) for group in groups] == [size] * (peers // size)
        assert len(set.union(*groups)) == peers
    assert "@M02+M03;" in cell_of("V.2.c", "level 80", 2, panel).options["groups"]
    method, nodes = made(cell_of("V.2.c", "level 15", peers // 2, panel), files)
    assert len(nodes) == peers
    topics = {n.name: tuple(method.sends(n)) for n in nodes}
    assert topics["M00"] == topics[f"M{peers // 2 - 1}"] != topics[f"M{peers - 1}"]
    method.check(nodes)


# ---- runs ----------------------------------------------------------------------------------------


def on_digits(cell: Cell, **options: Any) -> Cell:
    """The cell on the embedded digits, whose network is small."""
    widths = re.findall(r"\d+", str(cell.options["scheme"]))
    small = {"0-0-0-0": "0%", "784-250-80-10": "80%", "784-300-100-10": "100%"}
    scheme = small["-".join(widths)]
    kept = {k: v for k, v in cell.options.items() if k not in ("scheme", "rounds", "block")}
    return replace(
        cell,
        task="digits-permuted",
        options={**kept, "scheme": scheme, "block": 10, **options},
        task_options={"train": 20, "test": 20},
    )


def test_convergence_averages_after_every_tenth_block(tmp_path: Path) -> None:
    cells = [on_digits(c, rounds=21) for c in EVERY["V.3.b"].cells]
    (alone,), (partly,), (full,) = run_cells(cells, [0], tmp_path)
    assert {c.tick for c in partly.ledger.crossings()} == {10, 20}
    assert partly.ledger.bytes_sent("M0") < full.ledger.bytes_sent("M0")
    assert alone.ledger.bytes_sent() == 0
    figures = EVERY["V.3.b"].figures(partly)
    assert list(figures) == [str(t) for t in range(1, 22)]
    assert figures["21"] == pytest.approx(partly.mean_accuracy)


def test_levels_are_compared_over_the_number_of_peers() -> None:
    """These orderings are between points, not between lines."""
    growing = [c for c in EVERY["V.3.c"].claims if c.relation == ">" and c.left.x != c.right.x]
    assert not any(c.left.less for c in growing)
    assert [(c.left.series, c.left.x, c.right.x) for c in growing] == [
        (f"level {level}", 16, 4) for level in (60, 80, 100)
    ]
    pairs = [(c.left, c.right) for c in EVERY["V.2.c"].claims]
    here = "digits by writer"
    assert (Ref("level 80", panel=here, x=64), Ref("level 80", panel=here, x=2)) in pairs
    assert (Ref("level 100", panel=here, x=2), Ref("level 100", panel=here, x=64)) in pairs
    flat = [c for name in EVERY for c in EVERY[name].claims if c.left.x != c.right.x and c.margin]
    assert [(c.left.series, c.margin) for c in flat] == [
        ("level 0", 0.01),
        ("level 0", 0.01),
        ("level 15", 0.01),
    ]


def test_an_experiment_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing.plot, "is_available", lambda: False)
    lines = [c for c in EVERY["V.3.a"].cells if c.series in ("level 0", "level 80", "level 100")]
    cells = [on_digits(c, rounds=3) for c in lines if c.x in (500, 1000)]
    kept = {(c.series, c.x) for c in cells}
    claims = [
        claim
        for claim in EVERY["V.3.a"].claims
        if {(ref.series, ref.x) for ref in (claim.left, claim.right)} <= kept
    ]
    small = replace(EVERY["V.3.a"], cells=cells, claims=claims)
    results = reproduce(small, out=tmp_path, seeds=[0, 1])
    page = (tmp_path / small.name / "page.md").read_text()
    assert "| at 500: level 80 above level 100 | undecided |" in page
    assert "Of the block sizes, 50 to 3000, six were chosen." in page
    values = results.values(Ref("level 80", x=500))
    assert values is not None
    assert len(values) == 2
    assert all(0 < v < 1 for v in values)


def test_figures_have_the_end_even_if_it_is_no_point() -> None:
    metrics: list[dict[str, Any]] = [
        {"tick": t, "node": "M0", "test_accuracy": t / 10} for t in (0, 2, 4, 5)
    ]
    metrics += [{"tick": "final", "node": "M0", "test_accuracy": 0.9}, {"tick": 5, "seconds": 1.0}]
    run = Run("made", {"M0": 0.5}, metrics, Ledger(Log()), [])
    assert _levels.after(2, 30)(run) == {"2": 0.2, "5": 0.5}


@pytest.mark.parametrize("name", EVERY)
def test_quick_is_small(name: str) -> None:
    """Steps of a node, over all cells: seconds."""
    experiment, steps = EVERY[name], 0
    for cell in experiment.scaled(quick=True):
        method, task = cell.make()
        assert isinstance(method, PartialAveraging)
        steps += (
            getattr(task, "num_nodes", 8) * method.rounds * -(-method.block // int(method.batch))
        )
        if "samples a step" in experiment.quick.says:
            assert method.lr == pytest.approx(method.batch / 10)
            assert experiment.quick.says.startswith(f"{method.batch:g} samples a step")
    assert steps * experiment.quick.seeds <= 10_000

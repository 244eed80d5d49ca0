"""FedFoA's tables and figures: the printed numbers, what is read from a run, what is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed import Run, experiments
from polyfed.experiments import fedfoa, fedfoa_figures, pictures
from polyfed.experiments.experiment import Cell, Experiment, Picture, Quick, Ref
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.runner import _key
from polyfed.experiments.verdict import printed
from polyfed.record import Ledger, Log

EXPERIMENTS = [*fedfoa.EXPERIMENTS, *fedfoa_figures.EXPERIMENTS]
ALL = {e.name.removeprefix("fedfoa-"): e for e in EXPERIMENTS}
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def run_of(metrics: list[dict[str, Any]], accuracy: dict[str, float] | None = None) -> Run:
    return Run("made", accuracy or {}, metrics, Ledger(Log()), [])


def test_all_tables_and_figures_are_there() -> None:
    assert list(ALL) == [
        "table-1", "table-2", "table-3", "figure-4", "figure-5", "figure-6", "figure-7",
    ]  # fmt: skip
    assert experiments.load("fedfoa-table-1") is ALL["table-1"]


# ---- printed numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table-1", "table-2"])
def test_printed_means_are_those_of_the_printed_rows(name: str) -> None:
    """Also in the shifted row of Table 2, whose missing number its mean tells: SPEC, finding 5."""
    published = ALL[name].published
    for series in ("BYOL", "FedMD", "FedDF", "FedFoA"):
        row = {r.figure: printed(t).value for r, t in published.items() if r.series == series}
        if len(row) == 4:
            missing = 4 * row["mean"] - sum(v for f, v in row.items() if f != "mean")
            assert missing == pytest.approx(0.4688, abs=1e-4)
        else:
            mean = sum(v for f, v in row.items() if f != "mean") / 4
            assert mean == pytest.approx(row["mean"], abs=1.1e-4)


def test_some_printed_numbers() -> None:
    assert ALL["table-1"].published[Ref("FedFoA", "ResNet-34")] == "0.8114"
    assert ALL["table-2"].published[Ref("FedMD", "AlexNet")] == "0.412"
    assert ALL["table-2"].published[Ref("FedFoA", "AlexNet")] == "0.4206"
    assert Ref("FedFoA", "VGG-9") not in ALL["table-2"].published
    table = ALL["table-3"].published
    assert len(table) == 26
    assert table[Ref("FedU+FedFoA", "best", "CIFAR-10")] == "0.7871"
    assert table[Ref("FedEMA", "last", "CIFAR-100")] == "0.4319"
    assert table[Ref("FedBYOL+FedFoA", "best", "CIFAR-10")] == "0.7900"


@pytest.mark.parametrize("panel", ["CIFAR-10", "CIFAR-100"])
def test_printed_gains_are_those_of_the_best_rounds(panel: str) -> None:
    table = ALL["table-3"].published
    ((gain, text),) = [(r, t) for r, t in table.items() if r.less and r.panel == panel]
    best = [printed(table[Ref(series, "best", panel)]) for series in ("FedEMA+FedFoA", "FedEMA")]
    assert printed(text).value == pytest.approx(best[0].value - best[1].value, abs=1e-6)
    assert (gain.series, gain.figure) == ("FedEMA+FedFoA", "best")


# ---- what is claimed, put to the test with made-up figures ---------------------------------------

PAIRS = [
    "ResNet-18 and VGG-9", "ResNet-18 and AlexNet", "ResNet-18 and ResNet-34", "VGG-9 and AlexNet",
    "VGG-9 and ResNet-34", "AlexNet and ResNet-34",
]  # fmt: skip


def as_the_paper_has_it(name: str) -> Callable[[str, str, Any, str], float]:
    """Its numbers, and, for what it only draws, some that fit its text."""
    numbers = {ref: printed(text).value for ref, text in ALL[name].published.items()}
    curves = {"FedEMA+FedFoA": (0.40, 0.44, 0.498), "FedEMA": (0.36, 0.39, 0.432)}

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        if name == "figure-4":
            return dict(zip(("30", "50", "100"), curves[series], strict=True))[figure]
        if name == "figure-5":
            return {0.001: 0.44, 0.003: 0.46, 0.01: 0.50, 0.03: 0.48, 0.1: 0.45}[x]
        if name == "figure-6":
            stage, _, pair = figure.partition(": ")
            least = pair == "ResNet-18 and ResNet-34"
            return {"first": (9, 4), "middle": (6, 3), "last": (3, 2.5)}[stage][least]
        if name == "figure-7":
            return {"FedEMA": 0.7, "FedEMA+FedFoA": 0.8}[series]
        return numbers[Ref(series, figure, panel)]

    return value


CLAIMS = {
    "table-1": 15, "table-2": 15, "table-3": 24, "figure-4": 3, "figure-5": 4, "figure-6": 16,
    "figure-7": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_orderings_hold_of_the_papers_figures_and_not_of_their_opposites(
    name: str, judged: Any
) -> None:
    value = as_the_paper_has_it(name)
    assert list(judged(ALL[name], value).values()) == ["holds"] * CLAIMS[name]
    opposite = judged(ALL[name], value, turned=True)
    assert list(opposite.values()) == ["does not hold"] * CLAIMS[name]


@pytest.mark.parametrize("name", ["table-1", "table-2"])
def test_single_networks_are_judged(name: str, judged: Any) -> None:
    """FedMD that improves all, and a network that is not the worst by itself, are not the paper."""
    value = as_the_paper_has_it(name)

    def improves_all(panel: str, series: str, x: Any, figure: str) -> float:
        more = 0.05 if series == "FedMD" and figure != "mean" else 0.0
        return value(panel, series, x, figure) + more

    said = judged(ALL[name], improves_all)
    failed = {claim for claim, word in said.items() if word == "does not hold"}
    assert failed == {"ResNet-18: BYOL above FedMD", "ResNet-34: BYOL above FedMD"}

    def best_is_alexnet(panel: str, series: str, x: Any, figure: str) -> float:
        return 0.9 if (series, figure) == ("BYOL", "AlexNet") else value(panel, series, x, figure)

    said = judged(ALL[name], best_is_alexnet)
    failed = {claim for claim, word in said.items() if word == "does not hold"}
    nets = ("ResNet-18", "ResNet-34", "VGG-9")
    assert failed == {*(f"BYOL: {net} above AlexNet" for net in nets), "AlexNet: FedMD above BYOL"}


def test_the_best_method_is_judged_but_where_its_own_table_contradicts_the_text(
    judged: Any,
) -> None:
    table = ALL["table-3"]
    value = as_the_paper_has_it("table-3")

    def fedu_leads(panel: str, series: str, x: Any, figure: str) -> float:
        return 0.9 if series == "FedU+FedFoA" else value(panel, series, x, figure)

    failed = {c for c, word in judged(table, fedu_leads).items() if word == "does not hold"}
    assert failed == {
        f"{at}: FedEMA+FedFoA above FedU+FedFoA"
        for at in ("CIFAR-10, last", "CIFAR-100, last", "CIFAR-100, best")
    }
    best = [value("CIFAR-10", f"{base}+FedFoA", None, "best") for base in ("FedBYOL", "FedEMA")]
    assert best[0] > best[1]


def test_the_last_round_of_figure_6_is_judged(judged: Any) -> None:
    """That the ResNets are still the nearest pair, and no longer stand out."""
    value = as_the_paper_has_it("figure-6")

    def another_pair(panel: str, series: str, x: Any, figure: str) -> float:
        return 1.0 if figure == "last: VGG-9 and AlexNet" else value(panel, series, x, figure)

    def still_apart(panel: str, series: str, x: Any, figure: str) -> float:
        return (
            -9.0 if figure == "last: ResNet-18 and ResNet-34" else value(panel, series, x, figure)
        )

    failed = [
        [claim for claim, word in judged(ALL["figure-6"], f).items() if word == "does not hold"]
        for f in (another_pair, still_apart)
    ]
    assert failed == [
        ["FedFoA: last: VGG-9 and AlexNet above last: ResNet-18 and ResNet-34"],
        [
            "FedFoA: first: mean, less FedFoA, first: ResNet-18 and ResNet-34 above "
            "last: mean, less FedFoA, last: ResNet-18 and ResNet-34"
        ],
    ]
    refs = {ref.figure for claim in ALL["figure-6"].claims for ref in (claim.left, claim.right)}
    assert {f"{stage}: {pair}" for stage in ("first", "last") for pair in PAIRS} <= refs


def test_stored_tables_say_whose_linear_probes_had_fewer_images() -> None:
    """Those of FedMD and FedDF had not seen what was set aside for them."""
    for path in RESULTS.glob("fedfoa-table-[12]*/summary.json"):
        summary = json.loads(path.read_text(encoding="utf-8"))
        probes = {cell["series"]: cell["task_options"]["probe"] for cell in summary["cells"]}
        assert probes == {"BYOL": "all", "FedMD": "trained", "FedDF": "trained", "FedFoA": "all"}
        task = summary["cells"][0]["task"]
        assert f"task {task}: probe all → trained" in summary["changed"]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [c for e in ALL.values() for c in e.cells], ids=lambda c: c.label)
def test_the_settings_are_those_of_section_41(cell: Cell) -> None:
    method, task = cell.make()
    options = vars(method)
    assert (options["batch"], options["lr"], options["projection"]) == (500, 0.032, 256)
    assert (options["judge"], options["probe_epochs"]) == ("linear", 200)
    assert vars(task)["probe"] == "all"
    if cell.method == "fedfoa":
        assert options["warm_up"] == 5
        assert options["lam"] == (cell.x or 0.01)


def test_heterogeneous_and_homogeneous() -> None:
    different = [cell.make() for cell in ALL["table-1"].cells]
    assert [m.name for m, _ in different] == ["byol", "fedmd-ssl", "feddf-ssl", "fedfoa"]
    assert [(vars(t)["public"], vars(t)["hub"]) for _, t in different] == [
        (0, False), (5000, False), (5000, True), (0, False),
    ]  # fmt: skip
    assert all(vars(t)["encoders"] == "resnet18,vgg9,alexnet,resnet34" for _, t in different)
    equal = {c.label: c.make() for c in ALL["table-3"].cells}
    method, task = equal["CIFAR-100, FedU+FedFoA"]
    assert (method.name, vars(method)["base"], task.name) == ("fedfoa", "fedu", "cifar100-encoders")
    assert (vars(task)["encoders"], vars(task)["num_nodes"]) == ("resnet18", 5)
    assert [m.name for m, _ in equal.values()][::2] == ["fedbyol", "fedu", "fedema"] * 2
    assert [c.x for c in ALL["figure-5"].cells] == [0.001, 0.003, 0.01, 0.03, 0.1, None]
    assert [c.options["map_samples"] for c in ALL["figure-7"].cells] == [2048, 2048]


@pytest.mark.parametrize("name", ALL)
def test_rounds_and_quick_are_taken(name: str) -> None:
    for cell in ALL[name].scaled(quick=True, rounds=7):
        method, task = cell.make()
        assert (method.rounds, vars(method)["projection"], vars(task)["quick"]) == (7, 8, True)


# ---- what is read from a run ---------------------------------------------------------------------


def test_by_network() -> None:
    accuracy = {"M0-resnet18": 0.8, "M1-vgg9": 0.6, "M2-alexnet": 0.5, "M3-resnet34": 0.7}
    found = fedfoa.by_network(run_of([], accuracy))
    assert list(found) == ["ResNet-18", "VGG-9", "AlexNet", "ResNet-34", "mean"]
    assert list(found.values()) == pytest.approx([0.8, 0.6, 0.5, 0.7, 0.65])


def test_last_and_best() -> None:
    metrics: list[dict[str, Any]] = [
        {"tick": tick, "node": node, "test_accuracy": value}
        for tick, values in ((0, (1.0, 1.0)), (10, (0.6, 0.8)), (20, (0.5, 0.7)))
        for node, value in zip("ab", values, strict=True)
    ]
    metrics.append({"tick": "final", "node": "a", "test_accuracy": 0.9})
    run = run_of(metrics, {"a": 0.5, "b": 0.7})
    assert fedfoa.last_and_best(run) == pytest.approx({"last": 0.6, "best": 0.7})
    assert fedfoa_figures.accuracies(run) == pytest.approx({"10": 0.7, "20": 0.6})
    better = run_of(metrics, {"a": 0.9, "b": 0.7})
    assert fedfoa.last_and_best(better)["best"] == pytest.approx(0.8), "the last counts too"


def _distances(tick: int, far: float) -> dict[str, Any]:
    nodes = ["M0-resnet18", "M1-vgg9", "M2-alexnet"]
    rows = [[0, far, 1], [far, 0, 2], [1, 2, 0]]
    return {"tick": tick, "node": "hub", "distances": {"nodes": nodes, "rows": rows}}


def test_distances_at_three_moments() -> None:
    run = run_of([_distances(t, far) for t, far in ((1, 9.0), (2, 8.0), (3, 6.0), (4, 3.0))])
    found = fedfoa_figures.pairs(run)
    assert found["first: ResNet-18 and VGG-9"] == 9
    assert found["middle: ResNet-18 and VGG-9"] == 6
    assert found["last: mean"] == 2
    assert found["last: VGG-9 and AlexNet"] == 2
    assert len(found) == 12
    assert list(fedfoa_figures.stages(run)) == [
        "first round (1)",
        "middle round (3)",
        "last round (4)",
    ]


# ---- pictures ------------------------------------------------------------------------------------


def test_heat_maps_show_the_distances() -> None:
    pytest.importorskip("matplotlib")
    kept = fedfoa_figures.stages(run_of([_distances(1, 9.0), _distances(2, 4.0)]))
    figure = pictures.heat_maps([{"kept": kept}])
    first, _, last = figure.axes[:3]
    assert [text.get_text() for text in first.texts] == [
        "0.0", "9.0", "1.0", "9.0", "0.0", "2.0", "1.0", "2.0", "0.0",
    ]  # fmt: skip
    assert (first.get_title(loc="left"), last.get_title(loc="left")) == (
        "first round (1)",
        "last round (2)",
    )
    assert {axes.images[0].get_clim() for axes in figure.axes[:3]} == {(0, 9)}
    assert [text.get_text() for text in last.get_yticklabels()] == ["ResNet-18", "VGG-9", "AlexNet"]


def test_maps_show_every_sample_in_the_colour_of_its_class() -> None:
    pytest.importorskip("matplotlib")
    noted = {"points": [[0, 1], [2.0, 3], [4, 3]], "labels": [7, 0, 7]}
    kept = fedfoa_figures.plane(run_of([{"node": "M0", "map": noted}, {"node": "M1", "map": {}}]))
    assert kept == {"test images": {"": {"airplane": "500,749", "horse": "0,250 999,749"}}}
    figure = pictures.class_maps([{"series": "a", "kept": kept}, {"series": "b", "kept": kept}])
    airplane, horse = figure.axes[0].collections
    assert airplane.get_offsets().tolist() == [[500, 749]]
    assert horse.get_offsets().tolist() == [[0, 250], [999, 749]]
    assert airplane.get_facecolor().tolist() != horse.get_facecolor().tolist()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["a: test images", "b: test images"]
    assert {axes.get_gridspec().get_geometry() for axes in figure.axes} == {(1, 2)}, "side by side"
    many = {"test images": {"": {"horse": "1,2 " * 1001}}}
    crowded = pictures.class_maps([{"series": "a", "kept": many}]).axes[0].collections[0]
    assert crowded.get_sizes() < horse.get_sizes(), "else they hide each other"


def test_features_that_are_not_numbers_have_an_empty_map() -> None:
    pytest.importorskip("matplotlib")
    kept = fedfoa_figures.plane(run_of([{"node": "M0", "map": {"points": [], "labels": []}}]))
    assert kept == {"test images": {}}
    assert len(pictures.class_maps([{"series": "a", "kept": kept}]).axes) == 1


_SMALL = {"rounds": 2, "warm_up": 1, "local_epochs": 1, "projection": 8, "probe_epochs": 2}


def _on_digits(experiment: Experiment, **options: Any) -> Experiment:
    """The same experiment with the embedded digits in the place of CIFAR."""
    cells = [
        replace(
            cell,
            task="digits-encoders",
            task_options={"encoders": "mlp", "public": 1300},
            options={**cell.options, **(_SMALL if cell.method == "fedfoa" else {}), **options},
        )
        for cell in experiment.cells
    ]
    return replace(experiment, cells=cells, quick=Quick(says="-", task_options={}))


def _points(kept: dict[str, Any]) -> int:
    return sum(len(text.split()) for text in kept["test images"][""].values())


@pytest.mark.parametrize("name", ["figure-6", "figure-7"])
def test_pictures_are_drawn_from_what_runs_leave(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedfoa_figures, "NETWORKS", {"mlp": "MLP"})
    plane = {"map_samples": 20, "rounds": 2, "local_epochs": 1, "probe_epochs": 2}
    experiment = _on_digits(ALL[name], **(plane if name == "figure-7" else {}))
    assert isinstance(experiment.plot, Picture)
    seeds = [0] if name == "figure-6" else [0, 1]
    results = reproduce(experiment, out=tmp_path, seeds=seeds, progress=False)
    kept = [cell["kept"] for cell in results.summary["cells"]]
    if name == "figure-6":
        assert list(kept[0]) == ["first round (1)", "middle round (2)", "last round (2)"]
    else:
        assert [_points(k) for k in kept] == [20, 20]
        firsts = [fedfoa_figures.plane(Run.open(f)) for f in (tmp_path / "runs").glob("*/seed-0")]
        assert all(k in firsts for k in kept), "not of another seed"
    folder = tmp_path / experiment.name
    assert "![" in (folder / "page.md").read_text()
    if (folder / "plot.svg").exists():
        assert (folder / "plot.svg").read_text().lstrip().startswith("<?xml")


def test_figures_4_and_5_and_table_3_share_runs() -> None:
    """FedEMA with the paper's lambda, and without FedFoA, are run once for all three."""
    names = ("fedfoa-table-3", "fedfoa-figure-4", "fedfoa-figure-5")
    runs = []
    for made in map(experiments.load, names):
        settings = {"device": "cpu", "precision": "float32"}
        runs.append({_key(*c.make(), made.evaluate_every, settings, c.after) for c in made.cells})
    assert len(set.intersection(*runs)) == 2

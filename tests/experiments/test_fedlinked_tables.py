"""FedLinked's tables: the printed numbers, what is read from a run, and what is claimed."""

import math
import statistics
from typing import Any

import pytest

import polyfed as pf
from polyfed import Run, experiments
from polyfed.experiments import fedlinked
from polyfed.experiments.experiment import Cell, Experiment, Ref
from polyfed.experiments.verdict import printed
from polyfed.record import Ledger, Log

TABLES = {e.name: e for e in fedlinked.EXPERIMENTS}
NODES = ("M0", "M1", "M2")


def run_of(metrics: list[dict[str, Any]], accuracy: dict[str, float] | None = None) -> Run:
    return Run("made", accuracy or {}, metrics, Ledger(Log()), [])


@pytest.mark.parametrize(("name", "eta"), [("5.1", 2.97), ("5.2", 2.22)])
def test_the_printed_utilities_have_norm_eta_and_symmetric_numerators(
    name: str, eta: float
) -> None:
    """SPEC 1.8, invariant 13: rows have norm eta; products around the triangle agree."""
    published = TABLES[f"fedlinked-table-{name}"].published
    a = {ref.figure: printed(text).value for ref, text in published.items()}
    for j in NODES:
        row = [a[f"{j} from {k}"] for k in NODES if k != j]
        assert math.hypot(*row) == pytest.approx(eta, abs=0.005)
    forth = a["M0 from M1"] * a["M1 from M2"] * a["M2 from M0"]
    back = a["M1 from M0"] * a["M2 from M1"] * a["M0 from M2"]
    assert forth == pytest.approx(back, rel=1e-4)


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_own_numbers_fulfil_its_claims(name: str) -> None:
    """Each ordering that has printed numbers on both sides is the printed one."""
    experiment, seen = TABLES[name], 0
    for claim in experiment.claims:
        sides = [experiment.published.get(ref) for ref in (claim.left, claim.right)]
        if all(sides):
            left, right = (printed(str(text)).value for text in sides)
            ok = left > right if claim.relation == ">" else abs(left - right) < claim.margin
            assert ok, str(claim)
            seen += 1
    assert seen == {"5.1": 3, "5.2": 3, "5.3": 14, "6.1": 8}.get(
        name.removeprefix("fedlinked-table-"), 0
    )


def test_table_53_is_the_printed_one() -> None:
    published = TABLES["fedlinked-table-5.3"].published
    assert len(published) == 36
    assert published[Ref("FedLinked", "M0 first", "CIFAR-10")] == "0.74 ± 0.017"
    assert published[Ref("separated", "M1 last", "CIFAR-10")] == "0.839 ± 0.021"
    assert published[Ref("separated", "M2 middle", "CIFAR-10")] == "0.86 ± 0.024"
    assert published[Ref("FedLinked", "M1 last", "SVHN")] == "0.95 ± 0.009"
    assert published[Ref("separated", "M0 first", "SVHN")] == "0.94 ± 0.003"


def test_table_61_with_transformation_is_the_last_column_of_table_53() -> None:
    table = TABLES["fedlinked-table-5.3"].published
    ablation = TABLES["fedlinked-table-6.1"].published
    for panel in ("CIFAR-10", "SVHN"):
        for node in NODES:
            last = table[Ref("FedLinked", f"{node} last", panel)]
            assert ablation[Ref("with transformation", node, panel)] == last
    assert ablation[Ref("without", "mean", "CIFAR-10")] == "0.80 ± 0.006"
    assert len(ablation) == 17  # and what is gained by it, which the text has as 3 to 4 points
    assert [text for ref, text in ablation.items() if ref.less] == ["0.035 ± 0.005"]


# ---- what is claimed, put to the test with made-up figures ---------------------------------------


def as_printed(experiment: Experiment) -> Any:
    """The paper's own number; a mean that it does not print is that of the nodes."""
    numbers = {ref: printed(text).value for ref, text in experiment.published.items()}

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        node, _, stage = figure.partition(" ")
        if Ref(series, figure, panel) in numbers:
            return numbers[Ref(series, figure, panel)]
        assert node == "mean"
        return statistics.fmean(numbers[Ref(series, f"{n} {stage}", panel)] for n in NODES)

    return value


@pytest.mark.parametrize(("number", "above"), [("5.1", 3), ("5.2", 3), ("5.3", 22), ("6.1", 4)])
def test_orderings_hold_of_the_papers_numbers_and_not_of_their_opposites(
    number: str, above: int, judged: Any
) -> None:
    table = TABLES[f"fedlinked-table-{number}"]
    value = as_printed(table)
    said = judged(table, value)
    assert set(said.values()) == {"holds"}
    opposite = judged(table, value, turned=True)
    assert sum(word == "does not hold" for word in opposite.values()) == above
    assert all(opposite[claim] == "holds" for claim in said if "within" in claim)


def test_federated_is_claimed_ahead_wherever_it_is_printed_ahead() -> None:
    table = TABLES["fedlinked-table-5.3"]
    claimed = {(c.left.panel, c.left.figure) for c in table.claims if c.left.panel == c.right.panel}
    for panel in ("CIFAR-10", "SVHN"):
        for figure in (f"{node} {stage}" for stage in fedlinked.STAGES for node in NODES):
            ours, other = (
                printed(table.published[Ref(series, figure, panel)]).value
                for series in ("FedLinked", "separated")
            )
            assert ((panel, figure) in claimed) is (ours > other)
        assert {(panel, f"mean {stage}") for stage in fedlinked.STAGES} <= claimed


def test_a_transformation_that_matters_on_svhn_is_not_the_papers(judged: Any) -> None:
    table = TABLES["fedlinked-table-6.1"]
    said = judged(table, lambda panel, series, x, figure: 0.9 + 0.02 * (series == "without"))
    assert set(said.values()) == {"does not hold"}
    assert len(said) == 8


@pytest.mark.parametrize(("number", "first", "count"), [("5.1", 0.2, 18), ("5.2", 0.1, 10)])
def test_fedlinked_is_claimed_ahead_from_a_fifth_of_the_public_set_on(
    number: str, first: float, count: int, judged: Any
) -> None:
    """On SVHN with any share, and of FedAvg on private data only."""

    def value(panel: str, series: str, x: Any, figure: str) -> float:
        if series == "FedLinked":
            return 0.8 if x >= first else 0.6
        return 0.7 if number == "5.1" or "private" in series else 0.9

    figure = TABLES[f"fedlinked-figure-{number}"]
    assert list(judged(figure, value).values()) == ["holds"] * count
    assert list(judged(figure, value, turned=True).values()) == ["does not hold"] * count


# ---- settings, and what is read from runs --------------------------------------------------------


def test_the_settings_are_those_of_table_44() -> None:
    (cell,) = TABLES["fedlinked-table-5.1"].cells
    method, _ = cell.make()
    assert method == pf.FedLinked()  # whose defaults are CIFAR-10's column
    separated = TABLES["fedlinked-table-5.3"].cells[3].make()[0]
    assert (separated.rounds, separated.lr, separated.batch) == (10, 4e-4, 0.01)
    ablation = [c.make()[0] for c in TABLES["fedlinked-table-6.1"].cells]
    assert [m.transform for m in ablation] == [True, False] * 2  # type: ignore[attr-defined]


def test_utilities_are_the_last_rounds() -> None:
    rows = [[0.0, 1.0, 2.0], [3.0, 0.0, 4.0], [5.0, 6.0, 0.0]]
    metrics: list[dict[str, Any]] = [
        {"tick": t, "node": "hub", "utilities": {"nodes": list(NODES), "rows": r}}
        for t, r in enumerate([[[9.0] * 3] * 3, rows])
    ]
    assert fedlinked.utilities(run_of([*metrics, {"tick": 2, "seconds": 1.0}])) == {
        "M0 from M1": 1.0,
        "M0 from M2": 2.0,
        "M1 from M0": 3.0,
        "M1 from M2": 4.0,
        "M2 from M0": 5.0,
        "M2 from M1": 6.0,
    }


@pytest.mark.parametrize(("rounds", "middle"), [(1, 1), (2, 1), (7, 4), (10, 5), (11, 6)])
def test_stages(rounds: int, middle: int) -> None:
    metrics: list[dict[str, Any]] = []
    for t in range(rounds + 1):
        metrics += [{"tick": t, "node": n, "test_accuracy": t + i} for i, n in enumerate(NODES)]
        metrics.append({"tick": t, "seconds": 1.0})
        metrics.append({"tick": t, "node": "M0", "local_loss": 99.0})
    metrics += [{"tick": "final", "node": n, "test_accuracy": -1.0} for n in NODES]
    found = fedlinked.stages(run_of(metrics, dict.fromkeys(NODES, -1.0)))
    assert (found["M0 first"], found["M1 first"], found["mean first"]) == (1, 2, 2)
    assert (found["M0 middle"], found["M2 middle"]) == (middle, middle + 2)
    assert (found["M0 last"], found["mean last"]) == (rounds, rounds + 1)
    assert (found["M0 end"], found["mean end"]) == (-1, -1)


def test_figures_of_a_true_run() -> None:
    options = dict.fromkeys(("rounds", *fedlinked._EPOCHS), 1)
    method, task = Cell(method="fedlinked", task="digits", options=options).make()
    done = pf.run(method, task)
    utilities = fedlinked.utilities(done)
    assert len(utilities) == 6
    for j in NODES:
        row = [utilities[f"{j} from {k}"] for k in NODES if k != j]
        assert math.hypot(*row) == pytest.approx(pf.FedLinked().eta, rel=1e-5)
    stages = fedlinked.stages(done)
    assert stages["mean end"] == pytest.approx(done.mean_accuracy)
    assert fedlinked.final(done) == {**done.accuracy, "mean": pytest.approx(done.mean_accuracy)}
    assert len(stages) == 16


@pytest.mark.parametrize("experiment", experiments.every().values(), ids=lambda e: e.name)
def test_every_experiment_can_be_made(experiment: Experiment) -> None:
    assert experiment.seeds >= 5
    for quick in (False, True):
        cells = experiment.scaled(quick=quick)
        for cell in cells:
            cell.make()
        changes = experiment.changes(cells, experiment.quick.seeds, quick=quick)
        assert bool(changes) == (quick or experiment.quick.seeds < experiment.seeds)


@pytest.mark.parametrize("number", ["5.1", "5.2"])
def test_the_whole_public_set_is_what_table_6_1_ran(number: str) -> None:
    """So `--join` takes that point of the figure from the table's summary."""
    figure, table = (experiments.load(f"fedlinked-{n}") for n in (f"figure-{number}", "table-6.1"))
    assert (figure.figures, figure.evaluate_every) == (table.figures, table.evaluate_every)
    (whole,) = (cell for cell in figure.cells if cell.x == 1)
    assert [cell.series for cell in table.cells if cell.make() == whole.make()] == [
        "with transformation"
    ]

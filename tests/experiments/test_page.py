"""Pages and verdicts are made from a summary alone, and always the same."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import RunError, UnknownNameError
from polyfed.experiments.experiment import Claim, Experiment, Lines, Ref
from polyfed.experiments.page import page, tables, terminal
from polyfed.experiments.results import Results, state_of

Make = Callable[..., Results]
UP = [0.61, 0.62, 0.63, 0.64, 0.65]
DOWN = [0.51, 0.52, 0.53, 0.54, 0.55]
TWO = {("", "a", None): {"accuracy": UP}, ("", "b", None): {"accuracy": DOWN}}
SWEPT = {
    ("", "a", 1.0): {"accuracy": UP},
    ("", "a", 2.0): {"accuracy": DOWN},
    ("", "b", 1.0): {"accuracy": [0.6] * 5},
    ("", "flat", None): {"accuracy": [0.7] * 5},
}


def test_the_page_of_a_summary_is_the_page_that_was_written(whole: Path) -> None:
    folder = whole / "tiny-table"
    again = page(Results.read(folder / "summary.json"))
    assert again == (folder / "page.md").read_text(encoding="utf-8")


def test_a_page_has_everything(results: Make) -> None:
    made = results(
        TWO,
        title="Made of two",
        paper="Nobody 2026, Table 1",
        published={Ref("a"): "0.63 ± 0.01", Ref("b"): "0.80 ± 0.01"},
        claims=[Claim(Ref("a"), ">", Ref("b"))],
        notes=["A reading."],
    )
    lines = page(made).splitlines()
    assert lines[0] == "# Made of two"
    assert "Nobody 2026, Table 1. Experiment `made`." in lines
    assert "**Differs**: agrees 1, holds 1, differs 1." in lines
    assert "In the paper's setting." in lines
    assert "![Made of two](plot.svg)" in lines
    assert "| a | 0.630 ± 0.016 | 0.63 ± 0.01 | +0.000 | +0.0 | agrees |" in lines
    assert "| b | 0.530 ± 0.016 | 0.80 ± 0.01 | -0.270 | -14.2 | differs |" in lines
    assert "| a above b | holds | +0.1000 | 5 of 5 | 0.031 | 1.000 |" in lines
    assert "- A reading." in lines
    assert "- `polyfed reproduce made`" in lines
    assert "- commit abc1234; polyfed 1, torch 1, python 1, numpy 1" in lines
    assert "- 5 seeds: 0, 1, 2, 3, 4" in lines
    assert "| a | 1.0 | 2.0 kB |" in lines
    text = page(made)
    assert "At most 1: agrees. More than 2: differs." in text
    assert "Wilcoxon signed-rank" in text
    assert "Measured" not in text  # everything stands beside the paper's numbers


def test_what_has_no_printed_number_is_listed(results: Make) -> None:
    made = results(TWO, published={Ref("a"): "0.63"})
    titles = [title for title, _, _ in tables(made)]
    assert titles == [
        "Ours beside the paper's numbers",
        "Measured (mean ± standard deviation over seeds)",
    ]
    assert tables(made)[1][2] == [["accuracy", "0.630 ± 0.016", "0.530 ± 0.016"]]


def test_a_sweep_has_points_in_rows_and_series_in_columns(results: Make) -> None:
    (title, columns, rows), *more = tables(results(SWEPT, statistic="median"))
    assert more == []
    assert title == (
        "Measured: accuracy (median over seeds, in brackets the 40th and 60th percentiles)"
    )
    assert columns == ["", "a", "b", "flat"]
    assert rows == [
        ["1", "0.630 (0.626–0.634)", "0.600 (0.600–0.600)", "-"],
        ["2", "0.530 (0.526–0.534)", "-", "-"],
        ["all", "-", "-", "0.700 (0.700–0.700)"],
    ]


def test_panels_and_figures_of_a_sweep_have_tables_of_their_own(results: Make) -> None:
    both = {"accuracy": UP, "loss": DOWN}
    made = results({("P", "a", 1.0): both, ("Q", "a", 1.0): both})
    titles = [title.partition(" (")[0] for title, _, _ in tables(made)]
    assert titles == [
        "Measured: P, accuracy",
        "Measured: P, loss",
        "Measured: Q, accuracy",
        "Measured: Q, loss",
    ]
    figures = results({("P", "a", None): {"10": UP, "20": DOWN}})
    (_, columns, rows), *_ = tables(figures)
    assert (columns, [row[0] for row in rows]) == (["", "a"], ["10", "20"])


def test_without_x_a_series_is_the_mean_over_its_points(results: Make) -> None:
    made = results(SWEPT)
    assert made.values(Ref("a", x=2.0)) == DOWN
    assert made.values(Ref("a")) == pytest.approx([0.56, 0.57, 0.58, 0.59, 0.60])
    assert made.values(Ref("flat")) == [0.7] * 5
    assert made.values(Ref("c")) is None
    assert made.values(Ref("a", "loss")) is None
    assert made.values(Ref("a", panel="P")) is None


def test_means_over_points_are_compared_where_both_were_run(results: Make) -> None:
    """Else the one that was also run where it is easy would be ahead."""
    found = results(
        {
            ("", "a", 1.0): {"accuracy": [0.5] * 5},
            ("", "b", 1.0): {"accuracy": [0.4] * 5},
            ("", "b", 2.0): {"accuracy": [0.9] * 5},
            ("", "level", None): {"accuracy": [0.45] * 5},
        },
        claims=[Claim(Ref("a"), ">", Ref("b")), Claim(Ref("b"), ">", Ref("level"))],
    )
    first, second = found.orderings().values()
    found.summary["cells"][1]["x"] = 3.0  # now they have no point in common
    assert [each.word for each in found.orderings().values()] == ["not run", "holds"]
    assert (first.word, first.difference) == ("holds", pytest.approx(0.1))
    assert (second.word, second.difference) == ("holds", pytest.approx(0.2))


def test_what_was_left_out_is_not_judged(results: Make) -> None:
    made = results(SWEPT, claims=[Claim(Ref("a", x=2.0), ">", Ref("b", x=1.0))])
    cut = [c for c in made.summary["cells"] if c["x"] != 2.0]
    partly = Results(made.experiment, {**made.summary, "cells": cut, "changed": ["cells: 4 → 3"]})
    (claim,) = partly.orderings().values()
    assert claim.word == "not run"
    assert "| a at 2 above b at 1 | not run | - | 0 of 0 | - | - |" in page(partly)
    assert partly.as_dict()["orderings"][0]["p"] is None


@pytest.mark.parametrize(
    ("published", "claims", "changed", "state"),
    [
        ({Ref("a"): "0.63"}, [Claim(Ref("a"), ">", Ref("b"))], [], "reproduced"),
        ({Ref("a"): "0.63"}, [Claim(Ref("b"), ">", Ref("a"))], [], "differs"),
        ({Ref("a"): "0.73"}, [Claim(Ref("a"), ">", Ref("b"))], [], "differs"),
        ({Ref("a"): "0.66"}, [], [], "undecided"),  # .025 / .0224
        ({}, [Claim(Ref("a"), "~", Ref("b"), 0.1)], [], "undecided"),
        ({Ref("a"): "0.63"}, [Claim(Ref("a"), "~", Ref("b"), 0.1)], [], "undecided"),
        ({}, [], [], "measured"),
        ({Ref("a"): "0.73"}, [], ["seeds: 9 → 5", "rounds"], "partly (seeds: 9 → 5; rounds)"),
    ],
)
def test_states(results: Make, published: Any, claims: Any, changed: Any, state: str) -> None:
    made = results(TWO, published=published, claims=claims)
    assert replace(made, summary={**made.summary, "changed": changed}).state == state


def test_nothing_to_judge(results: Make) -> None:
    assert "Nothing is judged" in page(results(TWO))
    assert results(TWO).tally() == "nothing to judge"


def test_quick_is_marked(results: Make) -> None:
    made = results(TWO)
    quick = replace(made, summary={**made.summary, "quick": True, "changed": ["less: 9 → 5"]})
    for text in (page(quick), terminal(quick)):
        assert "--quick only shows the way; its figures and verdicts mean nothing." in text
        assert "- less: 9 → 5" in text
        assert "partly" in text.lower()
    for text in (page(made), terminal(made)):
        assert "quick" not in text


def test_the_terminal_shows_tables_and_verdicts(results: Make) -> None:
    made = results(TWO, published={Ref("a"): "0.63"}, claims=[Claim(Ref("a"), ">", Ref("b"))])
    text = terminal(made)
    assert "Ours beside the paper's numbers" in text
    assert "a above b" in text
    assert text.splitlines()[-1] == "made: reproduced; agrees 1, holds 1."


def test_what_went_wrong_is_told(results: Make) -> None:
    """A network of NaN has an accuracy, too, and nobody would see it in a table."""
    found = results(
        {("", "a", None): {"accuracy": [0.1, 0.2]}, ("", "b", 3.0): {"accuracy": [1, 1]}}
    )
    assert found.faults() == []
    assert "went wrong" not in page(found) + terminal(found)
    found.summary["cells"][1]["faults"] = [{}, {"training diverged": 3, "message refused": 1}]
    told = ["b at 3: training diverged (with seed 1)", "b at 3: message refused (with seed 1)"]
    assert found.faults() == told
    for text in (page(found), terminal(found)):
        assert all(f"- {each}" in text for each in told)


def test_for_machines(results: Make) -> None:
    claim = Claim(Ref("a"), ">", Ref("b"))
    made = results(TWO, published={Ref("a"): "0.63"}, claims=[claim]).as_dict()
    assert json.loads(json.dumps(made)) == made
    assert made["state"] == "reproduced"
    (number,), (ordering,) = made["numbers"], made["orderings"]
    assert (number["figure"], number["paper"], number["word"]) == ("a", "0.63", "agrees")
    assert (ordering["claim"], ordering["word"], ordering["p"]) == ("a above b", "holds", 1 / 32)


# ---- cells with different seeds ------------------------------------------------------------------


def uneven(
    results: Make, cells: Mapping[tuple[str, Any], Mapping[int, float]], **fields: Any
) -> Results:
    """Results of cells {(series, x): {seed: accuracy}}, as `joined` writes them."""
    given = {("", *key): {"accuracy": list(found.values())} for key, found in cells.items()}
    made = results(given, **fields)
    seeds = sorted({seed for found in cells.values() for seed in found})
    entries = made.summary["cells"]
    for entry, found in zip(entries, cells.values(), strict=True):
        entry |= {name: [1.0] * len(found) for name in ("seconds", "bytes_sent_per_node")}
        entry |= {"seeds": list(found)} if list(found) != seeds else {}
    return replace(made, summary={**made.summary, "seeds": seeds})


BASE = {0: 0.1, 1: 0.9, 2: 0.3, 3: 0.7, 4: 0.5, 5: 0.2, 6: 0.8}


def some(*seeds: int, more: float = 0.0) -> dict[int, float]:
    return {seed: BASE[seed] + more for seed in seeds}


def test_an_ordering_is_judged_over_the_seeds_that_both_have(results: Make) -> None:
    """Both sides have as many seeds: by position, other seeds would be pairs."""
    a, b = some(0, 1, 2, 3, 4, 5, more=0.01), some(1, 2, 3, 4, 5, 6)
    made = uneven(
        results, {("a", None): a, ("b", None): b}, claims=[Claim(Ref("a"), ">", Ref("b"))]
    )
    (judged,) = made.orderings().values()
    assert (judged.word, judged.above, judged.seeds) == ("holds", 5, 5)
    assert judged.difference == pytest.approx(0.01)
    assert made.values(Ref("a")) == list(a.values())  # by itself it keeps all of its own


def test_without_a_common_seed_nothing_is_judged(results: Make) -> None:
    cells = {("a", 1.0): some(0, 1), ("a", 2.0): some(2), ("b", 1.0): some(2, 3)}
    claims = [
        Claim(Ref("a", x=1.0), ">", Ref("b", x=1.0)),
        Claim(Ref("a", x=1.0, less=Ref("b", x=1.0)), ">", Ref("b", x=1.0)),
        Claim(Ref("a"), ">", Ref("a", x=1.0)),
    ]
    made = uneven(results, cells, claims=claims, published={Ref("a"): "0.50"})
    assert [each.word for each in made.orderings().values()] == ["not run"] * 3
    assert made.values(Ref("a")) is None
    assert made.comparisons() == {}
    assert made.tally() == "not run 3"
    assert "| at 1: a above b | not run | - | 0 of 0 | - | - |" in page(made)


def test_a_figure_less_another_has_the_seeds_of_both(results: Make) -> None:
    cells = {
        ("a", None): some(0, 1, 2, 3, 4, 5, more=0.05),
        ("b", None): some(1, 2, 3, 4, 5, 6),
        ("c", None): some(6, 5, 4, 3, 2, 1, more=0.01),
    }
    gains = [Ref(series, less=Ref("b")) for series in ("a", "c")]
    made = uneven(results, cells, claims=[Claim(gains[0], ">", gains[1])])
    assert made.values(gains[0]) == pytest.approx([0.05] * 5)
    (judged,) = made.orderings().values()
    assert (judged.word, judged.seeds, judged.difference) == ("holds", 5, pytest.approx(0.04))


def test_a_loss_of_more_than_half_is_a_claim_of_a_share(results: Make) -> None:
    half = Ref("a", x=0.0, times=0.5)
    claims = [Claim(half, ">", Ref("a", x=x)) for x in (1.0, 2.0)]
    assert str(claims[0]) == "a: at 0, times 0.5 above at 1"
    values = [0.8, 0.6, 0.7, 0.5, 0.9]
    cells = {0.0: values, 1.0: [0.49 * v for v in values], 2.0: [0.51 * v for v in values]}
    made = results({("", "a", x): {"accuracy": found} for x, found in cells.items()}, claims=claims)
    assert made.values(half) == pytest.approx([0.4, 0.3, 0.35, 0.25, 0.45])
    gain = replace(half, less=Ref("a", x=1.0))  # the factor is of the first alone
    assert made.values(gain) == pytest.approx([0.01 * v for v in values])
    assert [each.word for each in made.orderings().values()] == ["holds", "does not hold"]


def test_a_mean_over_points_is_over_the_seeds_that_all_of_them_have(results: Make) -> None:
    cells = {
        ("a", 1.0): some(0, 1, 2, 3, 4, 5),
        ("a", 2.0): some(1, 2, 3, 4, 5, more=0.2),
        ("b", 1.0): some(1, 2, 3, 4, 5, 6),
        ("b", 2.0): some(0, 1, 2, 3, 4, 5),
        ("b", 3.0): some(6),
    }
    made = uneven(results, cells, claims=[Claim(Ref("a"), ">", Ref("b"))])
    assert made.values(Ref("a")) == pytest.approx([*some(1, 2, 3, 4, 5, more=0.1).values()])
    (judged,) = made.orderings().values()  # at the points that both have
    assert (judged.word, judged.seeds, judged.difference) == ("holds", 5, pytest.approx(0.1))


def test_faults_name_a_cells_own_seeds(results: Make) -> None:
    made = uneven(results, {("a", None): some(0, 1, 2), ("b", None): some(1, 2)})
    made.summary["cells"][1]["faults"] = [{}, {"training diverged": 1}]
    assert made.faults() == ["b: training diverged (with seed 2)"]


def test_cells_with_fewer_seeds_are_named(results: Make) -> None:
    cells = {
        ("a", 1.0): some(0, 1, 2),
        ("a", 2.0): some(0, 1),
        ("b", 1.0): some(2),
        ("b", 2.0): some(0, 1),
    }
    made = uneven(results, cells, plot=Lines("x"))
    said = "3 seeds: 0, 1, 2; a at 2, b at 2: 0, 1; b at 1: 2"
    assert f"- {said}" in page(made).splitlines()
    assert said in terminal(made).splitlines()
    assert "| 1 | 0.433 ± 0.416 | 0.300 |" in page(made)
    assert "seeds:" not in terminal(results(SWEPT))


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_a_single_seed_has_no_spread(statistic: str, results: Make) -> None:
    one = {("", "a", None): {"accuracy": [0.944], "loss": [0.1]}}
    made = results(one, published={Ref("a"): "0.95"}, statistic=statistic)
    (_, _, [beside]), (_, _, measured) = tables(made)
    assert beside[:3] == ["a", "0.944", "0.95"]
    assert measured == [["loss", "0.100"]]


# ---- reading -------------------------------------------------------------------------------------


def test_states_in_a_folder(tmp_path: Path, whole: Path, table: Experiment) -> None:
    assert state_of(table, tmp_path) == "not run"
    assert state_of(table, whole) in ("reproduced", "differs", "undecided")
    without = replace(table, cannot="no data.")
    assert state_of(without, tmp_path) == "cannot (no data)"
    assert state_of(without, whole) == state_of(table, whole)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{", RunError, "is not the summary of an experiment"),
        ("[]", RunError, "is not the summary of an experiment"),
        ("{}", RunError, "is not the summary of an experiment"),
        ('{"format": 9}', RunError, "has format 9, this polyfed reads 1"),
        ('{"format": 1, "experiment": "tiny-tabel"}', UnknownNameError, "Did you mean 'tiny-ta"),
    ],
)
def test_what_is_no_summary(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(error, match=said):
        Results.read(tmp_path / "summary.json")
    with pytest.raises(RunError, match="could not read"):
        Results.read(tmp_path / "nothing.json")

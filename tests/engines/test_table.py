"""What a person reads, to the letter."""

import pytest

from polyfed.core.message import Message
from polyfed.engines.compare import Comparison
from polyfed.engines.run import Run
from polyfed.engines.table import Text, render, run_table, size, spread, utilities_table
from polyfed.record import Ledger, Log


def scripted(method: str, accuracy: dict[str, float], sent: int, seconds: float) -> Run:
    """A run that said `sent` float32 numbers from each node to the hub, and nothing back."""
    import torch

    ledger = Ledger(Log())
    for name in accuracy:
        if sent:
            ledger.enter(1, name, "hub", Message({"x": torch.zeros(sent)}))
    metrics = [{"tick": 1, "seconds": seconds}]
    return Run(method, accuracy, metrics, ledger, [])


COMPARISON = Comparison(
    {
        "fedlinked": [
            scripted("fedlinked", {"M0": 0.75, "M1": 0.875}, 28_672, 2.04),
            scripted("fedlinked", {"M0": 0.85, "M1": 0.885}, 28_672, 4.0),
        ],
        "local": [
            scripted("local", {"M0": 0.5, "M1": 0.6}, 0, 1.0),
            scripted("local", {"M0": 0.5, "M1": 0.8}, 0, 1.0),
        ],
    },
    [0, 1],
)

TWO_SEEDS = """\
Test accuracy, mean ± standard deviation over 2 seeds
------------------------------------------------------------------------------
method                M0             M1  mean accuracy  sent per node  seconds
------------------------------------------------------------------------------
fedlinked  0.800 ± 0.071  0.880 ± 0.007  0.840 ± 0.039       114.7 kB      3.0
local      0.500 ± 0.000  0.700 ± 0.141  0.600 ± 0.071              -      1.0
"""

ONE_RUN = """\
fedlinked: 2 nodes, 1 round in 2.0 s
---------------------------------------
node  test accuracy      sent  received
---------------------------------------
M0           0.7500  114.7 kB         -
M1           0.8750  114.7 kB         -
---------------------------------------
mean         0.8125
"""


def test_comparison() -> None:
    assert COMPARISON.table() == TWO_SEEDS.rstrip()


def test_comparison_of_one_seed() -> None:
    one = Comparison({"local": COMPARISON.runs["local"][:1]}, [7])
    assert one.table().splitlines()[0] == "Test accuracy, from 1 seed"
    assert one.table().splitlines()[-1].split() == ["local", "0.500", "0.600", "0.550", "-", "1.0"]


def test_many_nodes_are_not_listed() -> None:
    many = scripted("local", {f"M{k}": 0.5 for k in range(6)}, 0, 1.0)
    line = Comparison({"local": [many]}, [0]).table().splitlines()[2]
    assert line.split("  ") == ["method", "mean accuracy", "sent per node", "seconds"]


def test_one_run() -> None:
    table = run_table(COMPARISON.runs["fedlinked"][0])
    assert table == ONE_RUN.rstrip()
    assert repr(table) == str(table)  # at the prompt it shows itself


def test_as_dict_says_what_the_table_says() -> None:
    found = COMPARISON.as_dict()
    assert found["seeds"] == [0, 1]
    entry = found["methods"]["fedlinked"]
    assert entry["mean_accuracy_by_seed"] == pytest.approx([0.8125, 0.8675])
    assert entry["mean_accuracy"] == pytest.approx(0.84)
    assert entry["standard_deviation"] == pytest.approx(0.0388909, abs=1e-6)
    assert entry["accuracy_by_node"] == {"M0": [0.75, 0.85], "M1": [0.875, 0.885]}
    assert entry["bytes_sent_per_node"] == 114_688
    assert (entry["faults"], entry["seconds"]) == (0, [2.04, 4.0])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "-"), (1, "1 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"),
     (999_999, "1.0 MB"), (5_632_000, "5.6 MB"), (2e9, "2.0 GB"), (3.4e15, "3400.0 TB")],
)  # fmt: skip
def test_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.5], "0.500"), ([0.5, 0.7], "0.600 ± 0.141"), ([1.0, 1.0, 1.0], "1.000 ± 0.000")],
)
def test_spread_is_the_sample_standard_deviation(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_render() -> None:
    table = render("t", ["a", "bb"], [["x", "1"], ["long", "22"]], rules=(1,))
    assert table == Text("t\n--------\na     bb\n--------\nx      1\n--------\nlong  22")


def noted(nodes: str, rows: list[list[float]]) -> str:
    metrics = [{"tick": 1, "utilities": {"nodes": list(nodes), "rows": rows}}]
    return utilities_table(Run("fedlinked", {}, metrics, Ledger(Log()), []))


def test_utilities_are_between_receivers_and_sources() -> None:
    assert noted("AB", [[0.0, 0.25], [0.75, 0.0]]).splitlines()[2:] == [
        "receiver      A      B",
        "----------------------",
        "A             -  0.250",
        "B         0.750      -",
    ]


def test_utilities_of_four_give_a_ring_its_order() -> None:
    rows = [[0, 1, 9, 1], [1, 0, 1, 9], [9, 1, 0, 1], [1, 9, 1, 0]]
    last = noted("ABCD", rows).splitlines()[-1]
    assert last == "A ring in which each hears from one that counts: ring:order=A+B+D+C"

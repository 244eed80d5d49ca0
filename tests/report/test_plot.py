"""Plots for papers show the numbers of the runs."""

from pathlib import Path
from typing import Any

import pytest

from polyfed.engines.run import Run
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.experiments.plot import styled
from polyfed.report import plot

pytest.importorskip("matplotlib")


def drawn(runs: dict[str, list[Run]], what: str) -> Any:
    with styled():
        return plot._figure(runs, what).axes[0]


def lines(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): [round(v, 9) for v in line.get_ydata()] for line in axes.lines}


def test_one_run_shows_its_nodes_and_their_mean(make: Any) -> None:
    axes = drawn({"fedavg": [Run.open(make(rounds=2))]}, "accuracy")
    assert lines(axes) == {
        "M0": [0.1, 0.2, 0.3],
        "M1": [0.101, 0.201, 0.301],
        "M2": [0.102, 0.202, 0.302],
        "mean": [0.101, 0.201, 0.301],
    }
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy")
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2]


def test_seeds_are_a_mean_and_a_shade(make: Any) -> None:
    runs = {"fedavg": [Run.open(make(f"s{s}", rounds=1, seed=s * 500)) for s in (0, 1, 2)]}
    axes = drawn(runs, "accuracy")
    assert lines(axes) == {"fedavg": [0.201, 0.301]}  # seeds 0, 500, 1000 lift by 0, 0.1, 0.2
    (shade,) = axes.collections
    ends = {round(float(y), 6) for _, y in shade.get_paths()[0].vertices}
    assert ends == {0.101, 0.301, 0.201, 0.401}


@pytest.mark.parametrize(
    ("what", "values", "label"),
    [
        ("loss", [2.0, 1.0], "local loss"),
        ("local_loss", [2.0, 1.0], "local loss"),
        ("seconds", [1.0, 2.0, 3.0], "seconds"),
        ("bytes", [0.0, 216.0, 216.0], "bytes"),
    ],
)
def test_other_figures(what: str, values: list[float], label: str, make: Any) -> None:
    axes = drawn({"fedavg": [Run.open(make(rounds=2))]}, what)
    assert lines(axes)["mean"] == values
    assert axes.get_ylabel() == label


def test_files(make: Any, tmp_path: Path) -> None:
    runs = {"fedavg": [Run.open(make())]}
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        path = plot.plot(runs, "accuracy", tmp_path / name)
        assert path.read_bytes().startswith(start)
        assert path.read_bytes() == plot.plot(runs, "accuracy", tmp_path / f"b{name}").read_bytes()
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        plot.plot(runs, "accuracy", tmp_path / "a.gif")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'accuracy'\?"):
        plot.plot(runs, "acuracy", tmp_path / "a.svg")


def test_runs_of_unequal_length(make: Any) -> None:
    """One that goes on, beside one that is over: a mean of what there is."""
    runs = [Run.open(make("long", rounds=3)), Run.open(make("short", rounds=1, lift=0.2))]
    assert lines(drawn({"fedavg": runs}, "accuracy"))["fedavg"] == [0.201, 0.301, 0.301, 0.401]

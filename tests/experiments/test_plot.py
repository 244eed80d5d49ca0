"""Plots show the numbers they are given, each where it belongs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.experiments import plot
from polyfed.experiments.experiment import Dots, Experiment, Lines, Ref
from polyfed.experiments.reproduce import reproduce
from polyfed.experiments.results import Results
from polyfed.experiments.verdict import summarise

pytest.importorskip("matplotlib")
Make = Callable[..., Results]
UP, DOWN, FLAT = [0.6, 0.62, 0.7], [0.5, 0.52, 0.6], [0.8, 0.8, 0.8]


def axes_of(results: Results) -> list[Any]:
    return plot._figure(results).axes


def drawn(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Label, x and y of everything with error bars."""
    return {
        bars.get_label(): (list(bars[0].get_xdata()), list(bars[0].get_ydata()))
        for bars in axes.containers
    }


def bars_of(axes: Any, index: int) -> list[Any]:
    """The ends of the error bars of the container of that index."""
    (lines,) = axes.containers[index][2]
    return [segment.tolist() for segment in lines.get_segments()]


def test_lines(results: Make) -> None:
    made = results(
        {
            ("", "a", 100.0): {"accuracy": UP},
            ("", "a", 10.0): {"accuracy": DOWN},
            ("", "b", 10.0): {"accuracy": FLAT},
            ("", "level", None): {"accuracy": FLAT},
        },
        plot=Lines("block size", "accuracy", scale="log"),
        statistic="median",
    )
    (axes,) = axes_of(made)
    assert drawn(axes) == {"a": ([10, 100], [0.52, 0.62]), "b": ([10], [0.8])}
    low, high = summarise(DOWN, "median").low, summarise(DOWN, "median").high
    assert bars_of(axes, 0)[0] == [[10, pytest.approx(low)], [10, pytest.approx(high)]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("block size", "accuracy")
    assert axes.get_xscale() == "log"
    level = next(line for line in axes.lines if line.get_label() == "level")
    assert list(level.get_ydata()) == [0.8, 0.8]
    assert level.get_linestyle() == "--"


def test_points_that_are_words_stand_in_their_order(results: Make) -> None:
    words = ("784-300-100-0", "784-250-80-10")
    made = results({("", "a", w): {"accuracy": UP} for w in words}, plot=Lines("scheme"))
    (axes,) = axes_of(made)
    assert drawn(axes)["a"][0] == [0, 1]
    assert [text.get_text() for text in axes.get_xticklabels()] == list(words)


def test_a_point_that_the_first_series_lacks_stands_where_it_belongs(results: Make) -> None:
    cells = [("a", "none"), ("b", "none"), ("b", "some"), ("a", "all"), ("b", "all")]
    made = results(
        {("", series, x): {"accuracy": UP} for series, x in cells}, plot=Lines("n", scale="even")
    )
    (axes,) = axes_of(made)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["none", "some", "all"]
    assert drawn(axes)["a"][0] == [0, 2]


def test_even_numbers(results: Make) -> None:
    made = results(
        {("", "a", x): {"accuracy": UP} for x in (30.0, 1000.0)}, plot=Lines("n", scale="even")
    )
    (axes,) = axes_of(made)
    assert drawn(axes)["a"][0] == [0, 1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["30", "1000"]


def test_where_no_cell_has_a_point_the_figures_are_points(results: Make) -> None:
    made = results({("", "a", None): {"10": UP, "20": DOWN}}, plot=Lines("round"))
    (axes,) = axes_of(made)
    assert drawn(axes) == {"a": ([10, 20], [pytest.approx(0.64), pytest.approx(0.54)])}


@pytest.mark.parametrize(("points", "whole"), [((10, 20, 30), True), ((0.5, 1.0, 2.0), False)])
def test_whole_numbers_have_whole_ticks(results: Make, points: Any, whole: bool) -> None:
    cells = {("", "a", None): {f"{x:g}": UP for x in points}}
    (axes,) = axes_of(results(cells, plot=Lines("round")))
    ticks = [float(t) for t in axes.get_xticks()]
    assert all(t == round(t) for t in ticks) == whole


def test_of_a_sweep_its_levels_alone(tmp_path: Path, sweep: Experiment) -> None:
    """As after --only: no cell that was run has a point, but the experiment's have."""
    done = reproduce(sweep, out=tmp_path, only=["flat"], seeds=[0])
    (axes,) = axes_of(done)
    assert [line.get_label() for line in axes.lines] == ["flat"]


def test_dots_and_the_papers_beside_them(results: Make) -> None:
    made = results(
        {
            ("P", "a", None): {"M0": UP, "M1": DOWN},
            ("P", "b", None): {"M0": DOWN},
            ("Q", "a", None): {"M0": FLAT},
        },
        published={Ref("a", "M1", "P"): "0.9 ± 0.1"},
        plot=Dots("accuracy", figures=("M1", "M0")),
    )
    first, second = axes_of(made)
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("P", "Q")
    assert [text.get_text() for text in first.get_yticklabels()] == ["M1", "M0"]
    shown = [(b.get_label(), b[0].get_xdata()[0], b[0].get_ydata()[0]) for b in first.containers]
    (ours, x, row), (paper, there, row_there), (_, m0, row_m0), (other, low, row_low) = shown
    assert (ours, paper, other) == ("a", "a, paper", "b")
    assert (x, there, m0, low) == pytest.approx((0.54, 0.9, 0.64, 0.54))
    assert (round(row), round(row_there), round(row_m0), round(row_low)) == (0, 0, 1, 1)
    assert row_m0 < row_low
    assert bars_of(first, 1) == [[[0.8, row_there], [1.0, row_there]]]
    assert first.containers[1][0].get_markerfacecolor() == "white"
    assert first.yaxis_inverted()
    assert [b.get_label() for b in second.containers] == ["a"]


def test_dots_that_lie_far_apart(results: Make) -> None:
    small, large = [0.004, 0.005, 0.006], [0.4, 0.5, 0.6]
    cells = {("", "", None): {"M0": small, "M1": large}}
    (axes,) = axes_of(results(cells, plot=Dots("error", scale="log")))
    axes.get_figure().canvas.draw()
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    shown = [
        t.get_text()
        for x, t in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low < x < high
    ]
    assert {"0.01", "0.02", "0.05", "0.1"} <= set(shown)
    (axes,) = axes_of(results(cells, plot=Dots("error")))
    assert axes.get_xscale() == "linear"


def test_a_legend_names_series_once_in_their_order(results: Make) -> None:
    cells = {(p, s, None): {"M0": UP} for p in ("P", "Q") for s in ("b", "a")}
    made = results(cells, published={Ref("b", "M0", "Q"): "0.9"})
    (legend,) = plot._figure(made).legends
    assert [text.get_text() for text in legend.get_texts()] == ["b", "b, paper", "a"]
    nameless = results({("", "", None): {"M0": UP}}, published={Ref(figure="M0"): "0.9"})
    (legend,) = plot._figure(nameless).legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "paper"]
    assert plot._figure(results({("", "", None): {"M0": UP}})).legends == []


def test_series_keep_their_colours_and_more_than_there_are_share_the_last(results: Make) -> None:
    many = results({("", str(i), 1.0): {"accuracy": UP} for i in range(12)}, plot=Lines("x"))
    styles = [plot._style(many, str(i)) for i in range(12)]
    assert len(set(styles[:9])) == 9
    assert set(styles[8:]) == {(plot.COLOURS[-1], plot.MARKS[-1])}


def test_files_are_the_same_every_time(tmp_path: Path, results: Make) -> None:
    made = results({("P", "a", None): {"M0": UP}})
    names = ("one.svg", "two.svg", "one.png")
    plot.draw(made, *(tmp_path / name for name in names))
    again = tmp_path / "again.svg"
    plot.draw(made, again)
    one, two = ((tmp_path / name).read_bytes() for name in names[:2])
    assert one == two == again.read_bytes()
    assert b">M0</text>" in one
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "again.svg"])


def test_a_persons_own_settings_neither_matter_nor_change(
    tmp_path: Path, results: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "backend", "svg")
    made = results({("P", "a", None): {"M0": UP}})
    plot.draw(made, tmp_path / "a.svg")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        plot.draw(made, tmp_path / "b.svg")
        assert mpl.rcParams["font.size"] == 30
    assert mpl.rcParams["backend"] == "svg"
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib(tmp_path: Path, results: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install polyfed\[plots\]"):
        plot.draw(results({("P", "a", None): {"M0": UP}}), tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_nothing_draws_until_it_is_asked() -> None:
    """The module imports matplotlib only inside its functions."""
    source = Path(str(plot.__file__)).read_text(encoding="utf-8")
    top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert top
    assert not any("matplotlib" in line for line in top)


@pytest.mark.parametrize(("count", "rows"), [(2, 1), (3, 1), (4, 2), (5, 3)])
@pytest.mark.parametrize("spec", [Lines("n"), Dots()], ids=["lines", "dots"])
def test_many_panels_are_in_rows_of_two(results: Make, spec: Any, count: int, rows: int) -> None:
    names = [f"panel {k}" for k in range(count)]
    x = 1.0 if isinstance(spec, Lines) else None
    made = results({(name, "a", x): {"accuracy": UP} for name in names}, plot=spec)
    found = axes_of(made)
    assert [axes.get_title(loc="left") for axes in found] == names
    places = [axes.get_subplotspec() for axes in found]
    assert {place.get_gridspec().nrows for place in places} == {rows}
    assert [place.num1 for place in places] == list(range(count))
    assert all(drawn(axes)["a"] for axes in found)

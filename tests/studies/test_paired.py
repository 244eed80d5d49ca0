import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.engines.compare import Comparison
from polyfed.engines.run import Run
from polyfed.errors import ConfigError
from polyfed.record import Ledger, Log
from polyfed.studies import paired, ranks


def runs(*means: float, seeds: Any = None) -> list[Run]:
    return [
        Run(
            "m",
            {"A": mean - 0.1, "B": mean + 0.1},
            [],
            Ledger(Log()),
            [],
            config={"settings": {"seed": seed}},
        )
        for seed, mean in zip(seeds or range(len(means)), means, strict=True)
    ]


HIGH, LOW = (0.8, 0.81, 0.82, 0.83, 0.84, 0.85), (0.7, 0.72, 0.70, 0.72, 0.70, 0.72)


def test_the_best_beside_each_other_one() -> None:
    near = tuple(v - 0.001 * (-1) ** i for i, v in enumerate(HIGH))
    found = paired.pairs(
        Comparison({"a": runs(*LOW), "b": runs(*HIGH), "c": runs(*near)}, range(6))
    )
    assert [(p.best, p.other) for p in found] == [("b", "a"), ("b", "c")]
    far, close = found
    assert far.p == pytest.approx(1 / 64)  # all six signs the same
    assert far.p_holm == pytest.approx(2 / 64)
    assert (far.above, far.seeds, far.is_real) == (6, 6, True)
    assert far.difference == pytest.approx(np.median(np.subtract(HIGH, LOW)))
    assert not close.is_real


def test_runs_are_paired_by_seed_not_by_place() -> None:
    a = runs(0.9, 0.8, 0.7, seeds=[2, 1, 0])
    b = runs(0.69, 0.79, 0.89, seeds=[0, 1, 2])
    (pair,) = paired.pairs(Comparison({"a": a, "b": b}, range(3)))
    assert pair.above == 3
    assert pair.difference == pytest.approx(0.01)


def test_a_seed_that_one_lacks_is_left_out() -> None:
    (pair,) = paired.pairs(
        Comparison({"a": runs(0.9, 0.9, 0.9), "b": runs(0.1, 0.2, seeds=[0, 2])}, range(3))
    )
    assert pair.seeds == 2


def test_nothing_beside_it() -> None:
    assert paired.pairs(Comparison({"a": runs(0.9)}, [0])) == []
    assert paired.table(Comparison({"a": runs(0.9)}, [0])) == ""


@pytest.mark.parametrize("ps", list(itertools.permutations([0.005, 0.01, 0.03, 0.04])))
def test_holm_by_hand(ps: tuple[float, ...]) -> None:
    by_hand = {0.005: 0.02, 0.01: 0.03, 0.03: 0.06, 0.04: 0.06}
    assert paired.holm(ps) == pytest.approx([by_hand[p] for p in ps])


def test_table_says_when_seeds_are_too_few() -> None:
    few = Comparison({"a": runs(0.9, 0.9), "b": runs(0.1, 0.2)}, range(2))
    assert "2 seeds cannot reach p = 0.05: take 5 or more." in paired.table(few)
    many = Comparison({"a": runs(*HIGH), "b": runs(*LOW)}, range(6))
    assert "cannot reach" not in paired.table(many)
    assert "more than noise" in paired.table(many)


COMPARED = Comparison({"a_1": runs(*HIGH), "b": runs(*LOW)}, range(6))


def test_markdown() -> None:
    lines = paired.markdown(COMPARED).splitlines()
    assert lines[0] == "| method | A | B | mean |"
    assert lines[1] == "| --- | ---: | ---: | ---: |"
    assert lines[2] == "| a_1 | **0.725 ± 0.019** | **0.925 ± 0.019** | **0.825 ± 0.019** |"
    assert lines[3] == "| b* | 0.610 ± 0.011 | 0.810 ± 0.011 | 0.710 ± 0.011 |"
    assert "over 6 seeds" in lines[5]
    assert "*: below the best by more than noise" in lines[5]


def test_latex() -> None:
    text = paired.latex(COMPARED)
    assert text.startswith(
        "\\begin{tabular}{lrrr}\n\\toprule\nmethod & A & B & mean \\\\\n\\midrule"
    )
    assert r"a\_1 & \textbf{0.725 $\pm$ 0.019} & " in text
    assert text.count(r"\\") == 3
    assert text.splitlines()[-2] == r"\end{tabular}"


def test_equal_means_are_all_bold() -> None:
    same = Comparison({"a": runs(0.5, 0.5), "b": runs(0.5, 0.5)}, range(2))
    assert paired.markdown(same).count("**") == 12


# ---- ranks over tasks ----------------------------------------------------------------------------


def test_ranks_by_hand() -> None:
    ranked = ranks.rank({"t": {"a": 0.9, "b": 0.8, "c": 0.8}, "u": {"a": 0.5, "b": 0.7, "c": 0.6}})
    assert ranked.mean == {"a": 2.0, "b": 1.75, "c": 2.25}
    assert list(ranked.mean) == ["b", "a", "c"]


def test_friedman_as_demsar_has_it() -> None:
    """JMLR 2006, section 3.2.2: ranks 3.143, 2.000, 2.893, 1.964 over 14 sets: F = 3.69."""
    from scipy.stats import f

    mean = [3.143, 2.000, 2.893, 1.964]
    chi2 = 12 * 14 / (4 * 5) * (sum(r * r for r in mean) - 4 * 25 / 4)
    assert chi2 == pytest.approx(9.28, abs=0.02)
    assert ranks.friedman(mean, 14) == pytest.approx(f.sf(3.69, 3, 39), rel=0.02)


def test_friedman_beside_scipy() -> None:
    from scipy.stats import friedmanchisquare

    scores = np.random.default_rng(0).random((9, 4))
    order = (-scores).argsort(1).argsort(1) + 1
    chi2 = friedmanchisquare(*scores.T).statistic
    k, n, mean = 4, 9, order.mean(0)
    ours = 12 * n / (k * (k + 1)) * ((mean**2).sum() - k * (k + 1) ** 2 / 4)
    assert ours == pytest.approx(chi2)
    from scipy.stats import f

    expected = f.sf((n - 1) * chi2 / (n * (k - 1) - chi2), k - 1, (k - 1) * (n - 1))
    assert ranks.friedman(mean.tolist(), n) == pytest.approx(expected)


def test_all_tasks_agree() -> None:
    assert ranks.friedman([1.0, 2.0, 3.0], 5) == 0.0


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_values_of_demsar_s_table_5(methods: int, q: float) -> None:
    expected = q * (methods * (methods + 1) / (6 * 7)) ** 0.5
    assert ranks.critical_difference(methods, 7) == pytest.approx(expected, abs=2e-3)


def test_groups() -> None:
    made = ranks.Ranks({"a": 1.0, "b": 1.5, "c": 2.2, "d": 4.0}, ["t"], 0.1, 1.0)
    assert made.groups() == [("a", "b"), ("b", "c")]
    apart = ranks.Ranks({"a": 1.0, "b": 2.0}, ["t"], 0.1, 1.0)
    assert apart.groups() == []  # the difference itself is enough
    near = ranks.Ranks({"a": 1.0, "b": 1.5, "c": 1.9}, ["t"], 0.1, 1.0)
    assert near.groups() == [("a", "b", "c")]


def test_picture(tmp_path: Path) -> None:
    ranked = ranks.rank({t: {"one": 0.9, "two": 0.8, "three": 0.7} for t in "abc"})
    ranks.draw(ranked, tmp_path / "ranks.svg")
    text = (tmp_path / "ranks.svg").read_text()
    for said in ("one 1.00", "two 2.00", "three 3.00", f"CD = {ranked.critical:.2f}"):
        assert said in text


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"t": {"a": 1.0, "b": 2.0}}, "two tasks"),
        ({"t": {"a": 1.0}, "u": {"a": 1.0}}, "two methods"),
        ({"t": {"a": 1.0, "b": 1.0}, "u": {"a": 1.0}}, "no score of b"),
    ],
)
def test_what_cannot_be_ranked(scores: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ranks.rank(scores)

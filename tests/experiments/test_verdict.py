"""The rules, by numbers that somebody can derive."""

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from polyfed.errors import ConfigError
from polyfed.experiments.verdict import Spread, compare, order, printed, signed_rank, summarise


def literal_signed_rank(differences: Sequence[float]) -> float:
    """Every sign of every difference, one by one."""
    d = [x for x in differences if x != 0]
    ranks = stats.rankdata([abs(x) for x in d]) if d else []
    observed = sum(r for r, x in zip(ranks, d, strict=True) if x > 0)
    draws = list(itertools.product([0, 1], repeat=len(d)))
    reached = [sum(s * r for s, r in zip(signs, ranks, strict=True)) >= observed for signs in draws]
    return sum(reached) / len(draws)


@settings(max_examples=200)
@example([0, 1, 2, -3])
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_signed_rank_is_the_enumeration_of_all_signs(differences: list[int]) -> None:
    assert signed_rank(differences) == pytest.approx(literal_signed_rank(differences), abs=1e-12)


def test_signed_rank_is_scipys_where_there_are_no_ties() -> None:
    d = np.random.default_rng(0).standard_normal(25) + 0.3
    theirs = stats.wilcoxon(d, alternative="greater", method="exact").pvalue
    assert signed_rank(d.tolist()) == pytest.approx(theirs, rel=1e-12)


def test_five_seeds_can_decide_and_four_cannot() -> None:
    assert signed_rank([1, 1, 1, 1]) == 1 / 16
    assert signed_rank([1, 1, 1, 1, 1]) == 1 / 32
    assert signed_rank([0, 0, 0]) == 1
    assert signed_rank(list(range(1, 101))) == pytest.approx(0.5**100)


def test_rounding_errors_break_no_ties() -> None:
    """0.3 - 0.2 and 0.2 - 0.1 differ in the last bit."""
    assert 0.3 - 0.2 != 0.2 - 0.1
    assert signed_rank([0.3 - 0.2, -(0.2 - 0.1)]) == signed_rank([1, -1]) == 0.75
    assert signed_rank([0.1 + 0.2 - 0.3]) == 1


def test_spreads() -> None:
    values = [0.0, 1.0, 2.0, 3.0, 14.0]
    sd = statistics.stdev(values)
    assert summarise(values, "mean") == Spread(4.0, 4.0 - sd, 4.0 + sd)
    median = summarise(values, "median")
    assert (median.centre, median.low, median.high) == pytest.approx((2.0, 1.6, 2.4))
    assert summarise([0.5], "mean") == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "value", "spread", "half"),
    [
        ("0.76 ± 0.013", 0.76, 0.013, 0.005),
        ("0.839±0.021", 0.839, 0.021, 0.0005),
        ("0.80", 0.8, None, 0.005),
        ("2.4278", 2.4278, None, 0.00005),
        ("93", 93, None, 0.5),
    ],
)
def test_printed_numbers(text: str, value: float, spread: float | None, half: float) -> None:
    read = printed(text)
    assert (read.value, read.spread, read.half) == (value, spread, pytest.approx(half))


@pytest.mark.parametrize("text", ["", "much", "0.7 ± x", "± 0.1"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write 0\.76 or 0\.76 ± 0\.013"):
        printed(text)


def test_the_difference_in_spreads() -> None:
    """Mean .75, sd .01 sqrt 2; less half a digit .045 is left, by sqrt(.0002 + .0001)."""
    judged = compare([0.74, 0.76], "0.80 ± 0.01")
    assert judged.difference == pytest.approx(-0.05)
    assert judged.spreads == pytest.approx(-0.045 / math.sqrt(0.0003))
    assert judged.word == "differs"


def test_without_a_printed_spread_ours_stands_for_both() -> None:
    judged = compare([0.74, 0.76], "0.800")
    assert judged.spreads == pytest.approx(-0.0495 / math.sqrt(0.0004))


@pytest.mark.parametrize(
    ("ours", "paper", "word"),
    [
        ([0.74, 0.76], "0.75 ± 0.01", "agrees"),
        ([0.74, 0.76], "0.772 ± 0.010", "undecided"),  # .0215 / .0173 = 1.24
        ([0.74, 0.76], "0.728 ± 0.010", "undecided"),
        ([0.74, 0.76], "0.740 ± 0.000", "agrees"),
        ([0.74], "0.74", "undecided"),
        ([0.5, 0.5], "0.504 ± 0", "differs"),
        ([0.5, 0.5], "0.50 ± 0", "agrees"),
        ([0.504, 0.504], "0.50 ± 0", "agrees"),  # prints as 0.50 too
    ],
)
def test_words_for_numbers(ours: list[float], paper: str, word: str) -> None:
    assert compare(ours, paper).word == word


def test_one_seed_has_no_spread() -> None:
    assert compare([0.7], "0.8 ± 0.1").spreads is None


ONE_TO_FIVE = [0.01, 0.02, 0.03, 0.04, 0.05]


def test_orderings() -> None:
    zeros = [0.0] * 5
    holds = order(ONE_TO_FIVE, zeros, ">")
    assert (holds.word, holds.above, holds.seeds) == ("holds", 5, 5)
    assert (holds.difference, holds.p, holds.p_opposite) == (0.03, 1 / 32, 1.0)
    opposite = order(zeros, ONE_TO_FIVE, ">")
    assert (opposite.word, opposite.above, opposite.difference) == ("does not hold", 0, -0.03)
    assert (opposite.p, opposite.p_opposite) == (1.0, 1 / 32)
    assert order(ONE_TO_FIVE[:4], zeros[:4], ">").word == "undecided"
    assert order(zeros, zeros, ">").word == "undecided"


def test_seeds_are_pairs() -> None:
    """Far apart between seeds, but one side a little above in each of them."""
    base = [0.1, 0.9, 0.3, 0.7, 0.5]
    assert order([b + 0.01 for b in base], base, ">").word == "holds"


@pytest.mark.parametrize(
    ("difference", "word"),
    [
        ([0.004, -0.003, 0.002, -0.001, 0.0], "holds"),
        ([0.02, 0.03, 0.02, 0.04, 0.05], "does not hold"),
        ([-0.02, -0.03, -0.02, -0.04, -0.05], "does not hold"),
        ([0.02, -0.02, 0.03, -0.03, 0.0], "undecided"),
        ([0.009, 0.011, 0.012, 0.009, 0.008], "undecided"),
        ([0.001, 0.002, 0.001, 0.002], "undecided"),
    ],
)
def test_as_good_as(difference: list[float], word: str) -> None:
    zeros = [0.0] * len(difference)
    assert order(difference, zeros, "~", 0.01).word == word
    assert order(zeros, difference, "~", 0.01).word == word


def test_sides_have_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="zip"):
        order([1.0, 2.0], [1.0], ">")

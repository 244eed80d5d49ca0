"""Verdicts: ours beside a paper's printed numbers, and its orderings put to a test over seeds.

Numbers. The paper prints v, perhaps with a spread p; ours have mean m and standard deviation s:

    in spreads = max(0, |m - v| - h) / sqrt(s^2 + p^2)                                   (1)

where h is half a unit of the last printed digit (what rounding can hide), and p = s where no
spread is printed. At most 1 agrees, more than 2 differs, between them it is undecided.

Orderings. Runs of one seed are a pair. An ordering "a above b" is judged by Wilcoxon's
signed-rank test on the differences a - b, exact also with ties, zeros left out: it holds if the
one-sided p is at most alpha, does not hold if that of "b above a" is, else it is undecided.
"a as b" is two such tests, of a - b above -margin and below +margin (equivalence); it does not
hold if the difference is beyond the margin on either side.

Wilcoxon, Individual comparisons by ranking methods, 1945.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polyfed.errors import ConfigError

ALPHA = 0.05
AGREES, DIFFERS = 1.0, 2.0  # combined spreads: at most, more than
_DIGITS = 12  # differences are rounded to these, or rounding errors would break their ties

Statistic = Literal["mean", "median"]
Word = Literal["agrees", "differs", "holds", "does not hold", "undecided", "not run"]
Relation = Literal[">", "~"]

NUMBERS_RULE = (
    "Numbers: the difference between our mean and the paper's number, less what its rounding can "
    "hide, in units of the combined spread (root of the sum of squares of both standard "
    "deviations; where the paper prints none, ours stands for both). "
    f"At most {AGREES:g}: agrees. More than {DIFFERS:g}: differs. Between, or one seed: undecided."
)
ORDERINGS_RULE = (
    "Orderings: exact one-sided Wilcoxon signed-rank test on the differences within seeds, "
    f"alpha {ALPHA:g}, no correction for the number of orderings. Holds: p at most alpha. Does "
    "not hold: p of the opposite at most alpha. Else undecided, as always with fewer than five "
    "seeds. Equality: both one-sided tests against the margin (equivalence)."
)


@dataclass(frozen=True)
class Spread:
    """A figure over seeds.

    Attributes:
        centre: mean, or median.
        low: mean less a standard deviation, or 40th percentile.
        high: mean and a standard deviation, or 60th percentile.
    """

    centre: float
    low: float
    high: float


def summarise(values: Sequence[float], statistic: Statistic) -> Spread:
    """Mean and standard deviation, or median and the 40th and 60th percentiles.

    >>> summarise([1, 2, 3], "mean")
    Spread(centre=2.0, low=1.0, high=3.0)
    >>> summarise([0, 10, 20, 30, 40, 50], "median")
    Spread(centre=25.0, low=20.0, high=30.0)
    """
    if statistic == "median":
        low, centre, high = (float(q) for q in np.percentile(values, [40, 50, 60]))
        return Spread(centre, low, high)
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(mean, mean - sd, mean + sd)


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it; `half` a unit of its last digit."""

    value: float
    spread: float | None
    half: float


def printed(text: str) -> Printed:
    """Read a printed number.

    >>> printed("0.76 ± 0.013"), printed("2.4")
    (Printed(value=0.76, spread=0.013, half=0.005), Printed(value=2.4, spread=None, half=0.05))
    """
    value, _, spread = (part.strip() for part in text.partition("±"))
    try:
        half = float(f"0.5e-{len(value.partition('.')[2])}")
        return Printed(float(value), float(spread) if spread else None, half)
    except ValueError as error:
        raise ConfigError(f"printed number '{text}': write 0.76 or 0.76 ± 0.013.") from error


@dataclass(frozen=True)
class Comparison:
    """Our mean less the paper's number, and Eq. 1 with its sign; None with a single seed."""

    difference: float
    spreads: float | None
    word: Word


def compare(ours: Sequence[float], paper: str) -> Comparison:
    """Judge our values of each seed by the number that the paper prints."""
    theirs = printed(paper)
    difference = statistics.fmean(ours) - theirs.value
    if len(ours) < 2:
        return Comparison(difference, None, "undecided")
    sd = statistics.stdev(ours)
    combined = math.hypot(sd, sd if theirs.spread is None else theirs.spread)
    gap = max(0.0, abs(difference) - theirs.half)
    spreads = 0.0 if gap == 0 else gap / combined if combined else math.inf
    word: Word = "agrees" if spreads <= AGREES else "differs" if spreads > DIFFERS else "undecided"
    return Comparison(difference, math.copysign(spreads, difference), word)


def signed_rank(differences: Sequence[float]) -> float:
    """One-sided p of Wilcoxon's signed-rank test: are these above zero?

    The sum of the ranks of the positive ones, against its distribution when every sign is a fair
    coin; ties share their mean rank (twice the rank is whole), zeros are left out.

    >>> signed_rank([1, 2, 3, 4, 5]), signed_rank([1, -1]), signed_rank([0.0])
    (0.03125, 0.75, 1.0)
    """
    d = np.round(np.asarray(differences, dtype=float), _DIGITS)
    d = d[d != 0]
    size = np.abs(d)
    twice = [int((size < s).sum() + (size <= s).sum()) + 1 for s in size]
    chance = np.zeros(sum(twice) + 1)
    chance[0] = 1.0
    for rank in twice:
        chance[rank:] = chance[rank:] / 2 + chance[:-rank] / 2
        chance[:rank] /= 2
    observed = sum(r for r, positive in zip(twice, d > 0, strict=True) if positive)
    return float(min(1.0, chance[observed:].sum()))


@dataclass(frozen=True)
class Ordering:
    """An ordering put to the test.

    Attributes:
        word: holds, does not hold, undecided, or not run.
        difference: median over seeds of left less right.
        above: in how many seeds left is above right.
        seeds: number of seeds.
        p: of what is claimed.
        p_opposite: of the opposite.
    """

    word: Word
    difference: float = math.nan
    above: int = 0
    seeds: int = 0
    p: float = math.nan
    p_opposite: float = math.nan


def order(
    left: Sequence[float], right: Sequence[float], relation: Relation, margin: float = 0.0
) -> Ordering:
    """Judge "left above right", or with `~` "left as right, within the margin", over seeds."""
    d = [a - b for a, b in zip(left, right, strict=True)]
    if relation == ">":
        p, opposite = signed_rank(d), signed_rank([-x for x in d])
    else:
        p = max(signed_rank([x + margin for x in d]), signed_rank([margin - x for x in d]))
        opposite = min(signed_rank([x - margin for x in d]), signed_rank([-margin - x for x in d]))
    word: Word = "holds" if p <= ALPHA else "does not hold" if opposite <= ALPHA else "undecided"
    above = sum(a > b for a, b in zip(left, right, strict=True))
    return Ordering(word, statistics.median(d), above, len(d), p, opposite)

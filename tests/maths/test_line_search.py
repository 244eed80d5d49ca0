"""Golden section against known lowest points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.maths.line_search import golden_section


@given(lowest=st.floats(0, 1), power=st.sampled_from([1.0, 2.0, 4.0]))
def test_one_valley_is_found_to_the_width_that_is_left(lowest: float, power: float) -> None:
    """n points inside leave a bracket of g^(n-1); its best point is in it, or an end is better."""
    for count in (2, 5, 10, 20):
        found = golden_section(lambda x: abs(x - lowest) ** power, count)
        assert abs(found - lowest) <= ((math.sqrt(5) - 1) / 2) ** (count - 1)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_it_asks_for_as_many_values_as_it_says(count: int) -> None:
    asked: list[float] = []

    def f(x: float) -> float:
        asked.append(x)
        return (x - 0.4) ** 2

    golden_section(f, count)
    assert len(asked) == len(set(asked)) == count + 2
    assert all(0 <= x <= 1 for x in asked)


def test_the_ends_count() -> None:
    assert golden_section(lambda x: x, 10) == 0.0
    assert golden_section(lambda x: -x, 10) == 1.0


def test_of_several_valleys_the_best_point_seen_is_the_answer() -> None:
    """A narrow pit at the upper end, beside a wide valley at 0.3."""
    pit = golden_section(lambda x: -9.0 if x == 1.0 else (x - 0.3) ** 2, 10)
    assert pit == 1.0


def test_of_equal_points_the_smaller_one() -> None:
    assert golden_section(lambda x: 1.0, 10) == 0.0


def test_of_equal_points_the_search_goes_on_below() -> None:
    """Eq. (1): [a, x2] where f(x1) = f(x2)."""
    looked = list[float]()
    golden_section(lambda x: looked.append(x) or 0.0, 4)
    inside = sorted(looked[4:])
    assert len(inside) == 2
    assert inside[-1] < looked[2] < looked[3]

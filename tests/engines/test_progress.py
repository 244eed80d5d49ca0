"""Progress: time left is the pace of the rounds done, whatever came before them."""

import pytest

from polyfed.engines import progress
from polyfed.engines.progress import Bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def left(bar: Bar) -> str:
    return str(progress._Left().render(bar._bar.tasks[0]))


def test_time_left_is_the_pace_of_rounds(clock: list[float]) -> None:
    bar = Bar()
    bar.begin("fedlinked", 5)
    clock[0] += 1000  # pre-training
    bar.round_done(0, {})
    assert left(bar) == ""
    clock[0] += 100
    bar.round_done(1, {"M0": 0.5})
    assert left(bar) == "6:40 left"  # four rounds of 100 s
    clock[0] += 60
    assert left(bar) == "5:40 left"
    clock[0] += 2940
    bar.round_done(2, {})
    assert left(bar) == "1:17:30 left"  # three of 1550 s
    bar.end()
    bar.end()


def test_a_resumed_run_counts_its_own_rounds(clock: list[float]) -> None:
    bar = Bar()
    bar.begin("fedlinked", 10)
    bar.skip(8)
    clock[0] += 7
    bar.round_done(9, {})
    assert left(bar) == "0:07 left"
    bar.end()

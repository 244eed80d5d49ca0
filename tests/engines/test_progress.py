"""Progress: time left is the pace of the rounds done; trouble is told once."""

import pytest

from polyfed.engines import progress
from polyfed.engines.progress import Bar, Lines, Progress, shares


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


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_trouble_is_told_once_a_run(
    kind: type[Progress], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = kind()
    for title in ("first", "second"):
        shown.begin(title, 2)
        for node in ("M0", "M1"):
            shown.trouble(f"round 1, {node}: loss of 'local' is NaN")
        shown.end()
    said = " ".join(capsys.readouterr().err.split())
    for title in ("first", "second"):
        assert f"{title}: round 1, M0: loss of 'local' is NaN. It goes on" in said
    assert "M1" not in said


def test_trouble_of_one_of_several_runs_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    each = shares(Lines(), 2)
    for number, share in enumerate(each):
        share.title = f"run {number}"
        share.begin("", 2)
    each[1].trouble("M0 diverged")
    each[0].trouble("M0 diverged")
    assert capsys.readouterr().err.startswith("2 runs: run 1: M0 diverged. It goes on")

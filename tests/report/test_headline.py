"""The headline calls more than noise what the paired test calls so, and nothing else."""

import statistics
from collections.abc import Sequence

from polyfed.engines.run import Run
from polyfed.record import Ledger, Log
from polyfed.report.headline import rows, verdicts


def runs(values: Sequence[float], first: int = 0) -> dict[int, Run]:
    """A run for each seed; its two nodes lie evenly around its mean."""
    return {
        seed: Run("made", {"M0": v - 0.1, "M1": v + 0.1}, [], Ledger(Log()), [])
        for seed, v in enumerate(values, first)
    }


LOW, HIGH = [0.50, 0.52, 0.51, 0.53, 0.50], [0.60, 0.61, 0.63, 0.60, 0.62]


def test_rows_hold_every_seed() -> None:
    (row,) = rows({"a": runs(LOW)})
    assert row["label"] == "a"
    assert [round(v, 9) for v in row["nodes"]["M1"]] == [round(v + 0.1, 9) for v in LOW]
    assert [round(v, 9) for v in row["mean"]] == LOW


def test_more_than_noise() -> None:
    (found,) = verdicts({"low": runs(LOW), "high": runs(HIGH)})
    assert found["word"] == "holds"
    gap = statistics.median(h - low for h, low in zip(HIGH, LOW, strict=True))
    text = f"high is {gap:.3f} above low by the median of 5 seeds, above in 5 of 5: more than noise"
    assert found["text"] == f"{text} (p = 0.031)."


def test_not_told_apart() -> None:
    other = [0.50, 0.50, 0.53, 0.51, 0.53]
    (found,) = verdicts({"a": runs(LOW), "b": runs(other)})
    assert found["word"] == "undecided"
    assert "not told apart from noise (p = " in found["text"]


def test_the_pairs_are_seeds() -> None:
    """Shifted by one seed, only four pairs are left: too few to tell."""
    (found,) = verdicts({"low": runs(LOW), "high": runs(HIGH, first=1)})
    assert found["word"] == "few"
    (found,) = verdicts({"low": runs(LOW), "high": runs(HIGH, first=9)})
    assert found["text"] == "high and low have no seed in common."


def test_few_seeds_and_one_method() -> None:
    three = {"a": runs(LOW[:3]), "b": runs(HIGH[:3]), "c": runs(LOW[:3])}
    (found,) = verdicts(three)
    assert found["word"] == "few"
    assert found["text"].startswith("b is highest, 0.613 in the mean, but 3 seeds cannot show")
    (found,) = verdicts({"a": runs([0.5])})
    assert "One run says nothing about noise" in found["text"]
    (found,) = verdicts({"a": runs([0.5, 0.6])})
    assert found["text"] == "a reaches 0.550 ± 0.071 over 2 seeds; nothing beside it."
    assert verdicts({"a": {0: Run("made", {}, [], Ledger(Log()), [])}})[0]["word"] == "none"


def test_the_best_mean_may_be_below_in_the_median() -> None:
    high = [0.9, 0.50, 0.50, 0.50, 0.49]
    (found,) = verdicts({"steady": runs([0.51] * 5), "lucky": runs(high)})
    assert found["text"].startswith("lucky is 0.010 below steady by the median of 5 seeds")

"""The headline: methods by node, mean and spread over seeds, and what is more than noise.

Runs of one seed are a pair; "more than noise" is what `experiments/verdict.py` calls an ordering
that holds: an exact one-sided Wilcoxon signed-rank test on the differences within seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.engines.run import Run
from polyfed.engines.table import count
from polyfed.experiments.verdict import ALPHA, order

FEWEST = 5  # seeds: with fewer no ordering can reach alpha
Groups = Mapping[str, Mapping[int, Run]]  # by label and seed


def rows(groups: Groups) -> list[dict[str, Any]]:
    """A row a method: what each seed came to, by node and in the mean."""
    return [_row(label, list(runs.values())) for label, runs in groups.items()]


def _row(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    done = [run for run in runs if run.accuracy]
    nodes = dict.fromkeys(node for run in done for node in run.accuracy)
    return {
        "label": label,
        "nodes": {n: [run.accuracy.get(n) for run in done] for n in nodes},
        "mean": [run.mean_accuracy for run in done],
    }


def verdicts(groups: Groups) -> list[dict[str, Any]]:
    """The best method beside every other one, a sentence each."""
    means = {
        label: {seed: run.mean_accuracy for seed, run in runs.items() if run.accuracy}
        for label, runs in groups.items()
    }
    means = {label: found for label, found in means.items() if found}
    if len(means) < 2:
        return _alone(means)
    best = max(means, key=lambda label: statistics.fmean(means[label].values()))
    found = [_beside(best, other, means) for other in means if other != best]
    if all(verdict["word"] == "few" for verdict in found):
        return [_too_few(best, means[best])]
    return found


def _alone(means: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    if not means:
        return [{"word": "none", "text": "Nothing has been evaluated yet."}]
    ((label, found),) = means.items()
    mean = statistics.fmean(found.values())
    if len(found) == 1:
        text = (
            f"{label} reaches a mean accuracy of {mean:.3f}. One run says nothing about noise: "
            "compare it with another method over five seeds or more."
        )
        return [{"word": "none", "text": text}]
    spread = statistics.stdev(found.values())
    text = f"{label} reaches {mean:.3f} ± {spread:.3f} over {len(found)} seeds; nothing beside it."
    return [{"word": "none", "text": text}]


def _beside(best: str, other: str, means: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    seeds = [seed for seed in means[best] if seed in means[other]]
    if not seeds:
        return {"word": "none", "text": f"{best} and {other} have no seed in common."}
    found = order([means[best][s] for s in seeds], [means[other][s] for s in seeds], ">")
    said = f"{best} is {_by(found.difference)} {other} by the median of {count(len(seeds), 'seed')}"
    times = f"above in {found.above} of {len(seeds)}"
    if found.word == "holds":
        return {"word": "holds", "text": f"{said}, {times}: more than noise (p = {found.p:.2g})."}
    if len(seeds) < FEWEST:
        why = f"{count(len(seeds), 'seed')} cannot show that it is more than noise"
        return {"word": "few", "text": f"{said}, {times}; {why}."}
    why = f"not told apart from noise (p = {found.p:.2g}, needs {ALPHA:g})"
    return {"word": "undecided", "text": f"{said}, {times}: {why}."}


def _too_few(best: str, found: Mapping[int, float]) -> dict[str, Any]:
    text = (
        f"{best} is highest, {statistics.fmean(found.values()):.3f} in the mean, but "
        f"{count(len(found), 'seed')} cannot show that any difference is more than noise: "
        f"run {FEWEST} or more."
    )
    return {"word": "few", "text": text}


def _by(difference: float) -> str:
    return f"{abs(difference):.3f} {'below' if difference < 0 else 'above'}"

r"""Methods over many tasks: mean ranks, Friedman's test, Nemenyi's critical difference.

    R_j = (1/N) sum_i r_ij                          rank 1 is best; ties share their mean rank
    chi2 = 12 N / (k (k + 1)) (sum_j R_j^2 - k (k + 1)^2 / 4)
    F = (N - 1) chi2 / (N (k - 1) - chi2)           with k - 1 and (k - 1)(N - 1) degrees of freedom
    CD = q_alpha sqrt(k (k + 1) / (6 N))            q: studentized range, infinite df, over sqrt(2)

Two methods differ if their mean ranks do by at least CD.

Demsar, Statistical comparisons of classifiers over multiple data sets, JMLR 2006, section 3.2
(Iman and Davenport's F; tie-free form of chi2).
Symbols: N = tasks, k = methods, r_ij = rank of method j on task i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyfed.engines.table import Text, render
from polyfed.errors import ConfigError
from polyfed.experiments.plot import save, styled
from polyfed.experiments.verdict import ALPHA
from polyfed.record.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Ranks:
    """Methods ranked over tasks.

    Attributes:
        mean: mean rank of each method, the best first.
        tasks: names of the tasks.
        p: of Friedman's test that all methods are the same.
        critical: Nemenyi's critical difference.
    """

    mean: Mapping[str, float]
    tasks: Sequence[str]
    p: float
    critical: float

    def groups(self) -> list[tuple[str, ...]]:
        """The longest runs of methods that are not told apart."""
        names, found = list(self.mean), list[tuple[str, ...]]()
        for i, first in enumerate(names):
            near = [n for n in names[i:] if self.mean[n] - self.mean[first] < self.critical]
            if len(near) > 1 and not (found and near[-1] == found[-1][-1]):
                found.append(tuple(near))
        return found

    def table(self) -> Text:
        """The ranks to read."""
        rows = [[name, f"{rank:.2f}"] for name, rank in self.mean.items()]
        text = render(f"Mean rank over {len(self.tasks)} tasks", ["method", "rank"], rows)
        friedman = f"Friedman: p = {self.p:.3g}; critical difference (Nemenyi): {self.critical:.2f}"
        apart = "; ".join(", ".join(group) for group in self.groups()) or "none"
        return Text(f"{text}\n{friedman}\nnot told apart: {apart}")


def rank(scores: Mapping[str, Mapping[str, float]]) -> Ranks:
    """Rank methods by a score on each task; higher is better.

    Args:
        scores: by task and method.
    """
    tasks = list(scores)
    names = list(dict.fromkeys(n for each in scores.values() for n in each))
    if len(tasks) < 2 or len(names) < 2:
        raise ConfigError("ranks need at least two tasks and two methods.")
    for task, each in scores.items():
        if set(each) != set(names):
            missing = ", ".join(sorted(set(names) - set(each)))
            raise ConfigError(f"task {task} has no score of {missing}: ranks need all methods.")
    table = np.array([[-scores[t][n] for n in names] for t in tasks])
    below = (table[:, None, :] < table[:, :, None]).sum(2)  # how many are better
    equal = (table[:, None, :] == table[:, :, None]).sum(2)
    mean = (below + (equal + 1) / 2).mean(0)
    order = np.argsort(mean, kind="stable")
    return Ranks(
        {names[i]: float(mean[i]) for i in order},
        tasks,
        friedman(mean.tolist(), len(tasks)),
        critical_difference(len(names), len(tasks)),
    )


def friedman(mean_ranks: Sequence[float], tasks: int) -> float:
    """P of Friedman's test, by Iman and Davenport's F."""
    from scipy.stats import f as fisher

    k, n = len(mean_ranks), tasks
    chi2 = 12 * n / (k * (k + 1)) * (sum(r * r for r in mean_ranks) - k * (k + 1) ** 2 / 4)
    rest = n * (k - 1) - chi2
    if rest <= 1e-9:  # all tasks agree
        return 0.0
    return float(fisher.sf((n - 1) * chi2 / rest, k - 1, (k - 1) * (n - 1)))


def critical_difference(methods: int, tasks: int) -> float:
    """How far apart two mean ranks must be.

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    from scipy.stats import studentized_range

    q = studentized_range.ppf(1 - ALPHA, methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(methods * (methods + 1) / (6 * tasks)))


def draw(ranks: Ranks, *paths: Path) -> None:
    """Draw the critical-difference picture into files (.svg or .png)."""
    from matplotlib.figure import Figure

    with styled():
        for path in paths:
            height = 1.1 + 0.25 * math.ceil(len(ranks.mean) / 2) + 0.15 * len(ranks.groups())
            figure = Figure(figsize=(6.4, height))
            _fill(figure.subplots(), ranks)
            write_atomically(path, partial(save, figure, path.suffix[1:]))


def _fill(axes: Axes, ranks: Ranks) -> None:
    """Ranks on a line, best to the left; bars join what is not told apart."""
    k, names = len(ranks.mean), list(ranks.mean)
    axes.plot([1, k], [0, 0], color="#333333", linewidth=1)
    for at in range(1, k + 1):
        axes.plot([at, at], [0, 0.08], color="#333333", linewidth=1)
        axes.text(at, 0.14, str(at), ha="center", va="bottom", fontsize=8)
    axes.plot([1, 1 + ranks.critical], [0.75, 0.75], color="#333333", linewidth=1.5)
    axes.text(1 + ranks.critical / 2, 0.8, f"CD = {ranks.critical:.2f}", ha="center", fontsize=8)
    groups = ranks.groups()
    for i, group in enumerate(groups):
        ends = [ranks.mean[group[0]] - 0.04, ranks.mean[group[-1]] + 0.04]
        axes.plot(ends, [-0.15 - 0.15 * i] * 2, color="#0072B2", linewidth=3.5)
    half = math.ceil(k / 2)
    for i, name in enumerate(names):
        on_left = i < half
        depth = -0.35 - 0.15 * len(groups) - 0.25 * (i if on_left else k - 1 - i)
        edge = 0.7 if on_left else k + 0.3
        axes.plot([ranks.mean[name]] * 2 + [edge], [0, depth, depth], color="#888888", linewidth=1)
        text = f"{name} {ranks.mean[name]:.2f}"
        axes.text(edge, depth, text, ha="right" if on_left else "left", va="center", fontsize=9)
    axes.set_axis_off()

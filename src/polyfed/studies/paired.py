"""Methods beside each other over the same seeds: exact paired tests, tables for papers.

Runs of one seed are a pair. The best method (by mean) is put beside each other one by the exact
one-sided signed-rank test of `experiments/verdict.py`; p is also given with Holm's correction
for the number of methods, which is what "more than noise" is judged by.

Wilcoxon 1945; Holm, A simple sequentially rejective multiple test procedure, 1979.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.engines.compare import Comparison
from polyfed.engines.table import Text, count, quick_line, render, spread
from polyfed.experiments.verdict import ALPHA, order

FEWEST = 5  # pairs: with fewer no p can reach alpha
_ESCAPED = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
_MARK = "*"


@dataclass(frozen=True)
class Pair:
    """The best method beside another one.

    Attributes:
        best: label of the method with the highest mean.
        other: label of the one beside it.
        difference: median over seeds of best less other.
        above: in how many seeds the best is above.
        seeds: how many seeds both have.
        p: that it is above by chance, one-sided.
        p_holm: the same, corrected for the number of pairs.
    """

    best: str
    other: str
    difference: float
    above: int
    seeds: int
    p: float
    p_holm: float

    @property
    def is_real(self) -> bool:
        """Whether the difference is more than noise."""
        return self.p_holm <= ALPHA


def pairs(comparison: Comparison) -> list[Pair]:
    """The best method beside each other one; empty where there is nothing to compare."""
    means = _means(comparison)
    if len(means) < 2:
        return []
    best = max(means, key=lambda label: statistics.fmean(means[label].values()))
    found = []
    for other in (label for label in means if label != best):
        seeds = [seed for seed in means[best] if seed in means[other]]
        if seeds:
            judged = order([means[best][s] for s in seeds], [means[other][s] for s in seeds], ">")
            found.append((other, judged))
    corrected = holm([judged.p for _, judged in found])
    return [
        Pair(best, other, j.difference, j.above, j.seeds, j.p, p)
        for (other, j), p in zip(found, corrected, strict=True)
    ]


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's corrected p of each test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    ranked = sorted(range(len(ps)), key=lambda i: ps[i])
    corrected, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(ranked):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def table(comparison: Comparison) -> Text:
    """The pairs to read; nothing where there are none."""
    found = pairs(comparison)
    if not found:
        return Text()
    rows = [
        [
            pair.other,
            f"{pair.difference:+.3f}",
            f"{pair.above} of {pair.seeds}",
            f"{pair.p:.3g}",
            f"{pair.p_holm:.3g}",
            "more than noise" if pair.is_real else "not told apart",
        ]
        for pair in found
    ]
    title = f"{found[0].best} beside the others: exact one-sided signed-rank test over seeds"
    columns = ["beside", "median", "above in", "p", "p (Holm)", "difference"]
    few = max(pair.seeds for pair in found)
    more = f"\n{count(few, 'seed')} cannot reach p = {ALPHA:g}: take {FEWEST} or more."
    return Text(render(title, columns, rows) + (more if few < FEWEST else ""))


def as_dicts(comparison: Comparison) -> list[dict[str, Any]]:
    """The pairs for machines."""
    return [asdict(pair) | {"is_real": pair.is_real} for pair in pairs(comparison)]


def markdown(comparison: Comparison) -> str:
    """The table of the comparison for a README: the best of each column in bold."""
    head, rows, note = _cells(comparison, "**{}**", "±")
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", note])


def latex(comparison: Comparison) -> str:
    """The same for a paper (booktabs)."""
    head, rows, note = _cells(comparison, r"\textbf{{{}}}", r"$\pm$")
    lines = [" & ".join(map(_escape, line)) + r" \\" for line in [head, *rows]]
    columns = "l" + "r" * (len(head) - 1)
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*begin, *lines[1:], r"\bottomrule", r"\end{tabular}", f"% {note}"])


def _cells(comparison: Comparison, bold: str, sign: str) -> tuple[list[str], list[list[str]], str]:
    """Columns: method, each node, mean. A star: the best is above it by more than noise."""
    runs = comparison.runs
    nodes = list(next(iter(runs.values()))[0].accuracy)
    beaten = {pair.other for pair in pairs(comparison) if pair.is_real}
    columns = [
        {label: [run.accuracy[node] for run in each] for label, each in runs.items()}
        for node in nodes
    ]
    columns.append({label: [run.mean_accuracy for run in each] for label, each in runs.items()})
    rows = []
    for label in runs:
        marked = label + (_MARK if label in beaten else "")
        rows.append([marked, *(_cell(column, label, bold, sign) for column in columns)])
    seeds = count(max(map(len, runs.values())), "seed")
    star = f"{_MARK}: below the best by more than noise (signed-rank, Holm, alpha {ALPHA:g})."
    note = f"Test accuracy, mean {sign} standard deviation over {seeds}; bold: highest mean."
    quick = quick_line(run.config for each in runs.values() for run in each)
    said = [note, star if beaten else "", quick]
    return ["method", *nodes, "mean"], rows, " ".join(filter(None, said))


def _cell(column: Mapping[str, Sequence[float]], label: str, bold: str, sign: str) -> str:
    means = {name: round(statistics.fmean(values), 3) for name, values in column.items()}
    text = spread(column[label]).replace("±", sign)
    return bold.format(text) if means[label] == max(means.values()) else text


def _escape(text: str) -> str:
    """LaTeX's special letters; commands and mathematics of ours pass."""
    if text.startswith("\\textbf{") or "$" in text:
        return text
    return "".join(_ESCAPED.get(letter, letter) for letter in text)


def _means(comparison: Comparison) -> dict[str, dict[int, float]]:
    found = {
        label: {run.config["settings"]["seed"]: run.mean_accuracy for run in runs if run.accuracy}
        for label, runs in comparison.runs.items()
    }
    return {label: means for label, means in found.items() if means}

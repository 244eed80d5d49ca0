"""The page of an experiment, as Markdown, and what the terminal shows of it: both from a summary.

The same summary gives the same page, byte for byte, so that a test can tell whether a page in the
repository is the one its summary makes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from polyfed.engines.table import count, render, size
from polyfed.experiments.experiment import Ref, label, number
from polyfed.experiments.results import Grid, Results, seeds_of, shown
from polyfed.experiments.verdict import NUMBERS_RULE, ORDERINGS_RULE

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows
_STATISTIC = {
    "mean": "mean ± standard deviation over seeds",
    "median": "median over seeds, in brackets the 40th and 60th percentiles",
}
_FAULTS = "Something went wrong in these runs, and their figures are of that, too"
_QUICK = "--quick only shows the way; its figures and verdicts mean nothing."


def page(results: Results) -> str:
    """The whole page."""
    experiment = results.experiment
    parts = [
        f"# {experiment.title}",
        f"{experiment.paper}. Experiment `{experiment.name}`.",
        f"**{results.state[:1].upper()}{results.state[1:].partition(' (')[0]}**: "
        f"{results.tally()}.",
        _changed(results),
        *([f"**{_FAULTS}**:\n\n{_bullets(faults)}"] if (faults := results.faults()) else []),
        f"![{experiment.title}](plot.svg)",
    ]
    for title, columns, rows in tables(results):
        parts += [f"## {title}", _markdown(columns, rows)]
    parts += ["## Rules", _bullets(_rules(results))]
    if experiment.notes:
        parts += ["## How the paper was read", _bullets(experiment.notes)]
    parts += ["## How it was run", _bullets(_origin(results)), _markdown(*_cost(results))]
    return "\n\n".join(parts) + "\n"


def terminal(results: Results) -> str:
    """The tables and the verdicts, as plain text."""
    texts = [render(title, columns, rows) for title, columns, rows in tables(results)]
    experiment = results.experiment
    state = f"{experiment.name}: {results.state.partition(' (')[0]}; {results.tally()}."
    changed = ["Changed from the paper's setting:", *map("- {}".format, results.summary["changed"])]
    parts = [*texts, "\n".join(changed) if results.summary["changed"] else ""]
    if len(seeds := _seeds(results)) > 1:
        parts.append("; ".join(seeds))
    if faults := results.faults():
        parts.append("\n".join([f"{_FAULTS}:", *map("- {}".format, faults)]))
    parts.append(state)
    note = f"note: {_QUICK}" if results.summary["quick"] else ""
    return "\n\n".join(filter(None, [*parts, note]))


def tables(results: Results) -> list[Table]:
    """Ours beside the paper's, orderings, and everything else that was measured."""
    found = [_comparisons(results), _orderings(results)]
    found += [_measured(results, grid) for grid in results.grids()]
    return [table for table in found if table[2]]


def _comparisons(results: Results) -> Table:
    rows, statistic = [], results.experiment.statistic
    for ref, judged in results.comparisons().items():
        paper = results.experiment.published[ref]
        digits = max(3, len(paper.partition(".")[2].partition(" ")[0]))  # as many as the paper has
        ours = shown(results.values(ref) or [], statistic, digits)
        in_spreads = "-" if judged.spreads is None else f"{judged.spreads:+.1f}"
        difference = f"{judged.difference:+.{digits}f}"
        rows.append([str(ref), ours, paper, difference, in_spreads, judged.word])
    columns = ["figure", "ours", "paper", "difference", "in spreads", "verdict"]
    return "Ours beside the paper's numbers", columns, rows


def _orderings(results: Results) -> Table:
    rows = [
        [
            str(claim),
            judged.word,
            _signed(judged.difference),
            f"{judged.above} of {judged.seeds}",
            _probability(judged.p),
            _probability(judged.p_opposite),
        ]
        for claim, judged in results.orderings().items()
    ]
    columns = ["the paper's ordering", "verdict", "median difference", "seeds above"]
    return "Orderings", [*columns, "p", "p of the opposite"], rows


def _measured(results: Results, grid: Grid) -> Table:
    """A row a point and a column a series, without what is beside a paper's number already."""
    statistic = results.experiment.statistic
    seen = results.comparisons()
    rows = [
        [number(x), *(_shown(results, row.get(series)) for series in grid.series)]
        for x, row in grid.rows.items()
        if grid.figure or not all(Ref(s, str(x), grid.panel) in seen for s in row)
    ]
    what = ", ".join(filter(None, [grid.panel, grid.figure]))
    title = f"Measured{': ' if what else ''}{what} ({_STATISTIC[statistic]})"
    return title, ["", *(s or "all" for s in grid.series)], rows


def _shown(results: Results, values: Sequence[float] | None) -> str:
    return "-" if values is None else shown(values, results.experiment.statistic)


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"


def _probability(p: float) -> str:
    return "-" if math.isnan(p) else f"{p:.2g}" if p < 0.01 else f"{p:.3f}"


def _changed(results: Results) -> str:
    changed = results.summary["changed"]
    if not changed:
        return "In the paper's setting."
    warning = f"**{_QUICK}** " if results.summary["quick"] else ""
    return f"{warning}Changed from the paper's setting:\n\n{_bullets(changed)}"


def _rules(results: Results) -> list[str]:
    experiment = results.experiment
    rules = [NUMBERS_RULE] * bool(experiment.published) + [ORDERINGS_RULE] * bool(experiment.claims)
    return rules or ["Nothing is judged: the paper prints no number and states no ordering."]


def _origin(results: Results) -> list[str]:
    summary, environment = results.summary, results.summary["environment"]
    versions = [f"{name} {environment[name]}" for name in ("polyfed", "torch", "python", "numpy")]
    return [
        f"`{summary['command']}`",
        f"commit {summary['commit']}; {', '.join(versions)}",
        f"{summary['device']}; {environment['platform']}; torch threads: {environment['threads']}",
        "; ".join(_seeds(results)),
        summary["date"],
    ]


def _seeds(results: Results) -> list[str]:
    """All seeds; then the cells that have fewer of them, those with the same ones together."""
    summary, every = results.summary, results.summary["seeds"]
    fewer: dict[str, list[str]] = {}
    for cell in summary["cells"]:
        own = seeds_of(summary, cell)
        if own != every:
            name = label(cell["panel"], cell["series"], cell["x"])
            fewer.setdefault(", ".join(map(str, own)), []).append(name)
    said = [f"{', '.join(names)}: {own}" for own, names in fewer.items()]
    return [f"{count(len(every), 'seed')}: {', '.join(map(str, every))}", *said]


def _cost(results: Results) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            label(cell["panel"], cell["series"], cell["x"]),
            f"{statistics.fmean(cell['seconds']):.1f}",
            size(statistics.fmean(cell["bytes_sent_per_node"])),
        ]
        for cell in results.summary["cells"]
    ]
    return ["cell", "seconds a run", "sent per node"], rows


def _bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

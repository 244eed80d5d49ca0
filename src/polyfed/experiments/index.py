"""The list of all tables and figures with what came of them, and every page, from the summaries."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from polyfed import experiments
from polyfed.experiments import costs
from polyfed.experiments.experiment import Experiment
from polyfed.experiments.page import page
from polyfed.experiments.results import Results, folder_of, readings_of, state_of, summaries_of
from polyfed.record.files import write_text

_HEAD = """# Results

Every table and figure of the five papers that `polyfed reproduce` knows, and how ours compare.
**Reproduced**: every number agrees and every ordering holds, by the rules on its page. **Differs**:
some do not. **Undecided**: too few seeds to say. **Measured**: the paper says nothing that could be
judged. **Partly**: run in a smaller setting, which its page names. **Cannot**: we do not have what
it needs; with it, the same command runs it. This page and those behind it are made from the
summaries beside them:
`polyfed experiments --out docs/results --pages`.

[What they cost](costs.md). [When does which method win?](which_wins.md)
"""
_PAPERS = ("fedlinked", "partial-averaging", "fedfoa", "fedul", "li")
_NOT_LISTED = {
    "FedLinked, Table 4.1": "sizes of the splits, which `tests/tasks/test_split.py` checks",
    "FedLinked, Table 4.2": "who has which classes: `groups` of the tasks `cifar10` and `svhn`",
    "FedLinked, Tables 4.3 and 4.4": "hyper-parameters: see `polyfed.studies.spaces` and the "
    "recipes of the tasks `cifar10` and `svhn`",
    "FedLinked, Figures 4.2 and 4.3": "searches of hyper-parameters: `polyfed sweep` draws its own",
    "Partial averaging, Figure 7 and section V.6": "what the other figures show, in short",
    "FedFoA, Appendices A and C": "named in the paper, but not in the text that there is of it",
    "LI, Table 1, two rows": "Tiny-ImageNet is not at hand",
}


def pages(out: Path) -> dict[Path, str]:
    """Every page that the summaries in a folder make, with the list of all, by its path."""
    found = {
        path.parent / "page.md": page(Results.read(path))
        for experiment in experiments.every().values()
        for path in summaries_of(experiment, out)
    }
    return {**found, out / "index.md": _index(out), out / costs.PAGE: costs.costs(out)}


def write_pages(out: Path) -> list[Path]:
    """Write them; where they are."""
    found = pages(out)
    for path, text in found.items():
        write_text(path, text)
    return list(found)


def _index(out: Path) -> str:
    known = list(experiments.every().values())
    parts = [_HEAD]
    for family, members in groupby(known, key=_family):
        rows = [row for experiment in members for row in _rows(experiment, out)]
        heads = ["| experiment | what it shows | state | verdicts |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {family}", "", *heads, *rows, ""]))
    listed = [f"- {what}: {where}." for what, where in _NOT_LISTED.items()]
    return "\n".join([*parts, "## Tables and figures that are not above", "", *listed, ""])


def _family(experiment: Experiment) -> str:
    """The paper's method, with which the name begins; else the name itself."""
    return next((paper for paper in _PAPERS if experiment.name.startswith(paper)), experiment.name)


def _rows(experiment: Experiment, out: Path) -> list[str]:
    """The experiment, and below it its other readings."""
    rows = [_row(experiment, out)]
    for folder in readings_of(experiment, out):
        results = Results.read(folder / "summary.json")
        reading = folder.name.removeprefix(f"{experiment.name}-")
        name = f"[… with `{reading}`]({folder.name}/page.md)"
        what = "the same, with other options"
        rows.append(f"| {name} | {what} | {results.state} | {results.tally()} |")
    return rows


def _row(experiment: Experiment, out: Path) -> str:
    summary = folder_of(experiment, out) / "summary.json"
    name, verdicts = f"`{experiment.name}`", ""
    if summary.exists():
        name = f"[{name}]({folder_of(experiment, Path()).name}/page.md)"
        verdicts = Results.read(summary).tally()
    return f"| {name} | {experiment.title} | {state_of(experiment, out)} | {verdicts} |"

"""The list of all tables and figures with what came of them, and every page, from the summaries."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from polyfed import experiments
from polyfed.experiments.experiment import Experiment
from polyfed.experiments.page import page
from polyfed.experiments.results import Results, folder_of, state_of
from polyfed.record.files import write_text

_HEAD = """# Results

Every table and figure of the five papers that `polyfed reproduce` knows, and how ours compare.
**Reproduced**: every number agrees and every ordering holds, by the rules on its page. **Differs**:
some do not. **Undecided**: too few seeds to say. **Partly**: run in a smaller setting, which its
page names. This page and those behind it are made from the summaries beside them:
`polyfed experiments --out docs/results --pages`.
"""


def pages(out: Path) -> dict[Path, str]:
    """Every page that the summaries in a folder make, with the list of all, by its path."""
    found = {}
    for experiment in experiments.every().values():
        folder = folder_of(experiment, out)
        if (folder / "summary.json").exists():
            found[folder / "page.md"] = page(Results.read(folder / "summary.json"))
    return {**found, out / "index.md": _index(out)}


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
        rows = [_row(experiment, out) for experiment in members]
        heads = ["| experiment | what it shows | state | verdicts |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {family}", "", *heads, *rows, ""]))
    return "\n".join(parts)


def _family(experiment: Experiment) -> str:
    """The paper's method: the name without its table, figure or section."""
    return experiment.name.rsplit("-", 1)[0].removesuffix("-table").removesuffix("-figure")


def _row(experiment: Experiment, out: Path) -> str:
    summary = folder_of(experiment, out) / "summary.json"
    name, verdicts = f"`{experiment.name}`", ""
    if summary.exists():
        name = f"[{name}]({folder_of(experiment, Path()).name}/page.md)"
        verdicts = Results.read(summary).tally()
    return f"| {name} | {experiment.title} | {state_of(experiment, out)} | {verdicts} |"

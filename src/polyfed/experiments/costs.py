"""What every kept experiment cost: time, bytes, and what a bare loop would have saved.

Seconds and bytes are the runs' own, as their summaries keep them. Ratios to bare loops are those of
`benchmarks/papers.py`, whose figures lie beside the summaries.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from polyfed import experiments
from polyfed.engines.table import size
from polyfed.experiments.results import Results, summaries_of

PAGE, BARE = "costs.md", "bare_loop.json"
BARE_COMMAND = f"python benchmarks/papers.py --data DIR --json docs/results/{BARE}"
_HEAD = """# What the results cost

**In all**: seconds of all runs together; runs that train as one on a GPU share its time, but what
several processes (`--jobs`) took beside each other counts for each. **A run**: median, and the
shortest and longest. **Sent**: bytes that leave a node in one run, by the ledger;
the least and the most over the experiment's cells. Made from the summaries beside this page:
`polyfed experiments --out docs/results --pages`.
"""
_BARE = """## Through a bare loop

Each paper's method against a plain PyTorch loop written for that one experiment, which makes the
same steps, as the program checks on a CPU: a few rounds on a share of the data (on a GPU a larger
one), in turn, pair by pair. A ratio below 1: polyfed was faster. FedFoA's steps, FedAvg, and more:
[benchmarks](../benchmarks.md#what-polyfed-costs-over-a-bare-loop).
"""


def costs(out: Path) -> str:
    """The page."""
    heads = ["experiment", "device", "runs", "seconds in all", "seconds a run", "sent per node"]
    rows = [
        _row(Results.read(path), path.parent.name)
        for experiment in experiments.every().values()
        for path in summaries_of(experiment, out)
    ]
    parts = [_HEAD, _table(heads, rows)]
    if (out / BARE).exists():
        parts += ["", _BARE, _bare(json.loads((out / BARE).read_text(encoding="utf-8")))]
    return "\n".join(parts) + "\n"


def _row(results: Results, name: str) -> list[str]:
    summary = results.summary
    seconds = [each for cell in summary["cells"] for each in cell["seconds"]]
    sent = [each for cell in summary["cells"] for each in cell["bytes_sent_per_node"]]
    return [
        f"[`{name}`]({name}/page.md)",
        summary["device"],
        str(len(seconds)),
        f"{sum(seconds):,.0f}",
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        _range(min(sent), max(sent)),
    ]


def _range(least: float, most: float) -> str:
    return size(most) if least == most else f"{size(least) if least else 0} to {size(most)}"


def _bare(measured: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"`{row['experiment']}`",
            row["cell"],
            row["device"],
            f"{row['seconds']:.3f}",
            f"{statistics.median(row['ratios']):.3f} "
            f"({min(row['ratios']):.3f} to {max(row['ratios']):.3f})",
        ]
        for row in measured
    ]
    heads = [
        "experiment",
        "cell",
        "device",
        "bare loop, seconds a round",
        "polyfed, ratio of pairs",
    ]
    return f"{_table(heads, rows)}\n\n`{BARE_COMMAND}`, on a GPU with `--device cuda`."


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

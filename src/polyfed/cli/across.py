"""`polyfed compare --task a,b,c`: each task by itself, then the methods ranked over all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyfed.cli import show
from polyfed.engines.run import check_run
from polyfed.errors import ConfigError
from polyfed.experiments import plot
from polyfed.studies import paired, ranks

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.engines.compare import Comparison
    from polyfed.tasks import Task

PICTURE = "ranks.svg"


def compare_across(
    made: Mapping[str, tuple[Task, Mapping[str, Method]]],
    one: Callable[[Task, Mapping[str, Method], Path], Comparison],
    where: Path,
    seeds: Sequence[int],
    as_json: bool,
    style: show.Style,
) -> None:
    """Compare on every task, then rank; what cannot run is said before anything is trained."""
    if min(len(labelled) for _, labelled in made.values()) < 2:
        raise ConfigError("several tasks rank methods: name at least two.")
    for task, labelled in made.values():
        nodes = task.nodes(seeds[0])
        for method in labelled.values():
            check_run(method, nodes)
    done = {
        name: one(task, labelled, where / name.replace("/", "-"))
        for name, (task, labelled) in made.items()
    }
    ranked = ranks.rank(
        {
            name: {
                label: statistics.fmean(run.mean_accuracy for run in runs)
                for label, runs in comparison.runs.items()
            }
            for name, comparison in done.items()
        }
    )
    picture = where / PICTURE
    if plot.is_available():
        ranks.draw(ranked, picture)
    if as_json:
        said = {name: c.as_dict() | {"pairs": paired.as_dicts(c)} for name, c in done.items()}
        over = {"mean_rank": dict(ranked.mean), "p": ranked.p, "critical": ranked.critical}
        typer.echo(json.dumps({"tasks": said, "ranks": over}, indent=2))
        return
    head = "% " if style == "latex" else ""
    texts = [f"{head}{name}\n\n{show.comparison_text(c, style)}" for name, c in done.items()]
    drawn = f"picture: {picture}\n" if picture.exists() else ""
    show.say("\n\n".join(texts), f"{ranked.table()}\n\n{drawn}runs: {where}", style)

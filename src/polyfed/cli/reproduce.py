"""`polyfed reproduce` and `polyfed experiments`: the papers' tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.commands import AsJson, Device, Shown, app
from polyfed.cli.dynamic import Command

if TYPE_CHECKING:
    from polyfed.experiments.experiment import Experiment
    from polyfed.experiments.results import Results

ExperimentName = Annotated[str, typer.Argument(help="see: polyfed experiments", metavar="NAME")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="folder with the published files")]
IsQuick = Annotated[
    bool, typer.Option("--quick", help="a small version, minutes on a laptop; says what it scaled")
]
HowMany = Annotated[
    str | None, typer.Option("--seeds", help="how many (5), or which (3,7,9); else its own")
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="instead of the paper's")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="cells whose name begins so, such as a data set; may be repeated"),
]
WritePages = Annotated[
    bool, typer.Option("--pages", help="write index.md and every page again, from the summaries")
]
Out = Annotated[Path, typer.Option("--out", help="where to write; finished runs there are kept")]


@app.command("reproduce", cls=Command)
def reproduce_command(
    name: ExperimentName,
    data: DataFolder = None,
    quick: IsQuick = False,
    seeds: HowMany = None,
    rounds: Rounds = None,
    only: Only = None,
    device: Device = "cpu",
    out: Out = Path("results"),
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Run a table or figure of a paper, in its setting, and judge it.

    An interrupted experiment goes on when the same command is given again.

    Example: polyfed reproduce fedlinked-table-5.3 --data ~/data --quick
    """
    from polyfed import experiments
    from polyfed.experiments.reproduce import reproduce
    from polyfed.experiments.results import folder_of
    from polyfed.options import parse_seeds

    experiment = experiments.load(name)
    try:
        results = reproduce(
            experiment,
            data=data,
            out=out,
            quick=quick,
            seeds=None if seeds is None else parse_seeds(seeds),
            rounds=rounds,
            only=only or (),
            device=device,
            progress=progress,
        )
    except KeyboardInterrupt as error:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from error
    _show(results, folder_of(experiment, out, quick), as_json)


def _show(results: Results, folder: Path, as_json: bool) -> None:
    from polyfed.experiments import plot
    from polyfed.experiments.page import terminal
    from polyfed.experiments.runner import commit

    by, now = results.summary["commit"], commit()
    if by != now:
        kept = f"note: runs by commit {by} were kept, this is {now}"
        typer.echo(f"{kept}; choose another --out for new ones", err=True)
    files = {"page": str(folder / "page.md"), "summary": str(folder / "summary.json")}
    if plot.is_available():
        files |= {"plot": str(folder / "plot.svg"), "picture": str(folder / "plot.png")}
    if as_json:
        typer.echo(json.dumps({**results.as_dict(), "files": files}, indent=2))
        return
    drawn = "" if "plot" in files else "\nno plot: pip install polyfed[plots], then run it again"
    listed = "\n".join(f"{what}: {path}" for what, path in files.items())
    typer.echo(f"{terminal(results)}\n\n{listed}{drawn}")


@app.command("experiments", cls=Command)
def experiments_command(
    out: Out = Path("results"), write: WritePages = False, as_json: AsJson = False
) -> None:
    """List the tables and figures that can be reproduced, and what came of them in a folder.

    Example: polyfed experiments --out docs/results
    """
    from polyfed import experiments
    from polyfed.cli import show
    from polyfed.experiments.index import write_pages

    if write:
        typer.echo(f"written: {len(write_pages(out))} pages, {out / 'index.md'}", err=True)
    found = [_about(experiment, out) for experiment in experiments.every().values()]
    if not as_json:  # narrow enough for a terminal
        for entry in found:
            entry["what_it_shows"] += f" ({entry.pop('paper')})"
    show.listing(found, as_json)


def _about(experiment: Experiment, out: Path) -> dict[str, Any]:
    from polyfed.experiments.results import state_of

    return {
        "name": experiment.name,
        "paper": experiment.paper,
        "what_it_shows": experiment.title,
        "data": experiment.needs,
        "state": state_of(experiment, out),
    }

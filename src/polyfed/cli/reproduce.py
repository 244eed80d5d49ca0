"""`polyfed reproduce`, `experiments` and `contests`: papers' tables, and who wins where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.commands import AsJson, Device, Precise, Shown, app
from polyfed.cli.dynamic import Command

if TYPE_CHECKING:
    from polyfed.experiments.experiment import Experiment
    from polyfed.experiments.results import Results

_OWN = Path("results")  # of whoever runs them
ExperimentNames = Annotated[
    list[str] | None,
    typer.Argument(help="see: polyfed experiments; several share their work", metavar="NAME..."),
]
Every = Annotated[
    bool, typer.Option("--all", help="all of them, one after the other, whatever comes of each")
]
Resumed = Annotated[
    bool, typer.Option("--resume", help="with --all: leave out those that are finished there")
]
DataFolder = Annotated[Path | None, typer.Option("--data", help="folder with the published files")]
IsQuick = Annotated[
    bool, typer.Option("--quick", help="a small version, minutes on a laptop; says what it scaled")
]
HowMany = Annotated[
    str | None, typer.Option("--seeds", help="how many (5), or which (3,7,9); else its own")
]
Rounds = Annotated[
    str | None, typer.Option("--rounds", help="instead of the paper's: 20, or 20% of them")
]
Reading = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="another reading of the paper: options of its methods or tasks; may be repeated",
        metavar="OPTION=VALUE",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="cells of this name, or that begin so: a data set; repeatable"),
]
Join = Annotated[
    bool,
    typer.Option("--join", help="add these cells or seeds to the summary there, run elsewhere"),
]
Jobs = Annotated[int, typer.Option("--jobs", help="how many processes share the work")]
WritePages = Annotated[
    bool, typer.Option("--pages", help="write index.md and every page again, from the summaries")
]
Contests = Annotated[
    list[str] | None, typer.Argument(help="which; else all", metavar="[CONTEST]...")
]
Trials = Annotated[int, typer.Option("--trials", help="settings tried for each method")]
Tests = Annotated[int, typer.Option("--seeds", min=1, help="federations that each is tested on")]
Held = Annotated[Path, typer.Option("--out", help="where to write; what is finished there is kept")]
Out = Annotated[Path, typer.Option("--out", help="where to write; finished runs there are kept")]
Kept = Annotated[
    Path | None,
    typer.Option("--out", help="folder of results; else results, or docs/results of a checkout"),
]


@app.command("reproduce", cls=Command)
def reproduce_command(
    names: ExperimentNames = None,
    every: Every = False,
    data: DataFolder = None,
    quick: IsQuick = False,
    seeds: HowMany = None,
    rounds: Rounds = None,
    reading: Reading = None,
    only: Only = None,
    join: Join = False,
    resume: Resumed = False,
    device: Device = "cpu",
    precision: Precise = "float32",
    jobs: Jobs = 1,
    out: Out = _OWN,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Run a table or figure of a paper, in its setting, and judge it; or several, or all of them.

    Several by name are run as one piece of work: equal runs once, shared out
    among --jobs; with --all one follows the other. What was interrupted goes on
    when the command is given again; what was run elsewhere, and is a summary
    here, grows by --join. Its cells may then have different seeds; orderings are
    judged over those that both sides have.

    Example: polyfed reproduce fedlinked-table-5.3 --data ~/data --quick
    """
    from polyfed import experiments
    from polyfed.experiments.reproduce import reproduce, run_together
    from polyfed.experiments.results import folder_of
    from polyfed.options import parse_seeds

    _agree(names or [], every, only, reading, resume, join)
    other = dict(map(_option, reading or ()))
    settings: Any = {
        "data": data,
        "out": out,
        "quick": quick,
        "seeds": None if seeds is None else parse_seeds(seeds),
        "rounds": None if rounds is None else _so_many(rounds),
        "device": device,
        "precision": precision,
        "jobs": jobs,
        "progress": progress,
    }
    try:
        if every:
            _reproduce_all(settings, resume, as_json)
            return
        chosen = [experiments.load(name) for name in names or ()]
        if len(chosen) > 1:
            run_together(chosen, reading=other, **settings)
        piece: Any = {"only": only or (), "reading": other, "join": join}
        found = [reproduce(each, **piece, **settings) for each in chosen]
    except KeyboardInterrupt as error:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from error
    _show(found, [folder_of(each, out, quick, other) for each in chosen], as_json)


def _agree(
    names: list[str],
    every: bool,
    only: list[str] | None,
    reading: list[str] | None,
    resume: bool,
    join: bool,
) -> None:
    from polyfed.errors import ConfigError

    if every == bool(names):
        raise ConfigError("reproduce: name an experiment (see: polyfed experiments), or --all.")
    if only and len(names) != 1:
        raise ConfigError("--only chooses cells of one experiment: name that one alone.")
    if every and reading:
        raise ConfigError("--with reads one experiment in another way: name it instead of --all.")
    if join and len(names) != 1:
        raise ConfigError("--join adds to one experiment: name that one alone.")
    if resume and not every:
        raise ConfigError("--resume belongs to --all: an experiment by itself always goes on.")


def _so_many(text: str) -> int | float:
    """Rounds, or a share of them."""
    from polyfed.errors import ConfigError

    try:
        return float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError as error:
        raise ConfigError(f"--rounds {text}: write 20, or 20% for a share of them.") from error


def _option(text: str) -> tuple[str, str]:
    """An option of another reading, and its value."""
    from polyfed.errors import ConfigError

    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--with {text}: write OPTION=VALUE, as weights=xavier:4.")
    return name.strip().replace("-", "_"), value


def _reproduce_all(settings: dict[str, Any], resume: bool, as_json: bool) -> None:
    """Everything; the exit code is 1 if something failed."""
    from dataclasses import asdict

    from polyfed import experiments
    from polyfed.experiments.series import reproduce_all, table

    attempts = reproduce_all(
        experiments.every().values(),
        resume=resume,
        shown=lambda attempt: typer.echo(attempt, err=True),
        **settings,
    )
    if as_json:
        typer.echo(json.dumps([asdict(attempt) for attempt in attempts], indent=2))
    else:
        typer.echo(table(attempts))
    if any(attempt.state == "failed" for attempt in attempts):
        raise typer.Exit(1)


def _show(found: Sequence[Results], folders: Sequence[Path], as_json: bool) -> None:
    """What came out: one JSON object, or a list of them where there were several."""
    from polyfed.experiments import plot
    from polyfed.experiments.page import terminal
    from polyfed.experiments.runner import commit

    said: list[Any] = []
    for results, folder in zip(found, folders, strict=True):
        by, now = results.summary["commit"], commit()
        if by != now:
            kept = f"note: runs by commit {by} were kept, this is {now}"
            typer.echo(f"{kept}; choose another --out for new ones", err=True)
        files = {"page": str(folder / "page.md"), "summary": str(folder / "summary.json")}
        if plot.is_available():
            files |= {"plot": str(folder / "plot.svg"), "picture": str(folder / "plot.png")}
        said.append({**results.as_dict(), "files": files})
        if not as_json:
            none = "\nno plot: pip install polyfed[plots], then run it again"
            listed = "\n".join(f"{what}: {path}" for what, path in files.items())
            typer.echo(f"{terminal(results)}\n\n{listed}{'' if 'plot' in files else none}")
    if as_json:
        typer.echo(json.dumps(said[0] if len(said) == 1 else said, indent=2))


@app.command("experiments", cls=Command)
def experiments_command(
    out: Kept = None, write: WritePages = False, as_json: AsJson = False
) -> None:
    """List the tables and figures that can be reproduced, and what came of them in a folder.

    In a checkout of polyfed that is what came of them for us; your own go to results.

    Example: polyfed experiments --out docs/results --pages
    """
    from polyfed import experiments
    from polyfed.cli import lists
    from polyfed.experiments.index import write_pages

    if out is None:
        ours = Path("docs/results")
        out = ours if ours.is_dir() and not _OWN.exists() else _OWN
    if write:
        typer.echo(f"written: {len(write_pages(out))} pages, {out / 'index.md'}", err=True)
        _write_wins(out)
    found = [_about(experiment, out) for experiment in experiments.every().values()]
    if as_json:
        lists.listing(found, as_json)
        return
    rows = []
    for entry in found:  # narrow enough for a terminal
        state, _, why = entry["state"].partition(" (")
        said = f"\n({shorten(why.removesuffix(')'), 100, placeholder=' ...')})" if why else ""
        rows.append({"name": entry["name"], "state": state, "shows": entry["what_it_shows"] + said})
    lists.listing(rows)
    where = f"In {out}. " if out.is_dir() else ""
    typer.echo(f"{where}The papers, the data they need, and all that was changed: --json.")


def _write_wins(out: Path) -> None:
    """The page of the contests, where there is a summary of them."""
    from polyfed.experiments import plot
    from polyfed.studies import wins, wins_page

    if (out / wins.SUMMARY).exists():
        typer.echo(f"written: {wins_page.write(out, draw=plot.is_available())}", err=True)


@app.command("contests", cls=Command)
def contests_command(
    names: Contests = None,
    data: DataFolder = None,
    trials: Trials = 8,
    seeds: Tests = 10,
    out: Held = Path("contests"),
) -> None:
    """Let methods meet: each tuned with the same budget, then all tested alike.

    It takes hours; given again, it goes on where it stopped.

    Example: polyfed contests --data ~/data --out contests
    """
    from polyfed.errors import UnknownNameError
    from polyfed.studies.contests import CONTESTS
    from polyfed.studies.wins import hold

    known = {contest.name: contest for contest in CONTESTS}
    for name in names or ():
        if name not in known:
            raise UnknownNameError("contest", name, known)
    chosen = [known[name] for name in names or known]
    try:
        hold(
            out,
            data=data,
            trials=trials,
            seeds=seeds,
            contests=chosen,
            shown=lambda text: typer.echo(text, err=True),
        )
    except KeyboardInterrupt as error:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from error
    _write_wins(out)


def _about(experiment: Experiment, out: Path) -> dict[str, Any]:
    from polyfed.experiments.results import state_of

    return {
        "name": experiment.name,
        "paper": experiment.paper,
        "what_it_shows": experiment.title,
        "data": experiment.needs,
        "state": state_of(experiment, out),
    }

"""What the commands print: text for people, the same as JSON for machines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer

from polyfed.cli import complete
from polyfed.cli.dynamic import flag
from polyfed.cli.lists import listing, print_json
from polyfed.core.method import Method
from polyfed.engines import compare, table
from polyfed.engines.compare import Comparison
from polyfed.engines.run import Run
from polyfed.errors import ConfigError, PolyfedError
from polyfed.options import listed
from polyfed.record.files import write_text
from polyfed.record.recorder import go_on, read_config, read_result
from polyfed.report.page import FILE, write_report
from polyfed.report.pictures import labels_of
from polyfed.studies import paired
from polyfed.tasks import Task, picture
from polyfed.tasks.task import DATA_VARIABLE

Style = Literal["text", "markdown", "latex"]
_LEGEND = "mean accuracy: over the nodes of a run. sent, seconds: of one run."


def folder(where: Path, as_json: bool, style: Style = "text") -> None:
    """A run or a comparison, finished or not."""
    if not compare.is_comparison(where):
        if style != "text":
            raise ConfigError(f"{where} is a single run: --{style} is for comparisons.")
        result(Run.open(where), as_json, fully=True)
        return
    done, planned = compare.progress_of(where)
    if not as_json:
        state = _state(where, done == planned, f"{done} of {planned} runs")
        typer.echo(f"{state}\n", err=style != "text")
    if done or as_json:
        result(compare.open_comparison(where), as_json, style)


def finished(done: Run | Comparison, as_json: bool, style: Style = "text") -> None:
    """Write the report of what has just ended, then show it; no report is no reason to fail."""
    try:
        write_report([done.folder or Path()])
    except PolyfedError as error:
        typer.echo(f"no report: {error}", err=True)
    result(done, as_json, style)


def style_of(latex: bool, markdown: bool) -> Style:
    """How to write a table."""
    if latex and markdown:
        raise ConfigError("--latex and --markdown: choose one.")
    return "latex" if latex else "markdown" if markdown else "text"


def comparison_text(done: Comparison, style: Style) -> str:
    """The table of a comparison, and of its paired tests."""
    if style != "text":
        return paired.latex(done) if style == "latex" else paired.markdown(done)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n\n".join(filter(None, [done.table(width), paired.table(done), _LEGEND]))


def result(
    done: Run | Comparison, as_json: bool, style: Style = "text", *, fully: bool = False
) -> None:
    """The tables of a run or a comparison; `fully`, also where a run stands and its settings."""
    where = done.folder or Path()
    config = read_config(where)
    if as_json:
        pairs = {} if isinstance(done, Run) else {"pairs": paired.as_dicts(done)}
        said = _run_dict(done, config, fully) if isinstance(done, Run) else done.as_dict()
        print_json(said | pairs)
        return
    if isinstance(done, Run):
        texts = _run_texts(done, config, fully)
    else:
        texts = [comparison_text(done, style)]
    page = f"report: {where / FILE}\n" if (where / FILE).exists() else ""
    say("\n\n".join(filter(None, texts)), f"{page}run folder: {where}", style)


def say(tables: str, files: str, style: Style) -> None:
    """Print tables, then where files are; tables for papers are alone on standard output."""
    typer.echo(tables if style != "text" else f"{tables}\n")
    typer.echo(files, err=style != "text")


def _run_dict(done: Run, config: Mapping[str, Any], fully: bool) -> dict[str, Any]:
    said = table.as_dict(done, config)
    if fully:
        said["finished"] = read_result(done.folder or Path()) is not None
        said |= {"rounds": table.rounds_done(done), "sent": table.sent_by(done), "config": config}
    return said


def _run_texts(done: Run, config: Mapping[str, Any], fully: bool) -> list[str]:
    where = done.folder or Path()
    if fully:
        rounds = f"{table.rounds_done(done)} of {config['options']['rounds']} rounds"
        typer.echo(_state(where, read_result(where) is not None, rounds))
        listing(table.settings(config))
    on = config["task"] or "own nodes"
    title = f"{done.method} on {on}, seed {config['settings']['seed']}"
    first = table.run_table(done, title) if done.accuracy else "No accuracy yet."
    sent = table.sent_table(done) if fully else ""
    lines = [table.privacy_line(done), table.faults_line(done)]
    return [first, table.utilities_table(done), sent, *lines]


def _state(where: Path, is_done: bool, done: str) -> str:
    more = "" if is_done else f"; continue with: {go_on(where)}"
    return f"{'finished' if is_done else 'not finished'}: {done}{more}"


def configuration(
    cls: type[Method] | type[Task], as_json: bool, more: Mapping[str, Any] | None = None
) -> None:
    """A method or a task, and its options."""
    pair = "--" if as_json else "--[no-]"
    options = [
        {"option": name.replace("--", pair) if o.hint is bool else name, "default": o.default}
        | {"what_it_is": o.help}
        for o in listed(cls, cls.name)
        for name in [flag(o)]
    ]
    lines = complete.methods() if issubclass(cls, Method) else complete.tasks()
    about = next(line for line in lines if line["name"] == cls.name)
    if as_json:
        print_json(about | {"options": options, **(more or {})})
    else:
        listing([about])
        listing(options)
        if issubclass(cls, Method):
            name = cls.name
            typer.echo(f"A task may set other defaults: polyfed run {name} --task digits --help")


def task(chosen: Task, seed: int, svg: Path | None, as_json: bool) -> None:
    """Options, and who holds what; without the task's files, how to say where they are."""
    if svg and svg.suffix != ".svg":
        raise ConfigError(f"--picture {svg}: the picture is SVG. Call it NAME.svg.")
    given = getattr(chosen, "data", None) or os.environ.get(DATA_VARIABLE)
    has_data = given or svg or not chosen.needs_data
    labels, classes = labels_of(chosen.nodes(seed)) if has_data else ({}, [])
    counts = picture.holdings(labels, len(classes))
    title = f"Training samples by node and class: {chosen.name}, seed {seed}"
    if svg and not labels:
        raise ConfigError(f"task {chosen.name}: no node has labels for training to draw.")
    if svg:
        write_text(svg, picture.as_svg(counts, list(labels), classes, title))
    rows = zip(labels, counts.tolist(), strict=True)
    held = {node: dict(zip(classes, row, strict=True)) for node, row in rows}
    configuration(type(chosen), as_json, {"seed": seed, "holds": held})
    if not as_json:
        width = min(picture.WIDTH, shutil.get_terminal_size().columns)
        text = picture.as_text(counts, list(labels), classes, width) if labels else ""
        where = f"Who holds what: polyfed tasks {chosen.name} --data DIR"
        nothing = "No node has labels for training." if has_data else where
        typer.echo(f"{title}\n\n{text}" if text else nothing)
        if svg:
            typer.echo(f"picture: {svg}")

"""`polyfed sweep`: search the settings of a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.commands import (
    AsJson,
    Device,
    Meets,
    MethodName,
    Precise,
    Seed,
    Shown,
    Stacked,
    TaskName,
    _task,
    _typed,
    app,
)
from polyfed.cli.dynamic import TYPED, Command

if TYPE_CHECKING:
    from polyfed.studies.outcome import Outcome

Trials = Annotated[int, typer.Option("--trials", help="settings to try in all")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", help="seconds after which no further trial begins")
]
Spaces = Annotated[
    list[str] | None,
    typer.Option(
        "--space",
        metavar="NAME=LOW:HIGH[:log]",
        help="search this instead of the method's own space; or NAME=A,B,C; may be repeated",
    ),
]
Runs = Annotated[int, typer.Option("--runs", help="trainings of each setting; the worst counts")]
HoldOut = Annotated[
    float, typer.Option("--hold-out", help="share of training data to judge by; 0: validation data")
]
Together = Annotated[
    int | None, typer.Option("--together", help="trials at a time; else 1 on a CPU, 8 on a GPU")
]
StudyFolder = Annotated[
    Path | None, typer.Option("--folder", help="where to keep it; else studies/METHOD-TASK")
]


@app.command("sweep", cls=Command)
def sweep_command(
    ctx: typer.Context,
    method: MethodName,
    task: TaskName = "digits",
    trials: Trials = 30,
    timeout: Timeout = None,
    space: Spaces = None,
    runs: Runs = 3,
    seed: Seed = 0,
    hold_out: HoldOut = 0.0,
    together: Together = None,
    topology: Meets = None,
    device: Device = "cpu",
    stack: Stacked = "auto",
    precision: Precise = "float32",
    folder: StudyFolder = None,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Search the settings of a method, judged by validation data only.

    Options of the method and the task that you type are not searched. The same
    command again goes on where the last one stopped; with more trials, it adds
    to them.

    Example: polyfed sweep fedlinked --task digits --trials 10
    """
    from polyfed import methods
    from polyfed.studies.space import parse_space
    from polyfed.studies.sweep import sweep

    chosen = _task(ctx, task)
    cls = methods.load(method)
    common: Any = {"device": device, "stack": stack, "precision": precision}
    common |= {"topology": topology} if topology else {}
    try:
        outcome = sweep(
            method,
            chosen,
            folder=folder or Path("studies", f"{method}-{task}"),
            trials=trials,
            timeout=timeout,
            space=parse_space(space, cls, type(chosen)) if space else None,
            options=_typed(ctx, cls),
            fixed=list(ctx.meta[TYPED]),
            runs=runs,
            seed=seed,
            hold_out=hold_out,
            together=together,
            shown=_silent if progress is False else _shown,
            **common,
        )
    except KeyboardInterrupt as error:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from error
    _show(outcome, as_json)


def _shown(text: str) -> None:
    typer.echo(text, err=True)


def _silent(text: str) -> None:
    pass


def _show(outcome: Outcome, as_json: bool) -> None:
    from polyfed.engines.table import quick_line
    from polyfed.studies.outcome import BEST, REPORT, figure

    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=2))
        return
    best = ", ".join(f"{name}={figure(value)}" for name, value in outcome.best.items())
    pictures = [f"picture: {path}" for path in sorted(outcome.folder.glob("*.svg"))]
    no_picture = ["no picture: pip install polyfed[plots], then give the command again"]
    texts = [
        outcome.table(),
        f"best: {best}\nworst of {outcome.plan['runs']} runs: {outcome.value:.4f} on validation "
        f"data; test data were not used.\nTest it with: polyfed run {outcome.folder / BEST}",
        quick_line([outcome.plan]),
        "\n".join(
            [
                *(pictures or no_picture),
                f"report: {outcome.folder / REPORT}",
                f"study: {outcome.folder}",
            ]
        ),
    ]
    typer.echo("\n\n".join(filter(None, texts)))

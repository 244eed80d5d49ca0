"""What can be typed, and the way from text to configurations."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from polyfed import __version__
from polyfed.cli.complete import method_names, task_names
from polyfed.cli.dynamic import TYPED, Command, is_config
from polyfed.errors import ConfigError, PolyfedError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polyfed.core.method import Method
    from polyfed.engines.compare import Comparison
    from polyfed.tasks import Task

_FOLDER = "polyfed.folder"  # what a context carries: where this command writes


class Group(TyperGroup):
    """All commands; errors on purpose are one line, and an interrupted run says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo(f"interrupted{_go_on(ctx)}", err=True)
            raise typer.Exit(130) from error
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's, not imported for this
                text = f"error: the GPU's memory is full ({first_line(error)})"
                typer.echo(f"{text}{_go_on(ctx)}", err=True)
                raise typer.Exit(1) from error
            is_usage = hasattr(error, "format_message")  # Typer's own: they share no public name
            if not (is_usage or isinstance(error, PolyfedError)):
                raise
            text = getattr(error, "format_message", error.__str__)()
            more = f" See: polyfed {ctx.invoked_subcommand or ''} --help" if is_usage else ""
            typer.echo("error: " + " ".join((text + more).split()), err=True)
            raise typer.Exit(2) from error


def _go_on(ctx: Any) -> str:
    """How to continue the run that this command began, if it did."""
    folder = ctx.meta.get(_FOLDER)
    begun = folder is not None and (folder / "config.yaml").exists()
    return f"; continue with: polyfed resume {folder}" if begun else ""


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Begin with: polyfed run fedlinked",
)


def main() -> None:
    """What `polyfed` on the command line calls."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads sleep, not spin
    app(prog_name="polyfed")


AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
TaskName = Annotated[
    str, typer.Option("--task", help="see: polyfed tasks", autocompletion=task_names)
]
Seed = Annotated[int, typer.Option("--seed", help="same seed, same numbers")]
Seeds = Annotated[str, typer.Option("--seeds", help="how many (5), or which (3,7,9)")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:0, ...")]
Every = Annotated[int, typer.Option("--evaluate-every", help="rounds between evaluations")]
Meets = Annotated[
    str | None,
    typer.Option("--topology", help="see: polyfed topologies; else the method's first"),
]
Stacked = Annotated[
    Literal["auto", "always", "never"],
    typer.Option("--stack", help="train equal networks as one computation; auto: on a GPU"),
]
Precise = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--precision", help="what networks compute in; bfloat16 is for GPUs"),
]
Fail = Annotated[
    str | None, typer.Option("--fail", help="faults on purpose: 'cut 0-1 @3; kill M2 @5; heal @8'")
]
Folder = Annotated[Path | None, typer.Option("--folder", help="where to write; else under runs/")]
Shown = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress", help="tell rounds as they end; else on terminals only"
    ),
]
AsLatex = Annotated[bool, typer.Option("--latex", help="the table for a paper")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="the table for a README")]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="draw who holds what", metavar="FILE.svg")
]
MethodName = Annotated[
    str,
    typer.Argument(help="see: polyfed methods", metavar="METHOD", autocompletion=method_names),
]
MethodOrFile = Annotated[
    str,
    typer.Argument(
        help="see: polyfed methods; or FILE.yaml", metavar="METHOD", autocompletion=method_names
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="after a file: method.rounds=20", metavar="[NAME=VALUE]..."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="tensorboard, mlflow or wandb (offline); may be repeated"),
]
Labels = Annotated[
    list[str],
    typer.Argument(help="one or more", metavar="METHOD...", autocompletion=method_names),
]
Name = Annotated[str | None, typer.Argument(help="one, to see its options", metavar="NAME")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"polyfed {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def polyfed(
    version: bool = typer.Option(False, "--version", callback=_version, help="Say which version."),
) -> None:
    """Train models together across parties that differ."""


@app.command("run", cls=Command)
def run_command(
    ctx: typer.Context,
    method: MethodOrFile,
    overrides: Overrides = None,
    task: TaskName = "digits",
    seed: Seed = 0,
    topology: Meets = None,
    device: Device = "cpu",
    evaluate_every: Every = 1,
    stack: Stacked = "auto",
    precision: Precise = "float32",
    fail: Fail = None,
    track: Track = None,
    folder: Folder = None,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Train a federation with a method, or as a config file says.

    Each method and each task has options of its own. To see them, name them:
    polyfed run fedlinked --task digits --help
    A file is as the config.yaml of a run folder:
    polyfed run config.yaml method.rounds=20

    Example: polyfed run fedlinked --eta 1 --no-transform
    """
    from polyfed.cli import config, show
    from polyfed.engines.run import run
    from polyfed.studies.trackers import tracked_run, trackers_of

    trackers = trackers_of(track or [])
    common: Any = {"device": device, "evaluate_every": evaluate_every, "stack": stack, "fail": fail}
    common |= {"precision": precision, "topology": topology, "seed": seed}
    if is_config(method):
        asked = config.with_typed(config.read_config(Path(method), overrides or ()), ctx)
        built, chosen, common = config.built(asked)
    elif overrides:
        raise ConfigError(
            f"'{overrides[0]}' can only follow a config file, as polyfed run x.yaml method.lr=1. "
            "For several methods: polyfed compare."
        )
    else:
        chosen = _task(ctx, task)
        built = _method(ctx, method, chosen)
    where = _folder(ctx, folder, built.name, chosen.name, f"s{common['seed']}")
    common |= {"folder": where, "progress": progress}
    if trackers:
        done = tracked_run(built, chosen, trackers, **common)
    else:
        done = run(built, chosen, **common)
    show.finished(done, as_json)


@app.command("compare", cls=Command)
def compare_command(
    ctx: typer.Context,
    methods: Labels,
    task: TaskName = "digits",
    seeds: Seeds = "5",
    topology: Meets = None,
    device: Device = "cpu",
    evaluate_every: Every = 1,
    stack: Stacked = "auto",
    precision: Precise = "float32",
    fail: Fail = None,
    folder: Folder = None,
    latex: AsLatex = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Run several methods over several seeds: one table.

    An option is for every named method that has it; a method's own follow a
    colon. Several tasks (--task digits,heart) are compared one after the other,
    then ranked over all.

    Example: polyfed compare fedlinked fedlinked:transform=false,eta=1 local --seeds 3
    """
    from polyfed.cli import show
    from polyfed.engines.compare import compare
    from polyfed.options import parse_seeds

    which, names = parse_seeds(seeds), list(dict.fromkeys(task.split(",")))
    if len(set(methods)) < len(methods):
        raise ConfigError("a method is named twice. Give one its own options: fedlinked:eta=1.")
    common: Any = {"device": device, "evaluate_every": evaluate_every, "stack": stack, "fail": fail}
    common |= {"precision": precision} | ({"topology": topology} if topology else {})
    made = {}
    for name in names:
        chosen = _task(ctx, name)
        made[name] = chosen, {text: _method(ctx, text, chosen) for text in methods}
    where = _folder(ctx, folder, "compare", *names)
    style = show.style_of(latex, markdown)

    def one(chosen: Task, labelled: Mapping[str, Method], base: Path) -> Comparison:
        return compare(labelled, chosen, seeds=which, folder=base, progress=progress, **common)

    if len(names) == 1:
        show.finished(one(*made[names[0]], where), as_json, style)
        return
    from polyfed.cli.across import compare_across

    compare_across(made, one, where, which, as_json, style)


@app.command("resume", cls=Command)
def resume_command(
    ctx: typer.Context, folder: RunFolder, as_json: AsJson = False, progress: Shown = None
) -> None:
    """Continue a run or a comparison that was interrupted.

    Example: polyfed resume runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.cli import show
    from polyfed.engines import compare, run

    ctx.meta[_FOLDER] = folder
    again = compare.resume_comparison if compare.is_comparison(folder) else run.resume
    show.finished(again(folder, progress=progress), as_json)


@app.command("show", cls=Command)
def show_command(
    folder: RunFolder,
    latex: AsLatex = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Show a run or a comparison, finished or not.

    Example: polyfed show runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.cli import show

    show.folder(folder, as_json, show.style_of(latex, markdown))


@app.command("methods", cls=Command)
def methods_command(name: Name = None, as_json: AsJson = False) -> None:
    """List the methods, or the options of one.

    Example: polyfed methods fedlinked
    """
    from polyfed.cli import complete, lists

    if name is None:
        lists.listing(complete.methods(), as_json)
        return
    complete.check_name("method", name)
    from polyfed import methods
    from polyfed.cli import show

    show.configuration(methods.load(name), as_json)


@app.command("tasks", cls=Command)
def tasks_command(
    ctx: typer.Context,
    name: Name = None,
    seed: Seed = 0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or the options of one and who holds what.

    Example: polyfed tasks mnist --data ~/data --partition dirichlet:0.1 --picture mnist.svg
    """
    from polyfed.cli import complete, lists

    if name is not None:
        from polyfed.cli import show

        show.task(_task(ctx, name), seed, picture, as_json)
    elif ctx.meta[TYPED] or picture:
        raise ConfigError("these options are a task's: name one, as in `polyfed tasks digits`.")
    else:
        lists.listing(complete.tasks(), as_json)


@app.command("topologies", cls=Command)
def topologies_command(as_json: AsJson = False) -> None:
    """List the topologies: who meets whom.

    Example: polyfed run fedlinked --topology star
    """
    from polyfed.cli import complete, lists

    lists.listing(complete.topologies(), as_json)


# ---- from text to configurations -----------------------------------------------------------------


def _typed(ctx: typer.Context, cls: Any) -> dict[str, Any]:
    """What was typed for a configuration class; the rest is for others that the line names."""
    from polyfed.options import fields_of

    return {name: value for name, value in ctx.meta[TYPED].items() if name in fields_of(cls)}


def _task(ctx: typer.Context, name: str) -> Task:
    from polyfed import tasks

    return tasks.make(name, _typed(ctx, tasks.load(name)))


def _method(ctx: typer.Context, label: str, task: Task) -> Method:
    """A method with the task's recipe, what was typed, and its own options after the colon."""
    from polyfed import methods, options

    name, own = options.parse_label(label)
    return methods.make(name, _typed(ctx, methods.load(name)) | own, task)


def _folder(ctx: typer.Context, given: Path | None, *names: str) -> Path:
    """Where to write: as given, else a new folder named by time and by what runs."""
    base = Path("runs", "-".join([time.strftime("%Y%m%d-%H%M%S"), *names]))
    folder, number = given or base, 2
    while given is None and folder.exists():
        folder, number = Path(f"{base}-{number}"), number + 1
    ctx.meta[_FOLDER] = folder
    return folder

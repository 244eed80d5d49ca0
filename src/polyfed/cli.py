"""The command line: `polyfed run fedlinked`, `polyfed compare fedlinked local`, ...

Options of methods and tasks are their dataclasses' fields, read when a command line names them;
nothing heavy is imported before that, so `polyfed --help` answers at once.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from polyfed import __version__
from polyfed.errors import ConfigError, PolyfedError

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.node import Node
    from polyfed.engines.compare import Comparison
    from polyfed.engines.run import Run
    from polyfed.tasks import Task

_TYPED, _FOLDER = "polyfed.typed", "polyfed.folder"  # what a context carries
_SHORT = {"num_nodes": "nodes"}  # fields with another name on the command line


# ---- options that come from dataclasses ----------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One field of a method or a task, as an option."""

    field: str
    hint: Any
    default: Any
    help: str
    panel: str = "Run"

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return "--" + _SHORT.get(self.field, self.field).replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """For Typer, a flag or plain text: `polyfed.options` turns the text into a value."""
        is_flag = self.hint is bool
        about = typer.Option(
            self.default if is_flag or self.default is None else str(self.default),
            f"{self.flag}/--no-{self.flag[2:]}" if is_flag else self.flag,
            help=self.help.replace("[", r"\["),
            rich_help_panel=self.panel,
            metavar=None if is_flag else _metavar(self.hint),
            show_default=self.default is not None,
        )
        kind = bool if is_flag else str | None
        return inspect.Parameter(self.field, _KEYWORD, default=about, annotation=kind)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_GENERAL = (  # what --help shows before a method or a task is named
    Option("rounds", int, None, "rounds of training; else what suits method and task"),
    Option("data", Path, None, "folder with the published files of the task"),
    Option("quick", bool, False, "a small version that shows the way in seconds"),
)


def options_for(method_names: Iterable[str], task_name: str) -> list[Option]:
    """The options of these methods and this task, with the defaults they have together."""
    from polyfed import methods, tasks

    task = tasks.load(task_name)
    own = list(fields_as_options(task, {}, f"Task {task_name}"))
    owners: dict[str, dict[str, Option]] = {}
    for name in method_names:
        recipe = task().recipe(name)
        for option in fields_as_options(methods.load(name), recipe, f"Method {name}"):
            owners.setdefault(option.field, {})[name] = option
    for option in own:
        if option.field in owners:
            whose = ", ".join(owners[option.field])
            raise ConfigError(f"{option.flag} is an option of {whose} and of task {task_name}.")
    return [*map(_together, sorted(owners.values(), key=len, reverse=True)), *own]


def fields_as_options(cls: Any, recipe: Mapping[str, Any], panel: str = "Run") -> Iterator[Option]:
    """The fields of a configuration class; a recipe's values go before the class's defaults."""
    from polyfed import options

    helps, hints = options.help_of(cls), get_type_hints(cls)
    for name, field in options.fields_of(cls).items():
        default = recipe.get(name, field.default)
        yield Option(name, hints[name], default, helps.get(name, "").rstrip("."), panel)


def _together(each: Mapping[str, Option]) -> Option:
    """One option of several methods: it says whose it is, and its default if they agree on it."""
    first = next(iter(each.values()))
    if len(each) == 1:
        return first
    first = replace(first, panel=f"Methods {', '.join(each)}")
    if len({option.default for option in each.values()}) == 1:
        return first
    return replace(first, default=None, help=f"{first.help}; else each method's own default")


def _metavar(hint: Any) -> str:
    names = {int: "INTEGER", float: "FLOAT", str: "TEXT"}
    is_path = Path in (hint, *get_args(hint))
    return names.get(hint) or ("DIR" if is_path else "|".join(map(str, get_args(hint))))


def _parameters(found: Iterable[Option]) -> list[Any]:
    """Typer's own parameters for options, made through its public door."""

    def command(**values: Any) -> None: ...

    signature = inspect.Signature([option.parameter() for option in found])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    maker = typer.Typer(add_completion=False)
    maker.command()(command)
    return list(typer.main.get_command(maker).params)


class Command(TyperCommand):
    """A command whose line may name a method or a task, and then has their options as well."""

    context_class = typer.Context

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fixed = list(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the options, parse, and keep what was typed of them in the context."""
        found = self._found(args)
        taken = {flag for parameter in self._fixed for flag in parameter.opts}
        for option in found:
            if option.flag in taken:
                raise ConfigError(f"{option.panel}: {option.flag} is an option of {self.name}.")
        own = _parameters(found) if found else []
        self.params = [*self._fixed, *own]
        rest: list[str] = super().parse_args(ctx, args)
        values = {p.name: ctx.params.pop(p.name) for p in own}
        sources = {name: ctx.get_parameter_source(name).name for name in values}
        ctx.meta[_TYPED] = {n: v for n, v in values.items() if sources[n] == "COMMANDLINE"}
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As Typer does, but a pair of flags takes one narrow column."""
        for parameter in self.params:
            if getattr(parameter, "secondary_opts", None):
                parameter.opts = [f"--[no-]{parameter.opts[0][2:]}"]
                parameter.secondary_opts = []
        super().format_help(ctx, formatter)

    def _found(self, args: Sequence[str]) -> Sequence[Option]:
        """Options of what the line names; general ones while it names nothing."""
        general = {"run": _GENERAL, "compare": _GENERAL, "tasks": _GENERAL[1:]}.get(self.name or "")
        if general is None or all(arg.startswith("-") for arg in args):
            return general or ()
        from polyfed.methods import METHODS
        from polyfed.tasks import TASKS

        if self.name == "tasks":
            names = self._names(args, TASKS)
            return options_for((), names[0]) if names else general
        names = [name.partition(":")[0] for name in self._names(args, METHODS)]
        return options_for(dict.fromkeys(names), _task_name(args)) if names else general

    def _names(self, args: Sequence[str], known: Iterable[str]) -> list[str]:
        """Arguments that are names: those that exist, else words that follow no option."""
        valued = {f for p in self._fixed if not getattr(p, "is_flag", False) for f in p.opts}
        pairs = zip(["", *args], args, strict=False)
        words = [(b, w) for b, w in pairs if not w.startswith("-") and b not in valued]
        found = [word for _, word in words if word.partition(":")[0] in known]
        return found or [word for before, word in words if not before.startswith("-")]


def _task_name(args: Sequence[str]) -> str:
    pairs = [part for arg in args for part in (arg.split("=", 1) if "--task=" in arg else [arg])]
    return pairs[pairs.index("--task") + 1] if "--task" in pairs[:-1] else "digits"


class Group(TyperGroup):
    """All commands; errors on purpose are one line, and an interrupted run says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except PolyfedError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            folder = ctx.meta.get(_FOLDER)
            begun = folder is not None and (folder / "config.yaml").exists()
            more = f"; continue with: polyfed resume {folder}" if begun else ""
            typer.echo(f"interrupted{more}", err=True)
            raise typer.Exit(130) from error


# ---- commands ------------------------------------------------------------------------------------

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Begin with: polyfed run fedlinked",
)


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Run", **more)


def _maybe(*names: str, help: str, **more: Any) -> Any:
    return _option(*names, help=help, show_default=False, **more)


AsJson = Annotated[bool, _option("--json", help="one JSON object on standard output")]
TaskName = Annotated[str, _option("--task", help="see: polyfed tasks")]
Seed = Annotated[int, _option("--seed", help="same seed, same numbers")]
Seeds = Annotated[str, _option("--seeds", help="how many (5), or which (3,7,9)")]
Device = Annotated[str, _option("--device", help="cpu, cuda, cuda:0, ...")]
Every = Annotated[int, _option("--evaluate-every", help="rounds between evaluations")]
Meets = Annotated[str | None, _maybe("--topology", help="who meets; else the method's first")]
Folder = Annotated[Path | None, _maybe("--folder", help="where to write; else under runs/")]
Shown = Annotated[
    bool | None, _maybe("--progress/--no-progress", help="show it; else on terminals")
]
Picture = Annotated[Path | None, _maybe("--picture", help="write as SVG", metavar="FILE.svg")]
MethodName = Annotated[str, typer.Argument(help="see: polyfed methods", metavar="METHOD")]
Labels = Annotated[list[str], typer.Argument(help="one or more", metavar="METHOD")]
Name = Annotated[str | None, typer.Argument(help="one, to see its options", metavar="NAME")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"polyfed {__version__}")
        raise typer.Exit
    return wanted


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
]


@app.callback()
def polyfed(version: Version = False) -> None:
    """Train models together across parties that differ."""


@app.command("run", cls=Command)
def run_command(
    ctx: typer.Context,
    method: MethodName,
    task: TaskName = "digits",
    seed: Seed = 0,
    topology: Meets = None,
    device: Device = "cpu",
    evaluate_every: Every = 1,
    folder: Folder = None,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Train a federation with a method.

    Each method and each task has options of its own. To see them, name them:
    polyfed run fedlinked --task digits --help

    Example: polyfed run fedlinked --eta 1 --no-transform
    """
    from polyfed.engines.run import run

    chosen = _task(ctx, task)
    built = _method(ctx, method, chosen)
    where = ctx.meta[_FOLDER] = _folder(folder, built.name, task, f"s{seed}")
    settings: dict[str, Any] = {"device": device, "evaluate_every": evaluate_every}
    settings |= {"seed": seed, "topology": topology, "progress": progress}
    _print_run(run(built, chosen, folder=where, **settings), as_json)


@app.command("compare", cls=Command)
def compare_command(
    ctx: typer.Context,
    methods: Labels,
    task: TaskName = "digits",
    seeds: Seeds = "5",
    device: Device = "cpu",
    evaluate_every: Every = 1,
    folder: Folder = None,
    as_json: AsJson = False,
    progress: Shown = None,
) -> None:
    """Run several methods over several seeds: one table.

    An option is for every named method that has it; a method's own follow a colon.

    Example: polyfed compare fedlinked fedlinked:transform=false,eta=1 local --seeds 3
    """
    from polyfed.engines.compare import compare

    chosen, which = _task(ctx, task), _seeds(seeds)
    labelled = {text: _method(ctx, text, chosen) for text in methods}
    if len(labelled) < len(methods):
        raise ConfigError("a method is named twice. Give one its own options: fedlinked:eta=1.")
    where = ctx.meta[_FOLDER] = _folder(folder, "compare", task)
    settings = {"device": device, "evaluate_every": evaluate_every, "progress": progress}
    _print_comparison(compare(labelled, chosen, seeds=which, folder=where, **settings), as_json)


@app.command(cls=Command)
def resume(
    ctx: typer.Context, folder: RunFolder, as_json: AsJson = False, progress: Shown = None
) -> None:
    """Continue a run or a comparison that was interrupted.

    Example: polyfed resume runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.engines import compare, run

    ctx.meta[_FOLDER] = folder
    if compare.is_comparison(folder):
        _print_comparison(compare.resume_comparison(folder, progress=progress), as_json)
    else:
        _print_run(run.resume(folder, progress=progress), as_json)


@app.command(cls=Command)
def show(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show a run or a comparison, finished or not.

    Example: polyfed show runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.engines import compare, run

    if compare.is_comparison(folder):
        done, planned = compare.progress_of(folder)
        if not as_json:
            _print_state(folder, done == planned, f"{done} of {planned} runs")
        _print_comparison(compare.open_comparison(folder), as_json)
    else:
        _print_run(run.Run.open(folder), as_json, fully=True)


@app.command(cls=Command)
def methods(name: Name = None, as_json: AsJson = False) -> None:
    """List the methods, or the options of one.

    Example: polyfed methods fedlinked
    """
    from polyfed.methods import METHODS, load

    classes = [load(each) for each in ([name] if name else METHODS)]
    about = [
        {"name": c.name, "what it does": c.title, "topologies": list(c.topologies)} for c in classes
    ]
    if name is None:
        _print_list(about, as_json)
    else:
        _print_about(about[0], fields_as_options(classes[0], {}), {}, as_json)
        more = f"A task may set other defaults: polyfed run {name} --task digits --help"
        typer.echo("" if as_json else more, nl=not as_json)


@app.command(cls=Command)
def tasks(
    ctx: typer.Context,
    name: Name = None,
    seed: Seed = 0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or the options of one and who holds what.

    Example: polyfed tasks mnist --data ~/data --partition dirichlet:0.1 --picture mnist.svg
    """
    from polyfed.tasks import TASKS, load

    if name is not None:
        _print_task(_task(ctx, name), seed, picture, as_json)
    elif ctx.meta[_TYPED] or picture:
        raise ConfigError("these options are a task's: name one, as in `polyfed tasks digits`.")
    else:
        _print_list([_about_task(load(each)) for each in TASKS], as_json)


@app.command(cls=Command)
def topologies(as_json: AsJson = False) -> None:
    """List the topologies: who meets whom.

    Example: polyfed run fedlinked --topology star
    """
    from polyfed.topologies import TOPOLOGIES

    docs = {name: (cls.__doc__ or "").partition("\n")[0] for name, cls in TOPOLOGIES.items()}
    _print_list([{"name": name, "what it is": text} for name, text in docs.items()], as_json)


def main() -> None:
    """What `polyfed` on the command line calls."""
    app(prog_name="polyfed")


# ---- from text to configurations -----------------------------------------------------------------


def _task(ctx: typer.Context, name: str) -> Task:
    from polyfed import options, tasks

    known = options.fields_of(tasks.load(name))
    return tasks.make(name, {k: v for k, v in ctx.meta[_TYPED].items() if k in known})


def _method(ctx: typer.Context, text: str, task: Task) -> Method:
    """A method with the task's recipe, what was typed, and its own options after the colon."""
    from polyfed import methods, options

    name, _, own = text.partition(":")
    cls = methods.load(name)
    given = {**task.recipe(name), **ctx.meta[_TYPED]}
    values = {k: v for k, v in given.items() if k in options.fields_of(cls)}
    for part in filter(None, own.split(",")):
        field, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"'{text}': write name=value after the colon, as fedlinked:eta=1.")
        values[field.strip().replace("-", "_")] = value
    return options.build(cls, values, f"method {name}")


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds {text}: say how many (5), or which (3,7,9).")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds {text}: a seed is named twice.")
    return numbers if "," in text else list(range(numbers[0]))


def _folder(given: Path | None, *names: str) -> Path:
    base = Path("runs", "-".join([time.strftime("%Y%m%d-%H%M%S"), *names]))
    folder, number = given or base, 2
    while given is None and folder.exists():
        folder, number = Path(f"{base}-{number}"), number + 1
    return folder


# ---- output --------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_list(entries: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """One line an entry, its keys as columns; for machines the same with underscores."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if as_json:
        _print_json([{k.replace(" ", "_"): v for k, v in entry.items()} for entry in entries])
        return
    table = Table(*entries[0], box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for entry in entries:
        table.add_row(*map(_cell, entry.values()))
    Console(markup=False, highlight=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def _print_about(
    about: Mapping[str, Any], found: Iterable[Option], more: Mapping[str, Any], as_json: bool
) -> None:
    options = [{"option": o.flag, "default": o.default, "what it is": o.help} for o in found]
    if as_json:
        _print_json(
            {k.replace(" ", "_"): v for k, v in about.items()} | {"options": options, **more}
        )
    else:
        _print_list([about], False)
        _print_list(options, False)


def _print_run(run: Run, as_json: bool, *, fully: bool = False) -> None:
    """The result; `fully`, also where it stands, its settings, and what was sent."""
    from polyfed.engines.table import sent_by, sent_table, utilities_table
    from polyfed.record.recorder import read_config, read_result

    folder = run.folder or Path()
    config, is_done = read_config(folder), read_result(folder) is not None
    rounds = max((m["tick"] for m in run.metrics if "seconds" in m), default=0)
    if as_json:
        more = {"finished": is_done, "rounds": rounds, "sent": sent_by(run), "config": config}
        _print_json(_run_dict(run, config) | (more if fully else {}))
        return
    first = run.table() if run.accuracy else "No accuracy yet."
    tables = [first, utilities_table(run)]
    if fully:
        _print_state(folder, is_done, f"{rounds} of {config['options']['rounds']} rounds")
        _print_config(config)
        tables.append(sent_table(run))
    typer.echo("\n\n".join(table for table in tables if table))
    if run.faults:
        kinds = Counter(f"{fault['node']} {fault['fault']}" for fault in run.faults)
        listed = ", ".join(f"{kind} ({n})" for kind, n in kinds.items())
        typer.echo(f"\n{len(run.faults)} faults: {listed}; see {folder / 'faults.jsonl'}")
    typer.echo(f"\nrun folder: {folder}")


def _run_dict(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": run.method,
        "task": config["task"],
        "seed": config["settings"]["seed"],
        "accuracy": dict(run.accuracy),
        "mean_accuracy": run.mean_accuracy if run.accuracy else None,
        "bytes_sent": {node: run.ledger.bytes_sent(node) for node in run.accuracy},
        "seconds": run.seconds,
        "faults": len(run.faults),
        "folder": str(run.folder),
    }


def _print_state(folder: Path, is_done: bool, done: str) -> None:
    more = "" if is_done else f"; continue with: polyfed resume {folder}"
    typer.echo(f"{'finished' if is_done else 'not finished'}: {done}{more}")


def _print_config(config: Mapping[str, Any]) -> None:
    run = {"topology": config["topology"], **config["settings"]}
    pairs = {"method": config["options"], "task": config["task_options"], "run": run}
    entries = [
        {
            "": f"{kind} {config.get(kind) or ''}",
            "settings": [f"{k}={_cell(v)}" for k, v in each.items() if v not in (None, {})],
        }
        for kind, each in pairs.items()
    ]
    _print_list(entries, False)


def _print_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        _print_json(comparison.as_dict())
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        typer.echo(f"{comparison.table(width)}\n\nrun folder: {comparison.folder}")


def _about_task(task: Any) -> dict[str, Any]:
    return {"name": task.name, "what it is": task.title, "needs data": task.needs_data}


def _print_task(task: Task, seed: int, picture: Path | None, as_json: bool) -> None:
    """Options, and who holds what; without the task's files, how to say where they are."""
    from polyfed.record.files import write_text
    from polyfed.tasks.picture import as_svg, as_text, holdings
    from polyfed.tasks.task import DATA_VARIABLE

    has_data = not task.needs_data or getattr(task, "data", None) or os.environ.get(DATA_VARIABLE)
    labels, classes = _labels(task.nodes(seed)) if has_data or picture else ({}, [])
    counts = holdings(labels, len(classes))
    title = f"Training samples by node and class: {task.name}, seed {seed}"
    if picture:
        write_text(picture, as_svg(counts, list(labels), classes, title))
    rows = zip(labels, counts.tolist(), strict=True)
    held = {node: dict(zip(classes, row, strict=True)) for node, row in rows}
    about, found = _about_task(task), fields_as_options(type(task), {})
    _print_about(about, found, {"seed": seed, "holds": held}, as_json)
    if not as_json:
        text = as_text(counts, list(labels), classes) if labels else ""
        where = f"Who holds what: polyfed tasks {task.name} --data DIR"
        typer.echo(f"{title}\n\n{text}" if text else where)


def _labels(nodes: Sequence[Node]) -> tuple[dict[str, Any], list[str]]:
    """Training labels of every node as columns of the classes of all nodes."""
    import torch

    classes = list(dict.fromkeys(name for node in nodes for name in node.classes))
    columns = [torch.tensor([classes.index(name) for name in node.classes]) for node in nodes]
    ys = [node.data["train"].y for node in nodes]
    return {n.name: c[y] for n, c, y in zip(nodes, columns, ys, strict=True)}, classes

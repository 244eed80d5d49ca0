"""Commands whose options are the fields of the methods and of the task that a line names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import typer
from typer.core import TyperCommand

from polyfed.cli import complete
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.options import Option, as_text, listed

TYPED = "polyfed.typed"  # what a context carries: the options of methods and task that were typed
_SHORT = {"num_nodes": "nodes"}  # fields with another name on the command line
_GENERAL = (  # what --help shows before a method or a task is named
    Option("options", "rounds", int, None, "rounds of training; else what suits method and task"),
    Option("options", "data", Path, None, "folder with the published files of the task"),
    Option("options", "quick", bool, False, "a small version that shows the way in seconds"),
)


def flag(option: Option) -> str:
    """The option's name on the command line."""
    return "--" + _SHORT.get(option.name, option.name).replace("_", "-")


def options_for(method_names: Iterable[str], task_name: str) -> list[Option]:
    """The options of these methods and this task, with the defaults they have together.

    Several tasks (`digits,heart`) have the options that any of them has.
    """
    from polyfed import methods, tasks

    task_name, *others = task_name.split(",")
    task = tasks.load(task_name)
    holders: dict[str, dict[str, Option]] = {}
    for name in method_names:
        for option in listed(methods.load(name), f"method {name}", task().recipe(name)):
            holders.setdefault(option.name, {})[name] = option
    shared_first = sorted(holders.values(), key=len, reverse=True)
    owned = {option.name: option for option in listed(task, f"task {task_name}")}
    for other in others:
        found = {option.name: option for option in listed(tasks.load(other), f"task {other}")}
        owned = found | owned
    return [*map(_together, shared_first), *owned.values()]


def _together(each: Mapping[str, Option]) -> Option:
    """One option of several methods: it says whose it is, and its default if they agree on it."""
    first = next(iter(each.values()))
    if len(each) == 1:
        return first
    agreed = first.default if len({option.default for option in each.values()}) == 1 else None
    return replace(first, owner=f"methods {', '.join(each)}", default=agreed)


def _parameter(option: Option) -> inspect.Parameter:
    """For Typer, a flag or plain text: `polyfed.options` turns the text into a value."""
    name, is_flag = flag(option), option.hint is bool
    default = "" if option.default is False else as_text(option.default)
    about = typer.Option(
        None,
        f"{name}/--no-{name[2:]}" if is_flag else name,
        help=option.help.replace("[", r"\[") + (rf" [dim]\[default: {default}]" if default else ""),
        rich_help_panel=option.owner.capitalize(),
        metavar=None if is_flag else _metavar(option.hint),
        show_default=False,
    )
    kind, place = (bool if is_flag else str) | None, inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, place, default=about, annotation=kind)


def _metavar(hint: Any) -> str:
    nested = [get_args(kind) or (kind,) for kind in get_args(hint) or (hint,)]
    kinds = [kind for some in nested for kind in some if kind is not NoneType]
    return "|".join(f"<{k.__name__.lower()}>" if isinstance(k, type) else str(k) for k in kinds)


def _parameters(found: Iterable[Option]) -> list[Any]:
    """Typer's own parameters for options, made through its public door."""

    def command(**values: Any) -> None: ...

    signature = inspect.Signature([_parameter(option) for option in found])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    maker = typer.Typer(add_completion=False)
    maker.command()(command)
    return list(typer.main.get_command(maker).params)


def is_config(word: str) -> bool:
    """Whether a word names a config file rather than a method."""
    return word.endswith((".yaml", ".yml"))


class Command(TyperCommand):
    """A command; one that trains or is about tasks also has the options of what its line names."""

    context_class = typer.Context
    _task = "digits"  # unless the line names another

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the options, parse, and keep what was typed of them in the context."""
        words = [part for a in args for part in (a.split("=", 1) if a[:2] == "--" else [a])]
        names = self._names(words)
        task = self._own_task(names, words)
        if task:
            args = words = _with_task(words, task)
        found = self._found(names, words)
        own = _parameters(found) if found else []
        self.params = [*self.params, *own]
        where = " ".join([ctx.command_path, *names])
        _check_flags(words, self.get_params(ctx), where, found[-1].owner if names else "")
        rest: list[str] = super().parse_args(ctx, args)
        values = {p.name: ctx.params.pop(p.name) for p in own}
        ctx.meta[TYPED] = {name: value for name, value in values.items() if value is not None}
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As Typer does, but a pair of flags takes one narrow column."""
        for parameter in self.params:
            if getattr(parameter, "secondary_opts", None):
                parameter.opts = [f"--[no-]{parameter.opts[0][2:]}"]
                parameter.secondary_opts = []
        super().format_help(ctx, formatter)

    def _names(self, words: Sequence[str]) -> list[str]:
        """Methods or tasks of the line: names that exist, else words that follow no option."""
        if self.name not in ("run", "compare", "sweep", "tasks"):
            return []
        valued = {f for p in self.params if not getattr(p, "is_flag", False) for f in p.opts}
        pairs = zip(["", *words], words, strict=False)
        stems = [(b, w.partition(":")[0]) for b, w in pairs if w[:1] != "-" and b not in valued]
        if not stems:  # nothing heavy is imported for --help
            return []
        file = next((w for _, w in stems if self.name == "run" and is_config(w)), None)
        if file is not None and "--help" in words and not Path(file).exists():
            return []
        if file is not None:
            return [self._read(file, [w for _, w in stems if "=" in w])]
        kind = "task" if self.name == "tasks" else "method"
        known = complete.task_names("") if kind == "task" else complete.method_names("")
        found = [stem for _, stem in stems if stem in known]
        names = list(dict.fromkeys(found or [stem for before, stem in stems if before[:1] != "-"]))
        for name in names:
            complete.check_name(kind, name)
        return names

    def _own_task(self, names: Sequence[str], words: Sequence[str]) -> str:
        """What all methods of the line take for the task it names; empty if that is the task."""
        if self.name == "tasks" or not names or any(map(is_config, words)):
            return ""
        task = _task_of(words) or self._task
        from polyfed.methods import load

        own = {load(name).own_tasks.get(task, task) for name in names}
        if len(own) > 1 or task in own:
            return ""
        verb = "has" if len(names) == 1 else "have"
        typer.echo(f"{', '.join(names)} {verb} a task for {task}: {min(own)}.", err=True)
        return min(own)

    def _read(self, file: str, overrides: Sequence[str]) -> str:
        """The method of a config file; remember its task."""
        from polyfed.cli.config import read_config

        asked = read_config(Path(file), overrides)
        self._task = asked["task"]
        return str(asked["method"])

    def _found(self, names: Sequence[str], words: Sequence[str]) -> Sequence[Option]:
        """Options of what the line names; general ones while it names nothing."""
        if self.name == "tasks":
            return options_for([], names[0]) if names else _GENERAL[1:]
        if names:
            return options_for(names, _task_of(words) or self._task)
        return _GENERAL if self.name in ("run", "compare", "sweep") else ()


def _task_of(words: Sequence[str]) -> str:
    """The task that a line names, if it does."""
    found = words[words.index("--task") + 1] if "--task" in words[:-1] else ""
    for name in found.split(",") if found else ():
        complete.check_name("task", name)
    return found


def _with_task(words: Sequence[str], task: str) -> list[str]:
    """The line with this task."""
    at = words.index("--task") if "--task" in words else len(words)
    return [*words[:at], "--task", task, *words[at + 2 :]]


def _check_flags(words: Sequence[str], params: Iterable[Any], where: str, task: str) -> None:
    """Raise if an option does not exist, in the words that other names have."""
    pairs = [(p.opts, p.secondary_opts) for p in params if p.opts[0][:1] == "-"]
    known = {flag for opts, others in pairs for flag in (*opts, *others)}
    for word in takewhile(lambda word: word != "--", words):
        if not re.fullmatch(r"--?[a-zA-Z][\w-]*", word) or word in known:
            continue
        if task and word == "--data":
            raise ConfigError(f"{task} reads no files: leave {word} out.")
        names = [opts[0].lstrip("-") for opts, _ in pairs]  # all begin alike: not what is near
        raise UnknownNameError(f"option of {where}", word.lstrip("-"), names)

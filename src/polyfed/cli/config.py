"""`polyfed run config.yaml method.rounds=20` and `polyfed schema`: runs written in files.

A file is what a run folder keeps as its `config.yaml`; whatever it leaves out has its default:

    method: fedlinked
    options: {rounds: 7}
    task: digits
    task_options: {labels: 10}
    topology: star
    settings: {seed: 1, device: cpu}

What is typed goes before what the file says: `method.NAME=VALUE`, `task.NAME=VALUE`,
`settings.NAME=VALUE`, `topology=VALUE`, and options as without a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyfed.cli.commands import app
from polyfed.cli.dynamic import TYPED, Command
from polyfed.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.tasks import Task

_SECTIONS = {"method": "options", "task": "task_options", "settings": "settings"}
_PLAIN = ("method", "task", "topology")
_KNOWN = ("format", *_PLAIN, "options", "task_options", "settings")
_TYPED = ("seed", "device", "evaluate_every", "stack", "precision", "fail")


def read_config(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A file with overrides: every section is there, all names are known."""
    from polyfed.record.files import read_yaml

    found = read_yaml(path, "settings: begin with 'method: fedlinked'.")
    if "methods" in found:
        raise ConfigError(f"{path} is of a comparison. Continue it with: polyfed resume FOLDER.")
    for name in found:
        if name not in _KNOWN:
            raise UnknownNameError(f"setting in {path}", str(name), _KNOWN)
    config: dict[str, Any] = {"task": "digits", "topology": None, **found}
    for name in _PLAIN:
        if not isinstance(config.get(name), str | None):
            raise ConfigError(f"{path}: {name} must be a name, got {config[name]!r}.")
    for name in _SECTIONS.values():
        section = config.get(name) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: {name} must be a list of 'name: value' lines.")
        config[name] = dict(section)
    for text in overrides:
        _override(config, text)
    if "method" not in config:
        raise ConfigError(f"{path} names no method: write 'method: fedlinked'.")
    if config["task"] is None:
        raise ConfigError(f"{path} was run on nodes of your own: repeat it in Python.")
    return config


def _override(config: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    section, dot, option = name.replace("-", "_").partition(".")
    if not equals or (dot and not option):
        raise ConfigError(f"'{text}': write method.rounds=20, task.labels=5 or settings.seed=1.")
    if not dot and section in _PLAIN:
        config[section] = value
        if section in _SECTIONS:  # options of another method or task mean nothing here
            config[_SECTIONS[section]] = {}
    elif dot and section in _SECTIONS:
        config[_SECTIONS[section]][option] = value
    else:
        known = [*(f"{name}.NAME" for name in _SECTIONS), *_PLAIN]
        raise UnknownNameError("setting to override", name, known)


def with_typed(config: dict[str, Any], ctx: typer.Context) -> dict[str, Any]:
    """The same with the options that were typed on the line."""
    from polyfed import methods, options, tasks

    def is_typed(name: str) -> bool:
        source: Any = ctx.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    if is_typed("task") and ctx.params["task"] != config["task"]:
        config |= {"task": ctx.params["task"], "task_options": {}}
    if is_typed("topology"):
        config["topology"] = ctx.params["topology"]
    config["settings"] |= {name: ctx.params[name] for name in _TYPED if is_typed(name)}
    pairs = {"options": methods.load(config["method"]), "task_options": tasks.load(config["task"])}
    for section, cls in pairs.items():
        known = options.fields_of(cls)
        config[section] |= {n: v for n, v in ctx.meta[TYPED].items() if n in known}
    return config


def built(config: Mapping[str, Any]) -> tuple[Method, Task, dict[str, Any]]:
    """The method, the task, and what `run` takes besides."""
    from polyfed import methods, options, tasks
    from polyfed.engines.local import Settings

    task = tasks.make(config["task"], config["task_options"])
    method = methods.make(config["method"], config["options"], task)
    settings = options.build(Settings, config["settings"], "settings")
    return method, task, {**vars(settings), "topology": config["topology"]}


# ---- schema --------------------------------------------------------------------------------------


@app.command("schema", cls=Command)
def schema_command() -> None:
    """Print the JSON schema of config files, for editors.

    In VS Code with the YAML extension, begin a file with
    "# yaml-language-server: $schema=polyfed.schema.json".

    Example: polyfed schema > polyfed.schema.json
    """
    typer.echo(json.dumps(schema(), indent=2))


def schema() -> dict[str, Any]:
    """The JSON schema of config files: every method and task with its own options."""
    from polyfed import methods, tasks
    from polyfed.engines.local import Settings
    from polyfed.topologies import TOPOLOGIES

    known = {"method": methods.METHODS, "task": tasks.TASKS}
    load: dict[str, Any] = {"method": methods.load, "task": tasks.load}
    rules = [
        {
            "if": {"properties": {kind: {"const": name}}, "required": [kind]},
            "then": {"properties": {_SECTIONS[kind]: _object(load[kind](name))}},
        }
        for kind, names in known.items()
        for name in names
    ]
    topologies = f"who meets: {', '.join(TOPOLOGIES)}, with options as gossip:cycles=3"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "polyfed run",
        "type": "object",
        "required": ["method"],
        "additionalProperties": False,
        "properties": {
            "format": {"const": 1},
            "method": {"enum": list(methods.METHODS), "description": "see: polyfed methods"},
            "options": {"type": "object", "description": "hyper-parameters of the method"},
            "task": {"enum": list(tasks.TASKS), "description": "see: polyfed tasks"},
            "task_options": {"type": "object", "description": "options of the task"},
            "topology": {"type": ["string", "null"], "description": topologies},
            "settings": _object(Settings),
        },
        "allOf": rules,
    }


def _object(cls: Any) -> dict[str, Any]:
    """The options of a configuration class, each with its type, default and help."""
    from pydantic import TypeAdapter

    from polyfed.engines.run import simple
    from polyfed.options import listed

    properties = {}
    for option in listed(cls, cls.__name__):
        found = TypeAdapter(option.hint).json_schema()
        if option.default is not None:
            found["default"] = simple(option.default)
        properties[option.name] = found | {"description": option.help}
    return {"type": "object", "additionalProperties": False, "properties": properties}

"""How to get a run again: its federation from the task, and the line that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed import methods, tasks, topologies
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.engines.local import Settings
from polyfed.engines.run import Run, plain
from polyfed.errors import PolyfedError
from polyfed.tasks import Task

OWN_NODES = "It was run on nodes of your own: only the program that made them can make them again."
_SHORT = {"num_nodes": "nodes"}  # as on the command line
_PYTHON_ONLY = (
    "absent",
    "checkpoint_every",
    "checkpoint_seconds",
)  # settings that `run` takes and a line does not


@dataclass(frozen=True)
class Again:
    """A federation that was made again.

    Attributes:
        method: with its hyper-parameters.
        nodes: as the task makes them, hubs too.
        parties: as the method prepares them, without hubs.
    """

    method: Method
    nodes: Sequence[Node]
    parties: Sequence[Node]


def make_again(run: Run, made: dict[str, Sequence[Node]] | None = None) -> Again | str:
    """The federation of a run, or why it cannot be made here.

    Args:
        run: with its configuration; nodes of one's own are there only while it has them.
        made: the nodes of the last task, which the next run may have too; changes.
    """
    config = run.config
    try:
        method = methods.make(config["method"], config["options"])
        if config["task"] is None:
            own = list(run.nodes.values())
            return Again(method, own, own) if own else OWN_NODES
        nodes = _nodes(config, {} if made is None else made)
        places = topologies.make(config["topology"]).places
        parties = [n for n in nodes if not (method.hub_trains and n.name in places)]
        return Again(method, nodes, method.prepare(parties))
    except (PolyfedError, OSError) as error:
        return f"The task cannot be made again here: {error}"


def _nodes(config: Mapping[str, Any], made: dict[str, Sequence[Node]]) -> Sequence[Node]:
    seed = config["settings"]["seed"]
    key = json.dumps([config["task"], config["task_options"], seed], sort_keys=True)
    if key not in made:
        made.clear()  # one federation at a time: they may be large
        made[key] = tasks.make(config["task"], config["task_options"]).nodes(seed)
    return made[key]


def command(config: Mapping[str, Any]) -> str:
    """The line that repeats a run or a comparison; nothing for nodes of one's own."""
    try:
        return _comparison(config) if "methods" in config else _run(config)
    except PolyfedError:
        return ""


def _run(config: Mapping[str, Any]) -> str:
    if config["task"] is None:
        return ""
    task = tasks.make(config["task"], config["task_options"])
    method = methods.load(config["method"])
    topology = config["topology"]
    words = ["polyfed", "run", config["method"], "--task", config["task"]]
    words += _flags(_changed(task, config["task_options"]))
    words += _flags(_own(config["method"], config["options"], task))
    words += _flags({"topology": topology} if topology != method.topologies[0] else {})
    words += _flags(_settings(config["settings"]))
    return shlex.join(words)


def _comparison(config: Mapping[str, Any]) -> str:
    if config["task"] is None:
        return ""
    task = tasks.make(config["task"], config["task_options"])
    labels = []
    for each in config["methods"].values():
        own = _own(each["method"], each["options"], task)
        texts = {name: _text(value).replace(",", ";") for name, value in own.items()}
        listed = ",".join(f"{name}={text}" for name, text in texts.items())  # a comma ends one
        labels.append(f"{each['method']}:{listed}" if listed else each["method"])
    seeds = config["seeds"]
    count = str(len(seeds)) if seeds == list(range(len(seeds))) else ",".join(map(str, seeds)) + ","
    words = ["polyfed", "compare", *labels, "--task", config["task"]]
    words += _flags(_changed(task, config["task_options"]))
    words += ["--seeds", count, *_flags(_settings(config["settings"]))]
    return shlex.join(words)


def _own(name: str, options: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The options of a method that are neither its own defaults nor the task's recipe."""
    usual = plain(methods.make(name, {}, task))
    return {n: v for n, v in options.items() if v != usual[n]}


def _changed(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    usual = plain(tasks.make(task.name, {}))
    return {n: v for n, v in options.items() if v != usual[n]}


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    usual = plain(Settings())
    left_out = [n for n in _PYTHON_ONLY if n in settings]
    return {n: v for n, v in settings.items() if n not in left_out and v != usual.get(n)}


def _flags(values: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        typed = _SHORT.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{typed}" if value else f"--no-{typed}")
        else:
            words += [f"--{typed}", _text(value)]
    return words


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

"""Tasks: data sets in their publishers' layouts, partitions, ready-made federations.

`tasks.digits()`, `tasks.cifar10(data=DIR)`, ...: a task is a configuration; `nodes(seed)` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from polyfed import options
from polyfed.errors import UnknownNameError
from polyfed.tasks.split import stratified
from polyfed.tasks.task import Task

TASKS: dict[str, tuple[str, str]] = {
    "digits": ("embedded", "Digits"),
    "cifar10": ("images", "Cifar10"),
    "svhn": ("images", "Svhn"),
    "mnist": ("images", "Mnist"),
}

__all__ = ["TASKS", "Task", "cifar10", "digits", "load", "make", "mnist", "stratified", "svhn"]


def load(name: str) -> type[Task]:
    """The class of the task of that name."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    module, cls = TASKS[name]
    found: type[Task] = getattr(import_module(f"polyfed.tasks.{module}"), cls)
    return found


def make(name: str, values: Mapping[str, Any]) -> Task:
    """The task of that name with these options."""
    return options.build(load(name), values, f"task {name}")


def digits(**values: Any) -> Task:
    """The embedded digits: three nodes with overlapping classes and few labels."""
    return make("digits", values)


def cifar10(**values: Any) -> Task:
    """CIFAR-10, from a folder: `tasks.cifar10(data=DIR)`."""
    return make("cifar10", values)


def svhn(**values: Any) -> Task:
    """Street View House Numbers, from a folder: `tasks.svhn(data=DIR)`."""
    return make("svhn", values)


def mnist(**values: Any) -> Task:
    """MNIST, from a folder: `tasks.mnist(data=DIR, partition="dirichlet:0.1")`."""
    return make("mnist", values)

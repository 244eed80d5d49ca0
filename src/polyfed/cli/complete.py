"""Names, and what lists say of them, read from source: importing what they name is slow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from polyfed.errors import UnknownNameError

_TABLES = {"method": ("methods", "METHODS"), "task": ("tasks", "TASKS")}


@cache
def _source(module: str) -> ast.Module:
    """A module of polyfed, which is not imported."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """The value in `name: annotation = value`."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node.value
    return None


def _classes(module: str, name: str) -> Iterator[ast.ClassDef]:
    """A class, then its bases, as far as they are polyfed's."""
    body = _source(module).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            if (node.module or "").startswith("polyfed."):
                yield from _classes(str(node.module), name)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _classes(module, base.id)


def _variable(module: str, cls: str, name: str) -> Any:
    """A class variable, the class's own or of its nearest base; None if it has none."""
    values = (_assigned(each.body, name) for each in _classes(module, cls))
    return next((ast.literal_eval(value) for value in values if value is not None), None)


def _table(kind: str) -> dict[str, tuple[str, str]]:
    """Module and class of every method, or of every task."""
    folder, name = _TABLES[kind]
    value = _assigned(_source(f"polyfed.{folder}").body, name)
    found: dict[str, tuple[str, str]] = ast.literal_eval(value) if value is not None else {}
    return {key: (f"polyfed.{folder}.{module}", cls) for key, (module, cls) in found.items()}


def check_name(kind: str, name: str) -> None:
    """Raise if there is no such method, or task."""
    if name not in _table(kind):
        raise UnknownNameError(kind, name, _table(kind))


def methods() -> list[dict[str, Any]]:
    """A line of the list of methods for each."""
    return [
        {
            "name": name,
            "what_it_does": _variable(*place, "title"),
            "topologies": list(_variable(*place, "topologies")),
        }
        for name, place in _table("method").items()
    ]


def tasks() -> list[dict[str, Any]]:
    """A line of the list of tasks for each."""
    return [
        {
            "name": name,
            "what_it_is": _variable(*place, "title"),
            "needs_data": _variable(*place, "needs_data"),
        }
        for name, place in _table("task").items()
    ]


def topologies() -> list[dict[str, Any]]:
    """A line of the list of topologies for each."""
    module = "polyfed.topologies"
    value = _assigned(_source(module).body, "TOPOLOGIES")
    found = []
    for key, cls in (
        zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
    ):
        if isinstance(key, ast.Constant) and isinstance(cls, ast.Name):
            said = ast.get_docstring(next(_classes(module, cls.id))) or ""
            found.append({"name": key.value, "what_it_is": said.partition("\n")[0]})
    return found


def method_names(incomplete: str) -> list[str]:
    """Methods that begin so; the options after a colon are left as they are."""
    return [name for name in _table("method") if name.startswith(incomplete)]


def task_names(incomplete: str) -> list[str]:
    """Tasks that begin so; of several (digits,heart) the last."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _table("task") if name.startswith(last)]

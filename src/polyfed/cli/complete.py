"""Shell completion of names, read from the source of their tables: importing these is slow."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def _keys(module: str, table: str) -> list[str]:
    """The keys of a table `NAME: dict[...] = {...}` of a module, which is not imported."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return []
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id == table and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return [key for key in keys if isinstance(key, str)]
    return []


def method_names(incomplete: str) -> list[str]:
    """Methods that begin so; the options after a colon are left as they are."""
    return [name for name in _keys("polyfed.methods", "METHODS") if name.startswith(incomplete)]


def task_names(incomplete: str) -> list[str]:
    """Tasks that begin so; of several (digits,heart) the last."""
    before, comma, last = incomplete.rpartition(",")
    known = _keys("polyfed.tasks", "TASKS")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

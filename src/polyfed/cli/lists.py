"""Lists, as tables for people or JSON for machines; without anything heavy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from polyfed.options import as_text


def listing(entries: Iterable[Mapping[str, Any]], as_json: bool = False) -> None:
    """One line an entry, its keys as columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    entries = list(entries)
    if as_json:
        print_json(entries)
        return
    names = [key.replace("_", " ") for key in entries[0]]
    grid = Table(*names, box=box.SIMPLE_HEAD, pad_edge=False)
    grid.columns[0].no_wrap = True
    for entry in entries:
        grid.add_row(*map(as_text, entry.values()))
    Console(markup=False, highlight=False).print(grid)


def print_json(value: Any) -> None:
    """The value as JSON."""
    typer.echo(json.dumps(value, indent=2))

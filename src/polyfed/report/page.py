"""One self-contained HTML file: markup, style, script and data, nothing fetched from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from polyfed.errors import RunError
from polyfed.record.files import write_text
from polyfed.record.recorder import CONFIG
from polyfed.report.collect import collect

FILE = "report.html"
_PLACE = re.compile(r"<!--(\w+)-->")
_SCRIPTS = (
    "base.js", "charts.js", "timeline.js", "circle.js", "matrices.js", "ledger.js", "result.js",
    "rounds.js", "sections.js", "page.js",
)  # fmt: skip


def write_report(
    folders: Sequence[str | Path], path: str | Path | None = None, *, with_maps: bool = False
) -> Path:
    """Write the report of runs and comparisons; where it is.

    Args:
        folders: of runs and of comparisons, finished or not.
        path: where to write; None is `report.html`, in the folder of a single one, else here. The
            own report of another run is not overwritten.
        with_maps: also maps of representations, which take seconds each.
    """
    found = [Path(folder) for folder in folders]
    where = Path(path or (found[0] / FILE if len(found) == 1 else FILE))
    owner = where.resolve().parent
    is_own = [folder.resolve() for folder in found] == [owner]
    if where.name == FILE and (owner / CONFIG).exists() and not is_own:
        raise RunError(f"{where} is that run's own report. Name another file (--out FILE.html).")
    write_text(where, html(collect(found, with_maps=with_maps)))
    return where


def html(data: dict[str, Any], *, live: bool = False) -> str:
    """The page of what `collect` found.

    Args:
        data: what to show.
        live: ask the server for news every few seconds.
    """
    title = f"{data['title']['what']} on {data['title']['task']}"
    parts = {
        "title": escape(title),
        "live": "live" if live else "",
        "style": _file("page.css"),
        "data": as_json(data),
        "script": "\n".join(_file(name) for name in _SCRIPTS),
    }
    page = _file("page.html")
    return _PLACE.sub(lambda found: parts[found[1]], page)


def as_json(data: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _file(name: str) -> str:
    return (resources.files("polyfed.report") / "web" / name).read_text(encoding="utf-8")

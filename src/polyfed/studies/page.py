"""The report of a search: one HTML file with its tables and pictures, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from polyfed.engines.table import quick_line
from polyfed.studies.outcome import Outcome, Step, figure

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
.scroll { overflow-x: auto }
svg { background: #fff; max-width: 100%; height: auto; border-radius: 6px }
tr.best { font-weight: bold }
"""


def html(outcome: Outcome, pictures: Mapping[str, Path]) -> str:
    """The page.

    Args:
        outcome: the search.
        pictures: the SVG file of each step, where there is one.
    """
    plan = outcome.plan
    title = escape(f"Search: {plan['method']} on {plan['task']}")
    worst = f"the worst of {plan['runs']} runs reaches {outcome.value:.4f}"
    parts = [
        f"<h1>{title}</h1>",
        f"<p>With the best settings {worst} on validation data; test data were not used.</p>",
        *(f"<p><b>{line}</b></p>" for line in [quick_line([plan])] if line),
        _table(["option", "best"], [[n, figure(v)] for n, v in outcome.best.items()]),
        *(_step(step, pictures.get(step.name)) for step in outcome.steps),
        f"<h2>What was searched</h2>{_table(['setting', 'value'], _plan_rows(plan))}",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{title}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _step(step: Step, picture: Path | None) -> str:
    best, names = step.best, list(step.space)
    rows, marked = list[list[str]](), set[int]()
    for t in sorted(step.trials, key=lambda t: (not t.is_complete, -(t.value or 0.0))):
        marked |= {len(rows)} if t is best else set()
        worth = "-" if t.value is None else f"{t.value:.4f}"
        rows.append([str(t.number + 1), worth, t.state, *(figure(t.params[n]) for n in names)])
    shares = [[n, f"{share:.0%}"] for n, share in step.importance().items()]
    drawn = picture.read_text(encoding="utf-8") if picture is not None else ""
    return "\n".join(
        [
            f"<h2>Step {escape(step.name)}</h2>",
            f"<div class=scroll>{drawn[drawn.find('<svg') :]}</div>" if drawn else "",
            _table(["trial", "worst run", "state", *names], rows, marked),
            _table(["option", "importance"], shares) if shares else "",
        ]
    )


def _plan_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    rows = [[f"space {name}", text] for name, text in plan["space"].items()]
    for section in ("options", "task_options", "settings"):
        rows += [[f"{section} {name}", str(value)] for name, value in plan[section].items()]
    return [*rows, *([name, str(plan[name])] for name in ("runs", "seed", "hold_out"))]


def _table(
    head: list[str], rows: list[list[str]], marked: set[int] | frozenset[int] = frozenset()
) -> str:
    def line(cells: list[str], kind: str) -> str:
        return "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells)

    body = "".join(
        f"<tr{' class=best' if i in marked else ''}>{line(row, 'td')}</tr>"
        for i, row in enumerate(rows)
    )
    return f"<div class=scroll><table><tr>{line(head, 'th')}</tr>{body}</table></div>"

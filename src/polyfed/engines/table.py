"""Tables that a person reads, of one run and of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.engines.run import Run


class Text(str):
    """A string that shows itself as it is, also at the prompt and in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def run_table(run: Run) -> Text:
    """Accuracy and bytes of every node, then the mean."""
    rows = [
        [
            name,
            f"{value:.4f}",
            size(run.ledger.bytes_sent(name)),
            size(run.ledger.bytes_received(name)),
        ]
        for name, value in run.accuracy.items()
    ]
    if rows:
        rows.append(["mean", f"{run.mean_accuracy:.4f}", "", ""])
    title = f"{run.method}, {len(run.accuracy)} nodes, {run.seconds:.1f} s"
    columns, rules = ["node", "test accuracy", "sent", "received"], (-1,) if rows else ()
    return render(title, columns, rows, rules)


def utilities_table(run: Run) -> Text:
    """Who counted how much for whom in the last round, if the method notes it; else nothing."""
    noted = [m["utilities"] for m in run.metrics if "utilities" in m]
    if not noted:
        return Text()
    nodes, rows = noted[-1]["nodes"], noted[-1]["rows"]
    cells = [
        [to, *(_figure(value if by != to else None) for by, value in zip(nodes, row, strict=True))]
        for to, row in zip(nodes, rows, strict=True)
    ]
    return render("Utilities in the last round, by source", ["receiver", *nodes], cells)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def sent_by(run: Run) -> dict[str, dict[str, Any]]:
    """Messages, bytes and tensor names that left each node and hub."""
    sent: dict[str, dict[str, Any]] = {}
    for crossing in run.ledger.crossings():
        entry = sent.setdefault(crossing.source, {"messages": 0, "bytes": 0, "tensors": []})
        entry["messages"] += 1
        entry["bytes"] += crossing.bytes
        names = [t["name"] for t in crossing.tensors]
        entry["tensors"] += [name for name in names if name not in entry["tensors"]]
    return sent


def sent_table(run: Run) -> Text:
    """The same to read; nothing if nobody sent anything."""
    rows = [
        [name, str(entry["messages"]), size(entry["bytes"]), _listed(entry["tensors"])]
        for name, entry in sent_by(run).items()
    ]
    columns = ["from", "messages", "size", "tensors"]
    return render("What was sent", columns, rows, left=(0, 3)) if rows else Text()


def _listed(names: Sequence[str], shown: int = 2) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; a single value has no spread."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(0), size(1500), size(5_632_000)
    ('-', '1.5 kB', '5.6 MB')
    """
    if not count:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if round(count, 1) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def render(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    rules: Sequence[int] = (),
    left: Sequence[int] = (0,),
) -> Text:
    """Plain text: columns `left` to the left, the others right, a rule before rows `rules`."""
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * len("  ".join("x" * w for w in widths))
    before = {r % len(rows) for r in rules}
    body = [x for i, row in enumerate(rows) for x in ([rule] if i in before else []) + [line(row)]]
    return Text("\n".join([title, rule, line(columns), rule, *body]))

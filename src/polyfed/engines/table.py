"""Tables that a person reads, of one run and of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    rows.append(["mean", f"{run.mean_accuracy:.4f}", "", ""])
    title = f"{run.method}, {len(run.accuracy)} nodes, {run.seconds:.1f} s"
    return render(title, ["node", "test accuracy", "sent", "received"], rows, rules=(-1,))


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
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def render(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], rules: Sequence[int] = ()
) -> Text:
    """Plain text: first column left, the others right, a rule before each row of `rules`."""
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * len("  ".join("x" * w for w in widths))
    before = {r % len(rows) for r in rules}
    body = [x for i, row in enumerate(rows) for x in ([rule] if i in before else []) + [line(row)]]
    return Text("\n".join([title, rule, line(columns), rule, *body]))

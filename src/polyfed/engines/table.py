"""Tables that a person reads, of one run and of a comparison."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.engines import privacy
from polyfed.options import as_text
from polyfed.topologies.tour import order_by_utility

if TYPE_CHECKING:
    from polyfed.engines.run import Run

_QUICK = "--quick only shows the way; its figures mean nothing."


class Text(str):
    """A string that shows itself as it is, also at the prompt and in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def rounds_done(run: Run) -> int:
    """How many rounds are over."""
    return max((m["tick"] for m in run.metrics if "seconds" in m), default=0)


def as_dict(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    """The result for machines; the configuration is that of the run's folder."""
    return {
        "method": run.method,
        "task": config["task"],
        "seed": config["settings"]["seed"],
        "accuracy": dict(run.accuracy),
        "mean_accuracy": run.mean_accuracy if run.accuracy else None,
        "bytes_sent": {node: run.ledger.bytes_sent(node) for node in run.accuracy},
        "seconds": run.seconds,
        "faults": len(run.faults),
        "folder": str(run.folder),
        **({"epsilon": dict(found)} if (found := run.epsilon) else {}),
    }


def quick_line(configs: Iterable[Mapping[str, Any]]) -> str:
    """What to say of figures if any of these runs was of a small version; else nothing."""
    options = [config.get("task_options") or {} for config in configs]
    return _QUICK if any(each.get("quick") for each in options) else ""


def run_table(run: Run, title: str = "") -> Text:
    """Accuracy and bytes of every node, then the mean; a title may say more than the method."""
    rows = [
        [
            name,
            f"{value:.4f}",
            size(run.ledger.bytes_sent(name)),
            size(run.ledger.bytes_received(name)),
        ]
        for name, value in run.accuracy.items()
    ]
    rounds = f"{count(rounds_done(run), 'round')} in {run.seconds:.1f} s"
    title = f"{title or run.method}: {count(len(rows), 'node')}, {rounds}"
    if rows:
        rows.append(["mean", f"{run.mean_accuracy:.4f}", "", ""])
    columns, rules = ["node", "test accuracy", "sent", "received"], (-1,) if rows else ()
    return render(title, columns, rows, rules, note=quick_line([run.config]))


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
    title = "Utilities: how much each node (row) took from each other (column), last round"
    found = render(title, ["receiver", *nodes], cells)
    if len(nodes) < 4:  # fewer make the same ring in any order
        return found
    order = "+".join(order_by_utility(nodes, rows))
    return Text(f"{found}\n\nA ring in which each hears from one that counts: ring:order={order}")


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


def faults_line(run: Run) -> str:
    """How many faults of which kind, and where they are written; nothing if there were none.

    What healed is listed, but it is no fault.
    """
    number = sum(fault["fault"] != "healed" for fault in run.faults)
    kinds = Counter(f"{fault['node']} {fault['fault']}" for fault in run.faults)
    kinds_listed = ", ".join(f"{kind} ({times})" for kind, times in kinds.items())
    where = f"; see {run.folder / 'faults.jsonl'}" if run.folder else ""
    return f"{count(number, 'fault')}: {kinds_listed}{where}" if kinds else ""


def privacy_line(run: Run) -> str:
    """How much the messages have told, where that is known; else nothing."""
    return privacy.told(run.epsilon, privacy.guard_of(run.config))


def settings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run was asked to do, by method, task and run, without what was left open."""
    run = {"topology": config["topology"], **config["settings"]}
    pairs = {"method": config["options"], "task": config["task_options"], "run": run}
    return [
        {
            "": f"{kind} {config.get(kind) or ''}",
            "settings": [f"{k}={as_text(v)}" for k, v in each.items() if v not in (None, {})],
        }
        for kind, each in pairs.items()
    ]


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; a single value has no spread."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def count(number: int, what: str) -> str:
    """A number of things.

    >>> count(1, "seed"), count(3, "node")
    ('1 seed', '3 nodes')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
    note: str = "",
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
    end = [note] if note else []
    return Text("\n".join([title, rule, line(columns), rule, *body, *end]))

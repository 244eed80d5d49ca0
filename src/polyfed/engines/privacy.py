"""What a run has told about its nodes' data: epsilon, from the messages that had noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.guard import Guard
from polyfed.core.node import Name
from polyfed.maths.accountant import epsilon
from polyfed.methods._guard import NOISED


def guard_of(config: Mapping[str, Any]) -> Guard:
    """The guard of a run, as its configuration has it."""
    return Guard.parse((config.get("options") or {}).get("guard"))


def spent(metrics: Iterable[Mapping[str, Any]], guard: Guard) -> dict[Name, float]:
    """Epsilon of every node that sent messages with noise, over all that it sent."""
    if not guard.noise:
        return {}
    sent: Counter[Name] = Counter()
    for record in metrics:
        if NOISED in record:
            sent[record["node"]] += record[NOISED]
    by_count = {n: epsilon(guard.noise, n, guard.delta) for n in set(sent.values())}
    return {name: by_count[n] for name, n in sorted(sent.items())}


def summary(metrics: Iterable[Mapping[str, Any]], guard: str | None) -> dict[str, Any]:
    """What a result says about it: nothing, where there was no noise."""
    found = spent(metrics, Guard.parse(guard))
    return {"epsilon": found, "delta": Guard.parse(guard).delta} if found else {}


def told(spent_by: Mapping[Name, float], guard: Guard) -> str:
    """The same in a sentence; nothing where there was no noise."""
    if not spent_by:
        return ""
    values = {f"{value:.3g}" for value in spent_by.values()}
    each = ", ".join(f"{name} {value:.3g}" for name, value in spent_by.items())
    what = f"{values.pop()} for each node" if len(values) == 1 else each
    return (
        f"privacy: epsilon {what} at delta {guard.delta:g}, for all data of a node replaced by any "
        "other; whole numbers, such as counts of examples, are not covered"
    )

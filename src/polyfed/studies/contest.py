"""A contest as data: which methods meet on which task, and with what in common.

A contest is one situation: what the nodes have, and how they differ. All its methods train the same
networks, the same number of rounds (of a ring: laps) and with the same batches. What else a method
has is searched (`polyfed.studies.spaces`), with the same number of trials for all. Who does not
take part is said with the reason: by the method's own check where it cannot run, else by
`left_out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed import methods, tasks
from polyfed.options import fields_of
from polyfed.tasks import Task
from polyfed.train.together import Stack

CONTROL = "joint"  # all data in one place: what could be gained, not a method to choose
ALIKE, OTHERWISE = "labels, all mean the same", "labels, not all mean the same"
UNLIKE = "labels and networks of several kinds"
TAUGHT, IN_SETS = "no labels", "class proportions"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Methods that meet on a task.

    Attributes:
        name: what to call it.
        group: what the nodes learn from; contests of a group are ranked together, and those whose
            groups are the same up to a comma.
        asks: the situation, in a sentence.
        judged_by: what the task gives as accuracy.
        task: name of the task.
        task_options: its options.
        methods: who takes part.
        options: for every method that has them; they are not searched.
        base: where the search begins, for every method that has them.
        own: options of single methods, likewise not searched.
        own_task: options of the task for single methods: a hub that holds what nodes hold.
        hold_out: share of the training data to judge by, where there are no validation data.
        stack: whether equal networks train as one computation, which is a matter of time only.
        left_out: who could run but does not take part, and why.
    """

    name: str
    group: str
    asks: str
    judged_by: str = "accuracy"
    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hold_out: float = 0.0
    stack: Stack = "always"
    left_out: Mapping[str, str] = field(default_factory=dict)

    def federation(self, method: str, data: Path | None = None) -> Task:
        """The task as a method needs it; `data` is for those that read files."""
        needs = tasks.load(self.task).needs_data and data is not None
        own = self.own_task.get(method, {})
        more = {"data": data} if needs else {}
        return tasks.make(self.task, {**self.task_options, **own, **more})

    def settled(self, method: str) -> dict[str, Any]:
        """The options of a method that are not searched."""
        known = fields_of(methods.load(method))
        common = {name: value for name, value in self.options.items() if name in known}
        return {**common, **self.own.get(method, {})}

    def begun(self, method: str) -> dict[str, Any]:
        """Where the search of a method begins, apart from the task's recipe."""
        known = fields_of(methods.load(method))
        return {name: value for name, value in self.base.items() if name in known}


WHOLE = ("fedavg", "fedala", "ccvr", "cwt", "lg-fedavg")  # networks, or heads, that mean the same
TRUNKS = ("local", "fedavg-trunk", "fedper", "fedrep", "fedbabu", "li")
LINEAR = {"mocha": "linear models on the raw inputs, no match for networks"}
PARTIAL = dict.fromkeys(
    ("partial-averaging", "dynamic-averaging", "auto-slices"),
    "as published it trains sample by sample; it meets the others in other contests",
)
SELF = dict.fromkeys(
    ("byol", "fedbyol", "fedu", "fedema", "fedfoa", "fedmd-ssl", "feddf-ssl"), "uses no labels"
)
DRIFT = {"dynamic-averaging": "partial-averaging with fewer messages; it gains none in accuracy"}
LABELLED = {**LINEAR, **PARTIAL, **SELF}
USES_LABELS = dict.fromkeys(
    ("joint", "local", "fedavg", "fedavg-trunk", "fedper", "fedrep", "fedbabu", "lg-fedavg",
     "fedala", "ccvr", "mocha", "fedlinked", "cwt", "li", "partial-averaging", "dynamic-averaging",
     "auto-slices", "fedmd", "ds-fl", "feddf"),
    "uses labels",
)  # fmt: skip

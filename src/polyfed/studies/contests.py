"""Contests as data: which methods meet on which task, and with what in common.

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
SUPERVISED, TAUGHT, IN_SETS = "labels", "no labels", "class proportions"
UNLIKE = "labels and networks of several kinds"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Methods that meet on a task.

    Attributes:
        name: what to call it.
        group: what the nodes learn from; contests of a group are ranked together.
        asks: the situation, in a sentence.
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


_WHOLE = ("fedavg", "fedala", "ccvr", "cwt", "lg-fedavg")  # networks, or heads, that mean the same
_TRUNKS = ("local", "fedavg-trunk", "fedper", "fedrep", "fedbabu", "li")
_LINEAR = {"mocha": "linear models on the raw pixels, no match for networks"}
_PARTIAL = dict.fromkeys(
    ("partial-averaging", "dynamic-averaging", "auto-slices"),
    "trains sample by sample; it meets the others where labels are permuted",
)
_SELF = dict.fromkeys(
    ("byol", "fedbyol", "fedu", "fedema", "fedfoa", "fedmd-ssl", "feddf-ssl"), "uses no labels"
)
_DRIFT = {"dynamic-averaging": "partial-averaging with fewer messages; it gains none in accuracy"}
_LABELLED = {**_LINEAR, **_PARTIAL, **_SELF}
_USES_LABELS = dict.fromkeys(
    ("joint", "local", "fedavg", "fedavg-trunk", "fedper", "fedrep", "fedbabu", "lg-fedavg",
     "fedala", "ccvr", "mocha", "fedlinked", "cwt", "li", "partial-averaging", "dynamic-averaging",
     "auto-slices", "fedmd", "ds-fl", "feddf"),
    "uses labels",
)  # fmt: skip

_MNIST = {"quick": True, "num_nodes": 5, "public": 0.75, "public_share": 0.07}
_ON_MNIST = {"rounds": 5, "batch": 64, "decay_every": 0}
_MNIST_BASE = {
    "lr": 1e-3, "local_epochs": 2, "init_epochs": 5, "finetune_epochs": 2, "head_epochs": 2,
    "trunk_epochs": 2, "revisit_epochs": 2, "distil_epochs": 2,
}  # fmt: skip


def _mnist(name: str, partition: str, asks: str) -> Contest:
    return Contest(
        name=name,
        group=SUPERVISED,
        asks=asks,
        task="mnist",
        task_options={**_MNIST, "partition": partition, "heads": "all"},
        methods=(CONTROL, *_TRUNKS, *_WHOLE, "fedlinked", "fedmd", "ds-fl"),
        options={**_ON_MNIST, "public_batch": 64, "patience": 0, "virtual": 500},
        base=_MNIST_BASE,
        stack="never",
        left_out=_LABELLED,
    )


def _permuted(name: str, task: str, asks: str, **task_options: Any) -> Contest:
    return Contest(
        name=name,
        group=SUPERVISED,
        asks=asks,
        task=task,
        task_options={"head": "linear", **task_options},
        methods=(*_TRUNKS, *_WHOLE, "partial-averaging", "auto-slices"),
        options={
            "rounds": 20, "batch": 0.2, "optimiser": "adam", "weight_decay": 0.0, "decay_every": 0,
            "patience": 0,
        },
        base={
            "lr": 1e-2, "local_epochs": 2, "init_epochs": 5, "finetune_epochs": 2,
            "head_epochs": 2, "trunk_epochs": 2,
        },
        own={
            "partial-averaging": {"loss": "cross-entropy", "block": 0, "scheme": "80%"},
            "auto-slices": {"loss": "cross-entropy", "block": 0, "scheme": "80%", "after": 5},
        },
        hold_out=0.25,
        left_out={CONTROL: "a control, there in other contests", **_LINEAR, **_SELF, **_DRIFT},
    )  # fmt: skip


_UNLABELLED = {"rounds": 3, "batch": 64, "warm_up": 1, "public_batch": 64, "distil_steps": 30}
_WITH_HUB = {"feddf": {"hub": True}, "feddf-ssl": {"hub": True}}
_UNLABELLED_BASE = {"local_epochs": 3}

CONTESTS = (
    Contest(
        name="classes-overlap",
        group=SUPERVISED,
        asks="Three nodes, few labels, five digits each of which some are shared; public images.",
        task="digits",
        methods=(CONTROL, *_TRUNKS, *_WHOLE, "fedlinked", "fedmd", "ds-fl"),
        options={"rounds": 6, "batch": 0.5, "patience": 0, "public_batch": 256, "decay_every": 0},
        base={"lr": 1e-2, "local_epochs": 8, "head_epochs": 4, "trunk_epochs": 4,
              "init_epochs": 10, "revisit_epochs": 5, "distil_epochs": 2, "finetune_epochs": 3},
        own={CONTROL: {"batch": 0.17}},  # of all nodes' images: as many as elsewhere
        left_out=_LABELLED,
    ),
    _mnist(
        "strong-label-skew", "dirichlet:0.1",
        "Five nodes share MNIST out by a Dirichlet distribution of 0.1: few classes each.",
    ),
    _mnist("no-skew", "iid", "Five nodes share MNIST out evenly: all classes alike."),
    _permuted(
        "same-labels", "digits-permuted",
        "Four nodes with 100 small digits each, all mean the same.", kind="same",
    ),
    _permuted(
        "two-labels-exchanged", "digits-permuted",
        "Four nodes with 100 small digits each; two of them call an 8 a 9 and a 9 an 8.",
        kind="swap",
    ),
    _permuted(
        "all-labels-moved", "digits-permuted",
        "Four nodes with 100 small digits each; two of them move all ten labels round.",
        kind="cycle:10",
    ),
    _permuted(
        "mnist-four-labels-moved", "mnist-permuted",
        "Eight nodes with 100 MNIST digits each; four of them move four labels round.",
        kind="cycle:4", num_nodes=8, train=100, test=500, permuted=4, hidden="60=30",
    ),
    Contest(
        name="other-questions",
        group=SUPERVISED,
        asks="Four nodes with 112 images each; every node asks another yes-or-no question.",
        task="attributes",
        task_options={"apart": True, "quick": True},
        methods=(CONTROL, *_TRUNKS),
        options={"rounds": 5, "batch": 0.5, "patience": 0, "decay_every": 0},
        base={"lr": 3e-3, "local_epochs": 4, "head_epochs": 4, "trunk_epochs": 4,
              "init_epochs": 10, "finetune_epochs": 4},
        own={"joint": {"batch": 0.125}},
        left_out=_LABELLED,
    ),
    Contest(
        name="other-networks",
        group=UNLIKE,
        asks="Three nodes with 400 small digits and a network of another kind each; public images.",
        task="digits-encoders",
        own_task=_WITH_HUB,
        methods=("local", "fedmd", "ds-fl", "feddf"),
        options={"rounds": 4, "batch": 64, "public_batch": 64, "distil_steps": 30, "patience": 0},
        hold_out=0.25,
        left_out=_LABELLED,
    ),
    Contest(
        name="no-labels-other-networks",
        group=TAUGHT,
        asks="Three nodes with 400 small digits without labels and a network of another kind each; "
        "judged by the nearest labelled neighbours.",
        task="digits-encoders",
        own_task=_WITH_HUB,
        methods=("byol", "fedfoa", "fedmd-ssl", "feddf-ssl"),
        options=_UNLABELLED,
        base=_UNLABELLED_BASE,
        hold_out=0.25,
        left_out=_USES_LABELS,
    ),
    Contest(
        name="no-labels-same-networks",
        group=TAUGHT,
        asks="Three nodes with 400 small digits without labels and equal networks; judged by the "
        "nearest labelled neighbours.",
        task="digits-encoders",
        task_options={"encoders": "conv"},
        own_task=_WITH_HUB,
        methods=("byol", "fedbyol", "fedu", "fedema", "fedfoa", "fedmd-ssl", "feddf-ssl"),
        options=_UNLABELLED,
        base=_UNLABELLED_BASE,
        hold_out=0.25,
        left_out=_USES_LABELS,
    ),
    Contest(
        name="sets-with-proportions",
        group=IN_SETS,
        asks="Five nodes with unlabelled sets whose class proportions they know; a hub with 100 "
        "labels.",
        task="digits-sets",
        methods=("hub-only", "fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedllp", "fedpl"),
        options={"rounds": 10, "batch": 32},
        left_out=_USES_LABELS,
    ),
)  # fmt: skip

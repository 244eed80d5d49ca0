"""The contests: situations that a CPU can play in minutes.

Those on published files of other parties than digits are in `contests_of_files`.
"""

from __future__ import annotations

from typing import Any

from polyfed.studies.contest import (
    ALIKE,
    CONTROL,
    DRIFT,
    IN_SETS,
    LABELLED,
    LINEAR,
    OTHERWISE,
    SELF,
    TAUGHT,
    TRUNKS,
    UNLIKE,
    USES_LABELS,
    WHOLE,
    Contest,
)
from polyfed.studies.contests_of_files import OF_FILES

_MNIST = {"quick": True, "num_nodes": 5, "public": 0.75, "public_share": 0.07}
_ON_MNIST = {"rounds": 5, "batch": 64, "decay_every": 0}
_MNIST_BASE = {
    "lr": 1e-3, "local_epochs": 2, "init_epochs": 5, "finetune_epochs": 2, "head_epochs": 2,
    "trunk_epochs": 2, "revisit_epochs": 2, "distil_epochs": 2,
}  # fmt: skip


def _mnist(name: str, partition: str, asks: str) -> Contest:
    return Contest(
        name=name,
        group=ALIKE,
        asks=asks,
        task="mnist",
        task_options={**_MNIST, "partition": partition, "heads": "all"},
        methods=(CONTROL, *TRUNKS, *WHOLE, "fedlinked", "fedmd", "ds-fl"),
        options={**_ON_MNIST, "public_batch": 64, "patience": 0, "virtual": 500},
        base=_MNIST_BASE,
        stack="never",
        left_out=LABELLED,
    )


def _permuted(name: str, task: str, asks: str, **task_options: Any) -> Contest:
    return Contest(
        name=name,
        group=ALIKE if task_options["kind"] == "same" else OTHERWISE,
        asks=asks,
        task=task,
        task_options={"head": "linear", **task_options},
        methods=(*TRUNKS, *WHOLE, "partial-averaging", "auto-slices"),
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
        left_out={CONTROL: "a control, there in other contests", **LINEAR, **SELF, **DRIFT},
    )  # fmt: skip


_UNLABELLED = {"rounds": 3, "batch": 64, "warm_up": 1, "public_batch": 64, "distil_steps": 30}
_WITH_HUB = {"feddf": {"hub": True}, "feddf-ssl": {"hub": True}}
_UNLABELLED_BASE = {"local_epochs": 3}

CONTESTS = (
    Contest(
        name="classes-overlap",
        group=ALIKE,
        asks="Three nodes, few labels, five digits each of which some are shared; public images.",
        task="digits",
        methods=(CONTROL, *TRUNKS, *WHOLE, "fedlinked", "fedmd", "ds-fl"),
        options={"rounds": 6, "batch": 0.5, "patience": 0, "public_batch": 256, "decay_every": 0},
        base={"lr": 1e-2, "local_epochs": 8, "head_epochs": 4, "trunk_epochs": 4,
              "init_epochs": 10, "revisit_epochs": 5, "distil_epochs": 2, "finetune_epochs": 3},
        own={CONTROL: {"batch": 0.17}},  # of all nodes' images: as many as elsewhere
        left_out=LABELLED,
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
        group=OTHERWISE,
        asks="Four nodes with 112 images each; every node asks another yes-or-no question.",
        task="attributes",
        task_options={"apart": True, "quick": True},
        methods=(CONTROL, *TRUNKS),
        options={"rounds": 5, "batch": 0.5, "patience": 0, "decay_every": 0},
        base={"lr": 3e-3, "local_epochs": 4, "head_epochs": 4, "trunk_epochs": 4,
              "init_epochs": 10, "finetune_epochs": 4},
        own={"joint": {"batch": 0.125}},
        left_out=LABELLED,
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
        left_out=LABELLED,
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
        left_out=USES_LABELS,
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
        left_out=USES_LABELS,
    ),
    Contest(
        name="sets-with-proportions",
        group=IN_SETS,
        asks="Five nodes with unlabelled sets whose class proportions they know; a hub with 100 "
        "labels.",
        task="digits-sets",
        methods=("hub-only", "fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedllp", "fedpl"),
        options={"rounds": 10, "batch": 32},
        left_out=USES_LABELS,
    ),
    *OF_FILES,
)  # fmt: skip

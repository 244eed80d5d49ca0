"""Contests on published files: hospitals, mine fields, sensors, news, letters and photographs.

Rounds, batches and the ranges around `base` were set, alike for all methods, after single runs
without any search on the seeds 2000 and 2001, which are neither searched nor tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.studies.contest import (
    ALIKE,
    CONTROL,
    DRIFT,
    IN_SETS,
    LINEAR,
    PARTIAL,
    SELF,
    TRUNKS,
    USES_LABELS,
    WHOLE,
    Contest,
)

_SLICES = ("partial-averaging", "auto-slices")
_BY_SLICES: Mapping[str, Any] = {"loss": "cross-entropy", "block": 0, "scheme": "80%"}
_OWN = {"partial-averaging": _BY_SLICES, "auto-slices": {**_BY_SLICES, "after": 3}}
_ALL: Mapping[str, Any] = {
    "optimiser": "adam", "weight_decay": 0.0, "decay_every": 0, "patience": 0, "rollback": False,
}  # fmt: skip
_BASE: Mapping[str, Any] = {
    "local_epochs": 2, "init_epochs": 5, "finetune_epochs": 2, "head_epochs": 2, "trunk_epochs": 2,
    "revisit_epochs": 2, "distil_epochs": 2,
}  # fmt: skip
_MOCHA = {"mocha": {"hidden": 0}}  # it trains no trunk: inputs are its features


def _parties(name: str, asks: str, task: str, *, lr: float, **more: Any) -> Contest:
    """Parties with small perceptrons, and nothing public."""
    rounds, batch, why = more.pop("rounds"), more.pop("batch"), more.pop("why", {})
    methods = (CONTROL, *TRUNKS, *WHOLE, *more.pop("also", _SLICES))
    return Contest(
        name=name,
        group=ALIKE,
        asks=asks,
        task=task,
        methods=methods,
        options={**_ALL, "rounds": rounds, "batch": batch},
        base={**_BASE, "lr": lr},
        own=_OWN,
        left_out={m: r for m, r in {**LINEAR, **SELF, **DRIFT, **why}.items() if m not in methods},
        **more,
    )


def _images(name: str, asks: str, task: str, *, lr: float, **more: Any) -> Contest:
    """Nodes that share published images out; other ones are public."""
    rounds, also = more.pop("rounds"), more.pop("also", ())
    return Contest(
        name=name,
        group=ALIKE,
        asks=asks,
        task=task,
        methods=(CONTROL, *TRUNKS, *WHOLE, "fedlinked", "fedmd", "ds-fl", *also),
        options={**_ALL, "rounds": rounds, "batch": 32, "public_batch": 32, "virtual": 200},
        base={**_BASE, "lr": lr},
        own=_OWN if also else {},
        stack="never",
        left_out={**LINEAR, **SELF, **(DRIFT if also else PARTIAL)},
        **more,
    )


OF_FILES = (
    _parties(
        "hospitals",
        "Four hospitals with 62 to 152 patients to learn from: is the heart diseased? `mocha` has "
        "linear models.",
        "heart", lr=1e-2, rounds=10, batch=16, also=(*_SLICES, "mocha"), own_task=_MOCHA,
    ),
    _parties(
        "mine-fields",
        "29 mine fields with a few hundred objects each, 6 % of them mines; judged by the area "
        "under the ROC curve, for who never says mine is right in 94 % of all cases. `mocha` has "
        "linear models.",
        "landmine", task_options={"measure": "auc"}, judged_by="area under the ROC curve",
        lr=1e-2, rounds=10, batch=0.2, also=(*_SLICES, "mocha"), own_task=_MOCHA,
    ),
    _parties(
        "sensors",
        "Eight sensors with 50 samples each: which of two vehicles passes?",
        "vehicle", lr=1e-2, rounds=10, batch=0.2, hold_out=0.25,
        why={"mocha": "linear models; the task has networks with two hidden layers"},
    ),
    _parties(
        "news",
        "Five nodes share 1,500 news out by a Dirichlet distribution of 0.1: few of four topics "
        "each.",
        "agnews", task_options={"quick": True, "num_nodes": 5, "min_count": 10, "width": 16},
        lr=1e-2, rounds=5, batch=16, stack="never", also=(),
        why=dict.fromkeys(PARTIAL, "it cuts layers that form a chain, and an embedding is none"),
    ),
    _parties(
        "writers",
        "Sixteen writers with 100 digits each.",
        "mnist-writers", task_options={"head": "linear", "hidden": "60=30"},
        lr=1e-2, rounds=10, batch=0.2, hold_out=0.25,
    ),
    _parties(
        "hands",
        "Eight nodes with 360 letters each, turned and slanted in a way of their own.",
        "letters-hands",
        task_options={"head": "linear", "hidden": "100=50", "num_nodes": 8, "test": 200},
        lr=1e-2, rounds=8, batch=0.1, hold_out=0.25,
    ),
    _images(
        "letters",
        "Five nodes share letters out by a Dirichlet distribution of 0.1: few of 26 each; "
        "public ones.",
        "letters", task_options={"num_nodes": 5, "public": 0.8, "public_share": 0.025},
        lr=1e-3, rounds=5, also=_SLICES,
    ),
    _images(
        "house-numbers",
        "Three nodes with 455 to 779 house numbers, four digits each of which some are shared; "
        "public images.",
        "svhn", task_options={"quick": True, "heads": "all", "model": "cnn"}, lr=2e-3, rounds=3,
    ),
    _images(
        "photographs",
        "Three nodes with 274 or 365 photographs of three or four kinds, some of which are shared; "
        "public images.",
        "cifar10",
        task_options={
            "quick": True, "heads": "all", "blocks": 2, "channels": 4, "representation": 64,
            "dropout": 0.0, "last_dropout": 0.0,
        },
        lr=3e-3, rounds=3,
    ),
    Contest(
        name="sets-of-few-digits",
        group=IN_SETS,
        asks="Five nodes with unlabelled sets, mostly of two digits each, whose class proportions "
        "they know; a hub with 100 labels.",
        task="mnist-sets",
        task_options={"quick": True, "net": "cnn", "iid": False, "hub_labels": 1200},
        methods=("hub-only", "fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedllp", "fedpl"),
        options={"rounds": 6, "batch": 64, "rotate": 0.0},
        left_out=USES_LABELS,
    ),
)  # fmt: skip

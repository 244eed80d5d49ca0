"""Search spaces as data: FedLinked's Table 4.3 as printed, and one for every other method.

A dimension is an option of the method or of the task. Options of the task that shape its network
are searched first, those of the method after them (Kadar 2021, section 4.3). Table 4.3 is for
CIFAR-10 and SVHN; on small tasks the same options have smaller bounds, or a search would take
hours. Other methods have the options that their papers set (SPEC.md), around what suits the task: a
learning rate from a tenth to ten times its recipe's, epochs and batches from a quarter to twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed import methods, options
from polyfed.studies.space import Dimension, Range, Space
from polyfed.tasks import Task

ARCHITECTURE = (
    "blocks",
    "representation",
    "channels",
    "dropout",
    "last_dropout",
)  # b, r, c, p, p_l

_BOTH: Space = {  # Table 4.3, rows that are the same for CIFAR-10 and SVHN
    "blocks": Range(1, 4, whole=True),
    "dropout": Range(0.0, 0.8),
    "last_dropout": Range(0.0, 0.8),
    "eta": Range(0.8, 3.0),
    "batch": Range(0.008, 0.12),
    "local_epochs": Range(1, 20, whole=True),
    "init_epochs": Range(1, 40, whole=True),
    "distil_epochs": Range(1, 60, whole=True),
    "finetune_epochs": Range(1, 20, whole=True),
    "rounds": Range(3, 12, whole=True),
    "lr": Range(0.0001, 0.01, log=True),  # only bounds are printed; two decades ask for log
}
TABLE_4_3: Mapping[str, Space] = {
    "cifar10": {
        **_BOTH,
        "representation": Range(64, 512, whole=True),
        "channels": Range(8, 128, whole=True),
    },
    "svhn": {
        **_BOTH,
        "representation": Range(32, 256, whole=True),
        "channels": Range(8, 64, whole=True),
    },
}
SMALL: Space = {  # the same options for a few hundred images of 10 x 10 pixels
    "representation": Range(8, 64, log=True, whole=True),
    "eta": Range(0.8, 3.0),
    "batch": Range(0.1, 0.5, log=True),
    "local_epochs": Range(1, 6, whole=True),
    "init_epochs": Range(5, 30, whole=True),
    "distil_epochs": Range(1, 6, whole=True),
    "finetune_epochs": Range(1, 4, whole=True),
    "rounds": Range(1, 3, whole=True),
    "lr": Range(0.001, 0.01, log=True),
}
_OF_TABLE_4_4 = ("fedlinked", "fedavg-trunk", "local")  # what the paper searched it for

_FIXED: Space = {  # dimensionless: the same for every task
    "lam": Range(1e-4, 1.0, log=True),  # FedFoA, Figure 5
    "mu": Range(0.0, 1.0),
    "tau": Range(0.1, 1.0),
    "temperature": Range(0.05, 1.0, log=True),
    "target_momentum": Range(0.9, 0.999),
    "h": Range(0.0, 1.0),
    "share": Range(0.2, 1.0),
    "head_rate": Range(0.05, 1.0, log=True),
    "trunk_rate": Range(0.05, 1.0, log=True),
    "ridge": Range(1e-5, 1e-1, log=True),
    "drift": Range(1e-3, 1e-1, log=True),
    "threshold": Range(0.2, 0.9),
}
_BASE = ("lr", "batch")
SEARCHED: Mapping[str, tuple[str, ...]] = {
    "fedlinked": (*_BASE, "init_epochs", "distil_epochs", "finetune_epochs", "local_epochs"),
    "fedavg-trunk": (*_BASE, "init_epochs", "local_epochs", "finetune_epochs"),
    "local": (*_BASE, "init_epochs", "local_epochs"),
    "joint": (*_BASE, "init_epochs", "local_epochs"),
    "fedavg": (*_BASE, "local_epochs"),
    "fedper": (*_BASE, "local_epochs"),
    "lg-fedavg": (*_BASE, "local_epochs"),
    "cwt": (*_BASE, "local_epochs"),
    "fedrep": (*_BASE, "head_epochs", "trunk_epochs"),
    "fedbabu": (*_BASE, "local_epochs", "finetune_epochs"),
    "fedala": (*_BASE, "local_epochs", "share"),
    "ccvr": (*_BASE, "local_epochs", "calibrate_epochs"),
    "mocha": (*_BASE, "local_epochs", "ridge"),
    "li": (*_BASE, "head_epochs", "trunk_epochs", "head_rate", "trunk_rate"),
    "byol": (*_BASE, "local_epochs", "target_momentum"),
    "fedbyol": (*_BASE, "local_epochs", "target_momentum"),
    "fedu": (*_BASE, "local_epochs", "target_momentum", "mu"),
    "fedema": (*_BASE, "local_epochs", "target_momentum", "tau"),
    "fedfoa": (*_BASE, "local_epochs", "target_momentum", "lam"),
    "fedmd": (*_BASE, "init_epochs", "revisit_epochs", "digest_epochs"),
    "fedmd-ssl": (*_BASE, "local_epochs", "digest_epochs"),
    "ds-fl": (*_BASE, "local_epochs", "distil_epochs", "temperature"),
    "feddf": (*_BASE, "local_epochs", "distil_steps", "distil_lr"),
    "feddf-ssl": (*_BASE, "local_epochs", "distil_steps", "distil_lr"),
    "fedul-m2": (*_BASE, "local_epochs", "hub_epochs", "h"),
    "fedul-m1": (*_BASE, "local_epochs", "hub_epochs"),
    "fedpl": (*_BASE, "local_epochs", "threshold"),
    "partial-averaging": ("lr", "local_epochs"),  # it learns sample by sample: batch stays
    "auto-slices": ("lr", "local_epochs"),
    "dynamic-averaging": ("lr", "local_epochs", "drift"),
}
_OTHERS = (*_BASE, "local_epochs")


def space_of(
    method: str, task: Task, base: Mapping[str, Any] | None = None
) -> dict[str, Dimension]:
    """The space of a method on a task: of what both have as options, the task's network first.

    Args:
        method: name of the method.
        task: the federation.
        base: options around which all ranges lie, instead of those of the task's recipe.
    """
    chosen = methods.load(method)
    mine, its = options.fields_of(chosen), options.fields_of(type(task))
    if base is None and method in _OF_TABLE_4_4 and task.name in (*TABLE_4_3, "digits"):
        printed = TABLE_4_3.get(task.name, SMALL)
        network = {n: printed[n] for n in ARCHITECTURE if n in printed and n in its}
        return network | {n: d for n, d in printed.items() if n in mine}
    made = methods.make(method, base or {}, task)
    found = {n: _around(n, getattr(made, n)) for n in SEARCHED.get(method, _OTHERS) if n in mine}
    return {name: dimension for name, dimension in found.items() if dimension is not None}


def _around(name: str, value: Any) -> Dimension | None:
    """Of a dimensionless option its own range; else around what the method would do."""
    if name in _FIXED:
        return _FIXED[name]
    if not value:  # an option that is off stays off
        return None
    if name.endswith("lr"):
        return Range(value / 10, value * 10, log=True)
    if name == "batch" and value < 1:
        return Range(value / 4, min(0.9, value * 2), log=True)
    low, high = max(1, round(value / 4)), max(2, round(value * 2))
    return Range(low, high, log=name == "batch", whole=True)

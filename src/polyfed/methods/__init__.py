"""Methods, one file each. The table maps a name to its class without importing any of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from polyfed.core.method import Method
from polyfed.errors import UnknownNameError
from polyfed.options import build
from polyfed.tasks.task import Task

METHODS: dict[str, tuple[str, str]] = {
    "local": ("local", "Local"),
    "joint": ("joint", "Joint"),
    "fedavg": ("fedavg", "FedAvg"),
    "fedavg-trunk": ("fedavg_trunk", "FedAvgTrunk"),
    "fedper": ("fedper", "FedPer"),
    "fedrep": ("fedrep", "FedRep"),
    "fedbabu": ("fedbabu", "FedBABU"),
    "lg-fedavg": ("lg_fedavg", "LGFedAvg"),
    "fedala": ("fedala", "FedALA"),
    "ccvr": ("ccvr", "CCVR"),
    "mocha": ("mocha", "MOCHA"),
    "fedlinked": ("fedlinked", "FedLinked"),
    "byol": ("fedbyol", "BYOLAlone"),
    "fedbyol": ("fedbyol", "FedBYOL"),
    "fedu": ("fedbyol", "FedU"),
    "fedema": ("fedbyol", "FedEMA"),
    "fedfoa": ("fedfoa", "FedFoA"),
    "fedmd": ("fedmd", "FedMD"),
    "fedmd-ssl": ("fedmd", "FedMDSSL"),
    "ds-fl": ("ds_fl", "DSFL"),
    "feddf": ("feddf", "FedDF"),
    "feddf-ssl": ("feddf", "FedDFSSL"),
    "fedul": ("fedul", "FedUL"),
    "fedul-m1": ("fedul", "FedULM1"),
    "fedul-m2": ("fedul", "FedULM2"),
    "fedul-mgda": ("fedul", "FedULMgda"),
    "fedllp": ("fedul_controls", "FedLLP"),
    "fedpl": ("fedul_controls", "FedPL"),
    "hub-only": ("fedul_controls", "HubOnly"),
    "partial-averaging": ("partial_averaging", "PartialAveraging"),
    "dynamic-averaging": ("dynamic_averaging", "DynamicAveraging"),
    "auto-slices": ("auto_slices", "AutoSlices"),
    "cwt": ("cwt", "CWT"),
    "li": ("li", "LI"),
}


def load(name: str) -> type[Method]:
    """The class of the method of that name."""
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    module, cls = METHODS[name]
    found: type[Method] = getattr(import_module(f"polyfed.methods.{module}"), cls)
    return found


def make(name: str, options: Mapping[str, Any], task: Task | None = None) -> Method:
    """The method of that name: these options, then the task's recipe, then its own defaults."""
    recipe = {} if task is None else task.recipe(name)
    return build(load(name), {**recipe, **options}, f"method {name}")

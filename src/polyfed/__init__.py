"""polyfed: train models together across parties that differ.

>>> import polyfed as pf
>>> run = pf.run(pf.FedPer(rounds=1), pf.tasks.digits(), seed=0)
>>> sorted(run.accuracy)
['M0', 'M1', 'M2']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Nothing heavy is imported until it is asked for: `polyfed --help` answers at once.
_WHERE = {
    "AutoSlices": "polyfed.methods.auto_slices",
    "BYOLAlone": "polyfed.methods.fedbyol",
    "CCVR": "polyfed.methods.ccvr",
    "CWT": "polyfed.methods.cwt",
    "DSFL": "polyfed.methods.ds_fl",
    "Data": "polyfed.core.data",
    "DynamicAveraging": "polyfed.methods.dynamic_averaging",
    "FedALA": "polyfed.methods.fedala",
    "FedAvg": "polyfed.methods.fedavg",
    "FedAvgTrunk": "polyfed.methods.fedavg_trunk",
    "FedBABU": "polyfed.methods.fedbabu",
    "FedBYOL": "polyfed.methods.fedbyol",
    "FedDF": "polyfed.methods.feddf",
    "FedDFSSL": "polyfed.methods.feddf",
    "FedEMA": "polyfed.methods.fedbyol",
    "FedFoA": "polyfed.methods.fedfoa",
    "FedLLP": "polyfed.methods.fedul_controls",
    "FedLinked": "polyfed.methods.fedlinked",
    "FedMD": "polyfed.methods.fedmd",
    "FedMDSSL": "polyfed.methods.fedmd",
    "FedPL": "polyfed.methods.fedul_controls",
    "FedPer": "polyfed.methods.fedper",
    "FedRep": "polyfed.methods.fedrep",
    "FedU": "polyfed.methods.fedbyol",
    "FedUL": "polyfed.methods.fedul",
    "FedULM1": "polyfed.methods.fedul",
    "FedULM2": "polyfed.methods.fedul",
    "FedULMgda": "polyfed.methods.fedul",
    "HubOnly": "polyfed.methods.fedul_controls",
    "Joint": "polyfed.methods.joint",
    "LGFedAvg": "polyfed.methods.lg_fedavg",
    "LI": "polyfed.methods.li",
    "Local": "polyfed.methods.local",
    "MOCHA": "polyfed.methods.mocha",
    "Message": "polyfed.core.message",
    "Method": "polyfed.core.method",
    "Model": "polyfed.core.model",
    "Node": "polyfed.core.node",
    "PartialAveraging": "polyfed.methods.partial_averaging",
    "Phase": "polyfed.core.phase",
    "Run": "polyfed.report.shown",
    "Topology": "polyfed.core.topology",
    "compare": "polyfed.report.shown",
    "errors": "",
    "methods": "",
    "resume": "polyfed.report.shown",
    "run": "polyfed.report.shown",
    "tasks": "",
    "testing": "",
    "topologies": "",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from polyfed import (
        errors as errors,
    )
    from polyfed import (
        methods as methods,
    )
    from polyfed import (
        tasks as tasks,
    )
    from polyfed import (
        testing as testing,
    )
    from polyfed import (
        topologies as topologies,
    )
    from polyfed.core.data import Data as Data
    from polyfed.core.message import Message as Message
    from polyfed.core.method import Method as Method
    from polyfed.core.model import Model as Model
    from polyfed.core.node import Node as Node
    from polyfed.core.phase import Phase as Phase
    from polyfed.core.topology import Topology as Topology
    from polyfed.methods.auto_slices import AutoSlices as AutoSlices
    from polyfed.methods.ccvr import CCVR as CCVR
    from polyfed.methods.cwt import CWT as CWT
    from polyfed.methods.ds_fl import DSFL as DSFL
    from polyfed.methods.dynamic_averaging import DynamicAveraging as DynamicAveraging
    from polyfed.methods.fedala import FedALA as FedALA
    from polyfed.methods.fedavg import FedAvg as FedAvg
    from polyfed.methods.fedavg_trunk import FedAvgTrunk as FedAvgTrunk
    from polyfed.methods.fedbabu import FedBABU as FedBABU
    from polyfed.methods.fedbyol import BYOLAlone as BYOLAlone
    from polyfed.methods.fedbyol import FedBYOL as FedBYOL
    from polyfed.methods.fedbyol import FedEMA as FedEMA
    from polyfed.methods.fedbyol import FedU as FedU
    from polyfed.methods.feddf import FedDF as FedDF
    from polyfed.methods.feddf import FedDFSSL as FedDFSSL
    from polyfed.methods.fedfoa import FedFoA as FedFoA
    from polyfed.methods.fedlinked import FedLinked as FedLinked
    from polyfed.methods.fedmd import FedMD as FedMD
    from polyfed.methods.fedmd import FedMDSSL as FedMDSSL
    from polyfed.methods.fedper import FedPer as FedPer
    from polyfed.methods.fedrep import FedRep as FedRep
    from polyfed.methods.fedul import FedUL as FedUL
    from polyfed.methods.fedul import FedULM1 as FedULM1
    from polyfed.methods.fedul import FedULM2 as FedULM2
    from polyfed.methods.fedul import FedULMgda as FedULMgda
    from polyfed.methods.fedul_controls import FedLLP as FedLLP
    from polyfed.methods.fedul_controls import FedPL as FedPL
    from polyfed.methods.fedul_controls import HubOnly as HubOnly
    from polyfed.methods.joint import Joint as Joint
    from polyfed.methods.lg_fedavg import LGFedAvg as LGFedAvg
    from polyfed.methods.li import LI as LI
    from polyfed.methods.local import Local as Local
    from polyfed.methods.mocha import MOCHA as MOCHA
    from polyfed.methods.partial_averaging import PartialAveraging as PartialAveraging
    from polyfed.report.shown import Run as Run
    from polyfed.report.shown import compare as compare
    from polyfed.report.shown import resume as resume
    from polyfed.report.shown import run as run


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'polyfed' has no attribute {name!r}")
    if not _WHERE[name]:
        return import_module(f"polyfed.{name}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

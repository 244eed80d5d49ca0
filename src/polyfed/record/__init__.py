"""The record of a run: its folder, metrics, ledger, faults and checkpoints."""

from polyfed.record.ledger import Crossing, Ledger
from polyfed.record.log import Log
from polyfed.record.recorder import Recorder

__all__ = ["Crossing", "Ledger", "Log", "Recorder"]

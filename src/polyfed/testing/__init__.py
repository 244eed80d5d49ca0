"""Checks and oracles for methods: ours, and yours.

>>> from polyfed.methods.fedavg import FedAvg
>>> check_method(FedAvg(batch=8))
"""

from polyfed.testing.conformance import CHECKS, ConformanceError, check_method
from polyfed.testing.federations import one_class, one_sample, tiny

__all__ = ["CHECKS", "ConformanceError", "check_method", "one_class", "one_sample", "tiny"]

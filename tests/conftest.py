import os

import pytest
from hypothesis import settings
from jaxtyping import config

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


TYPED = "deterministic"  # the conformance check with types and shapes checked


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check types and shapes in every call, but for most conformance checks of a method.

    They call the functions that one of them calls, and would take twice as long.
    """
    case = getattr(item, "callspec", None)
    check = TYPED if case is None else case.params.get("check", TYPED)
    config.update("jaxtyping_disable", check != TYPED)

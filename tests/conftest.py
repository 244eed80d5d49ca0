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

TYPED = "deterministic"  # the conformance check of a method with types and shapes checked
UNTYPED = {"tests", "experiments", "golden", "report", "studies"}  # folders: whole runs


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check types and shapes in every call, but not where others make the same calls.

    It takes as long as the calls themselves.
    """
    case = getattr(item, "callspec", None)
    check = TYPED if case is None else case.params.get("check", TYPED)
    config.update("jaxtyping_disable", check != TYPED or item.path.parent.name in UNTYPED)


@pytest.fixture
def untyped() -> None:
    """Check no types in calls: a person's are not checked either, and here they are wrong."""
    config.update("jaxtyping_disable", True)

"""The numbers of a short run of every method, so that a change of numerics is noticed.

After a change that is meant, `POLYFED_WRITE_GOLDEN=1 pytest tests/golden` writes them anew; say
`Numerics: changed` in the commit, with the reason.
"""

import json
import os
from pathlib import Path

import pytest

import polyfed as pf
from polyfed import methods
from polyfed.testing import tiny

FILE = Path(__file__).with_name("golden.json")
ROUNDS = 10


def numbers(name: str) -> dict[str, dict[str, float]]:
    """For every node the mean of its parameters, of their squares, and its accuracy."""
    run = pf.run(methods.make(name, {"rounds": ROUNDS, "lr": 1e-3, "batch": 8}), tiny(), seed=7)
    found = {}
    for node in run.nodes.values():
        state = node.model.state().values()
        flat = [t.double().flatten() for t in state if t.is_floating_point()]
        count = sum(len(t) for t in flat)
        found[node.name] = {
            "mean": sum(float(t.sum()) for t in flat) / count,
            "mean_square": sum(float((t * t).sum()) for t in flat) / count,
        }
    return {"nodes": found, "accuracy": dict(run.accuracy)}


@pytest.mark.parametrize("name", methods.METHODS)
def test_the_numbers_have_not_changed(name: str) -> None:
    now = numbers(name)
    if os.environ.get("POLYFED_WRITE_GOLDEN"):
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps(known | {name: now}, indent=2, sort_keys=True) + "\n")
    golden = json.loads(FILE.read_text())[name]
    # One sample of nine may tip.
    assert now["accuracy"] == pytest.approx(golden["accuracy"], abs=0.12)
    for node, want in golden["nodes"].items():
        assert now["nodes"][node] == pytest.approx(want, rel=2e-3, abs=2e-5), node

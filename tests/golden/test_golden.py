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
from polyfed.testing.sets import tiny_sets
from polyfed.train.kinds import with_hub

FILE = Path(__file__).with_name("golden.json")
ROUNDS = 10
SMALL = {"local_epochs": 1, "projection": 4, "predictor_hidden": 6, "probe_epochs": 0}
OPTIONS = {  # for what cannot, or need not, run with its defaults on 25 samples
    **dict.fromkeys(("byol", "fedbyol", "fedu", "fedema", "fedmd-ssl"), SMALL),
    "fedfoa": {**SMALL, "warm_up": 2},
    "feddf": {"distil_steps": 20},
    "feddf-ssl": {**SMALL, "distil_steps": 20},
}
ON_SETS = ("fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedllp", "fedpl", "hub-only")
NODES = {
    "feddf": lambda: with_hub(tiny()),
    "feddf-ssl": lambda: with_hub(tiny()),
    **dict.fromkeys(ON_SETS, tiny_sets),
}


def numbers(name: str) -> dict[str, dict[str, float]]:
    """For every node the mean of its parameters, of their squares, and its accuracy."""
    method = methods.make(name, {"rounds": ROUNDS, "lr": 1e-3, "batch": 8} | OPTIONS.get(name, {}))
    run = pf.run(method, NODES.get(name, tiny)(), seed=7)
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

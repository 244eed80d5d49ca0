"""Automatic slices: the hub finds the groups that are there, and averages within them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.engines.run import run
from polyfed.errors import ConfigError
from polyfed.methods.auto_slices import AutoSlices
from polyfed.methods.partial_averaging import PartialAveraging
from polyfed.tasks.permuted import DigitsPermuted
from polyfed.testing import CHECKS, tiny

COMMON: dict[str, Any] = {"batch": 8, "lr": 1e-2}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("after", [0, 1])
def test_conformance(check: str, after: int) -> None:
    weighting: Any = "examples" if after else "uniform"
    method = AutoSlices(**COMMON, scheme="50%", after=after, weighting=weighting, own_start=True)
    CHECKS[check](method, tiny)


def spoken(done: Any, source: str, tick: int) -> list[str]:
    crossings = [c for c in done.ledger.crossings() if (c.source, c.tick) == (source, tick)]
    return [t["name"] for c in crossings[:1] for t in c.tensors]


def test_the_slice_travels_when_it_is_asked_for() -> None:
    method = AutoSlices(**COMMON, scheme="6-4-2-3", after=2, rounds=4)
    done = run(method, tiny(), progress=False)
    assert [spoken(done, "M0", t) for t in (1, 2, 3, 4)] == [
        ["global"],
        ["global"],
        ["global", "auto"],
        ["global", "auto"],
    ]
    assert [spoken(done, "hub", t) for t in (1, 2, 3)] == [
        ["global", "auto/ask"],
        ["global", "auto/ask"],
        ["global", "auto"],
    ]
    slices = method.slices(tiny())
    whole, part = 4 * slices.size("global"), 4 * slices.size("auto")
    assert done.ledger.bytes_sent("M0") == 4 * whole + 2 * part
    assert done.ledger.bytes_received("M0") == 4 * whole + 2 * part + 2
    # the rest of 6=8=5=3, with the weights to and from the global model
    assert slices.size("auto") == PartialAveraging(
        scheme="6-4-2-3", groups="a=0-4-3-0@M0+M1", depends="global"
    ).slices(tiny()).size("a")


def test_never_asked_is_partial_averaging() -> None:
    done = run(AutoSlices(**COMMON, scheme="50%", after=99, rounds=3), tiny(), progress=False)
    partial = run(PartialAveraging(**COMMON, scheme="50%", rounds=3), tiny(), progress=False)
    for name, node in done.nodes.items():
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, partial.nodes[name].model.state()[key]), key


def test_one_group_of_all_is_a_model_of_all() -> None:
    method = AutoSlices(**COMMON, scheme="6-4-2-3", after=0, count=1, rounds=2)
    done = run(method, tiny(), progress=False)
    notes = [m["groups"] for m in done.metrics if "groups" in m]
    assert notes == ["M0+M1+M2"]
    states = [node.model.state() for node in done.nodes.values()]
    for key in ("trunk.0.weight", "trunk.4.weight", "head.weight", "head.bias"):
        assert torch.equal(states[0][key], states[1][key])
        assert torch.equal(states[0][key], states[2][key])


@pytest.mark.parametrize(("depends", "cross"), [("", False), ("", True), ("global", False)])
def test_weights_between_are_of_the_slice_if_it_depends_or_with_cross(
    depends: str, cross: bool
) -> None:
    """The two models are the whole network, and so is what one group of all agrees on."""
    options: dict[str, Any] = {"scheme": "6-4-2-3", "depends": depends, "cross": cross}
    done = run(AutoSlices(**COMMON, **options, after=0, count=1, rounds=2), tiny(), progress=False)
    assert done.faults == []
    first, *others = (node.model.state() for node in done.nodes.values())
    for key in ("trunk.0.weight", "trunk.4.weight", "head.weight"):
        same = all(torch.equal(first[key], other[key]) for other in others)
        assert same is bool(depends or cross), key


def test_without_a_global_model_nodes_say_nothing_until_they_are_asked() -> None:
    method = AutoSlices(**COMMON, scheme="0-0-0-0", after=1, count=1, rounds=3)
    done = run(method, tiny(), progress=False)
    assert done.faults == []
    assert [spoken(done, "M0", t) for t in (1, 2, 3)] == [[], ["auto"], ["auto"]]
    assert {m["groups"] for m in done.metrics if "groups" in m} == {"M0+M1+M2"}


def test_groups_may_share_some_of_the_rest() -> None:
    method = AutoSlices(**COMMON, scheme="6-4-2-3", groups="0-1-0-0", after=0, count=1, rounds=2)
    done = run(method, tiny(), progress=False)
    first, *others = (node.model.state()["trunk.0.weight"] for node in done.nodes.values())
    for other in others:
        assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [True] * 5 + [
            False
        ] * 3


def test_within_a_group_all_agree_and_between_groups_they_do_not() -> None:
    method = AutoSlices(**COMMON, scheme="6-4-2-3", after=0, count=2, rounds=3)
    done = run(method, tiny(), progress=False)
    pairs = [m["groups"] for m in done.metrics if "groups" in m]
    assert pairs[0] == pairs[1]
    pair, alone = sorted((g.split("+") for g in pairs[0].split()), key=len, reverse=True)
    weights = {n: node.model.state()["trunk.0.weight"] for n, node in done.nodes.items()}
    assert torch.equal(weights[pair[0]][4:], weights[pair[1]][4:])
    assert not torch.equal(weights[pair[0]][4:], weights[alone[0]][4:])
    assert torch.equal(weights[pair[0]][:4], weights[alone[0]][:4])


def test_groups_are_found_anew_when_somebody_joins() -> None:
    method = AutoSlices(**COMMON, scheme="6-4-2-3", after=0, count=2, rounds=4)
    done = run(method, tiny(), absent={1: ["M1"], 2: ["M1"]}, progress=False)
    notes = [(m["tick"], m["groups"]) for m in done.metrics if "groups" in m]
    assert [tick for tick, _ in notes] == [2, 3, 4]
    assert sorted(notes[0][1].replace(" ", "+").split("+")) == ["M0", "M2"]
    assert sorted(notes[2][1].replace(" ", "+").split("+")) == ["M0", "M1", "M2"]
    assert [f["fault"] for f in done.faults] == ["absent", "absent"]


def test_hidden_groups_are_found() -> None:
    """Three of six nodes move six digits round; nobody says which nodes."""
    task = DigitsPermuted(kind="cycle:6", num_nodes=6, permuted=3, train=200)
    training = {**task.recipe("auto-slices"), "batch": 4, "lr": 2.0, "own_start": False}
    method = AutoSlices(**{**training, "rounds": 43, "after": 40})
    done = run(method, task, progress=False, evaluate_every=50, stack="always")
    found = {m["tick"]: m["groups"] for m in done.metrics if "groups" in m}
    assert found == dict.fromkeys((41, 42, 43), "M0+M1+M2 M3+M4+M5")


def test_wrong_options_are_errors() -> None:
    for name in ("after", "count"):
        with pytest.raises(ConfigError, match=rf"AutoSlices\.{name} must be >= 0"):
            AutoSlices(**{name: -1})
    with pytest.raises(ConfigError, match="no cell is left for groups to share"):
        run(AutoSlices(scheme="100%"), tiny(), progress=False)
    with pytest.raises(ConfigError, match="runs on star, not on gossip"):
        run(AutoSlices(), tiny(), topology="gossip", progress=False)

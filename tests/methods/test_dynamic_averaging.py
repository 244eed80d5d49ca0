"""Dynamic averaging: when slices are averaged, what it costs, and its two limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyfed.core.message import Message
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError
from polyfed.methods.dynamic_averaging import DynamicAveraging
from polyfed.methods.local import Local
from polyfed.methods.partial_averaging import PartialAveraging
from polyfed.testing import CHECKS, tiny

SHARED = {"scheme": "6-4-2-3", "groups": "fr=0-2-1-0@M0+M2", "depends": "fr:global"}
COMMON: dict[str, Any] = {"batch": 8, "lr": 1e-2, "optimiser": "sgd"}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("drift", [1e-6, 0.01])
def test_conformance(check: str, drift: float) -> None:
    weighting: Any = "examples" if drift == 0.01 else "uniform"
    CHECKS[check](DynamicAveraging(**COMMON, **SHARED, drift=drift, weighting=weighting), tiny)


def said(done: Run, name: str, tick: int) -> list[str]:
    """What a node said in a round."""
    crossings = [c for c in done.ledger.crossings() if (c.source, c.tick) == (name, tick)]
    return [t["name"] for c in crossings for t in c.tensors]


def literal(nodes: list[Node], drift: float, rounds: int) -> tuple[list[int], dict[str, Any]]:
    """The rounds in which all is averaged, and what comes of it, one round of FedAvg at a time."""
    one: dict[str, Any] = {**COMMON, "optimiser": "sgd", "batch": 1000}
    reference = {n.name: n.model.state() for n in nodes}
    asked, averaged = False, []
    for t in range(1, rounds + 1):
        trained = run(
            Local(rounds=1, local_epochs=1, patience=0, rollback=False, **one),
            nodes,
            progress=False,
        ).nodes
        states = {name: node.model.state() for name, node in trained.items()}
        if asked:
            keys = states["M0"]
            mean = {k: torch.stack([s[k] for s in states.values()]).mean(0) for k in keys}
            states = dict.fromkeys(states, mean)
            reference, asked = states, False
            averaged.append(t)
        else:
            moved = []
            for name, state in states.items():
                apart = torch.cat([(state[k] - reference[name][k]).flatten() for k in state])
                moved.append(float(apart.square().mean().sqrt()))
            asked = sum(moved) / len(moved) > drift
        nodes = [Node(n.name, n.data, n.model.copy()) for n in nodes]
        for node in nodes:
            node.model.load(states[node.name])
    return averaged, states


def test_slices_are_averaged_the_round_after_they_have_moved(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """Against one full-batch step at a time: batches have no order, rounds no other state."""
    nodes = plain_nodes(common=True)
    wanted, states = literal(nodes, drift=2.5e-3, rounds=12)
    method = DynamicAveraging(**{**COMMON, "batch": 1000}, scheme="100%", drift=2.5e-3, rounds=12)
    done = run(method, nodes, progress=False)
    assert [t for t in range(1, 13) if "global" in said(done, "M0", t)] == wanted
    assert 2 <= len(wanted) <= 4  # the bound is between two extremes
    for name, node in done.nodes.items():
        for key, tensor in node.model.state().items():
            torch.testing.assert_close(tensor, states[name][key], rtol=0, atol=1e-6)


def test_a_tiny_bound_averages_in_every_second_round() -> None:
    done = run(DynamicAveraging(**COMMON, **SHARED, drift=1e-9, rounds=5), tiny(), progress=False)
    assert [said(done, "M0", t) for t in range(1, 6)] == [
        ["global/moved", "fr/moved"],
        ["global", "fr"],
        ["global/moved", "fr/moved"],
        ["global", "fr"],
        ["global/moved", "fr/moved"],
    ]
    assert done.faults == []
    slices = DynamicAveraging(**SHARED).slices(tiny())
    own = 4 * (slices.size("global") + slices.size("fr"))
    assert done.ledger.bytes_sent("M0") == 2 * own + 3 * 2 * 4
    assert done.ledger.bytes_received("M0") == 2 * own + 3 * 2 * 1


def test_a_huge_bound_is_local_training_and_silence() -> None:
    common: dict[str, Any] = {"rounds": 3, "batch": 8}
    done = run(DynamicAveraging(**common, drift=1e9), tiny(), progress=False)
    alone = run(Local(**common, local_epochs=1, patience=0, rollback=False), tiny(), progress=False)
    for name, node in done.nodes.items():
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, alone.nodes[name].model.state()[key])
    assert done.ledger.bytes_sent("M0") == 3 * 4
    assert done.ledger.bytes_received("M0") == 0
    moved = [m["moved global"] for m in done.metrics if "moved global" in m]
    assert len(moved) == 3
    assert moved == sorted(moved)  # each is from the start


def test_a_topic_at_a_time() -> None:
    """The hub of a group decides for its group."""
    method = DynamicAveraging(**COMMON, **SHARED, drift=1e-9, rounds=2)
    done = run(method, tiny(), topology="groups", progress=False)
    assert done.faults == []
    heard = {(c.to, t["name"]) for c in done.ledger.crossings() for t in c.tensors if c.tick == 1}
    assert {("hub-fr", "fr/moved"), ("hub-global", "global/moved")} <= heard
    assert {("M0", "fr/ask"), ("M0", "global/ask"), ("M1", "global/ask")} <= heard
    assert ("M1", "fr/ask") not in heard
    after = {name: node.model.state() for name, node in done.nodes.items()}
    assert torch.equal(after["M0"]["head.bias"], after["M1"]["head.bias"])


def test_who_was_away_is_asked_by_itself() -> None:
    method = DynamicAveraging(**COMMON, scheme="6-4-2-3", drift=1e-9, rounds=3)
    done = run(method, tiny(), absent={1: ["M1"]}, progress=False)
    assert [said(done, "M0", t) for t in (1, 2, 3)] == [
        ["global/moved"],
        ["global"],
        ["global/moved"],
    ]
    assert [said(done, "M1", t) for t in (1, 2, 3)] == [[], ["global/moved"], ["global"]]
    assert [f["fault"] for f in done.faults] == ["absent"]


def test_it_averages_what_partial_averaging_does(plain_nodes: Callable[..., list[Node]]) -> None:
    """From agreement, one round asked for and one averaged: as one round of two epochs."""
    common: dict[str, Any] = {**COMMON, **SHARED, "batch": 1000}
    nodes = plain_nodes(common=True)
    twice = run(PartialAveraging(**common, rounds=1, local_epochs=2), nodes, progress=False)
    dynamic = run(DynamicAveraging(**common, rounds=2, drift=1e-9), nodes, progress=False)
    slices = DynamicAveraging(**SHARED).slices(nodes)
    for name in ("M0", "M2"):
        got, wanted = (slices.pack(name, r.nodes[name].model.state()) for r in (dynamic, twice))
        assert got.keys() == wanted.keys() == {"global", "fr"}
        for topic, vector in wanted.items():
            torch.testing.assert_close(got[topic], vector, rtol=0, atol=1e-6)
        assert not torch.equal(got["fr"], slices.pack(name, nodes[0].model.state())["fr"])


@pytest.mark.parametrize(
    ("moved", "asks"), [((0.5, 0.5), False), ((0.25, 0.625), False), ((0.25, 1.0), True)]
)
def test_the_mean_decides_and_must_be_above_the_bound(moved: tuple[float, ...], asks: bool) -> None:
    got = {f"M{i}": Message({"global/moved": torch.tensor(d)}) for i, d in enumerate(moved)}
    replies = DynamicAveraging(drift=0.5).combine(Node("hub"), got, list(got))
    told = {name: {n: bool(t) for n, t in reply.tensors.items()} for name, reply in replies.items()}
    assert told == ({name: {"global/ask": True} for name in got} if asks else {})


def test_movement_is_from_the_own_start() -> None:
    method, node = DynamicAveraging(**COMMON, **SHARED, own_start=True), tiny()[0]
    before = method.plan(node)[0].pack(method.plan(node)[1])
    assert list(method.start(node)) == []
    assert not torch.equal(method.plan(node)[0].pack(method.plan(node)[1])["fr"], before["fr"])
    assert [float(d) for d in method.send(node).tensors.values()] == [0, 0]


@pytest.mark.parametrize("drift", [0.0, -1.0, float("inf")])
def test_wrong_options_are_errors(drift: float) -> None:
    with pytest.raises(ConfigError, match=r"DynamicAveraging\.drift must be > 0"):
        DynamicAveraging(drift=drift)

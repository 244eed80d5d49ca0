"""Gossip as a plan: who trains, who meets, in which order, on which links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed import topologies
from polyfed.core.topology import State, Tick, Topology
from polyfed.engines.run import run
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.methods.fedavg import FedAvg
from polyfed.testing import tiny

NAMES = [f"M{i}" for i in range(6)]
ALL = frozenset(NAMES)


def bound(text: str, topics: dict[str, tuple[str, ...]] | None = None) -> Topology:
    return topologies.make(text).joined(0, NAMES, topics or {})


def ticks(gossip: Topology, t: int = 1, state: State | None = None) -> list[Tick]:
    return list(gossip.round(t, lambda r: state or State(ALL)))


def pairs(found: Sequence[Tick], topic: str = "") -> list[tuple[str, ...]]:
    return [m.sources for tick in found for m in tick.meetings if m.topic == topic]


def test_everybody_trains_once_then_meets_in_pairs() -> None:
    found = ticks(bound("gossip:cycles=4"))
    assert [tick.active for tick in found] == [tuple(NAMES), (), (), ()]
    for tick in found:
        met = [name for meeting in tick.meetings for name in meeting.sources]
        assert sorted(met) == NAMES
        for meeting in tick.meetings:
            assert meeting.to == meeting.sources
            assert meeting.at == meeting.sources[1]
            assert meeting.hops == 1


def test_topics_of_the_same_nodes_have_pairs_of_their_own() -> None:
    found = ticks(bound("gossip:cycles=4", {"a": tuple(NAMES), "b": tuple(NAMES)}))
    assert sorted(pairs(found[:1], "a")) != sorted(pairs(found[:1], "b"))
    assert sorted(pairs(found, "a")) != sorted(pairs(found, "b"))


def test_in_turn_nobody_is_in_two_meetings_of_a_tick() -> None:
    found = ticks(bound("gossip:cycles=2,pairs=sequential"))
    assert len(pairs(found)) == 2 * len(NAMES)
    for tick in found:
        met = [name for meeting in tick.meetings for name in meeting.sources]
        assert len(set(met)) == len(met)


def test_each_topic_has_pairs_of_its_own() -> None:
    topics = {"global": tuple(NAMES), "fr": ("M4", "M1", "M3")}
    found = ticks(bound("gossip:cycles=20", topics), t=3)
    assert {name for pair in pairs(found, "fr") for name in pair} == {"M1", "M3", "M4"}
    assert len(pairs(found, "fr")) == 20  # of three nodes one rests
    assert len(pairs(found, "global")) == 60
    assert pairs(found, "") == []


def test_pairs_are_a_function_of_seed_and_round() -> None:
    gossip = bound("gossip:cycles=3")
    assert ticks(gossip, 1) == ticks(gossip, 1)
    assert pairs(ticks(gossip, 1)) != pairs(ticks(gossip, 2))
    other = topologies.make("gossip:cycles=3").joined(1, NAMES, {})
    assert pairs(ticks(gossip)) != pairs(ticks(other))
    backwards = topologies.make("gossip:cycles=3").joined(0, NAMES[::-1], {})
    assert ticks(gossip) == ticks(backwards)
    topics = {"fr": ("M4", "M1", "M3")}
    turned = {"fr": ("M3", "M4", "M1")}
    assert ticks(bound("gossip", topics)) == ticks(bound("gossip", turned))


@given(st.frozensets(st.sampled_from(NAMES)), st.sampled_from(["matching", "sequential"]))
def test_who_is_away_is_left_out(alive: frozenset[str], how: str) -> None:
    found = ticks(bound(f"gossip:cycles=2,pairs={how}"), state=State(alive))
    assert found[0].active == tuple(sorted(alive))
    met = {name for pair in pairs(found) for name in pair}
    assert met <= alive
    assert met == alive or len(alive) % 2 or how == "sequential"


def test_a_cut_link_is_not_used() -> None:
    cut = frozenset({frozenset(("M0", name)) for name in NAMES[1:5]})
    found = ticks(bound("gossip:cycles=40"), state=State(ALL, cut))
    assert {pair for pair in pairs(found) if "M0" in pair} == {("M0", "M5")}


@pytest.mark.parametrize(
    ("graph", "near"),
    [
        ("ring", {"M1", "M5"}),
        ("regular:2", {"M1", "M5"}),
        ("regular:4", {"M1", "M2", "M4", "M5"}),
        ("complete", {"M1", "M2", "M3", "M4", "M5"}),
        ("M0:M3+M3:M1+M1:M2+M2:M4+M4:M5", {"M3"}),
    ],
)
def test_meetings_are_along_links(graph: str, near: set[str]) -> None:
    found = ticks(bound(f"gossip:cycles=60,graph={graph}"))
    assert {name for pair in pairs(found) if "M0" in pair for name in pair} == near | {"M0"}


def test_rounds_without_meetings() -> None:
    gossip = bound("gossip:cycles=2,every=3")
    assert [len(pairs(ticks(gossip, t))) for t in range(1, 7)] == [0, 0, 6, 0, 0, 6]
    assert ticks(gossip, 1) == [Tick(tuple(NAMES), ())]


def test_a_graph_that_falls_apart_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"not connect the nodes: no way from M0 to M3, M4, M5\."):
        bound("gossip:graph=M0:M1+M1:M2+M3:M4+M4:M5")
    topics = {"global": tuple(NAMES), "fr": ("M0", "M2")}
    bound("gossip:graph=regular:4", topics)
    with pytest.raises(ConfigError, match="that share 'fr': no way from M0 to M2"):
        bound("gossip:graph=ring", topics)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("gossip:cycles=0", ConfigError, r"Gossip\.cycles must be >= 1"),
        ("gossip:every=0", ConfigError, r"Gossip\.every must be >= 1"),
        ("gossip:pairs=triples", ConfigError, "'triples' does not fit"),
        ("gossip:graph=star", ConfigError, r"graph 'star' is not understood\. Write complete, "),
        ("gossip:graph=regular:3", ConfigError, "an even number of neighbours"),
        ("gossip:graph=M0:M1+M1:M9", UnknownNameError, "unknown node of topology gossip 'M9'"),
        ("gossip:cycle=3", UnknownNameError, "Did you mean 'cycles'"),
    ],
)
def test_errors(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        bound(text)


def test_one_node_and_none_are_no_error() -> None:
    alone = topologies.make("gossip:graph=ring").joined(0, ["M0"], {})
    assert list(alone.round(1, lambda r: State(frozenset({"M0"})))) == [Tick(("M0",), ())]


@dataclass(frozen=True, kw_only=True)
class Gossiped(FedAvg):
    topologies: ClassVar[tuple[str, ...]] = ("gossip",)


@pytest.mark.parametrize("how", ["matching", "sequential"])
def test_whole_networks_come_to_the_mean_weighted_by_examples(how: str) -> None:
    """25, 18 and 33 examples: pairs keep the weighted sum, so that is where all end."""
    nodes = tiny()
    for k, node in enumerate(nodes):
        node.model.load({n: t + k for n, t in node.model.state().items() if t.is_floating_point()})
    before = [node.model.state()["head.bias"] for node in nodes]
    wanted = (25 * before[0] + 18 * before[1] + 33 * before[2]) / 76
    method = Gossiped(rounds=1, local_epochs=0)
    done = run(method, nodes, topology=f"gossip:cycles=40,pairs={how}", progress=False)
    assert done.faults == []
    for node in done.nodes.values():
        got = node.model.state()["head.bias"]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)

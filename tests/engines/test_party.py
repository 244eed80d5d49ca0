"""The same numbers: parties that only know themselves, against all nodes in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed import topologies
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.engines.charter import Charter
from polyfed.engines.decision import Decision, Settled
from polyfed.engines.player import Player
from polyfed.engines.simulated import Network
from polyfed.errors import ConfigError, DataError
from polyfed.record import Recorder
from polyfed.testing import tiny
from polyfed.testing.sets import tiny_sets

SMALL: dict[str, Any] = {"rounds": 3, "batch": 8}
FEDLINKED = {"init_epochs": 1, "distil_epochs": 1, "finetune_epochs": 1, "local_epochs": 1}
FOA = {"projection": 4, "predictor_hidden": 6, "probe_epochs": 0, "neighbours": 5, "lam": 0.1}


def charter_of(
    method: Method, nodes: Sequence[Node], topology: str, host: str | None = None, **more: Any
) -> Charter:
    made = topologies.make(topology)
    names = tuple(sorted(n.name for n in nodes if n.name not in made.places))
    return Charter(run="t", method=method, topology=made, nodes=names, host=host, **more)


def network_of(charter: Charter, nodes: Sequence[Node], **more: Any) -> Network:
    by_name = {node.name: node for node in nodes}
    return Network(charter, by_name.get, **more)


def assert_equal_nodes(got: Node, wanted: Node) -> None:
    ours, theirs = (n.model.state() | n.memory for n in (got, wanted))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{got.name} {name}"


@dataclass(frozen=True, kw_only=True)
class Eager(pf.PartialAveraging):
    """Trains whenever it hears, so several times a round."""

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        yield from super().receive(node, message)
        yield self.phase("again", epochs=1)


CASES: list[tuple[Method, str, str | None, Callable[[], list[Node]]]] = [
    (pf.FedLinked(**SMALL, **FEDLINKED), "star", "hub", tiny),
    (pf.FedLinked(**SMALL, **FEDLINKED), "star", "M1", tiny),
    (pf.FedAvg(**SMALL, local_epochs=1), "star", "hub", tiny),
    (pf.PartialAveraging(**SMALL, scheme="50%"), "gossip:cycles=2", None, tiny),
    (pf.PartialAveraging(**SMALL, groups="ab=rest@M0+M1"), "gossip:cycles=2", None, tiny),
    (Eager(**SMALL, scheme="50%"), "gossip:cycles=4", None, tiny),
    (pf.PartialAveraging(**SMALL, groups="ab=rest@M0+M1"), "groups", "hub", tiny),
    (pf.DynamicAveraging(**SMALL, scheme="50%"), "star", "hub", tiny),
    (pf.LI(**SMALL), "ring", None, tiny),
    (pf.LI(**SMALL), "dual-ring", None, tiny),
    (pf.LI(**SMALL), "pipeline", None, tiny),
    (pf.LI(**SMALL, finetune_epochs=1), "ring:order=random", None, tiny),
    (pf.FedFoA(**SMALL, **FOA, local_epochs=1, per_sample=True), "mesh", None, tiny),
    (pf.FedULM1(**SMALL), "star", "hub", tiny_sets),
    (pf.Local(**SMALL), "alone", None, tiny),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "topology", "host", "make"),
    CASES,
    ids=[f"{m.name}-{t}-{h}" for m, t, h, _ in CASES],
)
def test_parties_compute_what_one_process_computes(
    method: Method, topology: str, host: str | None, make: Callable[[], list[Node]]
) -> None:
    run = pf.run(method, make(), topology=topology, stack="never")
    charter = charter_of(method, make(), topology, host)
    network = network_of(charter, make(), seed=3)
    network.run()
    assert network.over.keys() == set(charter.parties)
    for name in charter.nodes:
        party = network.over[name]
        assert party.player.node is not None
        assert_equal_nodes(party.player.node, run.nodes[name])
        assert (party.accuracy or {})[name] == run.accuracy[name]
    for place, node in network.over[host].player.places.items() if host else ():
        assert_equal_nodes(node, run.places[place])
    sent = [
        vars(crossing)
        for name in charter.parties
        for crossing in network.recorders[name].ledger.crossings()
        if charter.plays(crossing.source) == name
    ]
    assert sorted(map(repr, sent)) == sorted(repr(vars(c)) for c in run.ledger.crossings())
    assert not [f for r in network.recorders.values() for f in r.faults.records]


def test_what_comes_for_a_round_just_decided_is_not_lost() -> None:
    """A leader that is a node hears answers to its decision before it begins the round itself."""
    method = pf.FedLinked(**SMALL, **FEDLINKED)  # its messages are ready when a round begins
    for seed in range(12):
        network = network_of(charter_of(method, tiny(), "star", "M1"), tiny(), seed=seed)
        network.run()
        assert not any(party.is_alone for party in network.over.values()), seed
        assert not [f for r in network.recorders.values() for f in r.faults.records], seed


def test_what_is_received_is_in_the_ledger_too() -> None:
    charter = charter_of(pf.LI(**SMALL), tiny(), "ring")
    network = network_of(charter, tiny())
    network.run()
    books = {name: network.recorders[name].ledger.crossings() for name in charter.nodes}
    for name in charter.nodes:
        heard = [repr(vars(c)) for c in books[name] if c.to == name]
        told = [repr(vars(c)) for other in books for c in books[other] if other != name]
        assert heard
        assert all(each in told for each in heard)


def test_training_counts_again_only_where_it_comes_first() -> None:
    """In round 1 of a ring M0 trains first; in round 2 it hears from M2 before."""
    topology = topologies.make("ring").joined(0, ("M0", "M1", "M2"), {})
    node = tiny()[0]
    player = Player(pf.LI(), topology, node, {}, Recorder.in_memory(), lambda said: None)
    everybody = ("M0", "M1", "M2")
    first = Decision((0, 1), 1, everybody)
    second = Decision((0, 2), 2, everybody, (Settled((0, 1), everybody),))
    start, base = (0, 0, 0), (1, 0, 1)
    assert not player.is_trained(first, start)
    player.trained = (1, start)
    assert player.is_trained(first, start)
    assert not player.is_trained(first, base)
    player.trained = (2, base)
    assert not player.is_trained(second, base)


# ---- the charter ---------------------------------------------------------------------------------


def test_methods_that_pool_data_cannot_run_across_machines() -> None:
    charter = charter_of(pf.Joint(), tiny(), "alone")
    with pytest.raises(ConfigError, match="joint puts the data of all nodes in one place"):
        network_of(charter, tiny()).run()


def test_a_star_needs_a_host_and_a_ring_has_none() -> None:
    with pytest.raises(ConfigError, match="Name the party that plays it"):
        charter_of(pf.FedAvg(), tiny(), "star")
    with pytest.raises(ConfigError, match="no place for a host"):
        charter_of(pf.LI(), tiny(), "ring", "M0")
    with pytest.raises(ConfigError, match="fedavg runs on"):
        charter_of(pf.FedAvg(), tiny(), "ring")


def test_public_inputs_that_differ_are_found_before_training() -> None:
    nodes = tiny()
    nodes[1].data["public"].x.clone()
    other = pf.Data(**(dict(nodes[1].data) | {"public": nodes[1].data["public"].x.flip(0)}))
    nodes[1] = Node(nodes[1].name, other, nodes[1].model, nodes[1].classes)
    charter = charter_of(pf.FedLinked(**SMALL, **FEDLINKED), nodes, "star", "hub")
    network = network_of(charter, nodes)
    with pytest.raises(DataError, match="the public inputs differ"):
        network.run()
    assert not [m for r in network.recorders.values() for m in r.metrics.records]


def test_a_card_tells_shapes_and_a_digest_and_nothing_else() -> None:
    node = tiny()[0]
    plain = charter_of(pf.LI(**SMALL), tiny(), "ring").card(node)
    assert set(plain) == {"sends", "public"}
    sliced = charter_of(pf.PartialAveraging(**SMALL), tiny(), "gossip").card(node)
    assert set(sliced) == {"sends", "public", "shapes", "parts"}
    assert sliced["shapes"]["head.weight"] == [[3, 5], "torch.float32", None]

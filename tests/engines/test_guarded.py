"""Guards across machines: the same bits as in one process, whoever is lost on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import polyfed as pf
from polyfed import topologies
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.engines import peer
from polyfed.engines.charter import Charter
from polyfed.engines.party import Party
from polyfed.engines.privacy import summary
from polyfed.engines.simulated import Event, Network, Weather
from polyfed.errors import ConfigError
from polyfed.maths.accountant import epsilon
from polyfed.methods import _secure
from polyfed.testing import tiny

SMALL: dict[str, Any] = {"rounds": 3, "batch": 8}
ALL = ("M0", "M1", "M2", "M3")
CASES = [
    (pf.FedAvg(**SMALL, guard="secure"), "star", "hub"),
    (pf.FedAvg(**SMALL, guard="clip=0.05,noise=0.1,secure"), "star", "M1"),
    (pf.FedAvg(**SMALL, guard="clip=0.05,noise=0.1,compress=int8"), "star", "hub"),
    (pf.LI(**SMALL, guard="clip=0.05,noise=0.1,compress=float16"), "ring", None),
    (pf.PartialAveraging(**SMALL, scheme="50%", guard="compress=int8"), "gossip:cycles=2", None),
    (pf.PartialAveraging(**SMALL, scheme="50%", guard="secure"), "groups", "hub"),
]


def four() -> list[Node]:
    return [*tiny(), replace(tiny()[1], name="M3")]


def simulated(
    method: Method, topology: str, host: Name | None, events: Sequence[Event] = ()
) -> Network:
    made = {node.name: node for node in four()}
    charter = Charter(
        run="t",
        method=method,
        topology=topologies.make(topology),
        nodes=ALL,
        host=host,
        grace=1.0,
        patience=60.0,
    )
    weather = Weather(slow=dict.fromkeys(charter.parties, 0.2))
    network = Network(charter, made.get, seed=3, events=events, weather=weather)
    network.run(limit=1000.0)
    return network


def assert_as_one_process(network: Network, method: Method, topology: str) -> list[Sequence[Name]]:
    """With the absences that were decided, one process has the same bits; who took part."""
    complete = [p for p in network.over.values() if not p.is_alone]
    held = complete[0].council.accepted
    assert held is not None
    who = [settled.members for settled in held.log]
    absent = {t + 1: sorted(set(ALL) - set(members)) for t, members in enumerate(who)}
    run = pf.run(method, four(), topology=topology, stack="never", absent=absent)
    for party in complete:
        node = party.player.node
        if node is not None:
            ours, theirs = (n.model.state() | n.memory for n in (node, run.nodes[node.name]))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), node.name
    return who


@pytest.mark.parametrize(("method", "topology", "host"), CASES)
def test_parties_compute_what_one_process_computes(
    method: Method, topology: str, host: Name | None
) -> None:
    network = simulated(method, topology, host)
    who = assert_as_one_process(network, method, topology)
    assert all(set(ALL) <= set(members) for members in who)
    assert not [f for r in network.recorders.values() for f in r.faults.records]
    run = pf.run(method, four(), topology=topology, stack="never")
    sent = [
        repr(vars(crossing))
        for name in network.recorders
        for crossing in network.recorders[name].ledger.crossings()
        if network.charter.plays(crossing.source) == name
    ]
    assert sorted(sent) == sorted(repr(vars(c)) for c in run.ledger.crossings())


@pytest.mark.parametrize("at", [0.35, 0.62, 1.1])
@pytest.mark.parametrize("guard", ["secure", "clip=0.05,noise=0.1,compress=int8"])
def test_a_party_that_is_lost_in_the_middle_of_a_round(guard: str, at: float) -> None:
    """The round is played again, with new keys and the same noise, among those who are left."""
    method = pf.FedAvg(**SMALL, guard=guard)
    network = simulated(method, "star", "hub", [Event(at, "crash", ("M2",))])
    who = assert_as_one_process(network, method, "star")
    assert "M2" not in who[-1]
    if guard == "secure":
        faults = [f["fault"] for r in network.recorders.values() for f in r.faults.records]
        assert "messages do not meet" not in faults


def test_a_round_that_is_played_again_has_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums with the same masks would tell the difference of what was summed."""
    keys: list[bytes] = []
    announce = _secure.announce

    def noted(node: Node, topics: list[str]) -> Message:
        message = announce(node, topics)
        if node.name == "M0":
            keys.append(bytes(message.tensors["guard.key"].tolist()))
        return message

    monkeypatch.setattr(_secure, "announce", noted)
    method = pf.FedAvg(**SMALL, guard="secure")
    simulated(method, "star", "hub", [Event(0.62, "crash", ("M2",))])
    assert len(keys) > SMALL["rounds"]  # one round at least was played twice
    assert len(set(keys)) == len(keys)


def test_a_guard_is_checked_before_anything_begins() -> None:
    with pytest.raises(ConfigError, match="li looks at each message"):
        simulated(pf.LI(guard="secure"), "ring", None)


def test_a_federation_file_has_the_guard_among_the_options(tmp_path: Path) -> None:
    federation = {"run": "t", "method": "fedlinked", "nodes": ["M0"], "host": "M0"}
    federation["options"] = {"guard": "secure"}  # type: ignore[assignment]
    site = {"name": "M0", "federation": "federation.yaml", "listen": ["tcp/127.0.0.1:0"]}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(federation))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    with pytest.raises(ConfigError, match="fedlinked looks at each message"):
        peer.run_peer(tmp_path / "site.yaml", insecure=True)


def test_across_machines_noise_is_drawn_from_a_secret_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = []

    def driven(party: Party, link: Any, shown: Any) -> None:
        assert party.player.node is not None
        roots.append(int(party.player.node.memory["guard/root"]))

    @contextlib.contextmanager
    def no_link(*args: Any, **more: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr(peer, "drive", driven)
    monkeypatch.setattr(peer, "zenoh_link", no_link)
    federation = {"run": "t", "method": "fedper", "nodes": ["M0", "M1", "M2"], "host": "M0"}
    (tmp_path / "federation.yaml").write_text(
        yaml.safe_dump({**federation, "options": {"guard": "clip=1,noise=1"}})
    )
    for folder in ("one", "two"):
        site = {"name": "M0", "federation": "federation.yaml", "node": "digits", "folder": folder}
        (tmp_path / "site.yaml").write_text(yaml.safe_dump({**site, "listen": ["tcp/x:1"]}))
        peer.run_peer(tmp_path / "site.yaml", insecure=True)
    assert len(set(roots)) == 2


def test_the_result_of_a_party_has_its_epsilon() -> None:
    method = pf.FedAvg(rounds=2, batch=8, guard="clip=0.05,noise=4")
    network = simulated(method, "star", "hub")
    records = network.recorders["M1"].metrics.records
    assert summary(records, method.guard) == {"epsilon": {"M1": epsilon(4, 2, 1e-5)}, "delta": 1e-5}
    assert summary(network.recorders["hub"].metrics.records, method.guard) == {}

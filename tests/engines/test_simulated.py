"""The simulated network: faults drawn from seeds, and faults one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from polyfed import topologies
from polyfed.cli import app
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.engines import chaos
from polyfed.engines.charter import Charter
from polyfed.engines.simulated import Event, Network, Weather
from polyfed.engines.store import MemoryStore
from polyfed.engines.words import failure
from polyfed.errors import RunError
from polyfed.testing import tiny

PIECES, EACH = 4, 125


@pytest.mark.parametrize("piece", range(PIECES))
def test_five_hundred_seeds_hold(piece: int) -> None:
    """In a process of its own, where types are not checked: that takes ten times as long."""
    command = [sys.executable, "-m", "polyfed", "simulate", "--seed", str(piece * EACH)]
    done = subprocess.run(
        [*command, "--count", str(EACH)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{EACH} of {EACH} seeds held\n"


@pytest.mark.parametrize("seed", [*range(10), 1438])
def test_a_seed_holds(seed: int) -> None:
    """Seed 1438: who had played the last round is gone for ever, and another comes instead."""
    chaos.simulate(seed)


def test_a_seed_is_replayed_event_by_event() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        chaos.simulate(474, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


def test_the_scenarios_are_of_all_kinds() -> None:
    drawn = [chaos.scenario(seed) for seed in range(500)]
    assert {s.charter.topology.name for s in drawn} == set(chaos.Number.topologies)
    verbs = {event.verb for s in drawn for event in s.events}
    assert verbs == {"crash", "start", "cut", "sever", "heal"}
    assert {s.charter.host for s in drawn} == {None, "hub", "M0"}
    assert any(s.weather.loss for s in drawn)
    assert any(s.weather.twice for s in drawn)


def test_the_command_replays_and_counts() -> None:
    one = CliRunner().invoke(app, ["simulate", "--seed", "7", "--trace"])
    assert one.exit_code == 0
    assert "seed 7: " in one.stdout
    assert "1 of 1 seeds held" in one.stdout
    several = CliRunner().invoke(app, ["simulate", "--count", "3"])
    assert several.stdout == "3 of 3 seeds held\n"


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that forgets what it delivered delivers twice, and the checks find it."""
    from polyfed.engines import channel

    monkeypatch.setattr(channel, "_settle", lambda heard, floor: heard.settled.clear())
    with pytest.raises(RunError, match=r"came twice.*Replay: polyfed simulate --seed 1 --trace"):
        chaos.simulate(1)


def test_a_council_without_a_quorum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any side may go on alone, two histories come about."""
    from polyfed.engines.council import Council

    monkeypatch.setattr(Council, "is_enough", lambda self, present: bool(present))
    with pytest.raises(RunError, match="knows another round"):
        chaos.simulate(8)


# ---- one fault after the other -------------------------------------------------------------------


def simulated(
    method: Method,
    topology: str,
    events: Sequence[Event],
    *,
    host: Name | None = None,
    nodes: Sequence[Node] | None = None,
    **more: Any,
) -> Network:
    by_name = {node.name: node for node in nodes or tiny()}
    charter = Charter(
        run="t",
        method=method,
        topology=topologies.make(topology),
        nodes=tuple(sorted(by_name)),
        host=host,
        grace=1.0,
        patience=60.0,
    )
    slow = dict.fromkeys(charter.parties, 0.2)
    network = Network(charter, by_name.get, events=events, weather=Weather(slow=slow), **more)
    network.run(limit=1000.0)
    return network


def log_of(network: Network, name: Name = "M0") -> list[tuple[Name, ...]]:
    held = network.over[name].council.accepted
    assert held is not None
    return [settled.members for settled in held.log]


def assert_as_one_process(network: Network, method: Method, topology: str) -> None:
    """With the absences that were decided, one process computes the same bits."""
    names = {"M0", "M1", "M2"}
    absent = {t + 1: sorted(names - set(who)) for t, who in enumerate(log_of(network))}
    run = pf.run(method, tiny(), topology=topology, stack="never", absent=absent)
    for party in network.over.values():
        node = party.player.node
        if node is None or party.is_alone:
            continue
        ours, theirs = (n.model.state() | n.memory for n in (node, run.nodes[node.name]))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), node.name


LI = pf.LI(rounds=4, batch=8)
PAIRS = pf.PartialAveraging(rounds=4, batch=8, scheme="50%")
FEDAVG = pf.FedAvg(rounds=4, batch=8, local_epochs=1)
ALL = ("M0", "M1", "M2")


@pytest.mark.parametrize("at", [0.9, 2.3])
@pytest.mark.parametrize(
    ("method", "topology", "host", "victim"),
    [
        (LI, "ring", None, "M1"),
        (LI, "dual-ring", None, "M0"),
        (PAIRS, "gossip:cycles=2", None, "M2"),
        (FEDAVG, "star", "hub", "hub"),
        (FEDAVG, "star", "M0", "M0"),
    ],
    ids=["ring", "leader", "gossip", "hub", "host"],
)
def test_who_comes_back_soon_changes_nothing(
    method: Method, topology: str, host: Name | None, victim: Name, at: float
) -> None:
    events = [Event(at, "crash", (victim,)), Event(at + 0.4, "start", (victim,))]
    network = simulated(method, topology, events, host=host)
    everybody = set(network.charter.parties)
    assert all(set(who) == everybody for who in log_of(network))
    assert network.over.keys() == everybody
    assert_as_one_process(network, method, topology)


@pytest.mark.parametrize(
    ("method", "topology", "host"),
    [(LI, "ring", None), (PAIRS, "gossip:cycles=2", None), (FEDAVG, "star", "hub")],
    ids=["ring", "gossip", "star"],
)
def test_the_others_go_on_without_who_stays_away(
    method: Method, topology: str, host: Name | None
) -> None:
    network = simulated(method, topology, [Event(1.3, "crash", ("M1",))], host=host)
    who = log_of(network)
    assert len(who) == 4
    assert "M1" not in who[-1]
    assert_as_one_process(network, method, topology)


def test_who_was_away_takes_part_again() -> None:
    events = [Event(2.6, "crash", ("M2",)), Event(5.0, "start", ("M2",))]
    method = pf.LI(rounds=6, batch=8)
    network = simulated(method, "ring", events)
    present = ["M2" in who for who in log_of(network)]
    assert present[0]
    assert not all(present)
    assert present[-1]
    assert_as_one_process(network, method, "ring")


def test_a_cut_that_heals_costs_a_side_its_rounds() -> None:
    events = [Event(2.6, "cut", ("M2",)), Event(6.0, "heal")]
    method = pf.LI(rounds=7, batch=8)
    network = simulated(method, "ring", events)
    present = ["M2" in who for who in log_of(network)]
    assert (present[0], all(present), present[-1]) == (True, False, True)
    assert_as_one_process(network, method, "ring")


def test_a_severed_link_leaves_one_of_two_out() -> None:
    network = simulated(LI, "ring", [Event(1.0, "sever", ("M1", "M2"))])
    assert log_of(network)[-1] == ("M0", "M1")
    assert_as_one_process(network, LI, "ring")


def test_a_link_that_nobody_needs_may_be_cut() -> None:
    network = simulated(FEDAVG, "star", [Event(0.0, "sever", ("M1", "M2"))], host="hub")
    assert log_of(network)[-1] == (*ALL, "hub")


def test_who_does_not_see_the_leader_does_not_take_over_while_others_do() -> None:
    events = [Event(1.0, "sever", ("M0", "M1")), Event(30.0, "heal")]
    network = simulated(pf.LI(rounds=6, batch=8), "ring", events)
    held = network.over["M0"].council.accepted
    assert held is not None
    assert held.attempt[0] == 0  # M0 led from the beginning to the end


def test_half_of_the_parties_wait_for_the_others() -> None:
    """M1 and M2 are gone; M0 alone is not enough, and ends alone after its patience."""
    network = simulated(LI, "ring", [Event(1.0, "crash", ("M1", "M2"))])
    assert network.over.keys() == {"M0"}
    assert network.over["M0"].is_alone
    faults = [fault["fault"] for fault in network.recorders["M0"].faults.records]
    assert faults == ["left alone"]
    assert network.over["M0"].accuracy is None  # it has not finished
    assert "M0 is left alone after" in str(failure(network.over["M0"]))
    assert "for M1, M2. Nothing is lost" in str(failure(network.over["M0"]))


def test_a_party_that_agreed_to_something_else_takes_no_part() -> None:
    class Divided(Network):
        def _start(self, name: Name) -> None:
            agreed = self.charter
            if name == "M2":
                self.charter = replace(agreed, method=replace(FEDAVG, rounds=9))
            super()._start(name)
            self.charter = agreed

    star = topologies.make("star")
    charter = Charter(run="t", method=FEDAVG, topology=star, nodes=ALL, host="hub", patience=60.0)
    network = Divided(charter, {n.name: n for n in tiny()}.get)
    network.run(limit=1000.0)
    assert {name: party.refused for name, party in network.over.items()} == {
        "M0": None, "M1": None, "M2": "hub", "hub": None,
    }  # fmt: skip
    assert not any(party.states.points for party in network.over.values())
    assert "M2 has another federation file than hub" in str(failure(network.over["M2"]))
    for name in ("M0", "M1", "hub"):
        assert "for M2. Nothing" in str(failure(network.over[name])), name


def test_training_is_not_repeated_in_a_star_when_another_node_is_lost() -> None:
    network = simulated(FEDAVG, "star", [Event(0.35, "crash", ("M1",))], host="hub")
    assert "M1" not in log_of(network)[0]
    trained = [m for m in network.recorders["M0"].metrics.records if "local_loss" in m]
    assert len(trained) == 4  # one a round
    assert_as_one_process(network, FEDAVG, "star")


def test_only_states_that_may_be_needed_are_kept() -> None:
    kept = []

    class Counting(MemoryStore):
        def keep(self, facts: dict[str, Any]) -> None:
            super().keep(facts)
            kept.append(len(self.states))

    charter = Charter(run="t", method=LI, topology=topologies.make("ring"), nodes=ALL, grace=1.0)
    network = Network(charter, {n.name: n for n in tiny()}.get)
    network.stores = {name: Counting() for name in ALL}
    network.run()
    assert max(kept) == 3

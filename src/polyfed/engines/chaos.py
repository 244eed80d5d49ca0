"""Runs on a simulated network with faults drawn from a seed, and what must hold after every event.

A party has one number. In a ring it travels and every visit adds one; with gossip and at a hub
numbers are averaged, in powers of two, so that sums are exact. The checks do not use the engine:

- a history that enough parties have accepted is never changed;
- after every settled round the numbers are what the topology says, worked out here by hand (ring)
  or add up to what they were (gossip);
- nothing that was said is refused, nothing arrives twice, nothing is heard that was not said;
- everybody who is there at the end comes to the end;
- the numbers at the end are bit for bit those of one process in which the same parties were absent
  from the same rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyfed import topologies
from polyfed.core.data import Data
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.engines.charter import Charter
from polyfed.engines.decision import Settled
from polyfed.engines.local import LocalEngine, Settings
from polyfed.engines.progress import Progress
from polyfed.engines.simulated import Chance, Event, Network, Weather
from polyfed.errors import RunError
from polyfed.record import Recorder

_X = "number"
CALM = 15.0  # seconds after which nothing breaks any more
_KINDS = ("star", "star", "ring", "dual-ring", "gossip:cycles=2", "mesh")


@dataclass(frozen=True)
class Idle:
    """A rule that learns nothing."""

    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Nothing."""
        return x.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class Number(Method):
    """One number a node.

    Attributes:
        step: what a node's own work adds to it.
    """

    name: ClassVar[str] = "number"
    title: ClassVar[str] = "one number a node, for the simulated network"
    topologies: ClassVar[tuple[str, ...]] = ("star", "ring", "dual-ring", "gossip", "mesh")

    step: float = 0.0

    def start(self, node: Node) -> Iterable[Phase]:
        """Every node begins with another number."""
        node.memory[_X] = torch.tensor(float(ord(node.name[-1])), dtype=torch.float64)
        return ()

    def local(self, node: Node) -> Iterable[Phase]:
        """Add the step; then a phase that changes nothing, so that the party is busy."""
        node.memory[_X] = node.memory[_X] + self.step
        yield self.phase("work", objective=Idle(), steps=1)

    def sends(self, node: Node) -> Spec:
        """The number."""
        return {_X: TensorSpec((), torch.float64)}

    def send(self, node: Node) -> Message:
        """The number."""
        return Message({_X: node.memory[_X]})

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The mean."""
        mean = torch.stack([m.tensors[_X] for m in got.values()]).mean()
        return {name: Message({_X: mean}) for name in to}

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Take it."""
        node.memory[_X] = message.tensors[_X]
        return ()


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides."""

    seed: int
    charter: Charter
    weather: Weather
    events: tuple[Event, ...]

    def __str__(self) -> str:
        charter = self.charter
        return (
            f"seed {self.seed}: {topologies.label(charter.topology)} of "
            f"{', '.join(charter.parties)}, {charter.method.rounds} rounds; "
            f"loss {self.weather.loss:.2f}; "
            + ("; ".join(map(str, self.events)) or "nothing breaks")
        )


def scenario(seed: int) -> Scenario:
    """What a seed stands for."""
    chance = Chance(seed)

    def below(n: int) -> int:
        return int(chance() * n)

    kind = _KINDS[below(len(_KINDS))]
    nodes = tuple(f"M{i}" for i in range(3 + below(3)))
    host = {0: "hub", 1: "M0"}[below(2)] if kind == "star" else None
    method = Number(rounds=3 + below(4), step=1.0 if "ring" in kind else 0.0)
    charter = Charter(
        run=f"seed-{seed}",
        method=method,
        topology=topologies.make(kind),
        nodes=nodes,
        host=host,
        seed=seed,
        grace=1.0,
        patience=300.0,
        resend=0.3,
    )
    weather = Weather(
        delay=0.02 + 0.2 * chance(),
        loss=0.3 * chance() * below(2),
        twice=0.3 * chance() * below(2),
        notice=0.1 + 0.5 * chance(),
        slow={name: 0.05 + chance() * (2.0 if below(4) == 0 else 0.3) for name in charter.parties},
        skew={name: 0.4 * chance() - 0.2 for name in charter.parties},
    )
    return Scenario(seed, charter, weather, tuple(_faults(charter, chance)))


def _faults(charter: Charter, chance: Chance) -> list[Event]:
    """A few crashes and cuts; some of those that crash never come back, if enough remain."""
    names, events = charter.parties, []
    dead: set[Name] = set()
    for _ in range(int(chance() * 5)):
        at, name = CALM * chance(), names[int(chance() * len(names))]
        if chance() < 0.6:
            events.append(Event(at, "crash", (name,)))
            if 2 * (len(dead) + 1) < len(names) and name != charter.host and chance() < 0.3:
                dead.add(name)
            else:
                events.append(Event(at + 4 * chance(), "start", (name,)))
        elif chance() < 0.5:
            side = tuple(n for n in names if chance() < 0.5)
            events += [Event(at, "cut", side), Event(at + 5 * chance(), "heal")]
        else:
            other = names[(names.index(name) + 1) % len(names)]
            events += [Event(at, "sever", (name, other)), Event(at + 8 * chance(), "heal")]
    calm = CALM + 5.0
    living = tuple(name for name in names if name not in dead)
    events = [e for e in events if not (e.verb == "start" and e.names[0] in dead)]
    events += [Event(calm, "heal"), Event(calm, "start", living)]
    if dead:
        events.append(Event(calm, "crash", tuple(sorted(dead))))
    return sorted(events, key=lambda event: event.at)


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> Scenario:
    """Run a seed; raises RunError, naming it, where anything does not hold."""
    drawn = scenario(seed)
    if trace is not None:
        trace(str(drawn))
    judge = Judge(drawn.charter)
    network = Network(
        drawn.charter,
        lambda name: _node(name) if name in drawn.charter.nodes else None,
        seed=seed,
        weather=drawn.weather,
        events=drawn.events,
        piece=128,
        watch=judge.watch,
        trace=trace,
    )
    try:
        network.run(limit=3000.0)
        judge.end(network)
    except (AssertionError, RunError) as error:
        raise RunError(
            f"{error} ({drawn}). Replay: polyfed simulate --seed {seed} --trace"
        ) from error
    return drawn


def _node(name: Name) -> Node:
    net = nn.Linear(1, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    data = Data(train=(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)))
    return Node(name, data, Model.split(net, all=...))


class Judge:
    """What must hold."""

    def __init__(self, charter: Charter) -> None:
        self.charter = charter
        self.log: list[Settled] = []
        self._seen: dict[Name, Any] = {}
        self._has_begun = False
        self._followers: dict[Any, set[Name]] = {}
        self._numbers = {n: float(ord(n[-1])) for n in charter.nodes}
        self._total = sum(self._numbers.values())
        self._last: list[Name] = []  # nodes in the order they were visited, the last one last

    def watch(self, network: Network) -> None:
        """After every event."""
        for party in (*network.parties.values(), *network.over.values()):
            held = party.council.accepted
            if held is None or self._seen.get(party.name) == held.attempt:
                continue
            self._seen[party.name] = held.attempt
            followers = self._followers.setdefault(held.attempt, set())
            followers.add(party.name)
            if not party.council.is_enough(followers):
                continue  # a leader that dies before it is heard has decided nothing
            self._has_begun = True
            for i, settled in enumerate(held.log):
                if i == len(self.log):
                    self.log.append(settled)
                    self._check_round(network, i + 1)
                _must(self.log[i] == settled, f"{party.name} knows another round {i + 1}")

    def _check_round(self, network: Network, number: int) -> None:
        """A round was settled: the numbers are what they should be."""
        settled = self.log[number - 1]
        here = [n for n in self.charter.nodes if n in settled.members]
        kind = self.charter.topology.name
        found = {n: self._number(network, n, number) for n in self.charter.nodes}
        if "ring" in kind:
            before = [n for n in self._last if n in here]
            number_now = self._numbers[before[-1]] if before else self._numbers[here[0]]
            for name in here:
                number_now += 1
                self._numbers[name] = number_now
            self._last = [*(n for n in self._last if n not in here), *here]
        elif kind == "gossip":
            total = sum(found.values())
            _must(total == self._total, f"the sum is {total} after round {number}")
            self._numbers = found
        else:
            mean = sum(self._numbers[n] for n in here) / len(here)
            self._numbers |= dict.fromkeys(here, mean)
        for name, value in self._numbers.items():
            near = abs(found[name] - value) <= 1e-9 * abs(value)
            _must(near, f"{name} has {found[name]}, not {value}, after round {number}")

    def _number(self, network: Network, name: Name, number: int) -> float:
        """A node's number after a round, from what it has saved."""
        settled = [(0, 0, 0), *((i + 1, *s.attempt) for i, s in enumerate(self.log[:number]))]
        states = network.stores[name].states
        valid = [point for point in states if point in settled]
        return float(states[max(valid)][0][1][_X]) if valid else float(ord(name[-1]))

    def end(self, network: Network) -> None:
        """When all is over."""
        charter = self.charter
        _must(not network.parties, f"{', '.join(network.parties)} never came to the end")
        if not self._has_begun:
            return  # one was gone before the others knew it: all have ended alone
        complete = [p for p in network.over.values() if not p.is_alone]
        _must(bool(complete), "nobody completed the run")
        held = complete[0].council.accepted
        self.log = list(held.log) if held is not None else []
        _must(len(self.log) == charter.method.rounds, f"{len(self.log)} rounds were settled")
        absent = {
            i + 1: tuple(n for n in charter.nodes if n not in s.members)
            for i, s in enumerate(self.log)
        }
        engine = LocalEngine(
            charter.method,
            [_node(name) for name in charter.nodes],
            charter.topology,
            Settings(seed=charter.seed, absent=absent, stack="never"),
            Recorder.in_memory(),
            Progress(),
        )
        engine.run()
        for party in complete:
            node = party.player.node
            if node is not None:
                equal = torch.equal(node.memory[_X], engine.nodes[node.name].memory[_X])
                _must(equal, f"{node.name} does not have the number of one process")
        self._check_books(network)

    def _check_books(self, network: Network) -> None:
        """Nothing was refused, and nobody heard what was not said."""
        said: Counter[Any] = Counter()
        heard: Counter[Any] = Counter()
        for name, recorder in network.recorders.items():
            bad = [f for f in recorder.faults.records if f["fault"] != "left alone"]
            _must(not bad, f"{name} recorded {bad[:1]}")
            for crossing in recorder.ledger.crossings():
                key = (crossing.tick, crossing.source, crossing.to, crossing.bytes)
                (said if self.charter.plays(crossing.source) == name else heard)[key] += 1
        _must(heard <= said, f"heard and not said: {heard - said}")


def _must(holds: bool, text: str) -> None:
    if not holds:
        raise RunError(text)

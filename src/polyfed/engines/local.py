"""The local engine: all nodes in one process, tick by tick.

    start phases; checkpoint 0
    tick t:  local phases, send  ->  meetings: check, combine  ->  check, receive phases
             evaluate (on schedule), notes to metrics, checkpoint t
    finish phases; evaluate; result

Every message is entered in the ledger where it crosses, and checked against what the method
announces; a bad one is refused, recorded in faults, and the round goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.message import Message, Spec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Meeting, Topology
from polyfed.engines.gate import check_federation
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError, MessageError, UnknownNameError
from polyfed.record import Recorder
from polyfed.record.checkpoint import Checkpoint
from polyfed.train import accuracy, fit

FINAL = "final"


@dataclass(frozen=True)
class Settings:
    """How a run is carried out; none of it changes what a method computes.

    Attributes:
        seed: root of every random stream.
        device: where tensors live: cpu, cuda, cuda:1, ...
        evaluate_every: rounds between evaluations on the test splits; the last is always evaluated.
        absent: nodes that are away in a round, {3: ("M1",)}.
    """

    seed: int = 0
    device: str = "cpu"
    evaluate_every: int = 1
    absent: Mapping[int, tuple[Name, ...]] | None = None

    def __post_init__(self) -> None:
        if self.evaluate_every < 1:
            raise ConfigError(f"evaluate_every must be >= 1, got {self.evaluate_every}.")


class LocalEngine:
    """One run of one method on one federation."""

    def __init__(
        self,
        method: Method,
        nodes: Sequence[Node],
        topology: Topology,
        settings: Settings,
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        check_federation(nodes)
        _check_names([n.name for n in nodes], topology, settings)
        prepared = method.prepare(nodes)
        method.check(prepared)
        device, moved = torch_device(settings.device), dict[int, Tensor]()
        seed = settings.seed
        self.method, self.topology, self.settings = method, topology, settings
        self.recorder, self.progress = recorder, progress
        self.nodes = {
            n.name: n.working_copy(seed, device, moved)
            for n in sorted(prepared, key=lambda n: n.name)
        }
        self.places = {name: Node(name, seed=seed) for name in topology.places}
        self._tick = 0

    def run(self, point: Checkpoint | None = None) -> dict[Name, float]:
        """Run to the end, from the start or from a checkpoint; the final test accuracies."""
        rounds = self.method.rounds
        self.progress.begin(f"{self.method.name} seed {self.settings.seed}", rounds)
        if point is None:
            self._begin(rounds)
        else:
            point.load_into([*self.nodes.values(), *self.places.values()])
            self._tick = point.tick
            self.progress.skip(point.tick)
        accuracies: dict[Name, float] = {}
        for t in range(self._tick + 1, rounds + 1):
            accuracies = self._round(t, is_last=t == rounds)
        if rounds:
            self._train("finish", ((n, self.method.finish(n)) for n in self.nodes.values()))
        if not accuracies or type(self.method).finish is not Method.finish:
            accuracies = self._evaluate()
        self._note(FINAL, accuracies)
        self.progress.end()
        return accuracies

    def _begin(self, rounds: int) -> None:
        started = time.perf_counter()
        if rounds:
            self._train("start", ((n, self.method.start(n)) for n in self.nodes.values()))
        self._close_tick(evaluate=True, started=started)

    def _round(self, t: int, *, is_last: bool) -> dict[Name, float]:
        started = time.perf_counter()
        self._tick = t
        alive = frozenset(self.nodes) - self._absent(t)
        tick = self.topology.tick(t, alive)
        active = [self.nodes[name] for name in tick.active]
        self._train("local", ((node, self.method.local(node)) for node in active))
        for meeting in tick.meetings:
            replies = self._meet(meeting)
            heard = ((self.nodes[n], self.method.receive(self.nodes[n], m)) for n, m in replies)
            self._train("receive", heard)
        due = is_last or t % self.settings.evaluate_every == 0
        return self._close_tick(evaluate=due, started=started)

    def _absent(self, t: int) -> frozenset[Name]:
        away = frozenset((self.settings.absent or {}).get(t, ())).intersection(self.nodes)
        for name in sorted(away):
            self.recorder.faults.append({"tick": t, "node": name, "fault": "absent"})
        return away

    def _meet(self, meeting: Meeting) -> list[tuple[Name, Message]]:
        place = self.places.setdefault(meeting.at, Node(meeting.at, seed=self.settings.seed))
        got: dict[Name, Message] = {}
        for name in sorted(meeting.sources):
            node = self.nodes[name]
            message = self.method.send(node)
            if self._crosses(name, meeting.at, message, self.method.sends(node)):
                got[name] = message
        if not got:
            return []
        replies = self.method.combine(place, got, [n for n in meeting.to if n in self.nodes])
        return [
            (name, replies[name])
            for name in sorted(replies)
            if self._crosses(meeting.at, name, replies[name], self.method.hears(self.nodes[name]))
        ]

    def _crosses(self, source: Name, to: Name, message: Message, expected: Spec) -> bool:
        """Enter the message in the ledger; refuse it if it is not what was announced."""
        self.recorder.ledger.enter(self._tick, source, to, message)
        try:
            message.check(expected)
        except MessageError as error:
            record = {"tick": self._tick, "node": source, "to": to, "fault": "message refused"}
            self.recorder.faults.append(record | {"why": str(error)})
            return False
        return True

    def _train(self, stage: str, work: Iterable[tuple[Node, Iterable[Phase]]]) -> None:
        """Train the phases of each node; the random streams are named by tick, stage and place."""
        for node, phases in work:
            for index, phase in enumerate(phases):
                self.progress.working(node.name, phase.label)
                done = fit(node, phase, "tick", self._tick, stage, index)
                if done.steps:
                    node.notes[f"{phase.label}_loss"] = done.loss
                    node.notes[f"{phase.label}_epochs"] = done.epochs
                    if done.loss != done.loss:
                        fault = {
                            "tick": self._tick,
                            "node": node.name,
                            "fault": "training diverged",
                        }
                        self.recorder.faults.append(
                            fault | {"why": f"loss of '{done.label}' is NaN"}
                        )

    def _evaluate(self) -> dict[Name, float]:
        views: dict[Name, Node] = {}
        for node in self.nodes.values():
            views |= self.method.views(node)
        return {
            name: accuracy(view.model, view.data["test"])
            for name, view in sorted(views.items())
            if "test" in view.data
        }

    def _close_tick(self, *, evaluate: bool, started: float) -> dict[Name, float]:
        accuracies = self._evaluate() if evaluate else {}
        self._note(self._tick, accuracies)
        seconds = round(time.perf_counter() - started, 4)
        self.recorder.metrics.append({"tick": self._tick, "seconds": seconds})
        self.recorder.checkpoint(self._tick, [*self.nodes.values(), *self.places.values()])
        self.progress.round_done(self._tick, accuracies)
        return accuracies

    def _note(self, tick: int | str, accuracies: Mapping[Name, float]) -> None:
        """Write the notes of every node, then its accuracy, to the metrics."""
        for node in [*self.nodes.values(), *self.places.values()]:
            if node.notes:
                self.recorder.metrics.append({"tick": tick, "node": node.name, **node.notes})
                node.notes.clear()
        for name, value in accuracies.items():
            self.recorder.metrics.append({"tick": tick, "node": name, "test_accuracy": value})


def _check_names(names: Sequence[Name], topology: Topology, settings: Settings) -> None:
    for name in names:
        if name in topology.places:
            raise ConfigError(
                f"node name {name!r} is taken: the topology {topology.name} has a place of that "
                "name. Call the node something else."
            )
    for name in (n for away in (settings.absent or {}).values() for n in away):
        if name not in names:
            raise UnknownNameError("absent node", name, names)


def torch_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}. Use cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this machine has no CUDA device. Use --device cpu.")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each backend has its own
        raise ConfigError(f"device {name!r} cannot be used here: {error}") from error
    return device

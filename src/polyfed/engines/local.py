"""The local engine: all nodes in one process, tick by tick.

    start phases; checkpoint 0
    round t: every tick: local phases, send  ->  meetings: check, combine  ->  check, receive phases
             evaluate (on schedule), notes to metrics, checkpoint t
    finish phases; evaluate; result

Every message is entered in the ledger where it crosses, and checked against what the method
announces; a bad one is refused, recorded in faults, and the round goes on without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.faults import Faults
from polyfed.core.message import Message, Spec, about, look_at
from polyfed.core.method import Method
from polyfed.core.model import Precision
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Meeting, State, Topology
from polyfed.engines.gate import check_federation
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError, MessageError, UnknownNameError
from polyfed.methods._guard import guarded
from polyfed.record import Recorder
from polyfed.record.checkpoint import Checkpoint
from polyfed.train.loop import Fitted
from polyfed.train.together import Done, Exam, Stack, Trainer
from polyfed.train.track import Job

FINAL = "final"
_TIMES = 200  # as long as a checkpoint took, until the next: large states would take half the time
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How a run is carried out; none of it changes what a method computes, but for rounding.

    Attributes:
        seed: root of every random stream.
        device: where tensors live: cpu, cuda, cuda:1, ...
        evaluate_every: rounds between evaluations on the test splits; the last is always evaluated.
        absent: nodes that are away in a round, {3: ("M1",)}.
        stack: train equal phases of equal networks as one computation: where a measurement says it
            is faster (auto), wherever possible (always), or never.
        precision: what networks compute in; bfloat16 is for GPUs (parameters stay float32).
        fail: what breaks and when, such as "cut 0-1 @3; kill M2 @5; heal @8" (`core/faults.py`).
        checkpoint_every: rounds between checkpoints in the run folder; 0 writes none.
        checkpoint_seconds: time between checkpoints, at least: of short rounds some are left out,
            and more of them where a checkpoint takes long.
    """

    seed: int = 0
    device: str = "cpu"
    evaluate_every: int = 1
    absent: Mapping[int, tuple[Name, ...]] | None = None
    stack: Stack = "auto"
    precision: Precision = "float32"
    fail: str | None = None
    checkpoint_every: int = 1
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        check.types(self)
        if self.evaluate_every < 1:
            raise ConfigError(f"evaluate_every must be >= 1, got {self.evaluate_every}.")
        check.at_least(self, "checkpoint_every", 0)
        check.at_least(self, "checkpoint_seconds", 0)
        check.one_of(self, "stack", ("auto", "always", "never"))
        check.one_of(self, "precision", ("float32", "bfloat16"))


@dataclass(frozen=True)
class Work:
    """What a run asks for in one of its rounds."""

    tick: int
    asked: Sequence[Job] | Sequence[Exam]


Steps = Generator[Work, Sequence[Done], T]


class LocalEngine:
    """One run of one method on one federation.

    A run is a generator of work (`steps`): whoever drives it does the work, of this run alone or of
    several runs together.
    """

    def __init__(
        self,
        method: Method,
        nodes: Sequence[Node],
        topology: Topology,
        settings: Settings,
        recorder: Recorder,
        progress: Progress,
        moved: dict[int, Tensor] | None = None,
        *,
        owned: bool = False,
    ) -> None:
        method, topology = guarded(method, topology)
        hubs = [n for n in nodes if method.hub_trains and n.name in topology.places]
        parties = [n for n in nodes if not any(n is hub for hub in hubs)]
        check_federation([*parties, *(hub for hub in hubs if "train" in hub.data)])
        _check_names([n.name for n in parties], topology, settings)
        self._faults = Faults.parse(settings.fail or "", [n.name for n in parties], method.rounds)
        if not topology.has_links and any(len(e.what) == 2 for e in self._faults.events):
            raise ConfigError(
                f"fail {settings.fail!r}: the topology {topology.name} has no links between nodes "
                "to cut. Use ring, dual-ring, pipeline, mesh or gossip, or kill a node."
            )
        prepared = method.prepare([replace(n, seed=settings.seed) for n in parties])
        method.check([*prepared, *hubs])
        device, moved = torch_device(settings.device), {} if moved is None else moved
        seed = settings.seed
        self.method, self.settings = method, settings
        self.recorder, self.progress = recorder, progress
        self.config: Mapping[str, Any] = {}  # enough to run it again, where that is known
        self.nodes = {
            n.name: n.working_copy(seed, device, moved, owned=owned)
            for n in sorted(prepared, key=lambda n: n.name)
        }
        self.topology = topology.joined(seed, self.nodes, method.topics(prepared))
        self.places = {name: Node(name, seed=seed) for name in self.topology.places}
        self.places |= {n.name: n.working_copy(seed, device, moved) for n in hubs}
        self._set_precision([*self.nodes.values(), *self.places.values()])
        self._tick, self._spent, self._resumed = 0, 0.0, time.perf_counter()
        self._due = 0.0  # when the next checkpoint is
        self._visits: Counter[tuple[str, Name]] = Counter()

    def run(self, point: Checkpoint | None = None) -> dict[Name, float]:
        """Run to the end, from the start or from a checkpoint; the final test accuracies."""
        return drive([self.steps(point)], Trainer(self.settings.stack))[0]

    def steps(self, point: Checkpoint | None = None) -> Steps[dict[Name, float]]:
        """The run as a generator: yields jobs or exams, takes what they came to."""
        rounds = self.method.rounds
        self._resumed = time.perf_counter()
        self._due = self._resumed + self.settings.checkpoint_seconds
        self.progress.begin(f"{self.method.name} seed {self.settings.seed}", rounds)
        if point is None:
            yield from self._begin(rounds)
        else:
            point.load_into([*self.nodes.values(), *self.places.values()])
            self._tick = point.tick
            self.progress.skip(point.tick)
        accuracies: dict[Name, float] = {}
        for t in range(self._tick + 1, rounds + 1):
            accuracies = yield from self._round(t, is_last=t == rounds)
        if rounds:
            yield from self._train(
                "finish", ((n, self.method.finish(n)) for n in self.nodes.values())
            )
        if not accuracies or type(self.method).finish is not Method.finish:
            accuracies = yield from self._evaluate()
        self._note(FINAL, accuracies)
        self.progress.end()
        return accuracies

    def _begin(self, rounds: int) -> Steps[None]:
        if rounds:
            yield from self._train(
                "start", ((n, self.method.start(n)) for n in self.nodes.values())
            )
        yield from self._close_round(evaluate=True)

    def _round(self, t: int, *, is_last: bool) -> Steps[dict[Name, float]]:
        self._tick = t
        self._visits.clear()
        self._record_absent(t)
        for tick in self.topology.round(t, self._state):
            active = [self.nodes[name] for name in tick.active]
            yield from self._train("local", ((node, self.method.local(node)) for node in active))
            yield from self._meet(tick.meetings)
        due = is_last or t % self.settings.evaluate_every == 0
        return (yield from self._close_round(evaluate=due))

    def _state(self, t: int) -> State:
        """What works in round t."""
        script = self._faults.state(t)
        killed = frozenset(self._faults.names) - script.alive
        return State(frozenset(self.nodes) - killed - self._away(t), script.cut)

    def _away(self, t: int) -> frozenset[Name]:
        return frozenset((self.settings.absent or {}).get(t, ())) & frozenset(self.nodes)

    def _record_absent(self, t: int) -> None:
        changes = [*self._faults.changes(t), *((name, "absent") for name in sorted(self._away(t)))]
        for what, fault in changes:
            self.recorder.faults.append({"tick": t, "node": what, "fault": fault})

    def _meet(self, meetings: Sequence[Meeting]) -> Steps[None]:
        """All send, then all meetings combine, then all receive."""
        names = sorted({name for meeting in meetings for name in meeting.sources})
        nodes = {name: self.nodes[name] for name in names}
        said = {n: (self.method.send(node), self.method.sends(node)) for n, node in nodes.items()}
        look_at(message for message, _ in said.values())
        arrived = [(meeting, self._collect(meeting, said)) for meeting in meetings]
        answers: list[tuple[Meeting, Mapping[Name, Message]]] = []
        for meeting, got in arrived:
            if got:
                answers.append((meeting, (yield from self._combine(meeting, got))))
        look_at({id(m): m for _, replies in answers for m in replies.values()}.values())
        heard = [each for meeting, replies in answers for each in self._hear(meeting, replies)]
        while heard:  # who hears several times, listens to one after the other
            now, later, busy = list[tuple[Node, Message]](), list[tuple[Node, Message]](), set()
            for node, message in heard:
                (later if node.name in busy else now).append((node, message))
                busy.add(node.name)
            yield from self._train("receive", ((n, self.method.receive(n, m)) for n, m in now))
            heard = later

    def _collect(
        self, meeting: Meeting, said: Mapping[Name, tuple[Message, Spec]]
    ) -> dict[Name, Message]:
        """What arrives at a meeting, of what was said."""
        got = {}
        for name in sorted(meeting.sources):
            message, spec = said[name][0].about(meeting.topic), about(said[name][1], meeting.topic)
            if self._crosses(name, meeting.at, message, spec, meeting.hops):
                got[name] = message
        return got

    def _combine(self, meeting: Meeting, got: dict[Name, Message]) -> Steps[Mapping[Name, Message]]:
        place = self.nodes.get(meeting.at) or self.places.setdefault(
            meeting.at, Node(meeting.at, seed=self.settings.seed)
        )
        yield from self._train("gather", [(place, self.method.gather(place, got))])
        try:
            return self.method.combine(place, got, [n for n in meeting.to if n in self.nodes])
        except MessageError as error:
            record = {"tick": self._tick, "node": meeting.at, "fault": "messages do not meet"}
            self.recorder.faults.append(record | {"why": str(error)})
            return {}

    def _hear(
        self, meeting: Meeting, replies: Mapping[Name, Message]
    ) -> list[tuple[Node, Message]]:
        """What arrives of a meeting's replies."""
        heard = []
        for name in sorted(replies):
            node, reply = self.nodes[name], replies[name]
            spec = about(self.method.hears(node), meeting.topic)
            if self._crosses(meeting.at, name, reply, spec, meeting.hops):
                heard.append((node, reply))
        return heard

    def _crosses(self, source: Name, to: Name, message: Message, expected: Spec, hops: int) -> bool:
        """Enter the message in the ledger; refuse it if it is not what was announced."""
        if source != to:
            self.recorder.ledger.enter(self._tick, source, to, message, hops)
        try:
            message.check(expected)
        except MessageError as error:
            record = {"tick": self._tick, "node": source, "to": to, "fault": "message refused"}
            self.recorder.faults.append(record | {"why": str(error)})
            return False
        return True

    def _train(self, stage: str, work: Iterable[tuple[Node, Iterable[Phase]]]) -> Steps[None]:
        """Train the phases of each node; random streams are named by round, stage and place.

        A node that comes to the same stage again in a round has streams of its own for that.
        """
        running: list[tuple[Node, Iterator[Phase], tuple[str | int, ...]]] = []
        for node, phases in work:
            if phases is None:
                raise ConfigError(f"{self.method.name}.{stage} returns nothing: write return ().")
            visit = self._visits[stage, node.name]
            self._visits[stage, node.name] += 1
            running.append((node, iter(phases), ("visit", visit) if visit else ()))
        index = 0
        while running:
            jobs: list[Job] = []
            still = []
            for node, phases, again in running:
                phase = next(phases, None)
                if phase is not None:
                    node.model.check_parts(phase.parts)
                    self._set_precision([node])  # a method may have given it another model
                    path = ("tick", self._tick, stage, index, *again)
                    shown = partial(self.progress.working, node.name, phase.label)
                    jobs.append(Job(node, phase, path, shown))
                    still.append((node, phases, again))
            running, index = still, index + 1
            if jobs:
                for job, done in zip(jobs, (yield from self._ask(jobs)), strict=True):
                    self._note_training(job.node, done)

    def _set_precision(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.model.precision = self.settings.precision

    def _note_training(self, node: Node, done: Fitted) -> None:
        if not done.steps:
            return
        node.notes[f"{done.label}_loss"] = done.loss
        node.notes[f"{done.label}_epochs"] = done.epochs
        if done.loss != done.loss:
            fault = {"fault": "training diverged", "why": f"loss of '{done.label}' is NaN"}
            self.recorder.faults.append({"tick": self._tick, "node": node.name, **fault})
            self.progress.trouble(f"round {self._tick}, {node.name}: {fault['why']}")

    def _evaluate(self) -> Steps[dict[Name, float]]:
        views: dict[Name, Node] = {}
        for node in self.nodes.values():
            views |= self.method.views(node)
        self._set_precision(views.values())
        names = [name for name, view in sorted(views.items()) if "test" in view.data]
        scores = yield from self._ask([Exam(views[name]) for name in names])
        return dict(zip(names, map(float, scores), strict=True))  # a person's score may be a tensor

    def _ask(self, asked: Sequence[Job] | Sequence[Exam]) -> Steps[list[Any]]:
        """Have work done by whoever drives the run, and count its share of time as the run's."""
        if not asked:
            return []
        self._spent += time.perf_counter() - self._resumed
        done = yield Work(self._tick, asked)
        self._resumed = time.perf_counter()
        self._spent += sum(each.seconds for each in done)
        return [each.result for each in done]

    def _close_round(self, *, evaluate: bool) -> Steps[dict[Name, float]]:
        accuracies = (yield from self._evaluate()) if evaluate else {}
        self._note(self._tick, accuracies)
        now = time.perf_counter()
        seconds = round(self._spent + now - self._resumed, 4)
        self._spent, self._resumed = 0.0, now
        self.recorder.metrics.append({"tick": self._tick, "seconds": seconds})
        every, seconds = self.settings.checkpoint_every, self.settings.checkpoint_seconds
        if every and self._tick % every == 0 and now >= self._due:
            self.recorder.checkpoint(self._tick, [*self.nodes.values(), *self.places.values()])
            took = time.perf_counter() - now
            self._due = now + max(seconds, _TIMES * took if seconds else 0.0)
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


def drive(runs: Sequence[Steps[T]], trainer: Trainer) -> list[T]:
    """Do the work of several runs, in step: what they ask for at the same time is done together.

    No run is a round ahead of another: one whose round took fewer phases waits, so that its next
    phases can be trained with those of the others.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Work] = {}

    def resume(i: int, done: Sequence[Done] | None) -> None:
        try:
            waiting[i] = next(runs[i]) if done is None else runs[i].send(done)
        except StopIteration as end:
            waiting.pop(i, None)
            results[i] = end.value

    for i in range(len(runs)):
        resume(i, None)
    while waiting:
        last = min(work.tick for work in waiting.values())
        now = {i: work.asked for i, work in waiting.items() if work.tick == last}
        jobs = [(i, job) for i, asked in now.items() for job in asked if isinstance(job, Job)]
        exams = [(i, exam) for i, asked in now.items() for exam in asked if isinstance(exam, Exam)]
        done: dict[int, list[Done]] = {i: [] for i in now}
        for (i, _), each in zip(jobs, trainer.train([job for _, job in jobs]), strict=True):
            done[i].append(each)
        for (i, _), each in zip(exams, trainer.examine([e for _, e in exams]), strict=True):
            done[i].append(each)
        for i, given in done.items():
            resume(i, given)
    return [results[i] for i in range(len(runs))]


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

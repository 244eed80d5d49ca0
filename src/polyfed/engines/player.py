"""The player: what one party does in a round, as a generator.

    for every tick:  train, if active  ->  say, to the place of every meeting it is a source of
                     as a place: wait for what is said, combine, answer
                     wait for the answers of its meetings, receive

It yields `Work` (jobs or exams; whoever drives it sends back what they came to) and `Await` (what
it cannot go on without; it is resumed when `heard` holds all of it). It computes what `LocalEngine`
computes for that node and for the places the party plays, in the same order, from the same random
streams: the numbers are equal bit for bit. It knows no network, no clock and no other party.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyfed.core.message import Message, Spec, about
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Meeting, State, Tick, Topology
from polyfed.engines.decision import Decision
from polyfed.engines.store import Point
from polyfed.errors import MessageError, PolyfedError
from polyfed.methods._guard import guarded
from polyfed.record import Recorder
from polyfed.train.loop import Fitted
from polyfed.train.together import Exam, Trainer
from polyfed.train.track import Job

SAY, ANSWER = "say", "answer"
Key = tuple[str, int, int, Name, Name]  # say or answer, tick, meeting, from, to


@dataclass(frozen=True)
class Work:
    """Jobs or exams that must be done before the player goes on."""

    jobs: Sequence[Job] | Sequence[Exam]

    def do(self, trainer: Trainer) -> list[Any]:
        """What they come to."""
        jobs = [job for job in self.jobs if isinstance(job, Job)]
        exams = [exam for exam in self.jobs if isinstance(exam, Exam)]
        return [done.result for done in (*trainer.train(jobs), *trainer.examine(exams))]


@dataclass(frozen=True)
class Await:
    """What must have arrived before the player goes on."""

    keys: frozenset[Key]


@dataclass(frozen=True)
class Said:
    """A message on its way: where it belongs, and what it holds; None is nothing to say."""

    key: Key
    message: Message | None
    spec: Spec = field(default_factory=dict)
    topic: str = ""


Steps = Generator[Work | Await, Any, Any]


class Player:
    """A node, or the places of a topology, or both.

    Args:
        method: with its hyper-parameters.
        topology: joined among all nodes.
        node: the party's own; None if it plays places only.
        places: those that it plays.
        recorder: what happens is written there.
        tell: sends something to the party that plays its receiver; not called for oneself.
    """

    def __init__(
        self,
        method: Method,
        topology: Topology,
        node: Node | None,
        places: Mapping[Name, Node],
        recorder: Recorder,
        tell: Callable[[Said], None],
    ) -> None:
        self.method, self.topology, self.node = guarded(method, topology)[0], topology, node
        self.places, self.recorder, self._tell = dict(places), recorder, tell
        self.heard: dict[Key, tuple[Message, Spec] | MessageError | None] = {}
        self.trained: tuple[int, Point] | None = None  # the round whose first training is done, and
        # from what, while nothing has been heard in it
        self._unsaid: dict[str, Tensor] = {}  # the node's memory before it said anything in it
        self._tick = 0
        self._visits: Counter[tuple[str, Name]] = Counter()

    @property
    def own(self) -> list[Node]:
        """All that has state here."""
        return [*([] if self.node is None else [self.node]), *self.places.values()]

    # ---- stages of a run -----------------------------------------------------------------------

    def start(self) -> Steps:
        """Before the first round."""
        self._tick = 0
        if self.node is not None and self.method.rounds:
            yield from self._train("start", self.node, self.method.start(self.node))

    def round(self, decision: Decision, base: Point) -> Steps:
        """One round, as decided, from the state that `base` names."""
        self._tick = decision.round
        self._visits.clear()
        trained = (decision.round, base)
        is_trained = self.is_trained(decision, base)
        me = None if self.node is None else self.node.name
        for k, tick in enumerate(self._ticks(decision)):
            if self.node is not None and me in tick.active:
                if is_trained:
                    self._visits["local", self.node.name] += 1
                    self.node.memory = dict(self._unsaid)
                else:
                    is_first = not self._visits
                    yield from self._train("local", self.node, self.method.local(self.node))
                    self.trained = trained if is_first else None
                    self._unsaid = dict(self.node.memory)
                is_trained = False
            self._say(k, tick.meetings)
            for i, meeting in enumerate(tick.meetings):
                if self._plays(meeting.at):
                    yield from self._meet(k, i, meeting)
            for i, meeting in enumerate(tick.meetings):
                if self.node is not None and me in meeting.to:
                    yield from self._listen(k, i, meeting)

    def is_trained(self, decision: Decision, base: Point) -> bool:
        """Whether the state is that after the first thing to do, the same training as before."""
        if self.node is None or self.trained != (decision.round, base):
            return False
        me = self.node.name
        for tick in self._ticks(decision):
            if me in tick.active:
                return True
            if any(me in (m.at, *m.sources, *m.to) for m in tick.meetings):
                return False
        return False

    def _ticks(self, decision: Decision) -> Iterable[Tick]:
        def seen(t: int) -> State:
            members = decision.members if t >= decision.round else decision.log[t - 1].members
            return State(frozenset(members) & frozenset(self.topology.names))

        return self.topology.round(decision.round, seen)

    def finish(self) -> Steps:
        """After the last round."""
        if self.node is not None and self.method.rounds:
            yield from self._train("finish", self.node, self.method.finish(self.node))

    def evaluate(self) -> Steps:
        """The test accuracy of what the node answers for."""
        views = {} if self.node is None else self.method.views(self.node)
        names = [name for name, view in sorted(views.items()) if "test" in view.data]
        scores = (yield Work([Exam(views[name]) for name in names])) if names else []
        return dict(zip(names, scores, strict=True))

    # ---- a tick --------------------------------------------------------------------------------

    def _say(self, k: int, meetings: Sequence[Meeting]) -> None:
        node = self.node
        mine = [
            (i, m) for i, m in enumerate(meetings) if node is not None and node.name in m.sources
        ]
        if node is None or not mine:
            return
        message, spec = self.method.send(node), self.method.sends(node)
        for i, meeting in mine:
            part, announced = message, spec
            if meeting.topic:
                part = Message(about(message.tensors, meeting.topic))
                announced = about(spec, meeting.topic)
            key = (SAY, k, i, node.name, meeting.at)
            self._cross(Said(key, part, announced, meeting.topic), meeting.hops)

    def _meet(self, k: int, i: int, meeting: Meeting) -> Steps:
        """As the place of a meeting: wait for all, combine, answer."""
        place = self.node if self.node is not None and meeting.at == self.node.name else None
        place = place or self.places[meeting.at]
        keys = {name: (SAY, k, i, name, meeting.at) for name in sorted(meeting.sources)}
        yield Await(frozenset(keys.values()))
        got = {}
        for name, key in keys.items():
            message = self._take(key, None, meeting.hops)
            if message is not None:
                got[name] = message
        replies: Mapping[Name, Message] = {}
        if got:
            self.trained = None
            try:
                yield from self._train("gather", place, self.method.gather(place, got))
                to = [n for n in meeting.to if n in self.topology.names]
                replies = self.method.combine(place, got, to)
            except (PolyfedError, RuntimeError, ValueError, LookupError) as error:
                self._fault(meeting.at, "messages do not meet", str(error))
        for name in sorted(meeting.to):
            key = (ANSWER, k, i, meeting.at, name)
            if name in replies:
                self._cross(Said(key, replies[name]), meeting.hops)
            else:
                self._hand(Said(key, None))

    def _listen(self, k: int, i: int, meeting: Meeting) -> Steps:
        node = self.node
        if node is None:
            return
        key = (ANSWER, k, i, meeting.at, node.name)
        yield Await(frozenset((key,)))
        spec = about(self.method.hears(node), meeting.topic)
        message = self._take(key, spec, meeting.hops)
        if message is not None:
            self.trained = None
            yield from self._train("receive", node, self.method.receive(node, message))

    # ---- messages ------------------------------------------------------------------------------

    def _plays(self, place: Name) -> bool:
        return place in self.places or (self.node is not None and place == self.node.name)

    def _cross(self, said: Said, hops: int) -> None:
        """Enter a message in the ledger as it leaves, and send it."""
        source, to = said.key[3:]
        if source != to and said.message is not None:
            self.recorder.ledger.enter(self._tick, source, to, said.message, hops)
        self._hand(said)

    def _hand(self, said: Said) -> None:
        if self._plays(said.key[4]):
            self.heard[said.key] = None if said.message is None else (said.message, said.spec)
        else:
            self._tell(said)

    def _take(self, key: Key, spec: Spec | None, hops: int) -> Message | None:
        """What arrived, if it is what was announced; else it is refused, and that is recorded."""
        source, to = key[3:]
        found = self.heard.pop(key)
        if found is None:
            return None
        try:
            if isinstance(found, MessageError):
                raise found
            message, announced = found
            expected = announced if spec is None else spec
            message = _in_order(message, expected)  # safetensors has an order of its own
            if not self._plays(source) and source != to:
                self.recorder.ledger.enter(self._tick, source, to, message, hops)
            message.check(expected)
        except (MessageError, RuntimeError) as error:  # torch cannot look at every dtype
            self._fault(source, "message refused", str(error), to=to)
            return None
        return message

    # ---- training ------------------------------------------------------------------------------

    def _train(self, stage: str, node: Node, phases: Iterable[Phase]) -> Steps:
        """Phases one after the other; random streams are named by round, stage and place."""
        visit = self._visits[stage, node.name]
        self._visits[stage, node.name] += 1
        again: tuple[str | int, ...] = ("visit", visit) if visit else ()
        for index, phase in enumerate(phases):
            path = ("tick", self._tick, stage, index, *again)
            (done,) = yield Work([Job(node, phase, path)])
            self._note_training(node, done)

    def _note_training(self, node: Node, done: Fitted) -> None:
        if not done.steps:
            return
        node.notes[f"{done.label}_loss"] = done.loss
        node.notes[f"{done.label}_epochs"] = done.epochs
        if done.loss != done.loss:
            self._fault(node.name, "training diverged", f"loss of '{done.label}' is NaN")

    def _fault(self, node: Name, fault: str, why: str, **more: Any) -> None:
        record = {"tick": self._tick, "node": node, **more, "fault": fault, "why": why}
        self.recorder.faults.append(record)


def _in_order(message: Message, spec: Spec) -> Message:
    """The same tensors in the order they are announced in; what was not announced comes last."""
    names = dict.fromkeys((*(n for n in spec if n in message.tensors), *message.tensors))
    return Message({name: message.tensors[name] for name in names})

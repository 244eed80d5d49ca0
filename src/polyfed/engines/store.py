"""What a party keeps for its next life: states after rounds, and a few facts, in its run folder.

RUN/checkpoints/   the states after the last rounds, as of every run
RUN/party.json     which leader it follows, what was decided, which rounds it has finished
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError

from polyfed.core.node import Name, Node
from polyfed.engines.charter import Charter, check_card
from polyfed.engines.decision import Attempt, Decision, read_attempt, read_roster
from polyfed.errors import MessageError, RunError
from polyfed.record import Recorder
from polyfed.record.checkpoint import Checkpoint
from polyfed.record.files import write_text

FACTS = "party.json"
Facts = dict[str, Any]
Point = tuple[int, int, int]  # a state: after which round, and which attempt at it


@dataclass(frozen=True)
class Kept:
    """What a life of a party left to the next.

    Attributes:
        born: which life that was.
        promised: the smallest ballot that it followed.
        accepted: the last decision that it followed.
        done: the last that it had played to the end.
        roster: the cards of all.
        points: the states that it had saved.
    """

    born: int = 0
    promised: int = 0
    accepted: Decision | None = None
    done: Attempt | None = None
    roster: dict[Name, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    @classmethod
    def read(cls, facts: Facts, charter: Charter) -> Kept:
        """Read what a party had written down; nothing is a first life."""
        if not facts:
            return cls()
        try:
            held, done, roster = facts["accepted"], facts["done"], facts["roster"]
            cards = read_roster(roster, charter.parties) if roster else {}
            for name, card in cards.items():
                check_card(card, is_node=name in charter.nodes)
            born, promised = read_attempt([facts["born"], facts["promised"]])
            return cls(
                born,
                promised,
                None if held is None else Decision.read(held, charter.parties),
                None if done is None else read_attempt(done),
                cards,
                tuple(
                    (*read_attempt([r, b]), read_attempt([b, n])[1]) for r, b, n in facts["points"]
                ),
            )
        except (MessageError, LookupError, TypeError, ValueError) as error:
            raise RunError(f"what the party kept of its last life is damaged: {error}.") from error


@runtime_checkable
class Store(Protocol):
    """What outlives a process."""

    def keep(self, facts: Facts) -> None:
        """Make facts durable, in place of those before."""

    def facts(self) -> Facts:
        """The facts that were kept last; empty if none were."""

    def save(self, point: Point, nodes: Sequence[Node]) -> None:
        """Make the states at a point durable."""

    def load(self, point: Point, nodes: Sequence[Node]) -> None:
        """Put the states at a point back."""

    def drop(self, point: Point) -> None:
        """Forget the states at a point."""


class States:
    """The states that a party has saved after rounds.

    Args:
        store: where they lie.
        points: those of its lives before this one.

    Attributes:
        standing: the one that its nodes are in, if they are in any.
    """

    def __init__(self, store: Store, points: Sequence[Point]) -> None:
        self.points = list(points)
        self.standing: Point | None = None
        self._store = store

    @property
    def last(self) -> int:
        """The last round that is saved."""
        return max(self.points, default=(0, 0, 0))[0]

    def base(self, decision: Decision) -> Point | None:
        """The one from which a decision begins, if there is one."""
        return max(self._valid(decision), default=None)

    def lost(self, decision: Decision, me: Name) -> int:
        """The last round that this party has played, if nothing here holds what came of it."""
        played = [i + 1 for i, each in enumerate(decision.log) if me in each.members]
        base = self.base(decision)
        return played[-1] if played and (base is None or base[0] < played[-1]) else 0

    def save(self, point: Point, nodes: Sequence[Node]) -> None:
        """Add one: that which nodes are in now."""
        self._store.save(point, nodes)
        self.standing = point
        if point not in self.points:
            self.points.append(point)

    def forget(self, decision: Decision) -> None:
        """Drop the states that no later decision can begin from.

        A decision of round t tells that round t-1 was played by all its members; so who decides
        later knows of round t-1, and may at most have it played again, from the state before it.
        """
        number = decision.round
        before = max((p for p in self._valid(decision) if p[0] < number - 1), default=(0, 0, 0))
        for point in [p for p in self.points if p[0] < number - 1 and p != before]:
            self._store.drop(point)
            self.points.remove(point)

    def _valid(self, decision: Decision) -> list[Point]:
        settled = [(0, 0, 0), *((i + 1, *each.attempt) for i, each in enumerate(decision.log))]
        return [point for point in self.points if point in settled]


class FolderStore:
    """A store in a run folder."""

    def __init__(self, recorder: Recorder) -> None:
        if recorder.folder is None:
            raise RunError("a party that may be killed needs a run folder.")
        self._recorder, self._folder = recorder, recorder.folder

    def keep(self, facts: Facts) -> None:
        """Write RUN/party.json."""
        write_text(self._folder / FACTS, json.dumps(facts))

    def facts(self) -> Facts:
        """Read RUN/party.json."""
        path = self._folder / FACTS
        if not path.exists():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path} is damaged: {error}.") from error

    def save(self, point: Point, nodes: Sequence[Node]) -> None:
        """Write a checkpoint."""
        self._recorder.checkpoint(point[0], nodes, kept=0, label=_label(point))

    def load(self, point: Point, nodes: Sequence[Node]) -> None:
        """Read a checkpoint."""
        path = self._path(point)
        if not path.exists():
            raise RunError(f"{path} is gone: the party cannot go on from round {point[0]}.")
        try:
            Checkpoint(point[0], {}, path).load_into(nodes)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunError(f"{path} is damaged: {error}.") from error

    def drop(self, point: Point) -> None:
        """Remove a checkpoint."""
        self._path(point).unlink(missing_ok=True)

    def _path(self, point: Point) -> Path:
        name = f"{point[0]:06d}{_label(point)}.safetensors"
        return self._folder / "checkpoints" / name


class MemoryStore:
    """A store for tests and the simulated network: it outlives a party, not the process."""

    def __init__(self) -> None:
        self._facts = "{}"
        self.states: dict[Point, list[Any]] = {}

    def keep(self, facts: Facts) -> None:
        """Keep facts."""
        self._facts = json.dumps(facts)

    def facts(self) -> Facts:
        """The facts."""
        return dict(json.loads(self._facts))

    def save(self, point: Point, nodes: Sequence[Node]) -> None:
        """Keep copies of the states."""
        self.states[point] = [(n.model.state(), copy.deepcopy(n.memory)) for n in nodes]

    def load(self, point: Point, nodes: Sequence[Node]) -> None:
        """Put copies of the states back."""
        for node, (state, memory) in zip(nodes, self.states[point], strict=True):
            node.model.load(state)
            node.memory = copy.deepcopy(memory)

    def drop(self, point: Point) -> None:
        """Forget the states."""
        self.states.pop(point, None)


def _label(point: Point) -> str:
    return f"-{point[1]:06d}.{point[2]:06d}"

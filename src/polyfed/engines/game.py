"""One attempt at a round, as the hub of the relay sees it: whose turn it is, and what was said.

A node has a turn when it can come further, and has something to say on the way or has not begun.
What it says to a place of the topology the hub hears itself; what it says to another node lies here
until that node has its turn. The hub enters both in its ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.message import Message
from polyfed.core.node import Name, Node
from polyfed.core.topology import Topology
from polyfed.engines.charter import Charter
from polyfed.engines.decision import Decision
from polyfed.engines.mail import Mail
from polyfed.engines.player import Await, Key, Said, Steps, Work
from polyfed.engines.relay import Letter, Paced, reach, stages
from polyfed.errors import MessageError, RunError
from polyfed.record import Recorder
from polyfed.train.together import Trainer


class Game:
    """One attempt at a round.

    Args:
        charter: what all agree on.
        topology: joined among all nodes.
        decision: which round, and who plays it.
        places: what the hub plays.
        mail: opens what nodes say to places.
        recorder: of the hub.
    """

    def __init__(
        self,
        charter: Charter,
        topology: Topology,
        decision: Decision,
        places: Mapping[Name, Node],
        mail: Mail,
        recorder: Recorder,
    ) -> None:
        self._decision, self._mail, self._recorder = decision, mail, recorder
        self._player = Paced(charter.method, charter.topology, None, places, recorder, self._tell)
        self._player.topology = topology
        self._player.heard = mail.open(decision.attempt)
        ticks = self._player.ticks(decision)
        self._hops = {
            (k, i): m.hops for k, tick in enumerate(ticks) for i, m in enumerate(tick.meetings)
        }
        self._todo = {name: stages(ticks, name) for name in decision.members}
        self._stage = dict.fromkeys(decision.members, 0)
        self._goal = dict(self._stage)  # where those who have their turn will be after it
        self._said: dict[Key, Letter] = {}
        self._steps: Steps | None = self._player.round(decision, (0, 0, 0))
        self._awaited: Await | None = None
        self._trainer = Trainer("never")
        self._conduct()

    def turns(self) -> dict[Name, list[Letter]]:
        """Who goes on now, with what; nobody, when nobody has to say anything more."""
        self._goal = {name: self._reached(name) for name in self._todo}
        found = {}
        for name, todo in self._todo.items():
            now, then = self._stage[name], self._goal[name]
            if then > now and (now == 0 or any(stage.says for stage in todo[now:then])):
                found[name] = self._needed(name)
        if not found and any(self._goal[name] < len(todo) for name, todo in self._todo.items()):
            raise RunError(f"round {self._decision.round}: all nodes wait for each other.")
        return found

    def take(self, name: Name, header: Mapping[str, Any], letters: Sequence[Letter]) -> None:
        """What a node says in its turn; raises MessageError unless that is what it has to say."""
        then = self._goal[name]
        expected = {key for s in self._todo[name][self._stage[name] : then] for key in s.says}
        got = [letter.key for letter in letters]
        if header.get("stage") != then or len(got) != len(expected) or set(got) != expected:
            raise MessageError(f"{name} said {got} at stage {header.get('stage')!r}"[:300])
        if any(letter.header.get("attempt") != list(self._decision.attempt) for letter in letters):
            raise MessageError(f"{name} said something of another attempt")
        self._stage[name] = then
        for key, letter in zip(got, letters, strict=True):
            if key[4] in self._player.places:
                self._mail.arrive(name, letter.header, letter.payload, self._decision, True)
            else:
                self._pass_on(key, letter)
        self._conduct()

    def rest(self) -> dict[Name, list[Letter]]:
        """What nodes still have to take home, when nobody has a turn any more."""
        return {name: self._needed(name) for name in self._todo}

    def _reached(self, name: Name) -> int:
        return reach(self._todo[name], self._stage[name], self._said)

    def _needed(self, name: Name) -> list[Letter]:
        stages_now = self._todo[name][self._stage[name] : self._goal[name]]
        return [self._said[key] for key in sorted({k for s in stages_now for k in s.needs})]

    def _pass_on(self, key: Key, letter: Letter) -> None:
        """From a node to a node: it is read for the ledger, and checked where it arrives."""
        self._said[key] = letter
        if letter.header.get("none"):
            return
        try:
            message = Message.from_bytes(letter.payload)
        except MessageError as error:
            self._fault(key, str(error))
            return
        _, k, i, source, to = key
        hops = self._hops[k, i]
        self._recorder.ledger.enter(self._decision.round, source, to, message, hops)

    def _conduct(self) -> None:
        """Play the places, as far as they come with what was said."""
        results = None
        while self._steps is not None:
            if self._awaited is not None:
                if not self._awaited.keys <= self._player.heard.keys():
                    return
                self._awaited = None
            try:
                asked = self._steps.send(results)
            except StopIteration:
                self._steps = None
                return
            results = None
            if isinstance(asked, Work):
                results = asked.do(self._trainer)
            else:
                self._awaited = asked

    def _tell(self, said: Said) -> None:
        header, payload = self._mail.parcel(said, self._decision.attempt)
        self._said[said.key] = Letter.from_bytes(header + payload)

    def _fault(self, key: Key, why: str) -> None:
        record = {"tick": self._decision.round, "node": key[3], "to": key[4]}
        self._recorder.faults.append(record | {"fault": "message refused", "why": why})

"""The relay, without a network: exchanges with nodes whose whole state is on disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed import methods, topologies
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Seen, Tick
from polyfed.engines.agreement import terms_of
from polyfed.engines.charter import Charter
from polyfed.engines.clerk import serve
from polyfed.engines.conductor import Conductor
from polyfed.engines.relay import Letter, bundle, unbundle
from polyfed.engines.run import Run
from polyfed.errors import MessageError, RunError
from polyfed.random import stream
from polyfed.record import Recorder
from polyfed.testing import tiny
from polyfed.testing.sets import tiny_sets
from polyfed.topologies.star import Star
from polyfed.train.kinds import with_hub

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {"method": "x", "options": {}, "task": None, "settings": {}}
SMALL: dict[str, Any] = {"rounds": 2, "batch": 16}
FEDLINKED = {"init_epochs": 1, "distil_epochs": 1, "finetune_epochs": 1, "local_epochs": 1}
FOA = {"projection": 4, "predictor_hidden": 6, "probe_epochs": 0, "neighbours": 5, "lam": 0.1}


class Killed(BaseException):
    """The hub's process is gone."""


class Crashed(BaseException):
    """A node's process is gone."""


class Loopback:
    """Brings exchanges to clerks in this process; every exchange finds only what is on disk.

    Attributes:
        asked: every exchange that was sent: its kind, to whom.
        away: {exchange: names}: those do not get it, and are not seen until the next.
        deaf: {exchange: names}: those do it, and the answer is lost.
        kill: the hub dies before, or after, that exchange is sent.
        forge: changes what a node answers.
        said: what the hub has shown.
    """

    def __init__(self, charter: Charter, nodes: Sequence[Node], folder: Path) -> None:
        self.charter, self.folder = charter, folder
        self.nodes = {node.name: node for node in nodes}
        self.asked: list[tuple[str, tuple[Name, ...]]] = []
        self.away: dict[int, set[Name]] = {}
        self.deaf: dict[int, set[Name]] = {}
        self.kill: set[tuple[int, str]] = set()
        self.forge: Callable[[Name, bytes], bytes] | None = None
        self.gone: set[Name] = set()
        self.said: list[str] = []

    def present(self) -> Mapping[Any, Name | None]:
        return {f"id-{n}": None for n in self.charter.nodes if n not in self.gone}

    def exchange(self, given: Mapping[Any, bytes]) -> Mapping[Any, bytes]:
        number = len(self.asked)
        kind = unbundle(next(iter(given.values())))[0]["kind"]
        self.asked.append((kind, tuple(str(a)[3:] for a in given)))
        if (number, "before") in self.kill:
            raise Killed
        away = self.away.get(number, set())
        answers = {}
        for address, raw in given.items():
            name = str(address)[3:]
            if name in away:
                continue
            answer = self.serve(name, raw)
            if name not in self.deaf.get(number, ()):
                answers[address] = self.forge(name, answer) if self.forge else answer
        self.gone = away
        if (number, "after") in self.kill:
            raise Killed
        return answers

    def serve(self, name: Name, raw: bytes) -> bytes:
        def make() -> Node:
            made = self.charter.enter(name, self.nodes[name], CPU)
            assert made is not None
            return made

        return serve(self.charter, make, self.folder / f"run-{name}", CONFIG, raw)

    def conduct(self) -> None:
        """One life of the hub."""
        folder = self.folder / "run-hub"
        recorder, point = (
            Recorder.reopen(folder)
            if (folder / "config.yaml").exists()
            else (Recorder.create(folder, CONFIG), None)
        )
        hub = self.nodes.get("hub")
        made = None if hub is None else self.charter.enter("hub", hub, CPU)
        try:
            say = self.said.append
            Conductor(self.charter, made, recorder, point, self, shown=say, pause=0.0).run()
        finally:
            recorder.close()


def relay_of(
    folder: Path, method: Method, topology: str, nodes: Sequence[Node], **more: Any
) -> Loopback:
    made = topologies.make(topology)
    names = tuple(sorted(n.name for n in nodes if n.name not in made.places))
    has_places = topology.startswith(("star", "groups"))
    charter = Charter(
        run="t",
        method=method,
        topology=made,
        nodes=names,
        host="hub" if has_places else None,
        **more,
    )
    return Loopback(charter, nodes, folder)


def last_state(folder: Path, name: Name) -> dict[str, torch.Tensor]:
    """A node's network and memory as its last checkpoint holds them."""
    path = sorted((folder / f"run-{name}" / "checkpoints").glob("*.safetensors"))[-1]
    found = {}
    for kind in ("model", "memory"):
        start = f"{name}/{kind}/"
        found |= {k[len(start) :]: t for k, t in load_file(path).items() if k.startswith(start)}
    return found


def assert_as_one_process(relay: Loopback, run: Run, names: Sequence[Name] = ()) -> None:
    for name in names or relay.charter.nodes:
        node = run.nodes[name]
        ours, theirs = last_state(relay.folder, name), node.model.state() | node.memory
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
        assert Run.open(relay.folder / f"run-{name}").accuracy == {name: run.accuracy[name]}


def local(relay: Loopback, topology: str, **more: Any) -> Run:
    nodes = list(relay.nodes.values())
    return pf.run(relay.charter.method, nodes, topology=topology, stack="never", **more)


def crossings(run: Run, *, of: Name | None = None) -> list[str]:
    """All crossings; on the wire, tensors have an order of their own."""
    found = [
        {**vars(c), "tensors": sorted(c.tensors, key=lambda tensor: tensor["name"])}
        for c in run.ledger.crossings()
        if of is None or of in (c.source, c.to)
    ]
    return sorted(map(repr, found))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written as they are otherwise, but survive only the process."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def metrics(run: Run, name: Name) -> list[dict[str, Any]]:
    return [m for m in run.metrics if m.get("node") == name]


@dataclass(frozen=True, kw_only=True)
class Eager(pf.PartialAveraging):
    """Trains whenever it hears, so several times a round, in several exchanges."""

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        yield from super().receive(node, message)
        yield self.phase("again", epochs=1)


CASES: list[tuple[Method, str, Callable[[], list[Node]]]] = [
    (pf.FedLinked(**SMALL, **FEDLINKED), "star", tiny),
    (Eager(**SMALL, scheme="50%"), "gossip:cycles=4", tiny),
    (pf.PartialAveraging(**SMALL, groups="ab=rest@M0+M1"), "gossip:cycles=2", tiny),
    (pf.PartialAveraging(**SMALL, groups="ab=rest@M0+M1"), "groups", tiny),
    (pf.DynamicAveraging(**SMALL, scheme="50%"), "star", tiny),
    (pf.LI(**SMALL), "ring", tiny),
    (pf.LI(**SMALL), "dual-ring", tiny),
    (pf.LI(**SMALL), "pipeline", tiny),
    (pf.FedFoA(**SMALL, **FOA, local_epochs=1, per_sample=True), "mesh", tiny),
    (pf.FedULM1(**SMALL), "star", tiny_sets),
]
IDS = [f"{m.name} {t}" for m, t, _ in CASES]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("method", "topology", "make"), CASES, ids=IDS)
def test_the_relay_computes_what_one_process_computes(
    method: Method, topology: str, make: Callable[[], list[Node]], tmp_path: Path
) -> None:
    relay = relay_of(tmp_path, method, topology, make())
    relay.conduct()
    run = local(relay, topology)
    assert_as_one_process(relay, run)
    hub = Run.open(tmp_path / "run-hub")
    assert crossings(hub) == crossings(run)
    for name in relay.charter.nodes:
        done = Run.open(tmp_path / f"run-{name}")
        assert crossings(done) == crossings(run, of=name)
        assert metrics(done, name) == metrics(run, name)
        assert not done.faults
    assert not hub.faults


DONE = {"joint", *(method.name for method, _, _ in CASES)}  # joint is not for several machines
TINY = {"local_epochs": 1, "projection": 4, "predictor_hidden": 6, "probe_epochs": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("byol", "fedbyol", "fedu", "fedema", "fedmd-ssl"), TINY),
    "feddf": {"distil_steps": 5},
    "feddf-ssl": {**TINY, "distil_steps": 5},
}
ON_SETS = ("fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedllp", "fedpl", "hub-only")
NODES: dict[str, Callable[[], list[Node]]] = {
    "feddf": lambda: with_hub(tiny()),
    "feddf-ssl": lambda: with_hub(tiny()),
    **dict.fromkeys(ON_SETS, tiny_sets),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in methods.METHODS if name not in DONE])
def test_every_method_computes_what_it_computes_in_one_process(name: str, tmp_path: Path) -> None:
    method = methods.make(name, SMALL | OPTIONS.get(name, {}))
    relay = relay_of(tmp_path, method, method.topologies[0], NODES.get(name, tiny)())
    relay.conduct()
    assert_as_one_process(relay, local(relay, method.topologies[0]))


def test_a_star_costs_one_exchange_a_round_and_one_at_each_end(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    taken: list[int] = []
    serve_well = relay.serve

    def count(name: Name, raw: bytes) -> bytes:
        if name == "M0":
            taken.append(len(unbundle(raw)[1]))
        return serve_well(name, raw)

    relay.serve = count  # type: ignore[method-assign]
    relay.conduct()
    assert [kind for kind, _ in relay.asked] == ["hello", "play", "play", "play", "play"]
    assert taken == [0, 0, 1, 1, 1]  # the answer of a round comes with the next


FEDAVG = pf.FedAvg(rounds=3, batch=16, local_epochs=1)
LI = pf.LI(rounds=3, batch=16)
PAIRS = pf.PartialAveraging(rounds=3, batch=16, scheme="50%")


def absences(folder: Path) -> dict[int, list[Name]]:
    found: dict[int, list[Name]] = {}
    for fault in Run.open(folder / "run-hub").faults:
        if fault["fault"] == "absent":
            found.setdefault(fault["tick"], []).append(fault["node"])
    return found


@pytest.mark.parametrize(
    ("method", "topology", "at"),
    [(FEDAVG, "star", 1), (FEDAVG, "star", 2), (LI, "dual-ring", 3), (PAIRS, "gossip:cycles=2", 2)],
)
def test_who_does_not_answer_is_absent_from_the_round_and_comes_back(
    method: Method, topology: str, at: int, tmp_path: Path
) -> None:
    relay = relay_of(tmp_path, method, topology, tiny())
    relay.away = {number: {"M1"} for number in range(at, at + 2)}
    relay.conduct()
    absent = absences(tmp_path)
    assert list(absent.values()) in ([["M1"]], [["M1"], ["M1"]])
    assert relay.asked[-1][1] == ("M0", "M1", "M2")
    assert_as_one_process(relay, local(relay, topology, absent=absent))


def test_an_answer_that_is_lost_is_asked_for_again_and_nothing_is_trained_twice(
    tmp_path: Path,
) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    relay.deaf = {2: {"M1"}}
    relay.conduct()
    assert relay.asked[2:4] == [("play", ("M0", "M1", "M2")), ("play", ("M1",))]
    run = local(relay, "star")
    assert_as_one_process(relay, run)
    assert metrics(Run.open(tmp_path / "run-M1"), "M1") == metrics(run, "M1")
    faults = [f["fault"] for f in Run.open(tmp_path / "run-hub").faults]
    assert faults == ["no answer"]


def test_who_has_done_its_part_does_not_train_again_when_another_is_lost(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    relay.away = {2: {"M1"}}
    relay.conduct()
    run = local(relay, "star", absent={2: ["M1"]})
    assert_as_one_process(relay, run)
    for name in ("M0", "M1"):
        assert metrics(Run.open(tmp_path / f"run-{name}"), name) == metrics(run, name)


@dataclass(frozen=True, kw_only=True)
class Counting(pf.FedAvg):
    """Its hub counts how often there was a meeting."""

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        place.memory["met"] = place.memory.get("met", torch.tensor(0)) + 1
        return super().combine(place, got, to)


@dataclass(frozen=True, kw_only=True)
class Twice(Star):
    """Everybody meets twice in a round."""

    def round(self, t: int, seen: Seen) -> Iterable[Tick]:
        yield from (self.tick(t, seen(t).alive), self.tick(t, seen(t).alive))


def test_what_the_hub_did_in_an_attempt_that_was_given_up_is_undone(tmp_path: Path) -> None:
    """All have met once when M2 is lost, in exchange 2: the first round is played again."""
    charter = Charter(
        run="t",
        method=Counting(rounds=2, batch=16),
        topology=Twice(),
        nodes=("M0", "M1", "M2"),
        host="hub",
    )
    relay = Loopback(charter, tiny(), tmp_path)
    relay.away = {2: {"M2"}}
    relay.conduct()
    assert absences(tmp_path) == {1: ["M2"]}
    last = sorted((tmp_path / "run-hub" / "checkpoints").iterdir())[-1]
    assert int(load_file(last)["hub/memory/met"]) == 4


def test_who_has_ended_its_round_has_ended_it_in_the_next_attempt_too(tmp_path: Path) -> None:
    """M0 has trained and spoken when M2, the last of the ring, is lost."""
    relay = relay_of(tmp_path, LI, "dual-ring", tiny())
    relay.away = {3: {"M2"}}
    relay.conduct()
    run = local(relay, "dual-ring", absent={1: ["M2"]})
    assert_as_one_process(relay, run)
    assert metrics(Run.open(tmp_path / "run-M0"), "M0") == metrics(run, "M0")


@pytest.mark.parametrize("topology", ["ring", "dual-ring"])
def test_a_round_that_was_given_up_leaves_nothing_in_the_metrics(
    topology: str, tmp_path: Path
) -> None:
    """M1 has heard M0, has trained and spoken, and so ended its round, when M2 is lost."""
    relay = relay_of(tmp_path, LI, topology, tiny())
    relay.away = {3: {"M2"}}
    relay.conduct()
    assert absences(tmp_path) == {1: ["M2"]}
    run = local(relay, topology, absent={1: ["M2"]})
    assert_as_one_process(relay, run)
    for name in relay.charter.nodes:
        done = Run.open(tmp_path / f"run-{name}")
        assert metrics(done, name) == metrics(run, name)
        assert [m["tick"] for m in done.metrics if "seconds" in m] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("method", "topology", "when", "every"),
    [
        (FEDAVG, "star", "before", 3),
        (Counting(rounds=3, batch=16), "star", "after", 3),
        (LI, "dual-ring", "after", 6),
        (PAIRS, "gossip:cycles=2", "after", 8),
    ],
)
def test_a_hub_that_is_killed_at_any_exchange_goes_on_to_the_same_numbers(
    method: Method, topology: str, when: str, every: int, tmp_path: Path
) -> None:
    relay = relay_of(tmp_path, method, topology, tiny())
    relay.kill = {(number, when) for number in range(0, 60, every)}
    lives = 0
    while not (tmp_path / "run-hub" / "result.json").exists():
        lives += 1
        assert lives < 30
        with contextlib.suppress(Killed):
            relay.conduct()
    assert lives > 2
    run = local(relay, topology)
    assert_as_one_process(relay, run)
    hub = Run.open(tmp_path / "run-hub")
    assert crossings(hub) == crossings(run)
    assert [m["tick"] for m in hub.metrics if "seconds" in m] == [1, 2, 3]
    if isinstance(method, Counting):
        last = sorted((tmp_path / "run-hub" / "checkpoints").iterdir())[-1]
        assert int(load_file(last)["hub/memory/met"]) == 3
    for name in relay.charter.nodes:
        assert len(list((tmp_path / f"run-{name}" / "checkpoints").iterdir())) <= 3


@pytest.mark.parametrize(
    ("method", "topology"), [(FEDAVG, "star"), (LI, "dual-ring"), (PAIRS, "gossip:cycles=2")]
)
def test_a_node_that_is_killed_at_any_write_goes_on_to_the_same_numbers(
    method: Method, topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third time a file is to be renamed in a node's folder, the process dies instead."""
    relay = relay_of(tmp_path, method, topology, tiny())
    count = Counter[str]()
    rename = Path.replace

    def dying(self: Path, to: Any) -> Any:
        where = Path(to).parent
        if where.name == "checkpoints" and where.parent.name == "run-M1":
            count["writes"] += 1
            if count["writes"] % 3 == 0:
                raise Crashed
        return rename(self, to)

    serve_well = relay.serve

    def serve_or_die(name: Name, raw: bytes) -> bytes:
        try:
            return serve_well(name, raw)
        except Crashed:
            count["crashes"] += 1
            return serve_well(name, raw)  # the hub asks again

    monkeypatch.setattr(Path, "replace", dying)
    relay.serve = serve_or_die  # type: ignore[method-assign]
    relay.conduct()
    assert count["crashes"] > 1
    run = local(relay, topology)
    assert_as_one_process(relay, run)
    assert metrics(Run.open(tmp_path / "run-M1"), "M1") == metrics(run, "M1")


# ---- what is no good ---------------------------------------------------------------------------


def changed(raw: bytes, **header: Any) -> bytes:
    found, letters = unbundle(raw)
    return bundle(found | header, letters)


def with_payload(raw: bytes, payload: Callable[[bytes], bytes]) -> bytes:
    found, letters = unbundle(raw)
    return bundle(found, [Letter(x.header, payload(x.payload)) for x in letters])


def spoilt(payload: bytes) -> bytes:
    tensors = dict(Message.from_bytes(payload).tensors)
    name = next(n for n, t in sorted(tensors.items()) if t.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    return Message(tensors).to_bytes()


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "noise": lambda raw: bytes(range(256)) * 4,
    "another stage": lambda raw: changed(raw, stage=7),
    "no stage": lambda raw: changed(raw, stage=None),
    "silence": lambda raw: bundle(unbundle(raw)[0]),
    "twice": lambda raw: bundle(unbundle(raw)[0], unbundle(raw)[1] * 2),
    "for another": lambda raw: bundle(
        unbundle(raw)[0],
        [Letter({**x.header, "key": [0, 0, "M0", "hub"]}, x.payload) for x in unbundle(raw)[1]],
    ),
    "of another attempt": lambda raw: bundle(
        unbundle(raw)[0],
        [Letter({**x.header, "attempt": [1, 99]}, x.payload) for x in unbundle(raw)[1]],
    ),
    "refused": lambda raw: bundle({"kind": "refused", "why": "no"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_node_whose_answers_are_no_good_is_absent(what: str, tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())

    def forge(name: Name, raw: bytes) -> bytes:
        is_play = len(relay.asked) in (3, 4) and name == "M1"
        return HOSTILE[what](raw) if is_play else raw

    relay.forge = forge
    relay.conduct()
    faults = [f for f in Run.open(tmp_path / "run-hub").faults if f["fault"] != "absent"]
    assert {(f["node"], f["fault"]) for f in faults} == {("M1", "message refused")}
    absent = absences(tmp_path)
    assert absent[2] == ["M1"]
    assert_as_one_process(relay, local(relay, "star", absent=absent))


def test_what_is_passed_on_from_node_to_node_is_said_once(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, LI, "ring", tiny())
    relay.forge = lambda name, raw: HOSTILE["twice"](raw) if name == "M1" else raw
    relay.conduct()
    faults = [f for f in Run.open(tmp_path / "run-hub").faults if f["fault"] != "absent"]
    assert {(f["node"], f["fault"]) for f in faults} == {("M1", "message refused")}
    absent = absences(tmp_path)
    assert set(map(tuple, absent.values())) == {("M1",)}
    assert_as_one_process(relay, local(relay, "ring", absent=absent), ["M0", "M2"])


PAYLOADS: dict[str, Callable[[bytes], bytes]] = {
    "not safetensors": lambda payload: b"x" * 100,
    "nothing": lambda payload: b"",
    "NaN": spoilt,
    "others": lambda payload: Message({"else": torch.zeros(2)}).to_bytes(),
}


@pytest.mark.parametrize("what", PAYLOADS)
@pytest.mark.parametrize(
    ("method", "topology", "listener"), [(FEDAVG, "star", "hub"), (LI, "ring", "M2")]
)
def test_a_message_that_is_no_good_is_refused_where_it_arrives(
    method: Method, topology: str, listener: Name, what: str, tmp_path: Path
) -> None:
    relay = relay_of(tmp_path, method, topology, tiny())
    relay.forge = lambda name, raw: (
        with_payload(raw, PAYLOADS[what]) if name == "M1" and unbundle(raw)[1] else raw
    )
    relay.conduct()
    faults = Run.open(tmp_path / f"run-{listener}").faults
    assert {(f["node"], f["fault"]) for f in faults} == {("M1", "message refused")}
    assert len(faults) >= 3
    assert all((tmp_path / f"run-{n}" / "result.json").exists() for n in relay.charter.nodes)


def test_a_clerk_refuses_what_is_no_good_and_writes_it_down(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    sent: list[bytes] = []
    serve_well = relay.serve

    def keep(name: Name, raw: bytes) -> bytes:
        if name == "M1":
            sent.append(raw)
        return serve_well(name, raw)

    relay.serve = keep  # type: ignore[method-assign]
    relay.conduct()
    before = last_state(tmp_path, "M1")
    hello, *plays = sent
    for raw, why in (
        (b"", "has no header"),
        (plays[-1][:-20], "says"),
        (changed(plays[0], exchange=[9, "x"]), "without a number"),
        (changed(plays[0], exchange=[0, 1]), "comes after"),
        (plays[0], "comes after"),
        (changed(plays[0], exchange=[9, 1], kind="please"), "of no kind"),
        (changed(plays[0], exchange=[9, 1], terms={"seed": "9"}), "another federation file"),
        (changed(plays[0], exchange=[9, 1], decision={"round": 3}), "not a decision"),
        (changed(plays[0], exchange=[9, 1], roster={"M1": {}}), "does not name all"),
        (changed(plays[0], exchange=[9, 1], roster={n: {} for n in ("M0", "M1", "M2")}), "card"),
    ):
        answer = unbundle(relay.serve("M1", raw))[0]
        assert answer["kind"] == "refused"
        assert why in answer["why"]
    done = Run.open(tmp_path / "run-M1")
    assert [f["fault"] for f in done.faults] == ["message refused"] * 10
    assert unbundle(relay.serve("M1", hello))[0]["name"] == "M1"
    again = relay.serve("M1", plays[-1])
    assert unbundle(again)[0]["kind"] == "play"
    after = last_state(tmp_path, "M1")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_clerk_that_was_refused_before_it_played_can_be_put_right(tmp_path: Path) -> None:
    """Its folder does not count as begun: else the right federation file would be refused there."""
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    header = {
        "kind": "hello",
        "exchange": [1, 1],
        "terms": {**terms_of(relay.charter), "seed": "9"},
    }
    answer = unbundle(relay.serve("M1", bundle(header)))[0]
    assert "than M1: seed is 0 here and 9 at the hub. Give all sites the same" in answer["why"]
    assert not (tmp_path / "run-M1" / "checkpoints").exists()


def test_a_round_that_was_not_sent_whole_is_not_played(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny())
    sent: list[bytes] = []
    serve_well = relay.serve

    def keep(name: Name, raw: bytes) -> bytes:
        if name == "M1" and len(sent) == 2:  # the hello, round 1, and now the answers of round 1
            sent.append(raw)
            assert unbundle(serve_well(name, bundle(unbundle(raw)[0])))[0]["kind"] == "refused"
        sent.append(raw)
        return serve_well(name, raw)

    relay.serve = lambda name, raw: keep(name, raw) if name == "M1" else serve_well(name, raw)  # type: ignore[method-assign]
    relay.conduct()
    assert_as_one_process(relay, local(relay, "star"))
    (fault,) = Run.open(tmp_path / "run-M1").faults
    assert "not all of it was sent" in fault["why"]


def test_strangers_and_second_ones_of_a_name_are_refused(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny(), patience=0.01)
    relay.forge = lambda name, raw: changed(raw, name={"M1": "M0", "M2": "M7"}.get(name, name))
    with pytest.raises(RunError, match=r"waiting for M1, M2 for 0.01 s"):
        relay.conduct()
    faults = [json.loads(x) for x in (tmp_path / "run-hub/faults.jsonl").read_text().splitlines()]
    assert {f["why"] for f in faults} == {
        "a second node calls itself M0",
        "a node that calls itself 'M7'",
    }
    assert "is not taken: a second node calls itself M0" in " ".join(relay.said)
    relay.forge = None
    relay.conduct()
    assert_as_one_process(relay, local(relay, "star"))


def test_a_name_that_is_vouched_for_is_not_to_be_changed(tmp_path: Path) -> None:
    relay = relay_of(tmp_path, FEDAVG, "star", tiny(), patience=0.01)
    relay.present = lambda: {f"id-{n}": n for n in relay.charter.nodes}  # type: ignore[method-assign]
    relay.forge = lambda name, raw: changed(raw, name={"M1": "M2", "M2": "M1"}.get(name, name))
    with pytest.raises(RunError, match="waiting for M1, M2"):
        relay.conduct()
    faults = [json.loads(x) for x in (tmp_path / "run-hub/faults.jsonl").read_text().splitlines()]
    assert {f["why"] for f in faults} == {"M1 calls itself M2", "M2 calls itself M1"}


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_never_taken_for_an_exchange(seed: int) -> None:
    chance = stream(seed, "noise")
    whole = bundle({"kind": "play", "exchange": [1, 1]}, [Letter({"kind": "say"}, b"abc" * 9)])
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(int(torch.randint(1, 4, (), generator=chance))):
            place = int(torch.randint(len(raw), (), generator=chance))
            raw[place] = int(torch.randint(256, (), generator=chance))
        cut = int(torch.randint(len(raw) + 1, (), generator=chance))
        with contextlib.suppress(MessageError):
            header, letters = unbundle(bytes(raw[:cut]))
            assert cut == len(raw)
            assert sum(len(x.to_bytes()) for x in letters) < len(raw)
            assert isinstance(header["kind"], str)


@pytest.mark.parametrize("guard", ["clip=1,noise=0.5", "compress=int8", "secure"])
def test_guards_work_and_a_lost_node_does_not_break_them(guard: str, tmp_path: Path) -> None:
    method = pf.FedAvg(rounds=2, batch=16, local_epochs=1, guard=guard)
    nodes = [*tiny(), replace(tiny()[0], name="M3")]
    relay = relay_of(tmp_path, method, "star", nodes)
    relay.away = {1: {"M1"}}
    relay.conduct()
    absent = absences(tmp_path)
    assert absent == {1: ["M1"]}
    run = local(relay, "star", absent=absent)
    for name in relay.charter.nodes:
        ours, theirs = last_state(tmp_path, name), run.nodes[name].model.state()
        for key, tensor in theirs.items():  # masks are drawn anew, and cancel up to rounding
            assert torch.allclose(ours[key].double(), tensor.double(), atol=1e-4), (name, key)

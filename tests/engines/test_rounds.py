"""Rounds of several ticks, meetings at nodes, topics, hubs that train, runs in step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import polyfed as pf
from polyfed import topologies
from polyfed.core.message import Message, Spec, TensorSpec, about
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Meeting, Seen, Tick, Topology
from polyfed.engines import local
from polyfed.engines.compare import Comparison
from polyfed.engines.local import LocalEngine, Settings, drive
from polyfed.engines.progress import Progress, shares
from polyfed.record import Recorder
from polyfed.testing.federations import stackable, tiny
from polyfed.train.together import Done, StackWarning, Trainer
from polyfed.train.track import Job


@dataclass(frozen=True, kw_only=True)
class Number(Method):
    """Every node has a number; it hears numbers and takes the mean. `a` and `b` are topics."""

    name: ClassVar[str] = "number"
    title: ClassVar[str] = "numbers"
    topologies: ClassVar[tuple[str, ...]] = ("plan",)

    def start(self, node: Node) -> Iterable[Phase]:
        node.memory["a"] = torch.tensor(float(node.name[1:]))
        node.memory["b"] = torch.tensor(10.0)
        return ()

    def topics(self, nodes: Sequence[Node]) -> Mapping[str, tuple[Name, ...]]:
        return {"a": tuple(n.name for n in nodes), "b": ("M0", "M1")}

    def local(self, node: Node) -> Iterable[Phase]:
        yield self.phase("one", steps=1)

    def sends(self, node: Node) -> Spec:
        return {"a": TensorSpec(()), "b": TensorSpec(())}

    def send(self, node: Node) -> Message:
        return Message({"a": node.memory["a"].clone(), "b": node.memory["b"].clone()})

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        names = next(iter(got.values())).tensors
        mean = {n: torch.stack([m.tensors[n] for m in got.values()]).mean() for n in names}
        return {name: Message(mean) for name in to}

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        node.memory.update(message.tensors)
        return ()


@dataclass(frozen=True, kw_only=True)
class Plan(Topology):
    """Whatever a test says."""

    name: ClassVar[str] = "plan"
    ticks: tuple[Tick, ...] = ()

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        return self.ticks[0]

    def round(self, t: int, seen: Seen) -> Iterable[Tick]:
        yield from self.ticks


def numbers(*ticks: Tick, rounds: int = 1) -> tuple[pf.Run, dict[str, float]]:
    run = pf.run(Number(rounds=rounds), tiny(), topology=Plan(ticks=ticks))
    return run, {name: float(node.memory["a"]) for name, node in run.nodes.items()}


def test_meetings_of_a_tick_happen_at_the_same_time() -> None:
    ring = [("M0", "M1"), ("M1", "M2"), ("M2", "M0")]
    at_once = Tick((), tuple(Meeting(b, (a,), (b,)) for a, b in ring))
    run, ends = numbers(at_once)
    assert ends == {"M0": 2, "M1": 0, "M2": 1}
    assert [(c.source, c.to) for c in run.ledger.crossings()] == ring
    _, ends = numbers(*(Tick((), (Meeting(b, (a,), (b,)),)) for a, b in ring))
    assert ends == {"M0": 0, "M1": 0, "M2": 0}, "one tick after the other: 0 travels round"


def test_what_a_node_says_to_itself_crosses_nothing() -> None:
    run, ends = numbers(Tick((), (Meeting("M2", ("M0", "M2"), ("M0", "M2")),)))
    assert ends == {"M0": 1, "M1": 1, "M2": 1}
    assert [(c.source, c.to) for c in run.ledger.crossings()] == [("M0", "M2"), ("M2", "M0")]


def test_only_the_topic_travels() -> None:
    run, ends = numbers(Tick((), (Meeting("hub-a", ("M0", "M2"), ("M0", "M2"), topic="a"),)))
    assert ends == {"M0": 1, "M1": 1, "M2": 1}
    assert {t["name"] for c in run.ledger.crossings() for t in c.tensors} == {"a"}
    assert run.ledger.bytes_sent("M0") == 4
    assert about({"a": 1, "ab": 2, "a/x": 3}, "a") == {"a": 1, "a/x": 3}
    assert about({"a": 1, "ab": 2}, "") == {"a": 1, "ab": 2}


def test_hops_are_written_down() -> None:
    run, _ = numbers(Tick((), (Meeting("M1", ("M0",), ("M1",), hops=2),)))
    assert [c.hops for c in run.ledger.crossings()] == [2]


def test_who_hears_twice_listens_to_one_after_the_other() -> None:
    both = (Meeting("hub-a", ("M0", "M1"), ("M0",), "a"), Meeting("hub-b", ("M1",), ("M0",), "b"))
    run, ends = numbers(Tick((), both))
    assert ends["M0"] == 0.5
    assert float(run.nodes["M0"].memory["b"]) == 10


def test_streams_of_a_visit_do_not_depend_on_its_place_in_the_round() -> None:
    """M1 trains the same whether it is first or last; its second visit draws anew."""

    def head(*visits: str) -> torch.Tensor:
        run, _ = numbers(*(Tick((name,), ()) for name in visits))
        return run.nodes["M1"].model.state()["head.weight"]

    assert torch.equal(head("M1", "M0"), head("M0", "M2", "M1"))
    assert not torch.equal(head("M1"), head("M1", "M1"))


def test_a_topology_knows_seed_names_and_topics() -> None:
    bound = Plan().joined(7, ["M1", "M0"], {"a": ("M0",)})
    assert (bound.seed, bound.names, bound.topics) == (7, ("M0", "M1"), {"a": ("M0",)})
    assert topologies.label(topologies.make("star")) == "star"


# ---- a hub that trains ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HubTrains(pf.FedAvg):
    """FedAvg whose hub trains the mean on data of its own before it answers."""

    hub_trains: ClassVar[bool] = True

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        place.model.load(self.mean(got))
        yield self.phase("hub", epochs=1)

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        return dict.fromkeys(to, Message(place.model.state()))


def test_a_hub_with_data_trains_before_it_answers() -> None:
    nodes = tiny()
    hub = replace(nodes[2], name="hub")
    run = pf.run(HubTrains(rounds=2, batch=8), [*nodes[:2], hub])
    assert set(run.nodes) == {"M0", "M1"}
    assert run.places["hub"].data["train"] is not None
    losses = [m["hub_loss"] for m in run.metrics if "hub_loss" in m]
    assert len(losses) == 2
    for name, t in run.places["hub"].model.state().items():
        assert torch.equal(t, run.nodes["M0"].model.state()[name])
    plain = pf.run(pf.FedAvg(rounds=2, batch=8), nodes[:2])
    assert not torch.equal(
        plain.nodes["M0"].model.state()["head.weight"],
        run.nodes["M0"].model.state()["head.weight"],
    )
    with pytest.raises(pf.errors.ConfigError, match="node name 'hub' is taken"):
        pf.run(pf.FedAvg(rounds=1, batch=8), [*nodes[:2], hub])


# ---- runs in step --------------------------------------------------------------------------------


def steps(seed: int, rounds: int) -> Any:
    method = pf.FedAvg(rounds=rounds, batch=8)
    engine = LocalEngine(
        method, tiny(), topologies.make("star"), Settings(seed=seed), Recorder.in_memory(),
        Progress(),
    )  # fmt: skip
    return engine.steps()


def test_runs_of_different_length_go_on_in_step() -> None:
    alone = [drive([steps(s, r)], Trainer("never"))[0] for s, r in ((0, 1), (1, 3))]
    assert drive([steps(0, 1), steps(1, 3)], Trainer("never")) == alone


@dataclass(frozen=True, kw_only=True)
class LongStart(pf.Local):
    """Local training; the first round has more phases, and another number of them for each seed."""

    def local(self, node: Node) -> Iterable[Phase]:
        extra = node.seed if "begun" not in node.memory else 0
        node.memory["begun"] = torch.ones(())
        for _ in range(1 + extra):
            yield from super().local(node)


class Counting(Trainer):
    """Notes how many jobs are trained at a time."""

    def __init__(self) -> None:
        super().__init__("never")
        self.jobs: list[int] = []

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        self.jobs += [len(jobs)] if jobs else []
        return super().train(jobs)


def test_runs_meet_again_after_a_round_of_different_length() -> None:
    """Else they would go on one phase apart, and equal networks would never train as one."""

    def begin(seed: int) -> Any:
        settings, silent = Settings(seed=seed), Progress()
        method, star = LongStart(rounds=3, batch=8), topologies.make("star")
        return LocalEngine(method, tiny(), star, settings, Recorder.in_memory(), silent).steps()

    alone = [drive([begin(seed)], Trainer("never"))[0] for seed in range(3)]
    trainer, nodes = Counting(), len(tiny())
    assert drive([begin(seed) for seed in range(3)], trainer) == alone
    start, first, later = [3 * nodes], [3 * nodes, 2 * nodes, nodes], [3 * nodes, 3 * nodes]
    assert trainer.jobs == start + first + later


def test_in_step_is_in_turn() -> None:
    nodes = [stackable(node) for node in tiny()]
    methods = {"a": pf.FedAvg(rounds=2, batch=8), "b": pf.Local(rounds=2, batch=8, lr=0.01)}
    turn: Comparison = pf.compare(methods, nodes, seeds=2, stack="never")
    step: Comparison = pf.compare(methods, nodes, seeds=2, stack="always")
    for label, runs in turn.runs.items():
        for one, other in zip(runs, step.runs[label], strict=True):
            assert one.accuracy == pytest.approx(other.accuracy)
            for name in one.nodes:
                for key, t in one.nodes[name].model.state().items():
                    got = other.nodes[name].model.state()[key]
                    torch.testing.assert_close(got, t, rtol=1e-4, atol=1e-5)
    assert all(run.seconds > 0 for runs in step.runs.values() for run in runs)


def test_in_step_with_folders_and_resume(tmp_path: Path) -> None:
    methods = {"a": pf.FedAvg(rounds=2, batch=8)}
    with pytest.warns(StackWarning, match="BatchNorm keeps statistics"):
        done = pf.compare(methods, tiny(), seeds=2, stack="always", folder=tmp_path / "c")
    written = [pf.Run.open(tmp_path / "c" / "a" / f"seed-{s}") for s in (0, 1)]
    assert [r.accuracy for r in written] == [r.accuracy for r in done.runs["a"]]


class Kept(Progress):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, title: str, rounds: int) -> None:
        self.said.append((title, rounds))

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        self.said.append(tick)

    def end(self) -> None:
        self.said.append("end")


def test_progress_of_runs_in_step_is_one() -> None:
    kept = Kept()
    one, two = shares(kept, 2)
    one.begin("x", 2)
    two.begin("y", 1)
    for tick in range(2):
        one.round_done(tick, {})
        two.round_done(tick, {})
    assert kept.said == [("2 runs", 2), 0, 1]
    two.end()
    one.round_done(2, {"M0": 0.5})
    one.end()
    assert kept.said == [("2 runs", 2), 0, 1, 2, "end"]


def test_checkpoints_at_an_interval(tmp_path: Path) -> None:
    method = pf.FedAvg(rounds=5, batch=8)
    pf.run(method, tiny(), folder=tmp_path / "two", checkpoint_every=2)
    names = sorted(p.stem for p in (tmp_path / "two" / "checkpoints").iterdir())
    assert names == ["000002", "000004"]
    pf.run(method, tiny(), folder=tmp_path / "none", checkpoint_every=0)
    assert not (tmp_path / "none" / "checkpoints").exists()
    with pytest.raises(pf.errors.ConfigError, match="checkpoint_every must be >= 0"):
        pf.run(method, tiny(), checkpoint_every=-1)


def test_checkpoints_at_an_interval_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class TenSeconds(Progress):
        def round_done(self, tick: int, accuracies: Any) -> None:
            clock[0] += 10

    monkeypatch.setattr(local, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    method, nodes = pf.FedAvg(rounds=5, batch=8), tiny()
    pf.run(method, nodes, folder=tmp_path, checkpoint_seconds=30, progress=TenSeconds())
    names = sorted(p.stem for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["000003"]
    with pytest.raises(pf.errors.ConfigError, match="checkpoint_seconds must be >= 0"):
        pf.run(method, nodes, checkpoint_seconds=-1)


def test_nodes_made_for_the_run_are_not_copied() -> None:
    class Held(pf.tasks.Task):
        name: ClassVar[str] = "held"
        title: ClassVar[str] = "held"
        made: ClassVar[list[Node]] = []

        def nodes(self, seed: int) -> list[Node]:
            self.made.extend(tiny())
            return self.made

    run = pf.run(pf.FedAvg(rounds=1, batch=8), Held())
    assert run.nodes["M0"].model.net is Held.made[0].model.net
    nodes = tiny()
    run = pf.run(pf.FedAvg(rounds=1, batch=8), nodes)
    assert run.nodes["M0"].model.net is not nodes[0].model.net


def test_a_star_has_no_links_to_cut() -> None:
    with pytest.raises(pf.errors.ConfigError, match="star has no links between nodes to cut"):
        pf.run(pf.FedAvg(rounds=1, batch=8), tiny(), fail="cut 0-1 @1")

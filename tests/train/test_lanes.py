"""Lanes: networks with BatchNorm side by side end where the loop of one node takes them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, MatchOutput, Optimiser, Phase, cross_entropy
from polyfed.random import ambient
from polyfed.train import columns, together
from polyfed.train.alike import structure
from polyfed.train.augment import Rotated
from polyfed.train.lanes import Lanes, _strided, can_take, lane_key
from polyfed.train.loop import Fitted, fit
from polyfed.train.together import StackWarning, Trainer
from polyfed.train.track import Job

ADAM = Optimiser(lr=2**-10)  # a graph's rate is a float32
PHASE = Phase(label="local", objective=cross_entropy, epochs=2, batch=6, optimiser=ADAM)


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions by columns would be stacked."""
    monkeypatch.setattr(columns, "_LIMIT", -1)


def node(k: int, count: int) -> Node:
    """So many small pictures of three classes; a network with BatchNorm and a buffer that stays."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(count, 2, 4, 4, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    with ambient(0, "init"):
        trunk = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        net = nn.Sequential(trunk, nn.Linear(16, 3))
    net.register_buffer("own", torch.full((2,), float(k)), persistent=False)
    return Node(f"M{k}", Data(train=(x, y)), Model.split(net, trunk="0", head="1"), seed=3)


def jobs(*counts: int, phase: Phase = PHASE) -> list[Job]:
    return [Job(node(k, n), phase, ("tick", 1, "local", 0)) for k, n in enumerate(counts)]


def tensors(job: Job) -> dict[str, Tensor]:
    net = job.node.model.net
    return {n: t.detach().clone() for n, t in (*net.named_parameters(), *net.named_buffers())}


def assert_same(
    ours: Sequence[Job], theirs: Sequence[Job], fitted: Sequence[Fitted], wanted: Sequence[Fitted]
) -> None:
    """The same networks and the same memories, bit for bit."""
    for mine, other, got, want in zip(ours, theirs, fitted, wanted, strict=True):
        for name, t in tensors(other).items():
            assert torch.equal(tensors(mine)[name], t), name
        assert mine.node.memory.keys() == other.node.memory.keys()
        assert all(torch.equal(mine.node.memory[n], t) for n, t in other.node.memory.items())
        assert (got.label, got.epochs, got.steps) == (want.label, want.epochs, want.steps)
        assert got.loss == pytest.approx(want.loss, rel=1e-6)


def assert_as_the_loop(phase: Phase, *counts: int, lanes: int, times: int = 2) -> None:
    ours, theirs = (jobs(*counts, phase=phase) for _ in range(2))
    side_by_side = Lanes(ours, lanes, graph=False)
    for _ in range(times):  # a second phase in the same lanes begins with a new optimiser
        fitted = side_by_side.fit(ours)
        wanted = [fit(job.node, job.phase, *job.path) for job in theirs]
        assert_same(ours, theirs, fitted, wanted)


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [(), ("head",)])
def test_lanes_equal_the_loop_bit_for_bit(lanes: int, parts: tuple[str, ...]) -> None:
    """Epochs end in short batches, one of a single sample; fewer and more lanes than nodes."""
    assert_as_the_loop(replace(PHASE, parts=parts), 72, 66, 73, 75, 72, lanes=lanes)


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": Optimiser(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.02)},
        {"optimiser": Optimiser(name="sgd", lr=0.05)},
        {"optimiser": Optimiser(name="adamw", lr=0.02, weight_decay=0.1)},
        {"optimiser": Optimiser(weight_decay=0.1), "keep": "all"},
        {"optimiser": Optimiser(name="sgd", momentum=0.5), "keep": "all"},
        {"epochs": None, "steps": 17},
        {"epochs": None, "steps": 17, "walk": True, "keep": "all"},
        {"drop_last": True},
        {"batch": 0.1},
    ],
    ids=str,
)
def test_what_a_phase_asks_for(change: dict[str, Any]) -> None:
    assert_as_the_loop(replace(PHASE, **change), 74, 66, 73, lanes=2, times=3)


def test_in_bfloat16_filters_stand_otherwise_and_nobody_sees_it() -> None:
    ours, theirs = (jobs(72, 73, phase=replace(PHASE, keep="all")) for _ in range(2))
    for job in (*ours, *theirs):
        job.node.model.precision = "bfloat16"
    lanes = Lanes(ours, 2, graph=False)
    (inner,) = (p for p in lanes.lanes[0].model.net.parameters() if p.dim() == 4)
    assert inner.stride()[1] == 1
    for _ in range(2):
        assert_same(ours, theirs, lanes.fit(ours), [fit(j.node, j.phase, *j.path) for j in theirs])
    for job in ours:
        assert all(t.is_contiguous() for t in (*tensors(job).values(), *job.node.memory.values()))


Made = tuple[list[tuple[tuple[int, ...], list[int]]], list[int]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Graphs that only do the step again: which were made, how warm, and of how many the used."""
    made: list[tuple[tuple[int, ...], list[int]]] = []
    replays: list[int] = []

    def captured(lanes: Sequence[Any], pool: Any) -> Mock:
        made.append((tuple(ln.number for ln in lanes), [ln.warmth for ln in lanes]))

        def replay() -> None:
            replays.append(len(lanes))
            for lane in lanes:
                lane.step_next()

        return Mock(spec=torch.cuda.CUDAGraph, replay=replay)

    monkeypatch.setattr("polyfed.train.lanes._captured", captured)
    return made, replays


def test_graphs_are_of_all_lanes_or_of_one(graphs: Made) -> None:
    made, replays = graphs
    ours, theirs = jobs(72, 66, 80), jobs(72, 66, 80)
    lanes = Lanes(ours, 3, graph=True)
    for _ in range(2):
        assert_same(ours, theirs, lanes.fit(ours), [fit(j.node, j.phase, *j.path) for j in theirs])
    assert made[0] == ((0, 1, 2), [3, 3, 3])
    assert sorted(made[1:]) == [((k,), [3]) for k in range(3)]
    whole = 13 + 8  # full batches of all at once: of 80 samples the 14th is short; 66 end with 22
    assert replays.count(3) == whole - 3 + whole
    assert len(replays) - replays.count(3) == 2 * (24 + 22 + 26 - 3 * whole)


def test_graphs_are_of_some_lanes_that_are_often_the_ones(graphs: Made) -> None:
    made, replays = graphs
    phase = replace(PHASE, epochs=3)
    ours, theirs = jobs(60, 186, 180, phase=phase), jobs(60, 186, 180, phase=phase)
    lanes = Lanes(ours, 3, graph=True)
    assert_same(ours, theirs, lanes.fit(ours), [fit(j.node, j.phase, *j.path) for j in theirs])
    assert {key for key, _ in made} == {(0, 1, 2), (0, 1), (0,), (1,)}
    assert replays.count(3) == 30 - 3
    assert replays.count(2) == 60 - 20
    assert replays.count(1) == 2 * 20 + 3


def test_a_lane_that_is_free_takes_the_next_job_and_the_longest_come_first(graphs: Made) -> None:
    begun = []
    ours, theirs = (jobs(60, 66, 180, 72) for _ in range(2))
    ours = [replace(j, shown=lambda j=j: begun.append(len(j.node.data["train"]))) for j in ours]
    lanes = Lanes(ours, 2, graph=True)
    assert_same(ours, theirs, lanes.fit(ours), [fit(j.node, j.phase, *j.path) for j in theirs])
    assert begun == [180, 72, 66, 60]
    made, replays = graphs
    assert made == [((0, 1), [3, 3]), ((1,), [3])]
    assert replays == [2] * (60 - 3) + [1] * 6


def with_validation(work: Sequence[Job]) -> Sequence[Job]:
    """Of pictures whose labels are those of other pictures, so that training soon harms."""
    for job in work:
        x, y = job.node.data["train"].x, job.node.data["train"].y
        assert y is not None
        job.node.data = Data(train=(x, y), val_es=(x[:30], y.roll(1)[:30]))
    return work


@pytest.mark.parametrize("parts", [(), ("head",)])
def test_each_stops_early_and_goes_back_to_its_best(parts: tuple[str, ...]) -> None:
    phase = replace(PHASE, parts=parts, epochs=9, stop=EarlyStop(patience=2), keep="all")
    ours, theirs = (with_validation(jobs(72, 66, 75, phase=phase)) for _ in range(2))
    lanes = Lanes(ours, 2, graph=False)
    epochs = []
    for _ in range(2):
        fitted = lanes.fit(ours)
        assert_same(ours, theirs, fitted, [fit(j.node, j.phase, *j.path) for j in theirs])
        epochs += [f.epochs for f in fitted]
    assert min(epochs) < 9
    assert len(set(epochs)) > 1


def test_what_was_kept_of_other_parameters_is_no_concern() -> None:
    phase = replace(PHASE, parts=("head",), keep="all")
    ours, theirs = jobs(72, phase=phase), jobs(72, phase=phase)
    for job in (*ours, *theirs):
        fit(job.node, replace(phase, parts=()), *job.path)
    fitted = Lanes(ours, 1, graph=False).fit(ours)
    assert_same(ours, theirs, fitted, [fit(job.node, phase, *job.path) for job in theirs])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_lane_takes_any_learning_rate(name: Any) -> None:
    phase = replace(PHASE, optimiser=Optimiser(name=name, lr=0.5))
    ours, theirs = jobs(72, 66, phase=phase), jobs(72, 66, phase=phase)
    lanes = Lanes(ours, 2, graph=False)
    for lr in (0.1, 0.001):
        rates = [Optimiser(name=name, lr=lr * k) for k in (1, 2)]
        mine, others = (
            [
                replace(j, phase=replace(PHASE, optimiser=o))
                for j, o in zip(work, rates, strict=True)
            ]
            for work in (ours, theirs)
        )
        assert_same(mine, others, lanes.fit(mine), [fit(j.node, j.phase, *j.path) for j in others])


def test_a_parameter_without_gradient_stays() -> None:
    """The trunk's output does not depend on the head, which weight decay would shrink."""
    phase = replace(PHASE, objective=MatchOutput("trunk"), optimiser=Optimiser(weight_decay=0.1))
    ours, theirs = jobs(72, phase=phase), jobs(72, phase=phase)
    for job in (*ours, *theirs):
        x = job.node.data["train"].x
        job.node.data = Data(train=(x, x[:, 0].flatten(1)))
    assert_same(
        ours,
        theirs,
        Lanes(ours, 1, graph=False).fit(ours),
        [fit(job.node, job.phase, *job.path) for job in theirs],
    )


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_data_are_gathered_a_few_batches_at_a_time(
    monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr("polyfed.train.lanes._GATHER_BYTES", batches * 6 * 32 * 4)
    assert_as_the_loop(replace(PHASE, epochs=3), 72, 73, 75, 66, lanes=2)


def test_alone_a_node_meets_the_chance_of_the_loop() -> None:
    assert_as_the_loop(replace(PHASE, objective=Rotated(cross_entropy)), 75, lanes=1)


def test_a_gradient_gets_the_layout_of_its_parameter() -> None:
    weight = torch.randn(4, 3, 2, 2)
    last = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert _strided(None, weight) is None
    assert _strided(weight, weight) is weight
    spread = torch.ones(()).expand(4)
    for gradient, like in ((last, weight), (weight, last), (spread, torch.zeros(4))):
        got = _strided(gradient, like)
        assert got is not None
        assert torch.equal(got, gradient)
        assert got.stride() == like.stride()


def test_a_buffer_that_is_not_stored_moves_in_with_its_node() -> None:
    """The proportions of unlabelled sets are such buffers."""
    ours = jobs(72, 72)
    seen: list[float] = []

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.append(float(model.net.get_buffer("own")[0]))
        return cross_entropy(model, x, y)

    ours = [Job(j.node, replace(PHASE, objective=objective, epochs=1), j.path) for j in ours]
    Lanes(ours, 1, graph=False).fit(ours)
    assert seen == [0.0] * 12 + [1.0] * 12


def test_chance_is_that_of_the_nodes_and_the_round() -> None:
    def drawn(names: str, tick: int) -> list[float]:
        seen: list[float] = []

        def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            seen.append(float(torch.rand(())))
            return cross_entropy(model, x, y)

        phase = replace(PHASE, objective=objective, epochs=1)
        made = zip(jobs(72, 72), names, strict=True)
        ours = [Job(replace(j.node, name=n), phase, ("tick", tick)) for j, n in made]
        Lanes(ours, 2, graph=False).fit(ours)
        return seen

    first = drawn("ab", 1)
    assert len(set(first)) == 24
    assert drawn("ab", 1) == first
    assert not {*first} & {*drawn("ab", 2)}
    assert not {*first} & {*drawn("ac", 1)}


def test_the_nodes_own_network_is_left_as_it_was() -> None:
    (job,) = jobs(72)
    job.node.model.net.eval()
    Lanes([job], 1, graph=False).fit([job])
    assert not job.node.model.net.training
    assert all(p.requires_grad and p.grad is None for p in job.node.model.net.parameters())


def test_lanes_may_be_let_go_at_any_time() -> None:
    """Such as by the garbage collector, in the midst of a stack's computation."""
    held = [Lanes(jobs(72), 1, graph=False)]

    def squared(x: Tensor) -> Tensor:
        held.clear()
        gc.collect()
        return x.square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(torch.func.grad(squared))(torch.ones(2, 3))
    assert not held


@dataclass(frozen=True)
class Acting:
    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return cross_entropy(model, x, y)

    def after_step(self, model: Model) -> None:
        return


@dataclass(frozen=True, eq=False)
class Unlike:
    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return cross_entropy(model, x, y)


@dataclass(frozen=True)
class Ruling:
    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("change", "count", "expected"),
    [
        ({}, 72, True),
        ({"stop": EarlyStop()}, 72, True),
        ({"keep": "all"}, 72, True),
        ({"epochs": None, "steps": 30}, 72, True),
        ({"objective": Acting()}, 72, False),
        ({"objective": Ruling()}, 72, False),
        ({}, 54, False),
        ({}, 55, False),  # the last one joins the batch before it
        ({}, 56, True),
        ({"epochs": None, "steps": 19}, 72, False),
        ({"epochs": None, "steps": 1 << 14}, 72, True),
        ({"epochs": None, "steps": (1 << 14) + 1}, 72, False),
        ({"epochs": 20}, 1, False),
        ({"objective": Unlike(), "epochs": None, "steps": 100}, 72, True),
        ({"objective": Unlike(), "epochs": None, "steps": 99}, 72, False),
    ],
)
def test_what_fits_a_lane(change: dict[str, Any], count: int, expected: bool) -> None:
    (job,) = jobs(count, phase=replace(PHASE, **change))
    assert can_take(job) == expected


def in_bfloat16(model: Model) -> Model:
    return Model(model.net, model.parts, "bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        lambda j: replace(j, phase=replace(j.phase, objective=Rotated(cross_entropy))),
        lambda j: replace(j, phase=replace(j.phase, batch=7)),
        lambda j: replace(j, phase=replace(j.phase, parts=("head",))),
        lambda j: replace(j, phase=replace(j.phase, optimiser=Optimiser(weight_decay=0.5))),
        lambda j: replace(j, node=replace(j.node, data=Data(train=j.node.data["train"].x))),
        lambda j: replace(j, node=replace(j.node, model=Model.split(j.node.model.net, head=...))),
        lambda j: replace(j, node=replace(j.node, model=in_bfloat16(j.node.model))),
    ],
)
def test_keys_differ_where_a_lane_would(change: Callable[[Job], Job]) -> None:
    job, other = jobs(72, 66)
    net = structure(job.node.model.net)
    assert lane_key(job, net) == lane_key(other, net)
    assert lane_key(job, net) != lane_key(change(job), net)
    assert lane_key(job, net) != lane_key(job, None)


def test_lanes_are_shared_by_learning_rates_and_stopping_rules() -> None:
    job, other = jobs(72, 66)
    phase = replace(PHASE, optimiser=Optimiser(lr=0.5), stop=EarlyStop())
    assert lane_key(job, None) == lane_key(replace(other, phase=phase), None)


# ---- who gets lanes ------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Lanes]:
    """The lanes that a trainer makes, which believes that it is on a GPU."""
    seen: list[Lanes] = []

    class Noted(Lanes):
        def __init__(self, jobs: Sequence[Job], count: int, *, graph: bool) -> None:
            assert graph
            super().__init__(jobs, count, graph=False)
            seen.append(self)

    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    monkeypatch.setattr(together, "Lanes", Noted)
    return seen


def train(trainer: Trainer, work: Sequence[Job]) -> list[Fitted]:
    return [done.result for done in trainer.train(work)]


def test_a_trainer_takes_lanes_for_batchnorm_and_keeps_them(made: list[Lanes]) -> None:
    ours, theirs = jobs(72, 66, 73, 75, 72, 70), jobs(72, 66, 73, 75, 72, 70)
    trainer = Trainer("always")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_same(ours, theirs, train(trainer, ours), train(Trainer("never"), theirs))
        assert [len(each.lanes) for each in made] == [5]
        train(trainer, ours[:1])
        train(trainer, ours[:1])
    assert [len(each.lanes) for each in made] == [5, 1]


def test_lanes_of_long_ago_are_let_go(made: list[Lanes]) -> None:
    trainer = Trainer()
    for width in (2, 3, 4, 5, 6, 6, 2):
        train(trainer, jobs(72, phase=replace(PHASE, batch=width)))
    assert len(made) == 6
    assert len(trainer._lanes) == 4


@pytest.mark.parametrize("trainer", [Trainer("never"), Trainer(graph=False)], ids=["never", "off"])
def test_who_wants_no_graphs_has_the_loop(made: list[Lanes], trainer: Trainer) -> None:
    train(trainer, jobs(72, 72))
    assert not made


def test_what_fits_no_lane_has_the_loop(made: list[Lanes]) -> None:
    train(Trainer(), jobs(72, 72, phase=replace(PHASE, objective=Acting())))
    train(Trainer(), jobs(30, phase=PHASE))
    assert not made


def test_other_networks_are_stacked_as_before(
    made: list[Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "measure", lambda jobs: False)
    monkeypatch.setattr(together, "remembered", lambda text, ask: ask())
    ours = jobs(72, 72)
    for job in ours:
        net = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
        job.node.model = Model.split(net, head="1")
    train(Trainer(), ours)
    assert not made


def test_convolutions_take_lanes_without_batchnorm_too(made: list[Lanes]) -> None:
    phase = replace(PHASE, parts=("head",))
    ours, theirs = jobs(72, 66, phase=phase), jobs(72, 66, phase=phase)
    assert_same(ours, theirs, train(Trainer(), ours), train(Trainer("never"), theirs))
    assert [len(each.lanes) for each in made] == [2]


def test_a_step_that_cannot_be_a_graph_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps are done, then a capture fails: nothing is lost, and it is not tried again."""
    tried: list[int] = []

    def fails(lanes: Sequence[Any], pool: Any) -> None:
        tried.append(len(lanes))
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    monkeypatch.setattr("polyfed.train.lanes._captured", fails)
    ours, theirs = jobs(72, 73), jobs(72, 73)
    trainer = Trainer("always")
    fitted = refused(trainer, ours)
    assert_same(ours, theirs, fitted, train(Trainer("never"), theirs))
    assert tried == [2]
    assert not trainer._lanes
    with pytest.warns(StackWarning, match="BatchNorm keeps statistics"):
        fitted = train(trainer, ours)
    assert_same(ours, theirs, fitted, train(Trainer("never"), theirs))


def refused(trainer: Trainer, work: Sequence[Job]) -> list[Fitted]:
    with pytest.warns(StackWarning, match=r"its step cannot be a CUDA graph \(.*operation"):
        return train(trainer, work)


# ---- on a GPU ------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def on_gpu(work: Sequence[Job]) -> list[Job]:
    device = torch.device("cuda")
    return [replace(job, node=job.node.working_copy(3, device, {})) for job in work]


def assert_close(ours: Sequence[Job], theirs: Sequence[Job], but: Collection[str] = ()) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in tensors(other).keys() - set(but):
            t = tensors(other)[name]
            torch.testing.assert_close(tensors(mine)[name], t, rtol=1e-3, atol=1e-4, msg=name)


SLOW = Optimiser(name="sgd", lr=0.01, momentum=0.9)  # Adam's first steps blow rounding up


@cuda
@pytest.mark.parametrize("optimiser", [SLOW, Optimiser(lr=1e-4)], ids=str)
@pytest.mark.parametrize("keep", [None, "all"])
def test_graphs_are_the_loop_on_cuda(optimiser: Optimiser, keep: str | None) -> None:
    phase = replace(PHASE, optimiser=optimiser, keep=keep)
    noise = () if optimiser is SLOW else ("0.0.bias", "0.1.running_mean")  # a gradient of 0
    ours, theirs = (on_gpu(jobs(72, 66, 73, 75, 80, phase=phase)) for _ in range(2))
    trainer = Trainer("always")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            fitted, wanted = train(trainer, ours), train(Trainer("never"), theirs)
            assert_close(ours, theirs, noise)
            assert [f.loss for f in fitted] == pytest.approx([w.loss for w in wanted], rel=1e-3)
    (lanes,) = trainer._lanes.values()
    assert (0, 1, 2, 3, 4) in lanes._graphs
    assert (4,) in lanes._graphs


@cuda
def test_chance_in_a_graph_is_that_of_the_loop_on_cuda() -> None:
    phase = replace(PHASE, objective=Rotated(cross_entropy, limit=180), optimiser=SLOW)
    ours, theirs = (on_gpu(jobs(75, phase=phase)) for _ in range(2))
    trainer = Trainer()
    for tick in range(3):
        ours, theirs = ([replace(j, path=("tick", tick)) for j in w] for w in (ours, theirs))
        train(trainer, ours)
        train(Trainer("never"), theirs)
        assert_close(ours, theirs)


@dataclass(frozen=True)
class Waiting:
    """Asks the device for a number, which no graph can do, and for chance."""

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        loss = cross_entropy(model, x + torch.rand((), device=x.device), y)
        return loss if float(loss.detach()) > -1 else loss * 2


@cuda
def test_a_capture_that_fails_loses_nothing_on_cuda() -> None:
    phase = replace(PHASE, objective=Waiting(), optimiser=SLOW)
    ours, theirs = (on_gpu(jobs(75, phase=phase)) for _ in range(2))
    trainer, before = Trainer("always"), torch.cuda.current_stream()
    refused(trainer, ours)
    train(Trainer("never"), theirs)
    assert_close(ours, theirs)
    assert torch.cuda.current_stream() == before
    assert torch.rand(3, device="cuda").isfinite().all()
    fine = replace(PHASE, optimiser=SLOW)
    ours, theirs = (on_gpu(jobs(75, 72, phase=fine)) for _ in range(2))
    train(trainer, ours)
    train(Trainer("never"), theirs)
    assert_close(ours, theirs)

"""A phase of the last parts, on what the frozen rest puts out = the same phase of the whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import (
    CrossEntropy,
    EarlyStop,
    MatchOutput,
    Optimiser,
    Phase,
    SquaredError,
    cross_entropy,
)
from polyfed.engines.run import Run, run
from polyfed.methods.fedbabu import FedBABU
from polyfed.methods.fedrep import FedRep
from polyfed.methods.li import LI
from polyfed.models.cnn import conv_net
from polyfed.random import ambient
from polyfed.train import together
from polyfed.train.tail import Cut, Tails, cut
from polyfed.train.together import Trainer
from polyfed.train.track import Job

SIDE = 8


def flat(head: nn.Module | None = None) -> Model:
    """Convolution, BatchNorm and dropout in front, then two layers in one long Sequential."""
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(),
        nn.Linear(108, 7), nn.ReLU(), head or nn.Linear(7, 4),
    )  # fmt: skip
    return Model.split(net, stem=("0", "1", "2", "3", "4"), body=("5", "6"), head="7")


def nested(dropout: float = 0.0) -> Model:
    """The cut goes through the middle of the middle of three Sequentials."""
    middle = OrderedDict(low=nn.Linear(108, 7), gate=nn.ReLU(), drop=nn.Dropout(dropout))
    middle["high"] = nn.Linear(7, 6)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()),
        nn.Sequential(middle),
        nn.Sequential(nn.Tanh(), nn.Linear(6, 4)),
    )
    return Model.split(net, trunk=("0", "1.low", "1.gate"), neck=("1.drop", "1.high"), head="2")


def party(make: Callable[[], Model] = flat, i: int = 0, size: int = 23, seed: int = 0) -> Node:
    draw = torch.Generator().manual_seed(i)
    with ambient(i, "net"):
        model = make()
    splits = {
        name: (
            torch.randn(n, 1, SIDE, SIDE, generator=draw),
            torch.randint(4, (n,), generator=draw),
        )
        for name, n in {"train": size, "val_es": 11, "test": 9}.items()
    }
    goal = torch.randn(size, 4, generator=draw)
    data = Data(may_miss_classes=True, **splits)
    return Node(f"N{i}", data, model, seed=seed, memory={"goal": goal})


def phase(**settings: Any) -> Phase:
    plain: dict[str, Any] = {"label": "p", "objective": cross_entropy, "parts": ("head",)}
    plain |= {"batch": 4, "optimiser": Optimiser(name="sgd", lr=0.05, momentum=0.5)}
    if not {"epochs", "steps"} & settings.keys():
        plain["epochs"] = 2
    return Phase(**(plain | settings))


def trained(stack: Any, nodes: list[Node], *phases: Phase) -> list[Any]:
    trainer = Trainer(stack)
    return [
        done.result
        for k, each in enumerate(phases)
        for done in trainer.train([Job(n, each, ("path", k)) for n in nodes])
    ]


def assert_same(one: Node, other: Node, tolerance: float = 2e-6) -> None:
    for mine, its in ((one.model.state(), other.model.state()), (one.memory, other.memory)):
        assert mine.keys() == its.keys()
        for name, t in mine.items():
            torch.testing.assert_close(its[name], t, rtol=1e-4, atol=tolerance, msg=name)


def both(make: Callable[[], Model], sizes: list[int], *phases: Phase) -> tuple[Node, Node]:
    """Nodes after the same phases, whole and on tails: the same in everything."""
    ways = {way: [party(make, i, n) for i, n in enumerate(sizes)] for way in ("never", "always")}
    never, always = (trained(way, nodes, *phases) for way, nodes in ways.items())
    for a, b in zip(never, always, strict=True):
        assert (a.label, a.epochs, a.steps) == (b.label, b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    start = [party(make, i, n) for i, n in enumerate(sizes)]
    for begun, one, other in zip(start, *ways.values(), strict=True):
        assert_same(one, other)
        moved = set(phases[0].parts)
        for part in one.model.parts:
            rests = all(
                torch.equal(t, other.model.state()[n]) for n, t in begun.model.state(part).items()
            )
            assert rests == (part not in moved), part
            assert all(p.requires_grad for p in other.model.parameters(part))
    return ways["never"][0], ways["always"][0]


def on_tail(node: Node, each: Phase, least: int = 1, most: float = 1e9) -> bool:
    """Whether a job is put on a tail."""
    job = Job(node, each, ("path",))
    ((found, seconds),) = Tails().take([job], least=least, most=most)
    assert seconds >= 0
    assert (found.node.name, found.node.seed, found.phase, found.path) == (
        (node.name, node.seed, each, ("path",))
    )
    assert found.node.memory is node.memory
    return found is not job


@pytest.mark.parametrize(
    ("make", "parts", "names"),
    [
        (flat, ("head",), ["7.weight", "7.bias"]),
        (flat, ("head", "body"), ["5.weight", "5.bias", "7.weight", "7.bias"]),
        (nested, ("head",), ["2.1.weight", "2.1.bias"]),
        (nested, ("neck", "head"), ["1.high.weight", "1.high.bias", "2.1.weight", "2.1.bias"]),
    ],
)
def test_a_cut_is_the_same_modules_under_the_same_names(
    make: Callable[[], Model], parts: tuple[str, ...], names: list[str]
) -> None:
    model, x = make(), torch.randn(5, 1, SIDE, SIDE)
    found = cut(model, parts)
    assert found is not None
    assert [name for name, _ in found.tail.net.named_parameters()] == names
    assert list(found.tail.parts) == [part for part in model.parts if part in parts]
    assert set(found.tail.names()) == set(model.names(*parts))
    own = dict(model.net.named_parameters())
    assert all(p is own[name] for name, p in found.tail.net.named_parameters())
    model.net.eval()
    assert torch.equal(found.tail(found.front(x)), model(x))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimiser": Optimiser(name="adamw", lr=1e-2, weight_decay=0.1), "keep": "head"},
        {"parts": ("body", "head"), "keep": "both"},
        {"steps": 7, "walk": True},
        {"objective": SquaredError(), "target": "goal"},
        {"batch": 0.3, "drop_last": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[23], [23, 17, 23]], ids=str)
def test_equals_the_loop(sizes: list[int], settings: dict[str, Any]) -> None:
    """Also what is kept of the optimiser and where a walk stopped, by the same names."""
    each = phase(**settings)
    assert on_tail(party(), each)
    one, other = both(flat, sizes, each, each, each)
    if each.keep == "head":
        kept = {n for n in other.memory if n.startswith("optimiser head/")}
        entries = ("step", "exp_avg", "exp_avg_sq")
        assert kept == {f"optimiser head/7.{p}/{e}" for p in ("weight", "bias") for e in entries}
    assert ("walk/train" in one.memory) == each.walk


@pytest.mark.parametrize("parts", [("head",), ("neck", "head")])
def test_nested_sequentials(parts: tuple[str, ...]) -> None:
    both(nested, [23, 17], *[phase(parts=parts, keep="it")] * 2)


def test_phases_of_other_parts_in_between_are_seen() -> None:
    """The front's outputs are those of now, also where a stack is used again."""
    turns = [phase(), phase(parts=("trunk",)), phase()]
    ways = {way: [party(nested, i) for i in range(2)] for way in ("never", "always")}
    for way, nodes in ways.items():
        trained(way, nodes, *turns)
    for one, other in zip(*ways.values(), strict=True):
        assert_same(one, other)


def test_dropout_in_the_tail_makes_the_same_draws() -> None:
    """One node, so no stack: noise is named by node and phase."""
    make = lambda: nested(0.5)  # noqa: E731
    each = phase(parts=("neck", "head"), epochs=3)
    assert on_tail(party(make), each)
    one, other = both(make, [23], each)
    still = party(nested)
    trained("never", [still], each)
    assert not torch.allclose(one.model.state()["2.1.weight"], still.model.state()["2.1.weight"])
    assert_same(one, other, 1e-7)


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_stops_at_the_same_epoch(patience: int) -> None:
    adam = Optimiser(name="adam", lr=0.1)
    each = phase(epochs=30, stop=EarlyStop(patience=patience), optimiser=adam)
    assert on_tail(party(), each)
    ways = {way: [party(flat, i) for i in range(3)] for way in ("never", "always")}
    never, always = (trained(way, nodes, each) for way, nodes in ways.items())
    assert [f.epochs for f in never] == [f.epochs for f in always]
    assert max(f.epochs for f in never) < 30
    for one, other in zip(*ways.values(), strict=True):
        assert_same(one, other, 1e-5)


def test_a_node_without_the_split_to_stop_by_trains_to_the_end() -> None:
    each = phase(stop=EarlyStop(split="nowhere"))
    assert on_tail(party(), each)
    both(flat, [23], each)


def test_bfloat16_computes_as_the_whole_network_does() -> None:
    nodes = {way: party(nested) for way in ("never", "always")}
    for way, node in nodes.items():
        node.model.precision = "bfloat16"
        trained(way, [node], phase())
    assert_same(*nodes.values(), 1e-5)
    exact = party(nested)
    trained("never", [exact], phase())
    name = "2.1.weight"
    assert not torch.equal(exact.model.state()[name], nodes["always"].model.state()[name])


def test_a_parameter_that_its_owner_froze_stays() -> None:
    node = party()
    bias = node.model.net[7].bias
    bias.requires_grad_(False)
    before = bias.clone()
    assert on_tail(node, phase())
    trained("always", [node], phase())
    assert torch.equal(bias, before)
    assert not bias.requires_grad


def passes(stack: Any, each: Phase, module: str = "0") -> int:
    """Forward passes of the front in one phase."""
    node, count = party(), [0]

    def note(*_: Any) -> None:
        count[0] += 1

    node.model.net.get_submodule(module).register_forward_hook(note)
    trained(stack, [node], each)
    return count[0]


def test_the_front_runs_once_in_a_phase() -> None:
    assert passes("always", phase(epochs=5)) == 1
    assert passes("never", phase(epochs=5)) == 5 * 6
    assert passes("always", phase(epochs=5), "7") == 5 * 6
    held_out = phase(epochs=5, stop=EarlyStop(patience=9))
    assert passes("always", held_out) == 2
    assert passes("never", held_out) == 5 * 7


def test_on_a_cpu_by_auto_from_fifty_steps_on() -> None:
    assert passes("auto", phase(steps=49)) == 49
    assert passes("auto", phase(steps=50)) == 1


def test_large_data_run_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nested(), torch.randn(600, 1, SIDE, SIDE)
    found = cut(model, ("head",))
    assert found is not None
    sizes: list[int] = []
    found.front[0].register_forward_hook(lambda m, args, out: sizes.append(len(out)))
    monkeypatch.setattr("polyfed.train.tail._CPU_ROWS", 256)
    features = found.features(x, 600 * 6 * 4)
    assert sizes == [256, 256, 88]
    assert features is not None
    assert not features.requires_grad
    model.net.eval()
    torch.testing.assert_close(features, found.front(x))
    assert found.features(x, 600 * 6 * 4 - 1) is None


def test_modes_are_put_back() -> None:
    node = party()
    node.model.net.train()
    node.model.net[3].eval()
    modes = [m.training for m in node.model.net.modules()]
    assert on_tail(node, phase())
    assert [m.training for m in node.model.net.modules()] == modes


# ---- what is left alone


class Called(nn.Module):
    """No Sequential: nobody knows what its forward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x)) * 2
        return out


class Odd(nn.Sequential):
    """A Sequential with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * 2
        return out


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, pair: Any) -> Tensor:
        out: Tensor = self.layer(pair[0])
        return out


def small(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), *modules)


def _tied() -> Model:
    """The head's weight is a parameter of the trunk, too: it moves in neither phase."""
    net = small(nn.Linear(5, 64, bias=False), nn.ReLU(), nn.Linear(64, 5))
    net[4].weight = net[1].weight
    return Model.split(net, trunk=..., head="4")


def _hooked() -> Model:
    net = small(nn.Linear(5, 4))
    net.register_forward_hook(lambda module, args, out: out * 2)
    return Model.split(net, trunk=..., head="2")


def _hooked_before() -> Model:
    net = small(nn.Linear(5, 4))
    net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return Model.split(net, trunk=..., head="2")


def _twice() -> Model:
    """Dropout that the head shares with the trunk, and so rests with it."""
    drop = nn.Dropout()
    return Model.split(small(drop, nn.Linear(5, 4), drop), trunk=("0", "1", "2"), head=("3", "4"))


LEFT_ALONE: dict[str, Callable[[], Model]] = {
    "no Sequential": lambda: Model.split(Called(), trunk=..., head="head"),
    "a kind of Sequential": lambda: Model.split(
        Odd(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 4)), trunk=..., head="2"
    ),
    "a Sequential in another module": lambda: Model.split(
        nn.Sequential(Odd(small(), nn.Linear(5, 5)), nn.Linear(5, 4)), trunk="0.0", head=...
    ),
    "a hook on the network": _hooked,
    "a hook before the network": _hooked_before,
    "the first part": lambda: Model.split(small(nn.Linear(5, 4)), head=("0", "1"), top=...),
    "a frozen layer behind it": lambda: Model.split(
        small(nn.Linear(5, 5), nn.Linear(5, 4)), trunk=..., head="2"
    ),
    "frozen dropout behind it": lambda: Model.split(
        small(nn.Linear(5, 4), nn.Dropout()), trunk=..., head="2"
    ),
    "dropout of no part before it": lambda: Model.split(
        small(nn.Dropout(), nn.Linear(5, 4)), trunk="1", head="3"
    ),
    "frozen buffers behind it": lambda: Model.split(
        small(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)),
        trunk=("0", "1"),
        head="2",
        statistics=("3.running_mean", "3.running_var", "3.num_batches_tracked"),
    ),
    "a module that both have": _twice,
    "a parameter that both have": _tied,
    "a front without parameters": lambda: Model.split(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), trunk="0", head="1"
    ),
    "outputs that are no tensor": lambda: Model.split(small(Pair(), First()), trunk=..., head="3"),
    "outputs that are not one per sample": lambda: Model.split(
        small(nn.Flatten(0), nn.Unflatten(0, (-1, 5)), nn.Linear(5, 4)),
        trunk=("0", "1", "2"),
        head=("3", "4"),
    ),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_networks_that_are_left_alone(why: str) -> None:
    node = party(LEFT_ALONE[why])
    with torch.random.fork_rng(devices=[]):
        node.model(node.data["train"].x)  # it works
    if why != "a parameter that both have":
        trained("always", [node], phase())
    assert not on_tail(node, phase())


@dataclass(frozen=True)
class Penalised(CrossEntropy):
    """It sees more of the model than outputs, for all that is known."""


class Acting:
    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return cross_entropy(model, x, y)

    def after_step(self, model: Model) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": Penalised()},
        {"objective": Acting()},
        {"objective": MatchOutput("head"), "target": "goal"},
        {"parts": ()},
        {"parts": ("stem", "body", "head")},
        {"parts": ("stem",)},
        {"parts": ("stem", "head")},
        {"epochs": 1, "batch": 23},  # one step
        {"steps": 5},  # less than an epoch
        {"epochs": 0},
    ],
    ids=[
        "penalised",
        "acts after steps",
        "matches outputs",
        "all by default",
        "all",
        "first",
        "first and last",
        "one step",
        "less than an epoch",
        "nothing",
    ],
)
def test_phases_that_are_left_alone(settings: dict[str, Any]) -> None:
    assert not on_tail(party(), phase(**settings))


def test_what_is_just_worth_it() -> None:
    node = party()
    assert on_tail(node, phase(steps=6))
    assert on_tail(node, phase(epochs=1, batch=22))
    assert on_tail(node, phase(steps=9), least=9)
    assert not on_tail(node, phase(steps=8), least=9)


def test_never_is_the_literal_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Tails, "take", fails)
    trained("never", [party()], phase())
    with pytest.raises(AssertionError):
        trained("always", [party()], phase())


def test_the_features_of_all_jobs_together_are_bounded() -> None:
    jobs = [Job(party(flat, i), phase(), ()) for i in range(3)]
    size = 23 * 7 * 4
    for most, want in ((3 * size, 3), (3 * size - 1, 2), (size, 1), (size - 1, 0)):
        taken = Tails().take(jobs, least=1, most=most)
        assert [found is not job for job, (found, _) in zip(jobs, taken, strict=True)] == (
            [True] * want + [False] * (3 - want)
        )
    held_out = phase(stop=EarlyStop())
    assert on_tail(party(), held_out, most=2 * size)
    assert not on_tail(party(), held_out, most=2 * size - 2)


def test_the_trainer_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_CPU_BYTES", 23 * 7 * 4)
    assert passes("always", phase()) == 1
    monkeypatch.setattr(together, "_CPU_BYTES", 23 * 7 * 4 - 1)
    assert passes("always", phase()) == 12 + 1  # a batch to find out


def test_the_time_belongs_to_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Tails, jobs: list[Job], **_: Any) -> list[tuple[Job, float]]:
        return [(job, 1e6 * (i + 1)) for i, job in enumerate(jobs)]

    monkeypatch.setattr(Tails, "take", take)
    jobs = [Job(party(flat, i), phase(), ()) for i in range(2)]
    first, second = (done.seconds for done in Trainer("always").train(jobs))
    assert 1e6 < first < 1.5e6
    assert 2e6 < second < 2.5e6


def test_the_time_of_the_front_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def features(self: Cut, x: Tensor, most: float) -> Tensor:
        clock[0] += 7.0
        return torch.zeros(len(x), 7)

    monkeypatch.setattr(Cut, "features", features)
    monkeypatch.setattr("polyfed.train.tail.time.perf_counter", lambda: clock[0])
    ((_, seconds),) = Tails().take([Job(party(), phase(), ())], least=1, most=1e9)
    assert seconds == 7.0


def test_tails_are_kept_for_later_phases() -> None:
    """So stacks, and graphs, that are known by the network can be used again."""
    tails, node = Tails(), party()
    found = [
        tails.take([Job(node, each, ())], least=1, most=1e9)[0][0].node
        for each in (phase(), phase(epochs=3), phase(parts=("body", "head")))
    ]
    assert found[0].model is found[1].model
    assert found[2].model is not found[0].model
    node.model.precision = "bfloat16"
    ((narrow, _),) = tails.take([Job(node, phase(), ())], least=1, most=1e9)
    assert narrow.node.model.precision == "bfloat16"
    assert not torch.equal(narrow.node.data["train"].x, found[0].data["train"].x)
    other = replace(node, model=Model.split(node.model.net, stem=("0", "1", "2", "3"), head=...))
    ((again, _),) = tails.take([Job(other, phase(), ())], least=1, most=1e9)
    assert again.node.model.parts == {"head": ("4", "5", "6", "7")}


def test_on_a_gpu_a_tail_that_is_alone_takes_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network itself has convolutions, and takes one in any company."""
    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    trainer, each = Trainer(), phase(epochs=20)
    job = Job(party(), each, ())
    ((on_tail, _),) = trainer._tails.take([job], least=1, most=1e9)
    whole = Job(party(small_mlp), each, ())
    for found, alone, in_company in (
        (job, True, True),
        (on_tail, True, False),
        (whole, False, False),
    ):
        assert bool(trainer._lane(found, is_alone=True)) == alone
        assert bool(trainer._lane(found)) == in_company


def small_mlp() -> Model:
    return Model.split(small(nn.Linear(5, 4)), trunk=..., head="2")


# ---- whole runs


def parties(make: Callable[[], Model], count: int = 3) -> list[Node]:
    return [replace(party(make, i, 20 + 5 * i), memory={}) for i in range(count)]


def small_cnn() -> Model:
    with ambient(5):
        net = conv_net((1, SIDE, SIDE), 4, blocks=1, channels=2, representation=6)
    return Model.split(net, trunk="trunk", head="head")


def nested_trunk() -> Model:
    with ambient(6):
        model = nested()
    names = dict(model.parts)
    return Model(model.net, {"trunk": names["trunk"], "head": (*names["neck"], *names["head"])})


@pytest.mark.parametrize("make", [small_cnn, nested_trunk])
@pytest.mark.parametrize(
    "method",
    [
        LI(rounds=2, lr=5e-3),
        LI(rounds=2, lr=5e-3, visit_steps=4),
        FedRep(rounds=2, lr=5e-3, batch=8, head_epochs=3),
        FedBABU(rounds=2, lr=5e-3, batch=8, finetune_parts="head"),
    ],
    ids=repr,
)
def test_runs_end_where_the_loop_ends(
    method: Method, make: Callable[[], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, taken = [0], Tails.take

    def take(self: Tails, jobs: list[Job], **options: Any) -> list[tuple[Job, float]]:
        found = taken(self, jobs, **options)
        count[0] += sum(after is not before for before, (after, _) in zip(jobs, found, strict=True))
        return found

    monkeypatch.setattr(Tails, "take", take)
    runs: dict[str, Run] = {
        way: run(method, parties(make), stack=way, progress=False)  # type: ignore[arg-type]
        for way in ("never", "always")
    }
    assert count[0] >= 3
    for one, other in zip(*(done.nodes.values() for done in runs.values()), strict=True):
        assert_same(one, other, 2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 3])
def test_cuda_equals_the_loop(count: int) -> None:
    device = torch.device("cuda")
    ways: dict[str, list[Node]] = {}
    for way in ("never", "auto"):
        nodes = [party(flat, i, 60) for i in range(count)]
        ways[way] = [n.working_copy(0, device, {}) for n in nodes]
        trained(way, ways[way], *[phase(epochs=4, keep="it")] * 3)
    for one, other in zip(*ways.values(), strict=True):
        assert_same(one, other, 2e-4)

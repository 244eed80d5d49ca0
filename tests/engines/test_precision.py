"""bfloat16: it reaches every forward pass, and nothing outside of the networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from torch import Tensor, nn

from polyfed import options
from polyfed.core.data import Data
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model, Precision
from polyfed.core.node import Node
from polyfed.core.phase import MatchOutput, Optimiser, Phase, cross_entropy
from polyfed.engines.compare import compare
from polyfed.engines.local import Settings
from polyfed.engines.run import Run, resume, run
from polyfed.errors import ConfigError
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedlinked import FedLinked
from polyfed.methods.joint import Joint
from polyfed.methods.li import LI
from polyfed.methods.local import Local
from polyfed.models.siamese import Kind, siamese
from polyfed.random import ambient
from polyfed.testing.federations import stackable, tiny
from polyfed.train.cohort import fit_cohort, score_cohort
from polyfed.train.evaluate import accuracy, outputs
from polyfed.train.layout import channels_last
from polyfed.train.loop import fit
from polyfed.train.ssl import BYOL, SimCLR, SimSiam
from polyfed.train.together import Stack
from polyfed.train.track import Job

SEEN: set[torch.dtype] = set()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


class Witness(nn.Module):
    """Notes in what its input was computed."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:  # not what looks at a network before a run
            SEEN.add(x.dtype)
        return x


class Net(nn.Module):
    """A convolution, a linear layer, and a witness between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.seen = Witness()
        self.flat = nn.Flatten()
        self.head = nn.Linear(6 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.flat(self.seen(self.conv(x)).relu()))
        return out


def node(i: int = 0, size: int = 40) -> Node:
    draw = torch.Generator().manual_seed(i)
    with ambient(7):
        net = Net()
    y = torch.arange(size) % 3
    x = torch.randn(size, 3, 6, 6, generator=draw) + y[:, None, None, None]
    data = Data(train=(x, y), test=(x[:20], y[:20]))
    return Node(f"M{i}", data, Model.split(net, trunk=..., head="head"))


def nodes() -> list[Node]:
    return [node(i) for i in range(3)]


def low(each: Node) -> Node:
    each.model.precision = "bfloat16"
    return each


SGD = Phase(label="p", objective=cross_entropy, epochs=3, batch=8, optimiser=Optimiser(name="sgd"))


def test_forward_is_bfloat16_with_channels_last_and_all_else_is_float32() -> None:
    there = low(node())
    x = there.data["train"].x
    with torch.no_grad():
        out = there.model(x)
        assert out.dtype == torch.float32
        assert there.model.output(x, "trunk").dtype == torch.float32
        assert {torch.bfloat16} == SEEN
        assert 0 < float((out - node().model(x)).abs().max()) < 0.05
        given = there.model.compute(lambda x: x, x)
        assert torch.equal(given, x)
        assert given.is_contiguous(memory_format=torch.channels_last)


class Spread(nn.Module):
    """A grey picture as three channels, which have no stride."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("begin", ["three channels", "spread", "scaled"])
@pytest.mark.parametrize("device", DEVICES)
def test_pictures_have_their_channels_last(begin: str, device: str) -> None:
    """Whatever a network does first, while it trains: behind a convolution, and in gradients."""
    first = {"spread": Spread(), "scaled": nn.BatchNorm2d(3)}.get(begin, nn.Identity())
    net = nn.Sequential(
        first,
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 3 * 3, 2)),
    ).to(device)
    seen: list[Tensor] = []
    for module in list(net)[1:8]:
        module.register_forward_hook(lambda module, x, y: seen.append(y))
    x = torch.randn(4, 1 if begin == "spread" else 3, 12, 12, device=device)
    low_model = Model.split(net, all=...)
    low_model.precision = "bfloat16"
    with channels_last(low_model, True):
        low_model(x)
        gradients = torch.autograd.grad(seen[-1].square().sum(), seen[:-1])
    for t in (*seen, *gradients):
        assert t.shape[1] > 1
        assert t.is_contiguous(memory_format=torch.channels_last)
        assert t.dtype == torch.bfloat16


def test_float32_is_untouched() -> None:
    here = node()
    x = here.data["train"].x
    assert torch.equal(here.model(x), here.model.net(x))
    assert {torch.float32} == SEEN
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_computes_in_the_same() -> None:
    assert low(node()).model.copy().precision == "bfloat16"


def test_precision_ends_with_the_forward_pass_also_when_it_breaks() -> None:
    there = low(node())
    with pytest.raises(RuntimeError):
        there.model(torch.randn(2, 3, 99, 99))
    there.model.output(there.data["train"].x, "trunk")  # leaves the network by an exception
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_training_is_close_to_float32_and_parameters_stay(name: str, stacked: bool) -> None:
    phase = Phase(
        label="p",
        objective=cross_entropy,
        epochs=4,
        batch=8,
        optimiser=Optimiser(name="sgd" if name == "sgd" else "adamw", lr=0.01),
        keep="all",
    )

    def trained(each: list[Node]) -> list[float]:
        if stacked:
            done = fit_cohort([Job(n, phase, ()) for n in each])
        else:
            done = [fit(n, phase) for n in each]
        return [fitted.loss for fitted in done]

    full, short = nodes(), [low(n) for n in nodes()]
    losses = trained(full)
    SEEN.clear()
    others = trained(short)
    assert {torch.bfloat16} == SEEN
    assert losses != others
    assert others == pytest.approx(losses, rel=0.05)
    for a, b in zip(full, short, strict=True):
        for (n, t), u in zip(a.model.state().items(), b.model.state().values(), strict=True):
            assert u.dtype == torch.float32, n
            assert torch.allclose(t, u, atol=0.02), n
        assert {t.dtype for t in b.memory.values()} <= {torch.float32}


def test_stack_is_one_by_one_to_rounding() -> None:
    alone, together = [low(n) for n in nodes()], [low(n) for n in nodes()]
    for n in alone:
        fit(n, SGD)
    fit_cohort([Job(n, SGD, ()) for n in together])
    for a, b in zip(alone, together, strict=True):
        for t, u in zip(a.model.state().values(), b.model.state().values(), strict=True):
            assert torch.allclose(t, u, atol=2e-3)


def test_scores_of_a_stack_are_in_the_same_precision() -> None:
    there = [low(n) for n in nodes()]
    scores = score_cohort(there, "test")
    assert {torch.bfloat16} == SEEN
    assert scores == pytest.approx([accuracy(n.model, n.data["test"]) for n in there], abs=0.11)


def test_a_stack_joins_one_precision_only() -> None:
    from polyfed.train.alike import exam_key, job_key

    a, b = node(), low(node())
    b.data = a.data
    assert job_key(Job(a, SGD, ()), 1) != job_key(Job(b, SGD, ()), 1)
    assert exam_key(a, "test", 1) != exam_key(b, "test", 1)


@pytest.mark.parametrize("kind", ["byol", "simsiam", "simclr"])
def test_self_supervision_computes_in_it_too(kind: Kind) -> None:
    with ambient(3):
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), Witness(), nn.Linear(8, 8))
        model = siamese(kind, trunk, 8, projection=4, hidden=8).as_model()
        model.precision = "bfloat16"
        objective = {"byol": BYOL, "simsiam": SimSiam, "simclr": SimCLR}[kind]
        seen = objective(views=lambda x: x).see(model, node().data["train"].x)
    assert {t.dtype for t in (seen.loss, seen.first, seen.second)} == {torch.float32}
    assert {torch.bfloat16} == SEEN


METHODS = [Local(rounds=1), FedAvg(rounds=1), LI(rounds=1), Joint(rounds=1)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("stack", ["never", "always"])
@pytest.mark.filterwarnings("ignore::polyfed.train.together.StackWarning")
def test_a_run_passes_it_on(method: Method, stack: Stack, tmp_path: Path) -> None:
    def go(precision: Precision) -> Run:
        where = tmp_path / precision
        return run(method, nodes(), stack=stack, precision=precision, folder=where, progress=False)

    full = go("float32")
    SEEN.clear()
    short = go("bfloat16")
    assert {torch.bfloat16} == SEEN
    for name, each in short.nodes.items():
        there = full.nodes[name].model.state()
        for key, t in each.model.state().items():
            assert t.dtype == torch.float32
            assert not torch.equal(t, there[key])
            assert torch.allclose(t, there[key], atol=0.02)
    config = yaml.safe_load((tmp_path / "bfloat16" / "config.yaml").read_text())
    assert config["settings"]["precision"] == "bfloat16"


def test_it_is_there_after_a_break(tmp_path: Path) -> None:
    whole = run(FedAvg(rounds=2), nodes(), precision="bfloat16", progress=False)
    half = run(
        FedAvg(rounds=2), nodes(), precision="bfloat16", folder=tmp_path / "r", progress=False
    )
    (tmp_path / "r" / "result.json").unlink()
    (tmp_path / "r" / "checkpoints" / "000002.safetensors").unlink()
    again = resume(tmp_path / "r", method=FedAvg(rounds=2), nodes=nodes(), progress=False)
    assert again.accuracy == half.accuracy == whole.accuracy
    for name, t in again.nodes["M0"].model.state().items():
        assert torch.equal(t, whole.nodes["M0"].model.state()[name])


@dataclass(frozen=True, kw_only=True)
class AtTheHub(Method):
    """The hub answers with its network, or first trains another in its place."""

    name: ClassVar[str] = "at-the-hub"
    title: ClassVar[str] = "a hub that computes"
    hub_trains: ClassVar[bool] = True

    trains: bool = False

    def local(self, node: Node) -> Iterable[Phase]:
        return ()

    def sends(self, node: Node) -> Spec:
        return {"said": TensorSpec(())}

    def send(self, node: Node) -> Message:
        return Message({"said": torch.tensor(1.0)})

    def gather(self, place: Node, got: Mapping[str, Message]) -> Iterable[Phase]:
        if self.trains:
            place.model = node(5).model
            yield self.phase("hub", epochs=1)

    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        SEEN.clear()
        place.model(place.data["train"].x)
        return {}


@pytest.mark.parametrize("trains", [False, True])
def test_a_hub_computes_in_it_too(trains: bool) -> None:
    hub = replace(node(4), name="hub")
    run(AtTheHub(rounds=1, trains=trains), [*nodes(), hub], precision="bfloat16", progress=False)
    assert {torch.bfloat16} == SEEN


def test_what_nodes_say_is_float32() -> None:
    method = FedLinked(rounds=1, init_epochs=0)
    done = run(method, list(map(stackable, tiny())), precision="bfloat16", progress=False)
    assert not done.faults  # a message of another dtype would have been refused


def test_distillation_targets_meet_float32() -> None:
    there = low(node())
    x = there.data["train"].x
    loss = MatchOutput("trunk")(there.model, x, outputs(there.model, x, "trunk"))
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == 0


def test_a_comparison_takes_it() -> None:
    compare([Local(rounds=1)], nodes(), seeds=1, precision="bfloat16", progress=False)
    assert {torch.bfloat16} == SEEN


def test_unknown_precision() -> None:
    with pytest.raises(ConfigError, match=r"precision.*float32.*bfloat16"):
        options.build(Settings, {"precision": "half"}, "settings")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_a_cuda_graph() -> None:
    def trained(*, graph: bool) -> list[Node]:
        there = [low(n.working_copy(0, torch.device("cuda"), {})) for n in nodes()]
        long = Phase(label="p", objective=cross_entropy, steps=40, batch=8)
        fit_cohort([Job(n, long, ()) for n in there], graph=graph)
        return there

    for a, b in zip(trained(graph=False), trained(graph=True), strict=True):
        for t, u in zip(a.model.state().values(), b.model.state().values(), strict=True):
            assert torch.allclose(t, u, atol=2e-3)

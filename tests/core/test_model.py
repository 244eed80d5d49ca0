"""Networks of the shapes people bring, split by module names and by nothing else."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.message import TensorSpec
from polyfed.core.model import Model
from polyfed.errors import ModelError, UnknownNameError
from polyfed.random import ambient


class Functional(nn.Module):
    """Features, then a flatten that is no module, then a classifier called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Linear(2 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.classifier(input=self.features(x).flatten(1))
        return z


class Bare(nn.Module):
    """Parameters and buffers that no module owns, on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16))
        self.register_buffer("mean", torch.randn(16))
        self.register_buffer("scratch", torch.ones(16), persistent=False)
        self.body = nn.Linear(16, 4)
        self.head = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body((x.flatten(1) - self.get_buffer("mean")) * self.scratch + self.shift)
        out: Tensor = self.head(z) / self.temperature
        return out


class Residual(nn.Module):
    """A block with BatchNorm and a skip, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList([Residual(4), Residual(4)])
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def sequential() -> nn.Module:
    trunk = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 4))
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(4, 3)))


def resnet(x: Tensor, net: nn.Module) -> Tensor:
    z = net.get_submodule("stem")(x)
    for name in ("layers.0", "layers.1"):
        z = net.get_submodule(name)(z)
    return z.mean((2, 3))


def bare(x: Tensor, net: nn.Module) -> Tensor:
    shifted = x.flatten(1) - net.get_buffer("mean") + net.get_parameter("shift")
    out: Tensor = net.get_submodule("body")(shifted)
    return out


# name: network, parts, what is expected to leave the trunk, names of the head
SHAPES: dict[str, tuple[Callable[[], nn.Module], dict, Callable, list[str]]] = {
    "nested": (
        sequential,
        {"trunk": "trunk", "head": "head"},
        lambda x, net: net.get_submodule("trunk")(x),
        ["head.weight", "head.bias"],
    ),
    "nested rest": (
        sequential,
        {"trunk": ("trunk.0", "trunk.1"), "head": ...},
        lambda x, net: net.get_submodule("trunk.1")(x.flatten(1)),
        ["trunk.2.weight", "trunk.2.bias", "head.weight", "head.bias"],
    ),
    "functional": (
        Functional,
        {"trunk": "features", "head": "classifier"},
        lambda x, net: net.get_submodule("features")(x).flatten(1),
        ["classifier.weight", "classifier.bias"],
    ),
    "bare": (
        Bare,
        {"trunk": ..., "head": ("head", "temperature")},
        bare,
        ["temperature", "head.weight", "head.bias"],
    ),
    "resnet": (
        ResNet,
        {"trunk": ("stem", "layers"), "head": "fc"},
        resnet,
        ["fc.weight", "fc.bias"],
    ),
    "resnet rest": (ResNet, {"trunk": ..., "head": "fc"}, resnet, ["fc.weight", "fc.bias"]),
}


def made(net: Callable[[], nn.Module], parts: dict) -> Model:
    with ambient(0, "test"):
        return Model.split(net(), **parts)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 5 * 16).reshape(5, 1, 4, 4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_is_what_enters_the_next_part(shape: str, training: bool) -> None:
    net, parts, expected, _ = SHAPES[shape]
    model = made(net, parts)
    model.net.train(training)
    with ambient(1, "dropout"):
        got = model.output(batch(), "trunk")
    with ambient(1, "dropout"):
        torch.testing.assert_close(got, expected(batch(), model.net), rtol=0, atol=0)
    assert model.net.training is training
    got.square().sum().backward()
    grads = {n for n, p in model.net.named_parameters() if p.grad is not None}
    assert grads == {n for n, _ in model.net.named_parameters()} & set(model.names("trunk"))
    assert not any(m._forward_pre_hooks for m in model.net.modules())
    last = model.output(batch(), "head") if not training else None
    assert last is None or torch.equal(last, model(batch()))


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_cover_the_state_once(shape: str) -> None:
    net, parts, _, head = SHAPES[shape]
    model = made(net, parts)
    everything = list(model.net.state_dict())
    assert model.names("head") == head
    assert model.names("trunk") == [n for n in everything if n not in head]
    assert model.names() == model.names("trunk", "head") == everything
    assert {id(p) for p in model.parameters()} == {id(p) for p in model.net.parameters()}
    assert model.spec("head") == {
        n: TensorSpec.of(t) for n, t in model.net.state_dict().items() if n in head
    }


def test_three_parts_with_the_trunk_in_the_middle() -> None:
    model = made(ResNet, {"stem": "stem", "trunk": "layers", "head": "fc"})
    model.net.eval()
    x = batch()
    assert torch.equal(model.output(x, "stem"), model.net.get_submodule("stem")(x))
    assert torch.equal(model.output(x, "trunk"), resnet(x, model.net))
    assert torch.equal(model.output(x, "head"), model(x))
    assert model.output_size(x, "trunk") == 4
    with pytest.raises(ModelError, match=r"'stem' puts out \[4, 4, 4\] per sample"):
        model.output_size(x, "stem")
    assert model.names("trunk")[:2] == ["layers.0.conv.weight", "layers.0.norm.weight"]
    assert "layers.1.norm.running_var" in model.names("trunk")


def test_state_is_a_copy_and_load_is_partial_and_exact() -> None:
    model = made(ResNet, {"trunk": ..., "head": "fc"})
    before = {n: t.clone() for n, t in model.net.state_dict().items()}
    kept = model.state("trunk")
    for t in kept.values():
        t.add_(1)
    assert all(torch.equal(model.state()[n], before[n]) for n in before)
    model.load(kept)
    after = model.state()
    assert all(torch.equal(after[n], kept.get(n, before[n])) for n in before)
    assert after["layers.0.norm.num_batches_tracked"].item() == 1  # an int64 buffer travels too


def test_a_load_that_does_not_fit_changes_nothing() -> None:
    model = made(sequential, {"trunk": "trunk", "head": "head"})
    before = {n: t.clone() for n, t in model.net.state_dict().items()}
    bad = {"head.bias": torch.ones(3), "head.weight": torch.ones(3, 5)}
    with pytest.raises(ModelError, match=r"'head.weight' has shape \[3, 4\] here, got \[3, 5\]"):
        model.load(bad)
    with pytest.raises(UnknownNameError, match=r"'head.wieght'. Did you mean 'head.weight'"):
        model.load({"head.bias": torch.ones(3), "head.wieght": torch.ones(3, 4)})
    assert all(torch.equal(model.state()[n], t) for n, t in before.items())


@pytest.mark.parametrize("training", [True, False])
def test_moving_freezes_the_rest_and_puts_everything_back(training: bool) -> None:
    model = made(ResNet, {"trunk": ..., "head": "fc"})
    model.net.train(training)
    model.net.get_submodule("layers.1").eval()
    model.net.get_parameter("fc.bias").requires_grad_(False)  # its owner froze it: it stays so
    modes = {n: m.training for n, m in model.net.named_modules()}
    trunk = {n: t.clone() for n, t in model.state("trunk").items()}
    with model.moving("head") as parameters:
        assert [id(p) for p in parameters] == [id(model.net.get_parameter("fc.weight"))]
        required = {n for n, p in model.net.named_parameters() if p.requires_grad}
        assert required == {"fc.weight"}
        assert model.net.get_submodule("fc").training
        assert not any(m.training for m in model.net.get_submodule("layers").modules())
        model(batch()).sum().backward()  # BatchNorm statistics must not drift
    assert all(torch.equal(model.state()[n], t) for n, t in trunk.items())
    assert {n: m.training for n, m in model.net.named_modules()} == modes
    required = {n for n, p in model.net.named_parameters() if not p.requires_grad}
    assert required == {"fc.bias"}
    with model.moving() as parameters:
        assert len(parameters) == len(list(model.net.parameters())) - 1
        assert all(m.training for m in model.net.modules())


def test_moving_puts_everything_back_after_an_error_too() -> None:
    model = made(sequential, {"trunk": "trunk", "head": "head"})
    model.net.eval()
    with pytest.raises(ZeroDivisionError), model.moving("head"):
        raise ZeroDivisionError
    assert all(p.requires_grad for p in model.net.parameters())
    assert not any(m.training for m in model.net.modules())


def test_output_size_leaves_modes_alone() -> None:
    model = made(ResNet, {"trunk": ..., "head": "fc"})
    model.net.get_submodule("layers").eval()
    modes = {n: m.training for n, m in model.net.named_modules()}
    assert model.output_size(batch(), "trunk") == 4
    assert {n: m.training for n, m in model.net.named_modules()} == modes


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("net", "head", "text"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1, "a part is a module's name.*got 1"),
        (nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), "a part is a module's name.*got Linear"),
        (nn.Linear, "weight", "a network is an nn.Module.*got <class"),
        (nn.LazyLinear(2), "weight", "lazy modules.*call it once on a batch"),
    ],
)
def test_what_is_no_network_or_no_name(net: nn.Module, head: str, text: str) -> None:
    """A lazy network would get its weights from nobody's stream."""
    with pytest.raises(ModelError, match=text):
        Model.split(net, trunk=..., head=head)


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ({"trunk": "trnk", "head": "head"}, UnknownNameError, "'trnk'. Did you mean 'trunk'"),
        ({"trunk": "trunk", "head": "trunk.2"}, ModelError, "'trunk.2.weight' belongs to several"),
        ({"trunk": "trunk"}, ModelError, "'head.weight' belongs to no part.*everything else"),
        ({"trunk": ..., "head": ...}, ModelError, "only one part can be '...'.*trunk, head"),
        ({"trunk": ("trunk.1", "tru"), "head": ...}, UnknownNameError, "unknown module 'tru'"),
    ],
)
def test_splits_that_cannot_be(parts: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        made(sequential, parts)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.names("haed"),
        lambda model: model.state("trunk", "haed"),
        lambda model: model.spec("haed"),
        lambda model: model.parameters("haed"),
        lambda model: model.moving("haed").__enter__(),
        lambda model: model.output(batch(), "haed"),
    ],
)
def test_an_unknown_part_is_named_with_the_nearest(call: Callable[[Model], object]) -> None:
    model = made(sequential, {"trunk": "trunk", "head": "head"})
    with pytest.raises(UnknownNameError, match=r"unknown part 'haed'. Did you mean 'head'"):
        call(model)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x.flatten(1)) * self.scale
        return out


@pytest.mark.parametrize("head", ["unused", "scale"])
def test_a_part_that_is_never_called(head: str) -> None:
    model = Model.split(Unused(), trunk=..., head=head)
    with pytest.raises(ModelError, match=f"never reached part 'head' \\({head}\\)"):
        model.output(batch(), "trunk")
    assert not any(m._forward_pre_hooks for m in model.net.modules())


class Heads(nn.Module):
    """A container whose members are called, never itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(16, 4), nn.ModuleList([nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[0](self.body(x.flatten(1)))
        return out


def test_a_part_that_is_a_container() -> None:
    model = Model.split(Heads(), trunk="body", head="heads")
    expected = model.net.get_submodule("body")(batch().flatten(1))
    assert torch.equal(model.output(batch(), "trunk"), expected)


def test_nothing_to_train_is_a_clear_error() -> None:
    model = Model.split(sequential(), inputs="trunk.0", trunk=..., head="head")
    with pytest.raises(ModelError, match="part 'inputs' has no parameter to train"):
        model.moving("inputs").__enter__()


class Tied(nn.Module):
    """The decoder's weight is the encoder's, and one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.again = self.trunk
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.trunk.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.trunk(x.flatten(1))))
        return out


def test_tied_weights_and_shared_modules() -> None:
    model = Model.split(Tied(), trunk=("trunk", "again"), head="head")
    assert model.copy().net.get_parameter("head.weight") is not model.net.get_parameter(
        "head.weight"
    )
    twin = model.copy()
    assert twin.net.get_parameter("head.weight") is twin.net.get_parameter("trunk.weight")
    twin.load({n: t + 1 for n, t in model.state().items()})
    assert torch.equal(twin.state()["again.bias"], model.state()["trunk.bias"] + 1)
    assert len(model.parameters()) == 2
    with model.moving("trunk") as parameters:
        torch.optim.SGD(parameters, lr=0.1)
    assert model.output(batch(), "trunk").shape == (5, 16)


def test_copy_is_independent_and_none_is_empty() -> None:
    model = made(sequential, {"trunk": "trunk", "head": "head"})
    twin = model.copy()
    twin.load({n: t + 1 for n, t in twin.state().items()})
    assert twin.parts == model.parts
    assert not torch.equal(twin.state()["head.bias"], model.state()["head.bias"])
    assert (Model.none().names(), Model.none().state()) == ([], {})


def test_a_copy_has_hooks_and_parts_of_its_own() -> None:
    model = Model.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), trunk=..., head="1")
    model.precision = "bfloat16"
    called: list[str] = []
    model.net[0].register_forward_hook(lambda *_: called.append("given"))
    twin = model.copy()
    twin.net[1].register_forward_hook(lambda *_: called.append("own"))
    assert (twin.precision, twin.parts, twin.names("head")) == (
        "bfloat16",
        model.parts,
        ["1.weight", "1.bias"],
    )
    twin.parts["new"] = ()
    assert "new" not in model.parts
    model.net(torch.zeros(1, 2))
    assert called == ["given"]
    twin.net(torch.zeros(1, 2))
    assert called == ["given", "given", "own"]
    modules = zip(model.net.modules(), twin.net.modules(), strict=True)
    assert not any(vars(a)[n] is vars(b)[n] for a, b in modules for n in vars(a) if "hooks" in n)

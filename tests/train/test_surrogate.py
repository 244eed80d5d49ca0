"""Nodes that know sets instead of labels: what they train on, and what never leaves them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser, Phase, cross_entropy
from polyfed.engines.gate import check_federation
from polyfed.errors import ConfigError, DataError
from polyfed.maths.surrogate import log_transition, proportion_loss, surrogate_losses
from polyfed.methods.fedavg import FedAvg
from polyfed.random import ambient, stream
from polyfed.train import accuracy, fit
from polyfed.train.cohort import fit_cohort
from polyfed.train.surrogate import (
    SETS,
    L1Penalty,
    ProportionLoss,
    SurrogateLoss,
    attach_sets,
    checked_proportions,
    examine,
    set_proportions,
)
from polyfed.train.track import Job

K = 3
PI = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]])
CENTRES = torch.tensor([[4.0, 0.0], [-4.0, 1.0], [0.0, -4.0]])


def network(seed: int = 0) -> nn.Sequential:
    with ambient(seed, "init"):
        trunk = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(16, K)))


def make_node(*, Pi: Tensor = PI, size: int = 200, name: str = "M0", seed: int = 0) -> Node:
    """`size` samples a set from three well separated classes, in the proportions Pi."""
    generator = stream(seed, "blobs", name)
    counts = (Pi * size).round().long()
    y = torch.cat([torch.arange(K).repeat_interleave(row) for row in counts])
    sets = torch.arange(len(Pi)).repeat_interleave(counts.sum(1))
    x = CENTRES[y] + torch.randn(len(y), 2, generator=generator)
    test_y = torch.arange(K).repeat(100)
    test = CENTRES[test_y] + torch.randn(300, 2, generator=generator)
    data = Data(train=x, test=(test, test_y))
    node = Node(name, data, Model.split(network(seed), trunk="trunk", head="head"), seed=seed)
    attach_sets(node, sets, counts / counts.sum(1, keepdim=True))
    return node


def phase(objective: Any, **settings: Any) -> Phase:
    defaults: dict[str, Any] = {"epochs": 15, "batch": 50, "optimiser": Optimiser(lr=1e-2)}
    return Phase(label="local", objective=objective, **({"target": SETS} | defaults | settings))


# ---- what a node knows ---------------------------------------------------------------------------


def test_proportions_go_with_the_network_and_never_leave() -> None:
    """SPEC 4.6: Pi and pibar are private; FedAvg-like methods see a plain network."""
    node, plain = make_node(), Model.split(network(), trunk="trunk", head="head")
    buffers = dict(node.model.net.named_buffers())
    assert set(buffers) == {"set_proportions", "set_transition"}
    assert list(node.model.net.state_dict()) == list(network().state_dict())
    assert torch.allclose(set_proportions(node.model), PI, atol=1e-3)
    assert node.model.names() == plain.names()
    assert node.model.spec() == plain.spec()
    assert set(FedAvg().send(node).tensors) == {*plain.names(), "num_examples"}
    copied = node.working_copy(3, torch.device("cpu"), {})
    assert torch.equal(set_proportions(copied.model), set_proportions(node.model))
    assert torch.equal(copied.memory[SETS], node.memory[SETS])
    assert torch.equal(copied.model(node.data["train"].x), plain(node.data["train"].x))


def test_the_gate_lets_more_sets_than_classes_pass() -> None:
    check_federation([make_node()])


def test_the_transition_is_that_of_the_sizes_and_the_prior() -> None:
    sets = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    node = Node("M0", Data(train=torch.randn(7, 2)), Model.split(network(), all=...))
    prior = torch.tensor([0.5, 0.3, 0.2])
    attach_sets(node, sets, PI, prior)
    expected = log_transition(PI, torch.tensor([3, 1, 1, 2]), prior)
    got = node.model.net.get_buffer("set_transition")
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-6)
    attach_sets(node, sets, PI.flip(1))  # a second time replaces the first
    assert torch.allclose(set_proportions(node.model), PI.flip(1))


def test_examine_reads_the_nodes() -> None:
    poor = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    found = examine([make_node(), make_node(Pi=poor, name="M1")])
    assert found.ranks == (3, 2)
    assert found.dimension == 1
    assert "M1 (rank 2)" in found.sentence(["M0", "M1"])


# ---- objectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["proper", "reference"])
def test_the_surrogate_loss_is_that_of_the_maths(loss: Any) -> None:
    node = make_node()
    x, sets = node.data["train"].x[:50], node.memory[SETS][:50]
    T = node.model.net.get_buffer("set_transition")
    expected = surrogate_losses(node.model(x), sets, T, loss)
    objective = SurrogateLoss(loss)
    assert torch.equal(objective.losses(node.model, x, sets), expected)
    assert torch.allclose(objective(node.model, x, sets), expected.mean())
    assert objective == SurrogateLoss(loss)


def test_the_proportion_loss_is_that_of_the_maths() -> None:
    node = make_node()
    x, sets = node.data["train"].x, node.memory[SETS]
    expected = proportion_loss(node.model(x), sets, set_proportions(node.model))
    assert torch.equal(ProportionLoss()(node.model, x, sets), expected)
    assert not hasattr(ProportionLoss(), "losses")
    assert not hasattr(L1Penalty(ProportionLoss(), 0.1), "losses")


@pytest.mark.parametrize("objective", [SurrogateLoss(), ProportionLoss()], ids=str)
def test_sets_alone_teach_the_classes(objective: Any) -> None:
    """Classes 5.6 deviations apart, or more: the best classifier errs on fewer than 1 in 100."""
    node = make_node()
    assert node.data["train"].y is None
    fit(node, phase(objective))
    assert accuracy(node.model, node.data["test"]) > 0.97


def test_l1_is_the_sum_of_absolute_values() -> None:
    node = make_node()
    x, sets = node.data["train"].x[:20], node.memory[SETS][:20]
    size = sum(float(p.detach().abs().sum()) for p in node.model.net.parameters())
    plain = SurrogateLoss().losses(node.model, x, sets).detach()
    objective = L1Penalty(SurrogateLoss(), 0.5)
    assert torch.allclose(objective.losses(node.model, x, sets).detach(), plain + 0.5 * size)
    assert torch.allclose(objective(node.model, x, sets).detach(), plain.mean() + 0.5 * size)
    assert L1Penalty(SurrogateLoss(), 0.0)(node.model, x, sets) == plain.mean()
    bias = node.model.net.get_parameter("head.bias")
    (with_penalty,) = torch.autograd.grad(objective(node.model, x, sets), bias)
    (without,) = torch.autograd.grad(SurrogateLoss()(node.model, x, sets), bias)
    assert torch.allclose(with_penalty - without, 0.5 * bias.detach().sign(), atol=1e-6)
    assert objective == L1Penalty(SurrogateLoss(), 0.5)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_l1_of_all_tensors_is_that_of_each(device: str) -> None:
    """The value, and gradients bit for bit: of zeros, frozen parameters, as part of a sum."""
    node = make_node().working_copy(0, torch.device(device), {})
    net, (x, sets) = node.model.net, (node.data["train"].x[:20], node.memory[SETS][:20])
    with torch.no_grad():
        net.get_parameter("head.bias")[1] = 0
    net.get_parameter("head.weight").requires_grad_(False)
    moving = [p for p in net.parameters() if p.requires_grad]

    def nothing(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return x.new_zeros(())

    ours = L1Penalty(nothing, 0.3)(node.model, x, sets)
    each = [torch.linalg.vector_norm(p, 1) for p in net.parameters()]
    wanted = 0.3 * torch.stack(each).sum()
    assert torch.equal(ours, wanted) if device == "cpu" else torch.allclose(ours, wanted)
    got = torch.autograd.grad(2 * ours, moving)
    for g, w in zip(got, torch.autograd.grad(2 * wanted, moving), strict=True):
        assert torch.equal(g, w)


class _Stacked(nn.Module):
    """A network and its objective as one module, so that functional_call swaps for both."""

    def __init__(self, model: Model, objective: Any) -> None:
        super().__init__()
        self.net, self.model, self.objective = model.net, model, objective

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = self.objective.losses(self.model, x, y)
        return losses


@pytest.mark.parametrize("objective", [SurrogateLoss(), L1Penalty(SurrogateLoss(), 0.01)], ids=str)
def test_nodes_with_different_sets_train_as_one_stack(objective: Any) -> None:
    """vmap over parameters, buffers, inputs and sets: losses and gradients of the loop."""
    others = [PI, PI.flip(0), PI[:, [1, 2, 0]]]
    nodes = [make_node(Pi=p, name=f"M{c}", seed=c) for c, p in enumerate(others)]
    x = torch.stack([n.data["train"].x[::8] for n in nodes])
    y = torch.stack([n.memory[SETS][::8] for n in nodes])
    parameters, buffers = torch.func.stack_module_state([n.model.net for n in nodes])
    assert buffers["set_transition"].shape == (3, 4, 3)
    whole = _Stacked(nodes[0].model, objective)

    def losses(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        values = {f"net.{n}": t for n, t in (p | b).items()}
        out: Tensor = torch.func.functional_call(whole, values, (x, y))
        return out

    def mean(*args: Any) -> Tensor:
        return losses(*args).mean()

    together = torch.func.vmap(losses)(parameters, buffers, x, y)
    gradients = torch.func.vmap(torch.func.grad(mean))(parameters, buffers, x, y)
    for c, node in enumerate(nodes):
        alone = objective.losses(node.model, x[c], y[c])
        assert torch.allclose(together[c], alone, atol=1e-5)
        node.model.net.zero_grad()
        alone.mean().backward()
        for name, p in node.model.net.named_parameters():
            assert torch.allclose(gradients[name][c], p.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "sizes"),
    [
        (SurrogateLoss(), (200, 160, 120)),  # batches of different sizes
        (L1Penalty(SurrogateLoss(), 1e-3), (200, 160, 120)),
        (ProportionLoss(), (200, 200, 200)),
    ],
    ids=str,
)
def test_a_cohort_trains_them_as_the_loop_does(objective: Any, sizes: tuple[int, ...]) -> None:
    others = (PI, PI.flip(0), PI[:, [1, 2, 0]])
    stacked, looped = (
        [
            make_node(Pi=p, size=n, name=f"M{c}")
            for c, (p, n) in enumerate(zip(others, sizes, strict=True))
        ]
        for _ in range(2)
    )
    plan = phase(objective, epochs=2)
    fit_cohort([Job(node, plan, ("tick", 1)) for node in stacked])
    for one, other in zip(stacked, looped, strict=True):
        fit(other, plan, "tick", 1)
        for name, value in other.model.state().items():
            assert torch.allclose(one.model.state()[name], value, atol=1e-5)


# ---- what cannot be right ------------------------------------------------------------------------


def bare(n: int = 4, classes: tuple[str, ...] = ()) -> Node:
    return Node("M7", Data(train=torch.zeros(n, 2)), Model.split(network(), all=...), classes)


def pi(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


GOOD = pi([0.5, 0.3, 0.2], [0.1, 0.8, 0.1])


@pytest.mark.parametrize(
    ("proportions", "message"),
    [
        (pi([0.5, 0.3, 0.1], [0.1, 0.8, 0.1]), r"M7, set 0: its proportions sum to 0\.9, expected"),
        (pi([0.5, 0.3, 0.2], [10, 80, 10]), r"set 1: .* sum to 100.*Divide them by their sum"),
        (pi([0.5, 0.7, -0.2], [0.1, 0.8, 0.1]), r"set 0: proportions must be >= 0, got 0\.5, 0\.7"),
        (pi([0.5, 0.3, 0.2], [0.1, float("nan"), 0.9]), r"set 1: proportions must be >= 0"),
        (torch.tensor([0.5, 0.5]), r"proportions of shape \[2\], expected one row for each set"),
        (torch.empty(0, 3), r"proportions of shape \[0, 3\], expected one row for each set"),
    ],
)
def test_bad_proportions(proportions: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        attach_sets(bare(), torch.tensor([0, 0, 1, 1]), proportions)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([0, 1, 1], r"M7: sets of shape \[3\] for the 4 samples of split 'train'"),
        ([0, 1, 2, 2], r"whole numbers from 0 to 1, as there are proportions of 2; got 0 to 2"),
        ([0, -1, 1, 1], r"got -1 to 1"),
        ([0.0, 0.5, 1.0, 1.0], r"sets must be whole numbers"),
        ([1, 1, 1, 1], r"no sample in set 0\. Leave its row out"),
    ],
)
def test_bad_sets(sets: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        attach_sets(bare(), torch.tensor(sets), GOOD)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([0.5, 0.5, 0.0], r"class 2 has prior 0 but occurs in the sets"),
        ([0.5, 0.6, -0.1], r"a prior must be >= 0"),
        ([0.0, 0.0, 0.0], r"not all 0"),
        ([0.5, 0.5], r"a prior of shape \[2\] for 3 classes"),
    ],
)
def test_bad_priors(prior: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        attach_sets(bare(), torch.tensor([0, 0, 1, 1]), GOOD, torch.tensor(prior))


def test_a_class_that_never_occurs_may_have_prior_0() -> None:
    node = bare()
    without = pi([0.5, 0.5, 0.0], [0.1, 0.9, 0.0])
    attach_sets(node, torch.tensor([0, 0, 1, 1]), without, torch.tensor([0.5, 0.5, 0.0]))
    loss = SurrogateLoss()(node.model, torch.randn(4, 2), node.memory[SETS])
    loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in node.model.net.parameters())


def test_the_classes_are_those_of_the_node() -> None:
    with pytest.raises(DataError, match="proportions of 3 classes, but it names 2: cat, dog"):
        attach_sets(bare(classes=("cat", "dog")), torch.tensor([0, 0, 1, 1]), GOOD)


def test_arrays_and_lists_will_do() -> None:
    one, other = bare(), bare()
    attach_sets(one, [0, 0, 1, 1], GOOD.tolist(), [1, 1, 2])
    attach_sets(other, np.array([0.0, 0, 1, 1]), GOOD.numpy(), np.array([0.25, 0.25, 0.5]))
    for name in ("set_proportions", "set_transition"):
        pair = (node.model.net.get_buffer(name) for node in (one, other))
        assert torch.allclose(*pair)
    assert one.memory[SETS].tolist() == other.memory[SETS].tolist() == [0, 0, 1, 1]
    assert other.memory[SETS].dtype == torch.int64


def test_rounded_proportions_are_made_to_sum_to_one() -> None:
    rounded = checked_proportions(pi([0.333, 0.333, 0.333]), "node M0")
    assert rounded.dtype == torch.float64
    assert torch.allclose(rounded, torch.full((1, 3), 1 / 3, dtype=torch.float64))


def test_objectives_say_what_they_miss() -> None:
    node = bare()
    x = node.data["train"].x
    for objective in (SurrogateLoss(), ProportionLoss()):
        with pytest.raises(ConfigError, match=r"knows no sets.*attach_sets"):
            objective(node.model, x, torch.zeros(4, dtype=torch.int64))
    attach_sets(node, torch.tensor([0, 0, 1, 1]), GOOD)
    with pytest.raises(ConfigError, match=r"needs the set of each sample: Phase\(target='sets'\)"):
        SurrogateLoss()(node.model, x, None)
    with pytest.raises(ConfigError, match="cross_entropy needs labels"):
        cross_entropy(node.model, *_pair(node.data["train"]))
    with pytest.raises((ConfigError, TypeError)):  # the type checker of the tests is earlier
        SurrogateLoss("other")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"L1Penalty\.weight must be >= 0"):
        L1Penalty(SurrogateLoss(), -1.0)


def _pair(split: Split) -> tuple[Tensor, Tensor | None]:
    return split.x, split.y


def test_pure_sets_train_as_labels_do() -> None:
    """SPEC 4.7, 2, through the loop: the same steps as cross-entropy, to rounding."""
    sets = torch.arange(K).repeat(20)
    x = CENTRES[sets] + torch.randn(60, 2, generator=stream(0, "pure"))
    states = []
    for objective, target in ((SurrogateLoss(), SETS), (cross_entropy, None)):
        model = Model.split(network(), all=...)
        node = Node("M0", Data(train=(x, sets)), model)
        attach_sets(node, sets, torch.eye(K))
        fit(node, phase(objective, target=target, epochs=3, batch=10))
        states.append(torch.cat([p.flatten() for p in model.state().values()]))
    assert torch.allclose(*states, atol=1e-4)
    assert functional.mse_loss(states[0], torch.zeros_like(states[0])) > 0

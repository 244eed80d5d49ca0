"""FedDF, with labels and without: against its algorithm written out, and what it promises."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedbyol import BYOLAlone, FedBYOL
from polyfed.methods.feddf import FedDF, FedDFSSL, Projections, Scores
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny
from polyfed.train import outputs
from polyfed.train.kinds import with_hub

DF: dict[str, Any] = {"batch": 11, "local_epochs": 1, "distil_steps": 6, "public_batch": 7}
SSL: dict[str, Any] = {"batch": 8, "local_epochs": 1, "projection": 4, "predictor_hidden": 6}
SSL |= {"probe_epochs": 0}
HUB: dict[str, Any] = {"distil_steps": 6, "public_batch": 7}


def kinds(seed: int = 0) -> list[Node]:
    """The tiny federation with a hub; M1 has another network than M0 and M2."""
    nodes = tiny(seed)
    with ambient(seed, "kinds"):
        trunk = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh())
        net = nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(9, 3)))
    nodes[1].model = Model.split(net, trunk="trunk", head="head")
    return with_hub(nodes)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](FedDF(**{**DF, "batch": 8}), lambda seed: _renamed(kinds(seed)))


@pytest.mark.filterwarnings("ignore::polyfed.methods.fedbyol.CollapseWarning")
@pytest.mark.parametrize("check", CHECKS)
def test_conformance_without_labels(check: str) -> None:
    CHECKS[check](FedDFSSL(**SSL, **HUB), lambda seed: _renamed(kinds(seed)))


def _renamed(nodes: list[Node]) -> list[Node]:
    """The hub is neither the first nor the last of all names."""
    names = {"M0": "east", "M1": "north", "M2": "west", "hub": "hub"}
    return [replace(node, name=names[node.name]) for node in nodes]


def _divergence(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """KL(softmax(y) || softmax(net(x))), written out."""
    p = torch.exp(y) / torch.exp(y).sum(1, keepdim=True)
    out = net(x)
    q = torch.exp(out) / torch.exp(out).sum(1, keepdim=True)
    return (p * (p.log() - q.log())).sum() / len(x)


def test_equals_the_literal_algorithm(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Lin et al. 2020, Algorithm 3: two prototypes, of which one has two nodes of 25 and 33."""
    method, nodes = FedDF(rounds=2, distil_lr=2e-3, **DF), kinds()
    parties = nodes[:3]
    group = {"M0": 0, "M1": 1, "M2": 0}
    students = [copy.deepcopy(nodes[0].model.net), copy.deepcopy(nodes[1].model.net)]
    X = nodes[0].data["public"].x
    for t in range(1, 3):
        nets, n = {}, {node.name: len(node.data["train"]) for node in parties}
        for node in parties:
            nets[node.name] = net = copy.deepcopy(students[group[node.name]])
            split = node.data["train"]
            settings: Any = {"name": node.name, "path": ("tick", t, "local", 0), "epochs": 1}
            literal_train(net, [net], split.x, split.y, batch=11, lr=method.lr, **settings)
        with torch.no_grad():
            teacher = sum(net.eval()(X) for net in nets.values()) / 3
        for a, student in enumerate(students):
            members = [name for name in nets if group[name] == a]
            total = sum(n[name] for name in members)
            for key, value in student.state_dict().items():
                exact = sum(n[k] / total * nets[k].state_dict()[key].double() for k in members)
                value.copy_(exact if value.is_floating_point() else exact.round())
            settings = {"name": "hub", "path": ("tick", t, "gather", a), "epochs": 2, "batch": 7}
            literal_train(student, [student], X, teacher, lr=2e-3, loss=_divergence, **settings)
    done = run(method, nodes, progress=False)
    for name, node in done.nodes.items():
        assert_close(node, students[group[name]], 2e-5)


def states(done: Run) -> dict[str, Tensor]:
    return {
        f"{name}: {key}": tensor
        for name, node in done.nodes.items()
        for key, tensor in node.model.state().items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


def test_without_distillation_it_is_averaging() -> None:
    off: dict[str, Any] = {"distil_steps": 0}
    averaged = run(FedAvg(rounds=2, batch=11), tiny(), progress=False)
    done = run(FedDF(rounds=2, **{**DF, **off}), with_hub(tiny()), progress=False)
    assert_same(states(done), states(averaged))
    averaged = run(FedBYOL(rounds=2, **SSL), tiny(), progress=False)
    done = run(FedDFSSL(rounds=2, **SSL, **off), with_hub(tiny()), progress=False)
    assert_same(states(done), states(averaged))


def test_projections_are_distilled_at_the_hub() -> None:
    """One step of Adam, whose first step is lr times the sign, on trunk and projector."""
    method = FedDFSSL(rounds=1, **SSL, distil_steps=1, public_batch=20, distil_lr=1e-3)
    alone = run(BYOLAlone(rounds=1, **SSL), tiny(), progress=False)
    mean = run(FedBYOL(rounds=1, **SSL), tiny(), progress=False).nodes["M0"].model
    done = run(method, with_hub(tiny()), progress=False)
    X = tiny()[0].data["public"].x
    with torch.no_grad():
        q = sum(
            node.model.net.eval().projector(node.model.net.trunk(X))
            for node in alone.nodes.values()
        ) / 3  # fmt: skip
    path = ("tick", 1, "gather", 0)
    order = torch.randperm(20, generator=stream(0, "node", "hub", "batches", *path))
    mean.net.train()
    with ambient(0, "node", "hub", "noise", *path):
        z = mean.net.projector(mean.net.trunk(X[order]))
    (z - q[order]).square().mean().backward()
    for name, parameter in mean.net.named_parameters():
        if name.startswith(("trunk", "projector")):
            moved = done.nodes["M1"].model.state()[name] - parameter.detach()
            clear = parameter.grad.abs() > 1e-5  # Adam's epsilon is 1e-8
            torch.testing.assert_close(moved[clear], -1e-3 * parameter.grad.sign()[clear],
                                       rtol=0, atol=5e-6)  # fmt: skip
    for name, node in done.nodes.items():
        for key, tensor in node.model.state("target").items():
            assert torch.equal(tensor, alone.nodes[name].model.state()[key])


def test_labels_do_not_influence_self_supervised_training() -> None:
    honest, shuffled = kinds(), kinds()
    for node in shuffled[:3]:
        train = node.data["train"]
        y = train.y[torch.randperm(len(train), generator=stream(1, node.name))]
        node.data = Data(**{**node.data, "train": Split(train.x, y)})
    method = FedDFSSL(rounds=2, **SSL, **HUB)
    assert_same(states(run(method, honest)), states(run(method, shuffled)))


def test_the_hub_computes_in_the_precision_of_the_run() -> None:
    *nodes, hub = kinds()
    method, x = FedDF(**DF), hub.data["public"].x
    got = {node.name: method.send(node) for node in nodes}
    for node in nodes:
        node.model.precision = "bfloat16"
    hub.model.precision = "bfloat16"
    next(iter(method.gather(hub, got)))
    half = torch.stack([outputs(node.model, x) for node in nodes]).mean(0)
    assert torch.equal(hub.memory["teacher"], half)
    whole = Scores("kind0")(hub.model.copy(), x, half)
    hub.model.precision = "float32"
    assert float(whole.detach()) != float(Scores("kind0")(hub.model, x, half).detach())
    z = Projections("a")(_ssl_model("bfloat16"), x, torch.zeros(len(x), 4))
    assert float(z.detach()) != float(
        Projections("a")(_ssl_model("float32"), x, torch.zeros(len(x), 4)).detach()
    )


def _ssl_model(precision: Any) -> Model:
    with ambient(0, "precise"):
        parts = OrderedDict(trunk=nn.Linear(6, 5), projector=nn.Linear(5, 4))
    model = Model.split(nn.ModuleDict({"a": nn.Sequential(parts)}), a="a")
    model.precision = precision
    return model


def test_nodes_of_a_kind_hear_the_same_and_others_something_else() -> None:
    done = run(FedDF(rounds=1, **DF), kinds(), progress=False)
    one, other, twin = (done.nodes[f"M{i}"].model.state() for i in range(3))
    for key, tensor in one.items():
        assert torch.equal(tensor, twin[key])
    assert other.keys() != one.keys()
    sent = {c.source: {t["name"] for t in c.tensors} for c in done.ledger.crossings() if c.tick}
    assert sent["M1"] == {*other, "num_examples"}
    hub = done.places["hub"]
    assert [*hub.model.parts] == ["kind0", "kind1"]
    assert "teacher" not in hub.memory


def test_a_node_that_was_refused_is_answered_from_the_second_round_on() -> None:
    """Its kind is known then; before, nobody knows what to tell it."""
    nodes = kinds()
    nodes[0].model.load({"head.bias": torch.full((3,), torch.nan)})
    done = run(FedDF(rounds=1, **DF), nodes, progress=False)
    assert [c.to for c in done.ledger.crossings() if c.source == "hub"] == ["M1", "M2"]


def test_the_objectives_are_what_they_say() -> None:
    net = nn.ModuleDict(
        {"a": nn.Sequential(OrderedDict(trunk=nn.Linear(2, 2), projector=nn.Identity()))}
    )
    model = Model.split(net, a="a")
    model.load({"a.trunk.weight": torch.eye(2), "a.trunk.bias": torch.zeros(2)})
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]])
    assert Projections("a").losses(model, x, y).tolist() == [2.5]
    wanted = _divergence(net["a"], x, y).detach()
    torch.testing.assert_close(Scores("a").losses(model, x, y).detach()[0], wanted)
    assert Scores("a").losses(model, x, x + 5).detach().abs().max() < 1e-6  # softmax of both
    for objective in (Scores("a"), Projections("a")):
        with pytest.raises(ConfigError, match="distillation needs targets"):
            objective(model, x, None)


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedDF(**DF), FedDFSSL(**SSL)])
def test_a_hub_is_needed_and_public_inputs_and_all_kinds(
    method: Any, without: Callable[..., Node]
) -> None:
    with pytest.raises(ConfigError, match=f"{method.name} distils at the hub, but no node is"):
        run(method, tiny(), progress=False)
    bare = with_hub([without(node, "public") for node in tiny()])
    with pytest.raises(DataError, match="the hub has no split 'public'"):
        run(method, bare, progress=False)
    strange = [*kinds()[:3], with_hub(tiny())[-1]]
    with pytest.raises(ModelError, match="the hub has no network like that of node M1"):
        run(method, strange, progress=False)


def test_trunks_must_be_called_so() -> None:
    nodes = tiny()
    for node in nodes:
        net = nn.Sequential(OrderedDict(body=node.model.net.trunk, head=node.model.net.head))
        node.model = Model.split(net, trunk="body", head="head")
    with pytest.raises(ModelError, match="kind0 has no child called 'trunk'"):
        run(FedDFSSL(**SSL), with_hub(nodes), progress=False)


def test_other_classes_are_an_error() -> None:
    nodes = tiny()
    nodes[1].classes = ("a", "b", "d")
    with pytest.raises(ConfigError, match="feddf averages scores"):
        run(FedDF(**DF), with_hub(nodes), progress=False)


@pytest.mark.parametrize(
    "wrong",
    [{"distil_steps": -1}, {"distil_lr": 0.0}, {"public_batch": 0}, {"local_epochs": -1}],
)
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FedDF(**wrong)

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.methods import joint
from polyfed.methods.joint import Joint
from polyfed.methods.local import Local
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](Joint(batch=8, lr=1e-2, init_epochs=1, local_epochs=1, patience=1), tiny)


def _views(done_node: Node) -> dict[str, dict[str, Tensor]]:
    return {name: view.model.state() for name, view in Joint().views(done_node).items()}


def test_equals_the_literal_joint_training(plain_nodes: Callable[..., list[Node]]) -> None:
    """One trunk module, three heads, one loss: the mean over the batch of each head's own."""
    nodes = plain_nodes(common=True)
    method = Joint(rounds=2, batch=11, lr=1e-2, init_epochs=1, local_epochs=2, patience=0)
    done = run(method, nodes, progress=False)

    trunk = copy.deepcopy(nodes[0].model.net.trunk)
    heads = [copy.deepcopy(node.model.net.head) for node in nodes]
    x = torch.cat([node.data["train"].x for node in nodes])
    y = torch.cat([node.data["train"].y for node in nodes])
    owner = [k for k, node in enumerate(nodes) for _ in range(len(node.data["train"]))]
    for epochs, path in (
        (1, ("tick", 0, "start", 0)),
        (2, ("tick", 1, "local", 0)),
        (2, ("tick", 2, "local", 0)),
    ):
        modules = [trunk, *heads]
        optimiser = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-2)
        order = stream(0, "node", "pooled", "batches", *path)
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=order).split(11):
                loss = torch.zeros(())
                for i in rows.tolist():
                    scores = heads[owner[i]](trunk(x[i : i + 1]))
                    loss = loss + functional.cross_entropy(scores, y[i : i + 1])
                optimiser.zero_grad()
                (loss / len(rows)).backward()
                optimiser.step()

    for k, state in enumerate(_views(done.nodes["pooled"]).values()):
        wanted = nn.ModuleDict({"trunk": trunk, "head": heads[k]}).state_dict()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5)


def test_the_joint_loss_is_the_weighted_sum_over_nodes(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """Eq. (1): sum_k (n_k / n) CE_k, on all pooled data at once, and its gradient."""
    nodes = plain_nodes(common=True)
    pooled = Joint().prepare(nodes)[0]
    split = pooled.data["train"]
    loss = joint._joint_cross_entropy(pooled.model, split.x, split.y)
    loss.backward()
    n = sum(len(node.data["train"]) for node in nodes)
    wanted, grad = 0.0, torch.zeros(8, 6)
    for node in nodes:
        own = node.data["train"]
        ce = functional.cross_entropy(node.model(own.x), own.y)
        (g,) = torch.autograd.grad(ce, [node.model.net.trunk[0].weight])
        wanted += len(own) / n * ce.item()
        grad += len(own) / n * g
    assert loss.item() == pytest.approx(wanted, abs=1e-6)
    shared = pooled.model.net.nets[0].trunk[0].weight
    torch.testing.assert_close(shared.grad, grad, rtol=0, atol=1e-6)


def test_the_trunk_is_one_and_heads_are_each_nodes_own() -> None:
    done = run(Joint(rounds=1, batch=8, local_epochs=2), tiny(), progress=False)
    one, *others = _views(done.nodes["pooled"]).values()
    for other in others:
        for name in one:
            same = torch.equal(one[name], other[name])
            assert same == name.startswith("trunk."), name
    start = tiny()[0].model.state()
    assert not torch.equal(one["trunk.0.weight"], start["trunk.0.weight"])
    assert int(one["trunk.1.num_batches_tracked"]) > 0


@pytest.mark.parametrize("k", range(3))
def test_every_node_trains_the_trunk(k: int) -> None:
    """Other labels at any one node, another trunk everywhere."""
    method = Joint(rounds=1, batch=80, lr=0.1, local_epochs=1, patience=0)
    before = _views(run(method, tiny(), progress=False).nodes["pooled"])
    nodes = tiny()
    data = dict(nodes[k].data)
    data["train"] = Split(data["train"].x, (data["train"].y + 1) % 3)
    nodes[k] = replace(nodes[k], data=Data(**data))
    after = _views(run(method, nodes, progress=False).nodes["pooled"])
    for name in before:
        assert not torch.equal(before[name]["trunk.4.weight"], after[name]["trunk.4.weight"])


@pytest.mark.parametrize(
    "move",
    [
        copy.deepcopy,
        lambda net: net.double(),
        lambda net: net.double().float(),
        lambda net: net.to("meta"),
    ],
)
def test_the_trunk_stays_tied_when_the_network_is_moved(
    move: Callable[[nn.Module], nn.Module],
) -> None:
    """Moving makes buffers anew: BatchNorm statistics must not come apart."""
    first, *others = move(Joint().prepare(tiny())[0].model.net).nets
    for other in others:
        for part in ("named_parameters", "named_buffers"):
            mine, yours = dict(getattr(first, part)()), dict(getattr(other, part)())
            for name in mine:
                assert (mine[name] is yours[name]) == name.startswith("trunk."), name


def test_one_node_is_local_training(plain_nodes: Callable[..., list[Node]]) -> None:
    """The one node has the pool's name, so that the batches are the same."""
    node = replace(plain_nodes()[0], name="pooled")
    options = {"rounds": 2, "batch": 8, "lr": 0.1, "optimiser": "sgd", "local_epochs": 4}
    together = run(Joint(**options, patience=1), [node], progress=False)
    alone = run(Local(**options, patience=1, rollback=False), [node], progress=False)
    wanted = alone.nodes["pooled"].model.state()
    for name, tensor in _views(together.nodes["pooled"])["pooled"].items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6)
    assert together.accuracy == alone.accuracy


def test_early_stopping_watches_the_pooled_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def scripted(model: Model, split: Split, objective: object) -> float:
        seen.append(len(split))
        return float(len(seen))

    monkeypatch.setattr("polyfed.train.loop.mean_loss", scripted)
    done = run(Joint(rounds=1, batch=8, local_epochs=9, patience=2), tiny(), progress=False)
    assert seen == [27, 27, 27]
    assert [m["local_epochs"] for m in done.metrics if "local_epochs" in m] == [3]


def test_a_nodes_single_sample_in_a_batch_leaves_batchnorm_at_rest() -> None:
    """BatchNorm cannot normalise one sample: the node's network uses its running statistics."""
    pooled = Joint().prepare(tiny())[0]
    net, split = pooled.model.net, pooled.data["train"]
    net.train()
    norm = net.nets[0].trunk[1]
    before = norm.running_mean.clone()
    with ambient(0, "noise"):
        loss = joint._joint_cross_entropy(pooled.model, split.x[:1], split.y[:1])
    assert torch.isfinite(loss)
    assert torch.equal(norm.running_mean, before)
    assert norm.training
    joint._joint_cross_entropy(pooled.model, split.x[:2], split.y[:2])
    assert not torch.equal(norm.running_mean, before)


def test_every_node_is_evaluated_on_its_own_test_split() -> None:
    done = run(Joint(rounds=1, batch=8, local_epochs=1), tiny(), progress=False)
    assert sorted(done.accuracy) == ["M0", "M1", "M2"]
    for name, view in Joint().views(done.nodes["pooled"]).items():
        own = next(n for n in tiny() if n.name == name).data["test"]
        predicted = view.model.net.eval()(own.x).argmax(1)
        assert done.accuracy[name] == float((predicted == own.y).double().mean())


def test_nodes_are_judged_by_their_own_scores() -> None:
    nodes = [replace(n, score=lambda m, s, k=k: k / 4) for k, n in enumerate(tiny())]
    done = run(Joint(rounds=1, batch=8, local_epochs=1), nodes, progress=False)
    assert done.accuracy == {"M0": 0.0, "M1": 0.25, "M2": 0.5}


def test_nodes_without_labels_are_an_error() -> None:
    def bare(node: Node) -> Node:
        return replace(node, data=Data(train=node.data["train"].x, test=node.data["test"]))

    with pytest.raises(DataError, match="no node has labels in split 'train'"):
        run(Joint(rounds=1), [bare(node) for node in tiny()])


def test_heads_may_differ_and_a_node_may_lack_splits(
    plain_nodes: Callable[..., list[Node]], without: Callable[..., Node]
) -> None:
    nodes = plain_nodes(common=True)
    nodes[1] = plain_nodes(common=True, classes=4)[1]
    nodes[2] = without(nodes[2], "test", "val_es")
    done = run(Joint(rounds=1, batch=8, local_epochs=1), nodes, progress=False)
    assert sorted(done.accuracy) == ["M0", "M1"]


def test_different_trunks_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=7)[2]]
    with pytest.raises(ModelError, match=r"part 'trunk' of node M2 differs .* 'trunk\.2\.weight'"):
        run(Joint(), nodes, progress=False)


def test_inputs_of_another_shape_are_an_error() -> None:
    """The networks take both, so only pooling can object."""

    def node(name: str, *shape: int) -> Node:
        x = torch.randn(4, *shape, generator=stream(0, name))
        model = Model.split(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), trunk="0", head="1")
        return Node(name, Data(train=Split(x, torch.arange(4) % 2)), model)

    with pytest.raises(DataError, match=r"node B have shape \[2, 3\], those of A \[6\]"):
        run(Joint(), [node("A", 6), node("B", 2, 3)], progress=False)


@pytest.mark.parametrize("name", ["init_epochs", "local_epochs", "patience"])
def test_negative_options_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Joint(**{name: -1})

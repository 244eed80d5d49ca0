"""Partial averaging: its limits, its paper's loops, its section III, and what crosses."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError, PolyfedError, UnknownNameError
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from polyfed.methods.partial_averaging import PartialAveraging, paper_scheme
from polyfed.models.associative import AssociativeMemory
from polyfed.models.mlp import sigmoid_mlp
from polyfed.random import ambient, stream
from polyfed.tasks.binary_vectors import Associative
from polyfed.testing import CHECKS, tiny
from polyfed.testing.slices import literal_average

# tiny() is 6=8=5=3, with BatchNorm and dropout
FR = "fr=0-2-1-0@M0+M2"
SHARED = {"scheme": "6-4-2-3", "groups": FR, "depends": "fr:global"}
VARIANTS: dict[str, dict[str, Any]] = {
    "share": {"scheme": "50%", "weighting": "examples"},
    "groups": {**SHARED, "own_start": True},
    "blocks": {**SHARED, "batch": 2, "block": 10, "loss": "squared", "optimiser": "sgd"},
}


def states(nodes: Any) -> dict[str, dict[str, Tensor]]:
    return {node.name: node.model.state() for node in nodes}


def perceptron(*widths: int) -> nn.Module:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    body = [m for layer in layers[:-1] for m in (layer, nn.Sigmoid())]
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*body), head=layers[-1]))


def own_nodes(widths: dict[str, tuple[int, ...]], seed: int = 0) -> list[Node]:
    """Nodes with perceptrons of these widths, each with weights and samples of its own."""
    nodes = []
    for k, (name, own) in enumerate(widths.items()):
        chance = stream(seed, "own", name)
        with ambient(seed, "own", name):
            model = Model.split(perceptron(*own), trunk="trunk", head="head")
        x = torch.randn(5 + k, own[0], generator=chance)
        y = torch.randint(own[-1], (5 + k,), generator=chance)
        nodes.append(Node(name, Data(train=(x, y), test=(x, y)), model))
    return nodes


def same(node: Node, state: dict[str, Tensor]) -> None:
    for name, tensor in node.model.state().items():
        assert torch.equal(tensor, state[name]), f"{name} of {node.name}"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_conformance(check: str, variant: str) -> None:
    settings = {"batch": 8, "lr": 1e-2, **VARIANTS[variant]}
    CHECKS[check](PartialAveraging(**settings), tiny)


# ---- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["0-0-0-0", "0%"])
@pytest.mark.parametrize("topology", ["star", "groups", "gossip"])
def test_level_0_is_local_training(scheme: str, topology: str) -> None:
    """Bit for bit, dropout and BatchNorm included; and nothing is sent."""
    common: dict[str, Any] = {"rounds": 3, "batch": 8, "local_epochs": 2}
    local = run(Local(**common, patience=0, rollback=False), tiny(), progress=False)
    shared = run(
        PartialAveraging(**common, scheme=scheme), tiny(), topology=topology, progress=False
    )
    for name, node in shared.nodes.items():
        same(node, local.nodes[name].model.state())
    assert shared.ledger.bytes_sent() == 0


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("scheme", ["6-8-5-3", "100%"])
def test_a_global_model_of_everything_is_fedavg(
    weighting: Any, scheme: str, plain_nodes: Callable[..., list[Node]]
) -> None:
    common: dict[str, Any] = {"rounds": 3, "batch": 8, "local_epochs": 2, "weighting": weighting}
    averaged = run(FedAvg(**common), plain_nodes(), progress=False)
    partial = run(PartialAveraging(**common, scheme=scheme), plain_nodes(), progress=False)
    for name, node in partial.nodes.items():
        same(node, averaged.nodes[name].model.state())


def test_groups_of_their_own_are_separate_federations(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """No global model, the whole network in a group: FedAvg of M0 and M2, and M1 alone."""
    common: dict[str, Any] = {"rounds": 2, "batch": 8}
    nodes = plain_nodes()
    partial = run(
        PartialAveraging(**common, scheme=None, groups="a=6-8-5-3@M0+M2;b=6-8-5-3@M1"),
        nodes,
        progress=False,
    )
    pair = run(FedAvg(**common, weighting="uniform"), [nodes[0], nodes[2]], progress=False)
    alone = run(FedAvg(**common), [nodes[1]], progress=False)
    same(partial.nodes["M0"], pair.nodes["M0"].model.state())
    same(partial.nodes["M2"], pair.nodes["M2"].model.state())
    same(partial.nodes["M1"], alone.nodes["M1"].model.state())
    assert partial.ledger.bytes_sent("M1") == 0


@pytest.mark.parametrize("own_start", [False, True])
@pytest.mark.parametrize("topology", ["star", "groups", "gossip"])
def test_a_node_of_no_group_trains_alone_and_sends_nothing(topology: str, own_start: bool) -> None:
    """There is no global model, and M1 is in no group."""
    common: dict[str, Any] = {"rounds": 2, "batch": 8, "own_start": own_start}
    method = PartialAveraging(**common, scheme=None, groups="a=6-8-5-3@M0+M2")
    pair = run(method, tiny(), topology=topology, progress=False)
    alone = run(PartialAveraging(**common, scheme="0%"), tiny(), progress=False)
    same(pair.nodes["M1"], alone.nodes["M1"].model.state())
    assert {"M1" in (c.source, c.to) for c in pair.ledger.crossings() if c.bytes} == {False}
    assert not pair.faults


# ---- the paper ---------------------------------------------------------------------------------

WIDTHS = {"A": (5, 7, 6, 4), "B": (6, 9, 8, 5), "C": (4, 6, 3, 3), "D": (3, 5, 6, 4)}
DAG = {
    "scheme": "3-3-2-2",
    "groups": "green=1-2-1-0@A+B+C;yellow=0-1-2-1@A+B+D;red=1-1-1-1@A+B",
    "depends": "green:global;yellow:global;red:green+yellow+global",
}
ABOVE = {
    "green": {"global"},
    "yellow": {"global"},
    "red": {"green", "yellow", "global"},
    **{f"local {name}": {"global", "green", "yellow", "red"} for name in WIDTHS},
}
CELLS = {"global": (3, 3, 2, 2), "green": (1, 2, 1, 0), "yellow": (0, 1, 2, 1), "red": (1, 1, 1, 1)}
MEMBERS = {"global": "ABCD", "green": "ABC", "yellow": "ABD", "red": "AB"}


def cells_of(name: str) -> list[list[tuple[str, int]]]:
    """Model and rank of every cell, written out."""
    layers = []
    for i, width in enumerate(WIDTHS[name]):
        mine = [m for m in CELLS if name in MEMBERS[m]]
        layer = [(m, rank) for m in mine for rank in range(CELLS[m][i])]
        layers.append(layer + [(f"local {name}", r) for r in range(width - len(layer))])
    return layers


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("topology", ["star", "groups"])
def test_one_round_equals_the_literal_algorithm(cross: bool, topology: str) -> None:
    """Algorithms 1 and 2 on networks of four widths, without training."""
    nodes = own_nodes(WIDTHS)
    double = {n: {k: t.double() for k, t in s.items()} for n, s in states(nodes).items()}
    wanted = literal_average(double, {n: cells_of(n) for n in WIDTHS}, ABOVE, cross=cross)
    method = PartialAveraging(**DAG, cross=cross, rounds=1, local_epochs=0)
    done = run(method, nodes, topology=topology, progress=False)
    assert done.faults == []
    for name, node in done.nodes.items():
        for key, tensor in node.model.state().items():
            torch.testing.assert_close(tensor.double(), wanted[name][key], rtol=0, atol=1e-6)
    before = states(nodes)["A"]["trunk.0.weight"]
    assert not torch.equal(before, done.nodes["A"].model.state()["trunk.0.weight"])


@pytest.mark.parametrize("topology", ["star", "groups"])
def test_all_who_share_a_parameter_agree_to_the_bit(topology: str) -> None:
    nodes = own_nodes(WIDTHS)
    method = PartialAveraging(**DAG, rounds=2, batch=2)
    done = run(method, nodes, topology=topology, progress=False)
    slices = method.slices(nodes)
    packed = {n: slices.pack(n, node.model.state()) for n, node in done.nodes.items()}
    for topic in ("global", "green", "yellow", "red"):
        first, *others = slices.implementers(topic)
        assert others
        for other in others:
            assert torch.equal(packed[first][topic], packed[other][topic])


def test_section_three() -> None:
    """From agreement, one step each and averaging is one step on all partial models at once.

    The loss is the sum of all nodes' losses; the step of a model is divided by its implementers.
    """
    nodes, lr = own_nodes(WIDTHS), 0.3
    method = PartialAveraging(**DAG, rounds=1, local_epochs=0)
    nodes = [
        Node(n.name, n.data, node.model)
        for n, node in zip(nodes, run(method, nodes, progress=False).nodes.values(), strict=True)
    ]
    slices = method.slices(nodes)
    values: dict[Any, Tensor] = {}  # M, one number for each group, and for each local parameter
    count: dict[Any, int] = {}
    keys: dict[tuple[str, str], list[Any]] = {}
    for node in nodes:
        for key, gid in slices.gids(node.name).items():
            flat = node.model.state()[key].flatten()
            own = [
                g if g >= 0 else (node.name, key, i) for i, g in enumerate(gid.flatten().tolist())
            ]
            keys[node.name, key] = own
            for k, value in zip(own, flat, strict=True):
                values[k] = value.double().requires_grad_()
                count[k] = count.get(k, 0) + 1
    loss = torch.zeros((), dtype=torch.float64)
    for node in nodes:
        shapes = {key: t.shape for key, t in node.model.state().items()}
        own = {
            key: torch.stack([values[k] for k in keys[node.name, key]]).view(shape)
            for key, shape in shapes.items()
        }
        net, train = copy.deepcopy(node.model.net).double(), node.data["train"]
        out = torch.func.functional_call(net, own, (train.x.double(),))
        loss = loss + functional.cross_entropy(out, train.y)
    loss.backward()
    step = PartialAveraging(**DAG, rounds=1, batch=1000, lr=lr, optimiser="sgd")
    done = run(step, nodes, progress=False)
    for (name, key), own in keys.items():
        wanted = [float(values[k].detach() - lr / count[k] * values[k].grad) for k in own]
        got = done.nodes[name].model.state()[key].flatten()
        torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=1e-6)


def test_without_a_dependency_weights_from_inputs_stay() -> None:
    """Section V.3.d: only the 2 x 1 weights inside the group and its biases are averaged."""
    nodes = own_nodes(dict.fromkeys(("M0", "M1", "M2"), (6, 8, 5, 3)))
    sizes = {}
    for depends in ("", "global"):
        method = PartialAveraging(
            scheme="6-4-2-3", groups="fr=0-2-1-0@M0+M2", depends=depends, rounds=1, local_epochs=0
        )
        after = states(run(method, nodes, progress=False).nodes.values())
        before = states(nodes)
        moved = after["M0"]["trunk.0.weight"] != before["M0"]["trunk.0.weight"]
        assert bool(moved[:4].all())  # global cells
        assert bool(moved[4:6].all()) == bool(depends)  # the group's
        assert not bool(moved[6:].any())  # local ones
        assert torch.equal(after["M0"]["trunk.0.bias"][4:6], after["M2"]["trunk.0.bias"][4:6])
        assert not bool((after["M1"]["trunk.0.weight"] != before["M1"]["trunk.0.weight"])[4:].any())
        sizes[depends] = method.slices(nodes).size("fr")
    # biases 2 + 1, weights 1 x 2; with those from and to global cells 2 x 6, 1 x 4, 2 x 2, 3 x 1
    assert sizes == {"": 5, "global": 5 + 12 + 4 + 4 + 3}


# ---- training ----------------------------------------------------------------------------------


def literal_block(
    weights: list[Tensor], biases: list[Tensor], x: Tensor, y: Tensor, lr: float
) -> None:
    """Plain backpropagation through sigmoids, 1/2 sum (out - target)^2, one sample at a time."""
    for sample, label in zip(x, y.tolist(), strict=True):
        a = [sample.flatten()]
        for w, b in zip(weights, biases, strict=True):
            z = w @ a[-1] + b
            a.append(1 / (1 + torch.exp(-z)))
        target = torch.zeros_like(a[-1])
        target[label] = 1
        delta = (a[-1] - target) * a[-1] * (1 - a[-1])
        for i in reversed(range(len(weights))):
            before = (weights[i].T @ delta) * a[i] * (1 - a[i])
            weights[i] -= lr * torch.outer(delta, a[i])
            biases[i] -= lr * delta
            delta = before


def test_blocks_are_single_samples_in_a_walk_through_the_data() -> None:
    """Three blocks of 7 of 10 samples: the third goes on in the second epoch's order."""
    chance = stream(0, "blocks")
    x, y = torch.randn(10, 4, generator=chance), torch.arange(10) % 3
    with ambient(0, "blocks"):
        net = sigmoid_mlp(4, 5, 3)
    node = Node("M0", Data(train=(x, y)), Model.split(net, trunk="trunk", head="head"))
    method = PartialAveraging(
        rounds=3, block=7, batch=1, lr=0.5, optimiser="sgd", loss="squared", scheme="4-5-3"
    )
    done = run(method, [node], progress=False).nodes["M0"]
    order = [
        torch.randperm(10, generator=stream(0, "node", "M0", "batches", "walk", "train", epoch))
        for epoch in range(3)
    ]
    walked = torch.cat(order)[:21]
    state = {k: t.double() for k, t in node.model.state().items()}
    weights = [state["trunk.1.weight"], state["head.0.weight"]]
    biases = [state["trunk.1.bias"], state["head.0.bias"]]
    literal_block(weights, biases, x[walked].double(), y[walked], 0.5)
    got = done.model.state()
    for key, wanted in zip(
        ("trunk.1.weight", "head.0.weight", "trunk.1.bias", "head.0.bias"),
        (*weights, *biases),
        strict=True,
    ):
        torch.testing.assert_close(got[key].double(), wanted, rtol=0, atol=1e-5)


def test_a_block_of_batches_has_as_many_samples() -> None:
    node = tiny()[0]
    (phase,) = PartialAveraging(block=50, batch=8).local(node)
    assert (phase.steps, phase.batch, phase.walk, phase.epochs) == (7, 8, True, None)
    (phase,) = PartialAveraging(local_epochs=3, batch=8).local(node)
    assert (phase.steps, phase.walk, phase.epochs) == (None, False, 3)


@pytest.mark.parametrize("settings", [{}, VARIANTS["blocks"]])
def test_stacked_training_is_the_same(
    settings: dict[str, Any], plain_nodes: Callable[..., list[Node]]
) -> None:
    common: dict[str, Any] = {"rounds": 3, "batch": 8, **settings}
    one, other = (
        run(PartialAveraging(**common), plain_nodes(), stack=stack, progress=False)
        for stack in ("always", "never")
    )
    for name, node in one.nodes.items():
        for key, tensor in node.model.state().items():
            wanted = other.nodes[name].model.state()[key]
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5)


def test_an_associative_memory_learns_by_its_own_rule() -> None:
    """Algorithm 4 keeps weights in [-1, 1]; its hidden slice and all visible cells are averaged."""
    task = Associative(num_nodes=3, modified=1, cells=40)
    method = PartialAveraging(
        scheme="50-30-50", loss="hebbian", block=3, batch=1, lr=0.1, rounds=4, own_start=True
    )
    done = run(method, task, progress=False)
    nets = [node.model.net for node in done.nodes.values()]
    assert all(isinstance(net, AssociativeMemory) for net in nets)
    first, second = (net.state_dict() for net in nets[:2])
    assert torch.equal(first["hidden.weight"][:30], second["hidden.weight"][:30])
    assert torch.equal(first["visible.weight"][:, :30], second["visible.weight"][:, :30])
    assert not torch.equal(first["hidden.weight"][30:], second["hidden.weight"][30:])
    for net in nets:
        for tensor in net.state_dict().values():
            assert float(tensor.abs().max()) <= 1
    before = states(task.nodes(0))["M0"]["hidden.weight"]
    assert float((first["hidden.weight"][:30] - before[:30]).abs().max()) > 0.01


def test_data_may_come_in_their_own_order() -> None:
    """In blocks and in epochs."""
    node = Associative(num_nodes=1, modified=0, cells=5).nodes(0)[0]
    for length in ({"block": 4, "batch": 1}, {"local_epochs": 2}):
        for shuffle in (True, False):
            (phase,) = PartialAveraging(shuffle=shuffle, **length).local(node)
            assert phase.shuffle == shuffle
            assert phase.walk == ("block" in length)


# ---- the start ---------------------------------------------------------------------------------


def began(
    method: PartialAveraging, nodes: list[Node], seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Models as they begin: nobody meets in the first round."""
    done = run(method, nodes, seed=seed, topology="groups:every=9", progress=False)
    return states(done.nodes.values())


def test_an_own_start() -> None:
    """Global cells as given; a group agrees, wherever its cells are; local ones are nobody's."""
    made = own_nodes(dict.fromkeys(("M0", "M1", "M2", "M3"), (6, 9, 5, 3)))
    nodes = [Node(n.name, n.data, made[0].model.copy()) for n in made]
    method = PartialAveraging(
        scheme="6-4-2-3",
        groups="en=0-1-1-0@M2+M3;fr=0-2-1-0@M0+M1+M2",
        depends="global",
        rounds=1,
        local_epochs=0,
        own_start=True,
    )
    given, found = states(nodes)["M0"], began(method, nodes)
    slices = method.slices(nodes)
    packed = {name: slices.pack(name, state) for name, state in found.items()}
    as_given = slices.pack("M0", given)
    for name in found:
        assert torch.equal(packed[name]["global"], as_given["global"])
    for other in ("M1", "M2"):  # M2 has the group's cells behind those of 'en'
        assert torch.equal(packed["M0"]["fr"], packed[other]["fr"])
    assert not torch.equal(packed["M0"]["fr"], as_given["fr"])
    weights = {name: state["trunk.0.weight"] for name, state in found.items()}
    assert not bool((weights["M0"][6:] == weights["M1"][6:]).all())
    assert set(weights["M0"][6:].flatten().tolist()) <= set(
        given["trunk.0.weight"].flatten().tolist()
    )
    assert set(found["M0"]["head.bias"].tolist()) <= set(given["head.bias"].tolist())
    again, other = began(method, nodes), began(method, nodes, seed=1)
    assert torch.equal(again["M0"]["trunk.0.weight"], weights["M0"])
    assert not torch.equal(other["M0"]["trunk.0.weight"][4:6], weights["M0"][4:6])


def test_groups_of_the_same_cells_have_starts_of_their_own() -> None:
    """So do the slices that nobody shares, of nodes whose networks began alike."""
    made = own_nodes(dict.fromkeys(("M0", "M1", "M2", "M3"), (6, 9, 5, 3)))
    nodes = [Node(n.name, n.data, made[0].model.copy()) for n in made]
    method = PartialAveraging(
        scheme="6-4-2-3", groups="en=0-2-1-0@M0+M1;fr=0-2-1-0@M2+M3", depends="global",
        rounds=1, local_epochs=0, own_start=True,
    )  # fmt: skip
    slices, found = method.slices(nodes), began(method, nodes)
    packed = {name: slices.pack(name, state) for name, state in found.items()}
    assert packed["M0"]["en"].shape == packed["M2"]["fr"].shape
    assert not torch.equal(packed["M0"]["en"], packed["M2"]["fr"])
    rows = [state["trunk.0.weight"][6:] for state in found.values()]
    assert not any(torch.equal(rows[0], other) for other in rows[1:])


def test_an_own_start_is_drawn_from_the_whole_tensor() -> None:
    """Each number of the tensor is drawn about as often: mean and spread stay."""
    with ambient(0, "large"):
        net = perceptron(50, 200, 3)
    node = Node(
        "M0", Data(train=(torch.zeros(1, 50), torch.zeros(1).long())), Model.split(net, a=...)
    )
    method = PartialAveraging(scheme="0-0-0", rounds=1, local_epochs=0, own_start=True)
    given, found = node.model.state(), began(method, [node])["M0"]
    for name, tensor in found.items():
        assert set(tensor.flatten().tolist()) <= set(given[name].flatten().tolist())
    before, after = given["trunk.0.weight"], found["trunk.0.weight"]
    assert float(after.std() / before.std()) == pytest.approx(1, abs=0.02)
    assert len(set(after.flatten().tolist())) / after.numel() == pytest.approx(
        1 - 1 / math.e, abs=0.01
    )


# ---- what crosses ------------------------------------------------------------------------------


def test_bytes_are_four_times_the_grouped_parameters() -> None:
    """Level 80 of 784=300=100=10: 217,140 of 266,610 parameters, 868,560 bytes each way."""
    x, y = torch.zeros(2, 784), torch.tensor([0, 1])
    nodes = []
    for name in ("M0", "M1"):
        model = Model.split(sigmoid_mlp(784, 300, 100, 10), trunk="trunk", head="head")
        nodes.append(Node(name, Data(train=(x, y)), model))
    method = PartialAveraging(scheme=paper_scheme(80), rounds=2, local_epochs=0)
    done = run(method, nodes, progress=False)
    assert done.ledger.bytes_sent("M0") == done.ledger.bytes_received("M0") == 2 * 4 * 217_140
    assert method.slices(nodes).size("global") == 217_140


@pytest.mark.parametrize("topology", ["star", "groups", "gossip:cycles=1"])
def test_the_ledger_is_the_slices(topology: str) -> None:
    nodes = own_nodes(WIDTHS)
    method = PartialAveraging(**DAG, cross=True, rounds=1, local_epochs=0)
    done = run(method, nodes, topology=topology, progress=False)
    slices = method.slices(nodes)
    assert set(slices.topics()) == {"global", "green", "yellow", "red", "green+yellow"}
    for crossing in done.ledger.crossings():
        sizes = {t["name"]: t["bytes"] for t in crossing.tensors}
        assert sizes == {topic: 4 * slices.size(topic) for topic in sizes}
    if topology == "star":
        own = sum(4 * slices.size(topic) for topic in slices.topics("A"))
        assert done.ledger.bytes_sent("A") == done.ledger.bytes_received("A") == own


def test_the_hub_of_a_group_sees_that_group_only() -> None:
    done = run(
        PartialAveraging(**DAG, rounds=2, local_epochs=0),
        own_nodes(WIDTHS),
        topology="groups",
        progress=False,
    )
    heard: dict[str, set[tuple[str, str]]] = {}
    for crossing in done.ledger.crossings():
        for tensor in crossing.tensors:
            if crossing.to.startswith("hub"):
                heard.setdefault(crossing.to, set()).add((crossing.source, tensor["name"]))
    assert heard == {
        f"hub-{topic}": {(name, topic) for name in names} for topic, names in MEMBERS.items()
    }


def test_a_count_travels_with_each_topic_where_it_counts() -> None:
    method = PartialAveraging(**SHARED, weighting="examples", rounds=1)
    done = run(method, tiny(), topology="groups", progress=False)
    assert done.faults == []
    to_fr = [c for c in done.ledger.crossings() if c.to == "hub-fr"]
    assert [[t["name"] for t in c.tensors] for c in to_fr] == [["fr", "fr/num_examples"]] * 2


# ---- faults ------------------------------------------------------------------------------------


def test_the_mean_is_over_those_who_are_there() -> None:
    nodes = own_nodes(dict.fromkeys(("M0", "M1", "M2"), (6, 8, 5, 3)))
    method = PartialAveraging(scheme="6-4-2-3", rounds=1, local_epochs=0)
    done = run(method, nodes, absent={1: ["M1"]}, progress=False)
    before = states(nodes)
    wanted = (before["M0"]["head.bias"] + before["M2"]["head.bias"]) / 2
    for name in ("M0", "M2"):
        torch.testing.assert_close(done.nodes[name].model.state()["head.bias"], wanted)
    same(done.nodes["M1"], before["M1"])


def test_gossip_keeps_the_mean_and_comes_to_agree() -> None:
    """Groups too; a node that is away for two rounds catches up; cut links are gone round."""
    names = [f"M{i}" for i in range(8)]
    nodes = own_nodes(dict.fromkeys(names, (4, 6, 3)))
    groups = "fr=0-2-0@M0+M2+M4+M6;en=0-2-0@M1+M3+M5+M7"
    method = PartialAveraging(
        scheme="4-3-3", groups=groups, depends="global", rounds=6, local_epochs=0
    )
    done = run(
        method, nodes, topology="gossip:cycles=8", fail="kill M3 @1; cut 0-2 @2; heal M3 @3",
        progress=False,
    )  # fmt: skip
    assert {f["fault"] for f in done.faults} == {"killed", "healed", "cut"}
    slices = method.slices(nodes)
    before = {n.name: slices.pack(n.name, n.model.state()) for n in nodes}
    after = {n: slices.pack(n, node.model.state()) for n, node in done.nodes.items()}
    for topic in ("global", "fr", "en"):
        members = slices.implementers(topic)
        start = torch.stack([before[n][topic] for n in members])
        end = torch.stack([after[n][topic] for n in members])
        torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=1e-6)
        assert float(end.std(0).max()) < 1e-3 * float(start.std(0).max())


def test_a_message_that_is_refused_does_not_stop_the_others() -> None:
    """M2 sends NaN: it is left out of the mean, and gets the mean."""
    nodes = own_nodes(dict.fromkeys(("M0", "M1", "M2"), (6, 8, 5, 3)))
    with torch.no_grad():
        nodes[2].model.net.head.bias.fill_(torch.nan)
    done = run(PartialAveraging(scheme="6-4-2-3", rounds=1, local_epochs=0), nodes, progress=False)
    assert [f["node"] for f in done.faults] == ["M2"]
    before = states(nodes)
    wanted = (before["M0"]["head.bias"] + before["M1"]["head.bias"]) / 2
    torch.testing.assert_close(done.nodes["M2"].model.state()["head.bias"], wanted)


# ---- what is typed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "widths", "cells"),
    [
        ("80%", (784, 300, 100, 10), "784-240-80-10"),
        ("15 %", (100, 50, 20, 1), "100-7-3-1"),
        ("33.4%", (6, 3, 2), "6-1-2"),
        ("100%", (6, 3, 2), "6-3-2"),
        ("0%", (6, 3, 2), "0-0-0"),
        ("5-2-0", (6, 3, 2), "5-2-0"),
    ],
)
def test_shares_of_the_hidden_cells(scheme: str, widths: tuple[int, ...], cells: str) -> None:
    found = PartialAveraging(scheme=scheme).declared.among(widths)
    assert "-".join(map(str, found.sizes["global"])) == cells


def test_the_papers_levels() -> None:
    """SPEC 2.8: 0, 15, 30, 60, 80, 100 are 0, 50, 100, 200, 250, 300 cells of the first layer."""
    assert [paper_scheme(level) for level in (0, 15, 30, 60, 80, 100)] == [
        "0-0-0-0",
        "784-50-15-10",
        "784-100-30-10",
        "784-200-60-10",
        "784-250-80-10",
        "784-300-100-10",
    ]
    assert paper_scheme(60, 26) == "784-200-60-26"
    with pytest.raises(ConfigError, match="level 50"):
        paper_scheme(50)


def test_the_rest_and_everybody() -> None:
    """`rest` is what the global model leaves of hidden layers, `*` is everybody."""
    nodes = with_layers((6, 8, 5, 3), (6, 8, 5, 3), (6, 9, 5, 3))
    short = PartialAveraging(scheme="6-5-2-3", groups="fr=rest@M0+M1", rounds=1, local_epochs=0)
    long = PartialAveraging(scheme="6-5-2-3", groups="fr=0-3-3-0@M0+M1", rounds=1, local_epochs=0)
    one, other = (run(method, nodes, progress=False) for method in (short, long))
    for name, node in one.nodes.items():
        same(node, other.nodes[name].model.state())
    assert short.slices(nodes).layers("M2")[1] == {"global": 5, "local": 4}
    every = PartialAveraging(scheme="6-4-2-3", groups="all=0-2-1-0@*", depends="global")
    assert every.slices(nodes).implementers("all") == ("M0", "M1", "M2")
    assert every.declared.shares("M7", "all")
    with pytest.raises(
        ConfigError, match=r"'all' must have the same size .* 0-4-3-0 on M0 and 0-5"
    ):
        PartialAveraging(scheme="6-4-2-3", groups="all=rest@*").slices(nodes)
    alone = PartialAveraging(scheme=None, groups="fr=rest@M0+M1").slices(nodes[:2])
    assert alone.layers("M0")[1] == {"fr": 8, "local": 0}


def test_dependencies_of_all_groups() -> None:
    groups = "fr=0-2-1-0@M0+M1;qc=0-1-1-0@M0+M1"
    each = PartialAveraging(scheme="6-4-2-3", groups=groups, depends="fr:global; qc:global+fr")
    every = PartialAveraging(scheme="6-4-2-3", groups=groups, depends="global; qc:fr")
    for method in (each, every):
        depends = method.declared.among(()).depends
        assert depends == {"fr": {"global"}, "qc": {"global", "fr"}}


def with_layers(*widths: tuple[int, ...]) -> list[Node]:
    return own_nodes({f"M{i}": own for i, own in enumerate(widths)})


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"scheme": "6-4-2"}, ConfigError, "the scheme has 3 layers, the network of M0 has 4"),
        (
            {"scheme": "6-9-2-3"},
            ConfigError,
            "layer 1 of node M0 has 8 cells, but its slices need 9",
        ),
        (
            {"scheme": "6-7-2-3", "groups": "fr=0-2-1-0@M0+M1"},
            ConfigError,
            "need 9: global 7, fr 2. Slices cannot overlap",
        ),
        (
            {"scheme": None, "groups": "fr=6-8-5-3@M0+M7"},
            UnknownNameError,
            "unknown node 'M7'. There are: M0, M1",
        ),
        (
            {"scheme": "6-4-2-3", "groups": "a=0-1-1-0@M0+M1;b=0-1-1-0@M0", "depends": "a:b"},
            ConfigError,
            "node M1 implements 'a' but not 'b', on which it depends",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_before_training(
    settings: dict[str, Any], error: type[PolyfedError], said: str
) -> None:
    method = PartialAveraging(**settings)
    with pytest.raises(error, match=re.escape(said)):
        run(method, with_layers((6, 8, 5, 3), (6, 8, 5, 3)), progress=False)


def test_networks_that_differ_too_much() -> None:
    with pytest.raises(
        ConfigError, match="same number of layers, but M0 has 6=8=3 and M1 has 6=8=5=3"
    ):
        run(PartialAveraging(), with_layers((6, 8, 3), (6, 8, 5, 3)), progress=False)
    with pytest.raises(
        ConfigError,
        match=r"'global' must have the same size on all nodes, but it comes to 6-4-3 on M0 and "
        r"6-3-3 on M1\. .* such as 6-3-3\.",
    ):
        run(PartialAveraging(scheme="50%"), with_layers((6, 8, 3), (6, 7, 3)), progress=False)
    done = run(
        PartialAveraging(scheme="6-3-3", rounds=1),
        with_layers((6, 8, 3), (6, 7, 3)),
        progress=False,
    )
    assert done.faults == []


def test_tensors_in_another_order_are_an_error() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 4))
            self.scale = nn.Parameter(torch.zeros(3))
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight) * self.scale + self.bias

    class Straight(Turned):
        def __init__(self) -> None:
            super().__init__()
            scale = self.scale
            del self.scale
            self.scale = scale

    data = Data(train=(torch.zeros(2, 4), torch.tensor([0, 1])))
    nodes = [
        Node("M0", data, Model.split(Straight(), all=...)),
        Node("M1", data, Model.split(Turned(), all=...)),
    ]
    with pytest.raises(ModelError, match="tensors of node M1 come in another order"):
        run(PartialAveraging(scheme="4-3"), nodes, progress=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheme": None}, "there is no partial model"),
        ({"scheme": "784=300"}, "model 'global' must be its number of cells in every layer"),
        ({"scheme": "120%"}, "a share is at most 100%"),
        ({"groups": "fr"}, "group 'fr' is not understood. Write NAME=CELLS@NODE+NODE"),
        ({"groups": "fr=0-1@M0+M1;fr=0-2@M0+M1"}, "group 'fr=0-2@M0+M1' is named twice"),
        ({"scheme": "3-2", "groups": "fr=0-1@ + "}, "group 'fr' has no members"),
        ({"scheme": "3-2", "groups": "global=0-1@M0+M1"}, "a group cannot be called 'global'"),
        (
            {"scheme": "3-2", "groups": "fr=0-1-1@M0+M1"},
            "model 'fr' has 3 layers and 'global' has 2",
        ),
        ({"scheme": "3-2", "depends": "fr:global"}, "unknown model 'fr'"),
        (
            {"scheme": "3-2", "groups": "a=0-1@M0;b=0-1@M0", "depends": "a:b;b:a"},
            "dependencies go round in a circle",
        ),
        (
            {"scheme": "3-2", "groups": "a=0-1@M0;b=0-1@M0", "depends": "a:b;b:global"},
            "so 'a' must depend on 'global' too",
        ),
        ({"block": -1}, "PartialAveraging.block must be >= 0"),
        ({"local_epochs": -1}, "PartialAveraging.local_epochs must be >= 0"),
        (
            {"block": 10, "batch": 0.5},
            "batch=0.5 is a share of the data, but a block counts samples",
        ),
        ({"loss": "hinge"}, "PartialAveraging.loss must be one of"),
        ({"weighting": "loss"}, "PartialAveraging.weighting must be one of"),
        ({"loss": "hebbian", "lr": 3.0}, "rate must be between 0 and 2"),
    ],
)
def test_wrong_options_are_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        PartialAveraging(**settings)

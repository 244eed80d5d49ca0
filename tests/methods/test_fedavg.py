from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from polyfed.random import stream
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_conformance(check: str, weighting: Any) -> None:
    CHECKS[check](FedAvg(batch=8, lr=1e-2, weighting=weighting), tiny)


def _literal_fedavg(
    nodes: list[Node], method: FedAvg, literal_train: Callable[..., None]
) -> nn.Module:
    """McMahan et al. 2017, Algorithm 1, with everybody in every round."""
    n = {node.name: len(node.data["train"]) for node in nodes}
    server = copy.deepcopy(nodes[0].model.net)
    for t in range(1, method.rounds + 1):
        clients = []
        for node in nodes:
            net = copy.deepcopy(server)
            split = node.data["train"]
            literal_train(
                net,
                [net],
                split.x,
                split.y,
                name=node.name,
                path=("tick", t, "local", 0),
                epochs=method.local_epochs,
                batch=int(method.batch),
                lr=method.lr,
            )
            clients.append((node.name, net.state_dict()))
        mean: dict[str, Tensor] = {}
        for key, value in server.state_dict().items():
            total = torch.zeros_like(value, dtype=torch.float64)
            for name, state in clients:
                w = n[name] / sum(n.values()) if method.weighting == "examples" else 1 / len(n)
                total += w * state[key].double()
            mean[key] = total.to(value.dtype) if value.is_floating_point() else total.round().long()
        server.load_state_dict(mean)
    return server


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_equals_the_literal_algorithm(
    weighting: Any, literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Parameters, BatchNorm statistics and its counter, with 25, 18 and 33 examples."""
    method = FedAvg(rounds=1, batch=11, lr=1e-2, local_epochs=3, weighting=weighting)
    server = _literal_fedavg(tiny(), method, literal_train)
    done = run(method, tiny(), progress=False)
    for node in done.nodes.values():
        assert_close(node, server, 1e-6)
    counted = done.nodes["M0"].model.state()["trunk.1.num_batches_tracked"]
    assert counted.dtype == torch.int64
    assert int(counted) == 8  # (25*9 + 18*6 + 33*9) / 76 = 8.29, and (9 + 6 + 9) / 3


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_three_rounds_equal_the_literal_algorithm(
    weighting: Any, literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    method = FedAvg(rounds=3, batch=11, lr=1e-3, local_epochs=1, weighting=weighting)
    server = _literal_fedavg(tiny(), method, literal_train)
    for node in run(method, tiny(), progress=False).nodes.values():
        assert_close(node, server, 1e-5)


def test_the_weights_are_the_numbers_of_examples() -> None:
    """(1 * 0 + 3 * 4) / 4 = 3; the uniform mean is 2. The counter: (1 + 3 * 4) / 4 = 3.25."""

    def message(value: float, counter: int, n: int) -> Message:
        tensors = {"w": torch.tensor([value]), "counter": torch.tensor(counter)}
        return Message({**tensors, "num_examples": torch.tensor(n)})

    got = {"A": message(0.0, 1, 1), "B": message(4.0, 4, 3)}
    replies = FedAvg().combine(Node("hub"), got, ["A", "B"])
    assert replies.keys() == {"A", "B"}
    for reply in replies.values():
        assert reply.tensors.keys() == {"w", "counter"}
        assert reply.tensors["w"].item() == 3.0
        assert reply.tensors["counter"].item() == 3
        assert reply.tensors["counter"].dtype == torch.int64
    bare = {
        k: Message({n: t for n, t in m.tensors.items() if n != "num_examples"})
        for k, m in got.items()
    }
    uniform = FedAvg(weighting="uniform").combine(Node("hub"), bare, ["A"])
    assert uniform["A"].tensors["w"].item() == 2.0


def test_one_full_batch_step_is_centralised_descent(plain_nodes: Callable[..., list[Node]]) -> None:
    """Eq. (1) with one step of size lr: theta - lr * grad of the mean loss over all examples."""
    nodes = plain_nodes(common=True)
    method = FedAvg(rounds=1, batch=1000, lr=0.5, optimiser="sgd")
    done = run(method, nodes, progress=False)
    net = copy.deepcopy(nodes[0].model.net)
    x = torch.cat([n.data["train"].x for n in nodes])
    y = torch.cat([n.data["train"].y for n in nodes])
    functional.cross_entropy(net(x), y).backward()
    got = done.nodes["M1"].model.state()
    for name, p in net.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(got[name], p.detach() - 0.5 * p.grad, rtol=0, atol=1e-6)


def test_one_node_is_local_training() -> None:
    alone = tiny()[:1]
    federated = run(FedAvg(rounds=2, batch=8, local_epochs=2), alone, progress=False)
    local = run(
        Local(rounds=2, batch=8, local_epochs=2, patience=0, rollback=False), alone, progress=False
    )
    wanted = local.nodes["M0"].model.state()
    for name, tensor in federated.nodes["M0"].model.state().items():
        assert torch.equal(tensor, wanted[name]), name


def test_two_identical_nodes_are_one_node(plain_nodes: Callable[..., list[Node]]) -> None:
    one = plain_nodes()[0]
    method = FedAvg(rounds=3, batch=1000, lr=0.1, optimiser="sgd", local_epochs=2)
    alone = run(method, [one], progress=False).nodes["M0"].model.state()
    pair = run(method, [one, replace(one, name="twin")], progress=False)
    for node in pair.nodes.values():
        for name, tensor in node.model.state().items():
            torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-6)


def test_what_travels_is_everything_and_a_count() -> None:
    done = run(FedAvg(rounds=1, batch=11), tiny(), progress=False)
    names = set(tiny()[0].model.names())
    up = [c for c in done.ledger.crossings() if c.to == "hub"]
    down = [c for c in done.ledger.crossings() if c.source == "hub"]
    assert [{t["name"] for t in c.tensors} for c in up] == [names | {"num_examples"}] * 3
    assert [{t["name"] for t in c.tensors} for c in down] == [names] * 3
    assert up[0].bytes == down[0].bytes + 8


def test_an_absent_node_keeps_its_model_and_the_others_average() -> None:
    """With two of three away, the third hears its own mean: local training."""
    away = {1: ["M1", "M2"]}
    done = run(FedAvg(rounds=1, batch=11), tiny(), absent=away, progress=False)
    alone = run(FedAvg(rounds=1, batch=11), tiny()[:1], progress=False)
    for node, wanted in (("M0", alone.nodes["M0"]), ("M1", tiny()[1]), ("M2", tiny()[2])):
        for name, tensor in done.nodes[node].model.state().items():
            assert torch.equal(tensor, wanted.model.state()[name]), (node, name)


def test_a_diverged_node_is_left_out_and_hears_the_mean_of_the_others() -> None:
    nodes = tiny()
    nodes[0].model.load({"head.bias": torch.full((3,), torch.nan)})
    done = run(FedAvg(rounds=1, batch=11), nodes, progress=False)
    others = run(FedAvg(rounds=1, batch=11), tiny()[1:], progress=False)
    refused = [f for f in done.faults if f["fault"] == "message refused"]
    assert [(f["node"], f["tick"]) for f in refused] == [("M0", 1)]
    assert "NaN or infinity" in refused[0]["why"]
    for name, tensor in done.nodes["M0"].model.state().items():
        assert torch.equal(tensor, others.nodes["M1"].model.state()[name]), name


def test_different_classes_are_an_error_before_training() -> None:
    nodes = tiny()
    nodes[1].classes = ("a", "b", "d")
    with pytest.raises(ConfigError, match=r"M0 mean \{a, b, c\} and those of M1 mean \{a, b, d\}"):
        run(FedAvg(), nodes, progress=False)


def test_different_shapes_are_an_error_that_names_the_tensor_and_the_node(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    nodes = plain_nodes()
    nodes[2] = plain_nodes(width=7)[2]
    with pytest.raises(ModelError, match=r"node M2 differs from that of M0: 'trunk\.2\.weight'"):
        run(FedAvg(), nodes, progress=False)


def test_other_tensor_names_are_an_error_too() -> None:
    x = torch.randn(6, 2, generator=stream(0, "x"))
    data = Data(train=Split(x, torch.arange(6) % 2))
    nets = (nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    nodes = [Node(f"N{i}", data, Model.split(net, all=...)) for i, net in enumerate(nets)]
    with pytest.raises(ModelError, match=r"'1\.weight' is float32\[2\] there and missing here"):
        run(FedAvg(), nodes, progress=False)


@pytest.mark.parametrize("wrong", [{"local_epochs": -1}, {"rounds": -1}, {"lr": 0.0}])
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FedAvg(**wrong)


@dataclass(frozen=True, kw_only=True)
class Liar(FedAvg):
    def send(self, node: Node) -> Message:
        told = super().send(node).tensors
        lie = {"num_examples": torch.tensor(-100)} if node.name == "M1" else {}
        return Message({**told, **lie})


def test_a_count_that_cannot_be_is_refused() -> None:
    """A node that claims no examples, or fewer, would turn the mean around or divide by zero."""
    lied = run(Liar(rounds=1), tiny())
    assert [(f["node"], f["fault"]) for f in lied.faults] == [("M1", "message refused")]
    honest = run(FedAvg(rounds=1), tiny(), absent={1: ["M1"]})
    for name, value in honest.nodes["M0"].model.state().items():
        assert torch.equal(lied.nodes["M0"].model.state()[name], value)

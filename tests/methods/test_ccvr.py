from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.message import Message, TensorSpec
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.methods.ccvr import CCVR
from polyfed.methods.fedavg import FedAvg
from polyfed.random import stream
from polyfed.testing import CHECKS, tiny

SMALL = {"batch": 8, "virtual": 5, "calibrate_epochs": 2}


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](CCVR(**SMALL), tiny)


def test_what_crosses_is_announced_when_it_crosses() -> None:
    seen: list[tuple[str, set[str]]] = []

    class Watched(CCVR):
        def send(self, node: Node) -> Message:
            message, spec = super().send(node), self.sends(node)
            got = {n: TensorSpec.of(t) for n, t in message.tensors.items()}
            assert {n: (s.shape, s.dtype) for n, s in got.items()} == {
                n: (s.shape, s.dtype) for n, s in spec.items()
            }
            seen.append((node.name, set(got)))
            return message

    done = run(Watched(rounds=3, **SMALL), tiny(), progress=False)
    assert done.faults == []
    network, head = set(tiny()[0].model.names()), {"head.weight", "head.bias"}
    statistics = {"class_count", "class_mean", "class_covariance"}
    assert [names for _, names in seen] == [network | {"num_examples"}] * 6 + [
        head | statistics
    ] * 3
    down = [{t["name"] for t in c.tensors} for c in done.ledger.crossings() if c.source == "hub"]
    assert down == [network | {"round"}] * 6 + [head] * 3
    last = [c for c in done.ledger.crossings() if c.tick == 3 and c.to == "hub"]
    assert {c.bytes for c in last} == {4 * 18 + 8 * 3 + 4 * 3 * 5 + 4 * 3 * 5 * 5}


def _literal_fedavg(
    nodes: list[Node], method: CCVR, literal_train: Callable[..., None]
) -> nn.Module:
    n = {node.name: len(node.data["train"]) for node in nodes}
    server = copy.deepcopy(nodes[0].model.net)
    for t in range(1, method.rounds):
        nets = {node.name: copy.deepcopy(server) for node in nodes}
        for node in nodes:
            literal_train(
                nets[node.name],
                [nets[node.name]],
                node.data["train"].x,
                node.data["train"].y,
                name=node.name,
                path=("tick", t, "local", 0),
                epochs=method.local_epochs,
                batch=int(method.batch),
                lr=method.lr,
            )
        for key, value in server.state_dict().items():
            total = sum(n[k] / sum(n.values()) * nets[k].state_dict()[key].double() for k in nets)
            value.copy_(total if value.is_floating_point() else total.round())
    return server.eval()


def _literal_virtual(nodes: list[Node], server: nn.Module, method: CCVR) -> tuple[Tensor, Tensor]:
    """Luo et al. 2021, Algorithm 1, with Eq. (3) and (4) as they stand, a class at a time."""
    z, y = [], []
    for c in range(3):
        N, mu, S = [], [], []
        for node in nodes:
            split = node.data["train"]
            with torch.no_grad():
                features = server.trunk(split.x[split.y == c]).double().numpy()
            N.append(len(features))
            mu.append(features.mean(0))
            S.append(np.cov(features.T))
        total = sum(N)
        mean = sum(n / total * m for n, m in zip(N, mu, strict=True))
        cov = sum((n - 1) / (total - 1) * s for n, s in zip(N, S, strict=True))
        cov = cov + sum(n / (total - 1) * np.outer(m, m) for n, m in zip(N, mu, strict=True))
        cov = cov - total / (total - 1) * np.outer(mean, mean)
        noise = torch.randn(
            method.virtual, 5, generator=stream(0, "node", "hub", "virtual", c), dtype=torch.float64
        )
        z.append(torch.from_numpy(mean + noise.numpy() @ scipy.linalg.sqrtm(cov).real).float())
        y.append(torch.full((method.virtual,), c))
    return torch.cat(z), torch.cat(y)


def test_equals_the_literal_algorithm(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    settings: dict[str, Any] = {"local_epochs": 2, "virtual": 20, "calibrate_epochs": 4}
    method = CCVR(rounds=3, batch=11, lr=3e-3, **settings)
    server = _literal_fedavg(tiny(), method, literal_train)
    before = copy.deepcopy(server.head.state_dict())
    z, y = _literal_virtual(tiny(), server, method)
    literal_train(
        server.head,
        [server.head],
        z,
        y,
        name="hub",
        path=("tick", 3, "gather", 0),
        epochs=4,
        batch=11,
        lr=3e-3,
    )
    assert not torch.allclose(before["weight"], server.head.weight, atol=1e-2)
    for node in run(method, tiny(), progress=False).nodes.values():
        assert_close(node, server, 2e-5)


def test_without_calibration_it_is_fedavg_with_a_round_less() -> None:
    settings: dict[str, Any] = {"batch": 8, "lr": 1e-2}
    one = run(CCVR(rounds=3, calibrate_epochs=0, **settings), tiny(), progress=False)
    other = run(FedAvg(rounds=2, **settings), tiny(), progress=False)
    for name, node in one.nodes.items():
        wanted = other.nodes[name].model.state()
        for key, tensor in node.model.state().items():
            torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=1e-7)


def test_calibration_starts_from_the_mean_of_all_heads(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """Which differ where there was no round of FedAvg before."""
    nodes = plain_nodes()
    done = run(CCVR(rounds=1, calibrate_epochs=0), nodes, progress=False)
    mean = torch.stack([node.model.state()["head.weight"] for node in nodes]).mean(0)
    for node in done.nodes.values():
        torch.testing.assert_close(node.model.state()["head.weight"], mean)


def _told_statistics(done: Run) -> set[str]:
    return {
        c.source
        for c in done.ledger.crossings()
        if any(t["name"] == "class_mean" for t in c.tensors)
    }


@pytest.mark.parametrize(("away", "part"), [(1, {"M0", "M1", "M2"}), (2, {"M0", "M2"})])
def test_a_node_that_was_away_ends_with_the_common_network(away: int, part: set[str]) -> None:
    """The hub tells it the round, so only an absence just before the end keeps it out."""
    done = run(CCVR(rounds=3, **SMALL), tiny(), absent={away: ["M1"]}, progress=False)
    assert [f["fault"] for f in done.faults] == ["absent"]
    assert _told_statistics(done) == part
    first, *others = (node.model.state() for node in done.nodes.values())
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name


def test_a_round_that_the_hub_missed_counts_for_the_nodes() -> None:
    """Nothing fit to use arrives in round 1 of 3; the third is the last all the same."""

    class Spoilt(CCVR):
        def send(self, node: Node) -> Message:
            told = super().send(node).tensors
            bad = torch.nan if int(node.memory["round"]) == 1 else 1.0
            return Message({n: t * bad if t.is_floating_point() else t for n, t in told.items()})

    done = run(Spoilt(rounds=3, **SMALL), tiny(), progress=False)
    assert [f["tick"] for f in done.faults] == [1, 1, 1]
    assert _told_statistics(done) == {"M0", "M1", "M2"}


def test_a_node_that_is_away_at_last_keeps_the_averaged_head() -> None:
    done = run(CCVR(rounds=2, **SMALL), tiny(), absent={2: ["M1"]}, progress=False)
    m0, m1, _ = (node.model.state() for node in done.nodes.values())
    assert {n for n in m0 if not torch.equal(m0[n], m1[n])} == {"head.weight", "head.bias"}


def test_every_class_that_somebody_has_is_drawn_as_often() -> None:
    """Class 0 at one node, class 2 at the other, class 1 nowhere."""

    def told(c: int, n: int) -> dict[str, Tensor]:
        count = torch.zeros(3, dtype=torch.int64)
        mean, covariance = torch.zeros(3, 2), torch.zeros(3, 2, 2)
        count[c], mean[c] = n, c + 1.0
        return {"class_count": count, "class_mean": mean, "class_covariance": covariance}

    split = CCVR(virtual=4)._virtual(Node("hub"), [told(0, 5), told(2, 500)])
    assert split.y is not None
    assert split.y.tolist() == [0] * 4 + [2] * 4
    assert split.x.tolist() == [[1.0, 1.0]] * 4 + [[3.0, 3.0]] * 4


def test_another_seed_draws_other_features() -> None:
    message = {
        "class_count": torch.tensor([9]),
        "class_mean": torch.zeros(1, 2),
        "class_covariance": torch.eye(2).unsqueeze(0),
    }
    one, other = (CCVR(virtual=3)._virtual(Node("hub", seed=s), [message]).x for s in (0, 1))
    assert not torch.equal(one, other)


def test_a_head_without_bias_and_with_dropout() -> None:
    """Names are the network's own; dropout is not trained at the hub."""
    nodes = []
    for node in tiny():
        head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3, bias=False))
        nn.init.constant_(head[1].weight, 0.1)
        net = nn.Sequential(OrderedDict(trunk=nn.Flatten(), top=head))
        nodes.append(replace(node, model=Model.split(net, trunk="trunk", top="top")))
    done = run(CCVR(rounds=2, **SMALL), nodes, progress=False)
    assert done.faults == []
    down = [c for c in done.ledger.crossings() if c.source == "hub" and c.tick == 2]
    assert [t["name"] for c in down for t in c.tensors] == ["top.1.weight"] * 3


def test_a_deep_head_is_an_error_that_says_what_to_do() -> None:
    nodes = []
    for node in tiny():
        head = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        net = nn.Sequential(OrderedDict(trunk=nn.Flatten(), head=head))
        nodes.append(replace(node, model=Model.split(net, trunk="trunk", head="head")))
    with pytest.raises(ModelError, match=r"head of node M0 .* one linear layer on the 6 outputs"):
        run(CCVR(), nodes, progress=False)


def test_a_head_without_parameters_is_an_error() -> None:
    net = nn.Sequential(OrderedDict(trunk=nn.Linear(6, 3), head=nn.ReLU()))
    nodes = [replace(n, model=Model.split(net, trunk="trunk", head="head")) for n in tiny()]
    with pytest.raises(ModelError, match="but holds nothing"):
        run(CCVR(), nodes, progress=False)


def test_labels_that_are_no_classes_are_an_error() -> None:
    nodes = tiny()
    data = {n: s for n, s in nodes[1].data.items() if n != "train"}
    x = nodes[1].data["train"].x
    nodes[1] = replace(nodes[1], data=Data(**data, train=Split(x, torch.zeros(len(x), 3))))
    with pytest.raises(DataError, match="node M1: the labels of 'train' must be one class"):
        run(CCVR(), nodes, progress=False)


@pytest.mark.parametrize("wrong", [{"virtual": 0}, {"calibrate_epochs": -1}])
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"CCVR.{next(iter(wrong))} must be"):
        CCVR(**wrong)

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.fedavg_trunk import FedAvgTrunk
from polyfed.testing import CHECKS, tiny
from polyfed.train import fit, keep_best, roll_back


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    method = FedAvgTrunk(
        batch=8, lr=1e-2, init_epochs=1, local_epochs=2, finetune_epochs=1, patience=1
    )
    CHECKS[check](method, tiny)


def _literal_fedavg_trunk(
    nodes: list[Node], method: FedAvgTrunk, literal_train: Callable[..., None]
) -> dict[str, nn.Module]:
    """SPEC section 6: init; then local all -> uniform mean of trunks -> head alone; no rollback."""
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    data = {node.name: node.data for node in nodes}

    def train(name: str, modules: list[nn.Module], epochs: int, *path: Any, stop: bool) -> None:
        held = data[name]["val_es"]
        literal_train(
            nets[name],
            modules,
            data[name]["train"].x,
            data[name]["train"].y,
            name=name,
            path=path,
            epochs=epochs,
            batch=int(method.batch),
            lr=method.lr,
            stop=(held.x, held.y, method.patience) if stop else None,
        )

    for name, net in nets.items():
        train(name, [net], method.init_epochs, "tick", 0, "start", 0, stop=True)
    for t in range(1, method.rounds + 1):
        for name, net in nets.items():
            train(name, [net], method.local_epochs, "tick", t, "local", 0, stop=True)
        trunks = [net.trunk.state_dict() for net in nets.values()]
        mean = {}
        for key, value in trunks[0].items():
            total = sum(trunk[key].double() for trunk in trunks) / len(trunks)
            mean[key] = total.to(value.dtype) if value.is_floating_point() else total.round().long()
        for name, net in nets.items():
            net.trunk.load_state_dict(mean)
            path = ("tick", t, "receive", 0)
            train(name, [net.head], method.finetune_epochs, *path, stop=False)
    return nets


def test_equals_the_literal_rounds(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    method = FedAvgTrunk(
        rounds=2,
        batch=11,
        lr=5e-3,
        init_epochs=2,
        local_epochs=3,
        finetune_epochs=2,
        patience=1,
        rollback=False,
    )
    nets = _literal_fedavg_trunk(tiny(), method, literal_train)
    done = run(method, tiny(), progress=False)
    for name, node in done.nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_only_the_trunk_travels() -> None:
    done = run(FedAvgTrunk(rounds=2, local_epochs=1, finetune_epochs=1), tiny(), progress=False)
    wanted = set(tiny()[0].model.names("trunk"))
    crossings = done.ledger.crossings()
    assert len(crossings) == 12
    for crossing in crossings:
        assert {t["name"] for t in crossing.tensors} == wanted
        assert not any("head" in t["name"] for t in crossing.tensors)


def test_the_mean_is_uniform_whatever_the_amount_of_data() -> None:
    got = {"A": Message({"w": torch.tensor([0.0])}), "B": Message({"w": torch.tensor([4.0])})}
    assert FedAvgTrunk().combine(Node("hub"), got, ["A"])["A"].tensors["w"].item() == 2.0


def test_fine_tuning_moves_the_head_and_not_a_bit_of_the_trunk() -> None:
    """SPEC 1.8, oracle 11: parameters and BatchNorm statistics of the trunk, after the phase."""
    method = FedAvgTrunk(batch=8, lr=0.1, finetune_epochs=3, rollback=False)
    node = tiny()[0]
    mean = {n: t + 1 for n, t in node.model.state("trunk").items()}
    (phase,) = method.receive(node, Message(mean))
    head = node.model.state("head")
    fit(node, phase, "here")
    for name, tensor in node.model.state("trunk").items():
        assert torch.equal(tensor, mean[name]), name
    for name, tensor in node.model.state("head").items():
        assert not torch.equal(tensor, head[name]), name


def test_after_a_round_all_trunks_are_equal_and_heads_are_not() -> None:
    method = FedAvgTrunk(rounds=1, batch=8, local_epochs=1, finetune_epochs=2, rollback=False)
    first, *others = (n.model.state() for n in run(method, tiny(), progress=False).nodes.values())
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]) == name.startswith("trunk."), name


def test_a_network_that_is_all_trunk_is_an_error() -> None:
    """It has no head to fine-tune; `parts=()` would mean all of it."""
    nodes = [Node(n.name, n.data, Model.split(n.model.net, trunk=...)) for n in tiny()]
    with pytest.raises(ModelError, match="node M0 is all 'trunk'"):
        run(FedAvgTrunk(), nodes, progress=False)


def test_heads_may_differ(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(classes=4)[2]]
    done = run(FedAvgTrunk(rounds=1, local_epochs=1), nodes, progress=False)
    assert len(done.accuracy) == 3


def test_different_trunks_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=4)[2]]
    with pytest.raises(ModelError, match=r"part 'trunk' of node M2 .*'trunk\.2\.weight'"):
        run(FedAvgTrunk(), nodes, progress=False)


def test_a_network_without_a_trunk_is_an_error() -> None:
    nodes = [Node(n.name, n.data, Model.split(n.model.net, body=...)) for n in tiny()]
    with pytest.raises(ConfigError, match="unknown part of node M0 'trunk'"):
        run(FedAvgTrunk(), nodes, progress=False)


@pytest.mark.parametrize("name", ["init_epochs", "local_epochs", "finetune_epochs", "patience"])
def test_negative_options_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FedAvgTrunk(**{name: -1})


# --- rollback -----------------------------------------------------------------------------------


def _constant_node() -> Node:
    """Predicts the class of its largest bias: accuracies 0.4, 0.4, 0.2 for classes 0, 1, 2."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    model = Model.split(nn.Sequential(nn.Linear(1, 3)), head="0")
    model.load({"0.weight": torch.zeros(3, 1)})
    return Node("N", Data(val_rb=Split(torch.zeros(10, 1), y)), model)


def _bias(predicts: int, round_index: int) -> dict[str, Tensor]:
    bias = torch.zeros(3)
    bias[predicts] = 1.0 + round_index
    return {"0.bias": bias}


@pytest.mark.parametrize(
    ("predicts", "best"),
    [
        ([0], 0),
        ([2, 0, 2], 1),
        ([0, 2, 2], 0),
        ([2, 2, 2], 2),  # ties: the latest
        ([0, 1, 2], 1),  # a tie among the best
        ([0, 2, 1, 2], 2),
        ([2, 0, 2, 0, 2], 3),
    ],
)
def test_rollback_takes_the_best_round_and_of_equal_ones_the_last(
    predicts: Sequence[int], best: int
) -> None:
    """SPEC 1.8, oracle 10, with scripted accuracies."""
    node = _constant_node()
    for t, label in enumerate(predicts):
        node.model.load(_bias(label, t))
        keep_best(node)
        assert node.notes["val_rb_accuracy"] == pytest.approx(0.2 if label == 2 else 0.4)
    node.model.load(_bias(2, 99))
    roll_back(node)
    assert torch.equal(node.model.state()["0.bias"], _bias(predicts[best], best)["0.bias"])


def test_a_snapshot_is_a_copy() -> None:
    node = _constant_node()
    node.model.load(_bias(0, 0))
    keep_best(node)
    node.model.load(_bias(1, 5))
    assert torch.equal(node.recall("rollback")["0.bias"], _bias(0, 0)["0.bias"])


def test_without_val_rb_the_last_round_stays() -> None:
    node = _constant_node()
    node.data = Data()
    node.model.load(_bias(0, 0))
    keep_best(node)
    node.model.load(_bias(2, 1))
    keep_best(node)
    roll_back(node)
    assert torch.equal(node.model.state()["0.bias"], _bias(2, 1)["0.bias"])
    assert not node.memory
    assert not node.notes


def test_the_method_rolls_back_to_the_last_of_its_best_rounds() -> None:
    """SPEC 1.8, oracle 10, on the method: n rounds are the first n of a longer run."""

    def settings(rounds: int, rollback: bool) -> FedAvgTrunk:
        return FedAvgTrunk(
            rounds=rounds,
            batch=8,
            lr=0.1,
            local_epochs=1,
            finetune_epochs=1,
            patience=0,
            rollback=rollback,
        )

    done = run(settings(4, True), tiny(), progress=False)
    prefixes = {n: run(settings(n, False), tiny(), progress=False) for n in range(1, 5)}
    chosen = set()
    for name, node in done.nodes.items():
        scores = [
            m["val_rb_accuracy"]
            for m in done.metrics
            if m.get("node") == name and "val_rb_accuracy" in m
        ]
        last_best = max(range(4), key=lambda i: (scores[i], i)) + 1
        chosen.add(last_best)
        wanted = prefixes[last_best].nodes[name].model.state()
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, wanted[key]), (name, scores, key)
    assert chosen != {4}

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.fedavg_trunk import FedAvgTrunk
from polyfed.methods.fedper import FedPer
from polyfed.methods.local import Local
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](FedPer(batch=8, lr=1e-2), tiny)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_equals_the_literal_rounds(
    weighting: Any,
    literal_rounds: Callable[..., dict[str, nn.Module]],
    assert_close: Callable[..., None],
) -> None:
    """Algorithms 1 and 2: train both, average the base; 25, 18 and 33 examples."""
    nets = literal_rounds(
        tiny(),
        2,
        [(("trunk", "head"), 2)],
        "trunk",
        by_examples=weighting == "examples",
        batch=11,
        lr=5e-3,
    )
    method = FedPer(rounds=2, batch=11, lr=5e-3, local_epochs=2, weighting=weighting)
    for name, node in run(method, tiny(), progress=False).nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_is_trunk_fedavg_without_fine_tuning() -> None:
    """The limit that trunk-FedAvg's page names, bit for bit."""
    settings: dict[str, Any] = {"rounds": 2, "batch": 8, "local_epochs": 2}
    one = run(FedPer(**settings, weighting="uniform"), tiny(), progress=False)
    limit = FedAvgTrunk(**settings, finetune_epochs=0, patience=0, rollback=False)
    other = run(limit, tiny(), progress=False)
    for name, node in one.nodes.items():
        wanted = other.nodes[name].model.state()
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, wanted[key]), (name, key)


def test_one_node_is_local_training() -> None:
    alone = tiny()[:1]
    one = run(FedPer(rounds=2, batch=8), alone, progress=False).nodes["M0"].model.state()
    method = Local(rounds=2, batch=8, local_epochs=1, patience=0, rollback=False)
    for name, tensor in run(method, alone, progress=False).nodes["M0"].model.state().items():
        assert torch.equal(tensor, one[name]), name


def test_the_trunk_travels_with_a_count_and_the_head_never() -> None:
    done = run(FedPer(rounds=2), tiny(), progress=False)
    trunk = set(tiny()[0].model.names("trunk"))
    for crossing in done.ledger.crossings():
        wanted = trunk | {"num_examples"} if crossing.to == "hub" else trunk
        assert {t["name"] for t in crossing.tensors} == wanted


def test_after_a_round_trunks_are_equal_and_heads_are_not() -> None:
    done = run(FedPer(rounds=1, batch=8), tiny(), progress=False)
    first, *others = (node.model.state() for node in done.nodes.values())
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]) == name.startswith("trunk."), name


def test_heads_may_differ(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], replace(plain_nodes(classes=4)[2], classes=tuple("wxyz"))]
    done = run(FedPer(rounds=1), nodes, progress=False)
    assert len(done.accuracy) == 3
    trunks = [node.model.state("trunk")["trunk.0.weight"] for node in done.nodes.values()]
    assert all(torch.equal(trunk, trunks[0]) for trunk in trunks)


def test_the_weights_are_the_numbers_of_examples() -> None:
    def message(value: float, n: int) -> Message:
        return Message({"w": torch.tensor([value]), "num_examples": torch.tensor(n)})

    got = {"A": message(0.0, 1), "B": message(4.0, 3)}
    assert FedPer().combine(Node("hub"), got, ["A"])["A"].tensors["w"].item() == 3.0


def test_different_trunks_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=4)[2]]
    with pytest.raises(ModelError, match=r"part 'trunk' of node M2 .*'trunk\.2\.weight'"):
        run(FedPer(), nodes, progress=False)


@pytest.mark.parametrize("k", [0, 2])
def test_a_network_without_a_head_is_an_error(k: int) -> None:
    nodes = tiny()
    nodes[k] = replace(nodes[k], model=Model.split(nodes[k].model.net, trunk=...))
    with pytest.raises(ModelError, match=f"node M{k} is all 'trunk'"):
        run(FedPer(), nodes, progress=False)


def test_a_network_without_a_trunk_is_an_error() -> None:
    nodes = [replace(n, model=Model.split(n.model.net, body=...)) for n in tiny()]
    with pytest.raises(ConfigError, match="unknown part of node M0 'trunk'"):
        run(FedPer(), nodes, progress=False)


@pytest.mark.parametrize("wrong", [{"local_epochs": -1}, {"weighting": "median"}])
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"FedPer.{next(iter(wrong))} must be"):
        FedPer(**wrong)

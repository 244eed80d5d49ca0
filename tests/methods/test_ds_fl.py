"""DS-FL: against its algorithm written out, and what it promises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import methods
from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, DataError
from polyfed.methods.ds_fl import DSFL, SoftCrossEntropy
from polyfed.methods.local import Local
from polyfed.random import stream
from polyfed.testing import CHECKS, tiny

SMALL: dict[str, Any] = {"batch": 11, "public_batch": 7, "local_epochs": 1, "distil_epochs": 2}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("aggregation", ["era", "sa"])
def test_conformance(check: str, aggregation: Any) -> None:
    CHECKS[check](DSFL(**{**SMALL, "batch": 8}, aggregation=aggregation), tiny)


def _with_hub(seed: int = 0) -> list[Node]:
    nodes = tiny(seed)
    data = Data(public=nodes[0].data["public"], test=nodes[1].data["test"])
    hub = Node("hub", data, nodes[0].model.copy(), nodes[0].classes)
    names = ("east", "north", "west")  # the hub is neither the first nor the last of all names
    return [*(replace(n, name=name) for n, name in zip(nodes, names, strict=True)), hub]


@pytest.mark.parametrize("check", CHECKS)
def test_conformance_with_a_hub_that_learns(check: str) -> None:
    CHECKS[check](DSFL(**{**SMALL, "batch": 8}), _with_hub)


def _soft(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy against probabilities, written out."""
    out = net(x)
    log = torch.log(torch.exp(out) / torch.exp(out).sum(1, keepdim=True))
    return -(y * log).sum() / len(x)


@pytest.mark.parametrize("aggregation", ["era", "sa"])
def test_equals_the_literal_algorithm(
    aggregation: Any, literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Itahara et al. 2021, Algorithm 2, with a global model at the hub."""
    method = DSFL(rounds=3, aggregation=aggregation, alignment=14, **SMALL)
    nodes = _with_hub()
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    public = nodes[0].data["public"].x
    entropies = []
    for t in range(1, 4):
        for node in nodes[:3]:
            net, split = nets[node.name], node.data["train"]
            settings: Any = {"name": node.name, "path": ("tick", t, "local", 0), "epochs": 1}
            literal_train(net, [net], split.x, split.y, batch=11, lr=method.lr, **settings)
        X = public[torch.randperm(20, generator=stream(0, "aligned", t))[:14]]
        p = torch.zeros(14, 3)
        for node in nodes[:3]:
            with torch.no_grad():
                scores = nets[node.name].eval()(X)
            p += torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True) / 3
        c = p if aggregation == "sa" else torch.exp(p / 0.1) / torch.exp(p / 0.1).sum(1, True)
        entropies.append(float(-(c * c.log()).sum(1).mean()))
        for node in nodes:
            stage = "gather" if node.name == "hub" else "receive"
            net = nets[node.name]
            settings = {"name": node.name, "path": ("tick", t, stage, 0), "epochs": 2}
            literal_train(net, [net], X, c, batch=7, lr=method.lr, loss=_soft, **settings)
    done = run(method, nodes, progress=False)
    for node in nodes:
        trained = (done.places if node.name == "hub" else done.nodes)[node.name]
        assert_close(trained, nets[node.name], 2e-5)
    noted = [m for m in done.metrics if m.get("node") == "hub" and "entropy" in m]
    assert [m["entropy"] for m in noted] == pytest.approx(entropies, abs=1e-5)
    test = nodes[3].data["test"]
    right = (nets["hub"].eval()(test.x).argmax(1) == test.y).double().mean()
    assert noted[-1]["test_accuracy"] == float(right)


def test_entropy_is_reduced_by_era_alone() -> None:
    """softmax(p / 0.1): the larger probability goes from 2/3 to 1 / (1 + e^(-10/3))."""
    scores = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    torch.testing.assert_close(DSFL(aggregation="sa").agree(scores), torch.tensor([[2 / 3, 1 / 3]]))
    wanted = 1 / (1 + torch.exp(torch.tensor(-10 / 3)))
    torch.testing.assert_close(DSFL().agree(scores)[0, 0], wanted)
    flatter = DSFL(temperature=1.0).agree(scores)[0, 0]
    assert 0.5 < float(flatter) < 2 / 3  # softmax of probabilities


def test_without_distillation_it_is_local_training() -> None:
    done = run(DSFL(rounds=2, **{**SMALL, "distil_epochs": 0}), tiny(), progress=False)
    local = Local(rounds=2, batch=11, local_epochs=1, patience=0, rollback=False)
    alone = run(local, tiny(), progress=False)
    for name, node in alone.nodes.items():
        for key, tensor in node.model.state().items():
            assert torch.equal(done.nodes[name].model.state()[key], tensor), key


def test_a_hub_without_a_network_only_averages() -> None:
    nodes = tiny()
    plain = run(DSFL(rounds=1, **SMALL), nodes, progress=False)
    done = run(DSFL(rounds=1, **SMALL), [*nodes, Node("hub")], progress=False)
    for key, tensor in plain.nodes["M0"].model.state().items():
        assert torch.equal(done.nodes["M0"].model.state()[key], tensor), key


def test_a_hub_with_other_public_inputs_is_an_error() -> None:
    nodes = _with_hub()
    nodes[3].data = Data(public=nodes[3].data["public"].x.flip(0))
    with pytest.raises(DataError, match="public inputs of node hub differ"):
        run(DSFL(**SMALL), nodes, progress=False)


def test_other_classes_are_an_error() -> None:
    nodes = tiny()
    nodes[2].classes = ("a", "c", "b")
    with pytest.raises(ConfigError, match=r"ds-fl averages scores, but the outputs of M0 mean"):
        run(DSFL(**SMALL), nodes, progress=False)


def test_targets_are_needed() -> None:
    model = Model.split(nn.Sequential(nn.Linear(2, 2)), head=...)
    with pytest.raises(ConfigError, match="SoftCrossEntropy needs targets"):
        SoftCrossEntropy()(model, torch.zeros(1, 2), None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregation": "mean"}, {"temperature": 0.0}, {"local_epochs": -1},
        {"distil_epochs": -1}, {"alignment": -1},
    ],
)  # fmt: skip
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        methods.make("ds-fl", wrong)

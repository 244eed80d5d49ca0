from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from polyfed import methods
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.fedbabu import FedBABU
from polyfed.random import ambient
from polyfed.testing import CHECKS, tiny
from polyfed.testing.federations import tiny_net


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("parts", ["all", "head"])
def test_conformance(check: str, parts: Any) -> None:
    method = FedBABU(batch=8, lr=1e-2, finetune_epochs=1, finetune_parts=parts)
    CHECKS[check](method, tiny)


@pytest.mark.parametrize("parts", ["all", "head"])
def test_equals_the_literal_algorithm(
    parts: Any,
    literal_rounds: Callable[..., dict[str, nn.Module]],
    literal_train: Callable[..., None],
    assert_close: Callable[..., None],
) -> None:
    """Rounds that train and average the body; then each node fine-tunes on its own."""
    nodes, settings = tiny(), {"batch": 11, "lr": 2e-3}
    nets = literal_rounds(nodes, 2, [(("trunk",), 2)], "trunk", by_examples=True, **settings)
    for node in nodes:
        net, split = nets[node.name], node.data["train"]
        literal_train(
            net,
            [net] if parts == "all" else [net.head],
            split.x,
            split.y,
            name=node.name,
            path=("tick", 2, "finish", 0),
            epochs=3,
            **settings,
        )
    method = FedBABU(rounds=2, local_epochs=2, finetune_epochs=3, finetune_parts=parts, **settings)
    for name, node in run(method, tiny(), progress=False).nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_until_fine_tuning_nobody_moves_the_head() -> None:
    given = tiny()[0].model.state("head")
    done = run(FedBABU(rounds=3, batch=8, finetune_epochs=0), tiny(), progress=False)
    states = [node.model.state() for node in done.nodes.values()]
    for name, tensor in states[0].items():
        for other in states[1:]:
            assert torch.equal(tensor, other[name]), name
        if name in given:
            assert torch.equal(tensor, given[name]), name


def test_fine_tuning_the_head_leaves_the_common_trunk() -> None:
    done = run(FedBABU(rounds=1, batch=8, finetune_parts="head"), tiny(), progress=False)
    one, other, _ = (node.model.state() for node in done.nodes.values())
    equal = {name for name in one if torch.equal(one[name], other[name])}
    assert equal == set(tiny()[0].model.names("trunk"))


def _own_weights(nodes: Sequence[Node]) -> list[Node]:
    made = []
    for node in nodes:
        with ambient(0, "own", node.name):
            made.append(replace(node, model=Model.split(tiny_net(), trunk="trunk", head="head")))
    return made


def test_heads_of_equal_shape_are_made_common_and_trunks_are_not() -> None:
    nodes = _own_weights(tiny())
    prepared = FedBABU().prepare(nodes[::-1])[::-1]
    for node, before in zip(prepared, nodes, strict=True):
        for name, tensor in node.model.state().items():
            source = nodes[0] if name.startswith("head.") else before
            assert torch.equal(tensor, source.model.state()[name]), (node.name, name)
        assert node.data is before.data


def test_preparing_does_not_touch_the_given_nodes() -> None:
    nodes = _own_weights(tiny())
    before = [node.model.state() for node in nodes]
    FedBABU().prepare(nodes)
    for node, state in zip(nodes, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in node.model.state().items())


def test_a_head_of_another_shape_keeps_its_own_weights(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    wide = plain_nodes(classes=4)[2]
    nodes = [*plain_nodes()[:2], wide]
    done = run(FedBABU(rounds=1, finetune_epochs=0), nodes, progress=False)
    head = {name: node.model.state("head") for name, node in done.nodes.items()}
    for name in head["M0"]:
        assert torch.equal(head["M0"][name], nodes[0].model.state()[name])
        assert torch.equal(head["M1"][name], nodes[0].model.state()[name])
        assert torch.equal(head["M2"][name], wide.model.state()[name])


def test_only_the_trunk_travels() -> None:
    done = run(FedBABU(rounds=1, finetune_epochs=1), tiny(), progress=False)
    trunk = set(tiny()[0].model.names("trunk"))
    sent = {t["name"] for c in done.ledger.crossings() for t in c.tensors}
    assert sent == trunk | {"num_examples"}


def test_a_network_without_a_head_is_an_error() -> None:
    nodes = [replace(n, model=Model.split(n.model.net, trunk=...)) for n in tiny()]
    with pytest.raises(ModelError, match="node M0 is all 'trunk'"):
        run(FedBABU(), nodes, progress=False)


@pytest.mark.parametrize("name", ["local_epochs", "finetune_epochs"])
def test_negative_options_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"FedBABU\.{name} must be >= 0"):
        FedBABU(**{name: -1})


def test_the_trunk_alone_cannot_be_fine_tuned() -> None:
    with pytest.raises(ConfigError, match="method fedbabu, finetune_parts: 'trunk' does not fit"):
        methods.make("fedbabu", {"finetune_parts": "trunk"})

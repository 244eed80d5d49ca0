from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.lg_fedavg import LGFedAvg
from polyfed.methods.local import Local
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](LGFedAvg(batch=8, lr=1e-2), tiny)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_equals_the_literal_rounds(
    weighting: Any,
    literal_rounds: Callable[..., dict[str, nn.Module]],
    assert_close: Callable[..., None],
) -> None:
    """Algorithm 1: train both, average the head."""
    nets = literal_rounds(
        tiny(),
        2,
        [(("trunk", "head"), 2)],
        "head",
        by_examples=weighting == "examples",
        batch=11,
        lr=5e-3,
    )
    method = LGFedAvg(rounds=2, batch=11, lr=5e-3, local_epochs=2, weighting=weighting)
    for name, node in run(method, tiny(), progress=False).nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_after_a_round_heads_are_equal_and_trunks_are_not() -> None:
    done = run(LGFedAvg(rounds=1, batch=8), tiny(), progress=False)
    first, second, _ = (node.model.state() for node in done.nodes.values())
    equal = {name for name in first if torch.equal(first[name], second[name])}
    counter = "trunk.1.num_batches_tracked"  # batches may happen to be as many
    assert equal - {counter} == set(tiny()[0].model.names("head"))


def test_the_head_travels_and_the_trunk_never() -> None:
    done = run(LGFedAvg(rounds=2), tiny(), progress=False)
    sent = {t["name"] for c in done.ledger.crossings() for t in c.tensors}
    assert sent == {"head.weight", "head.bias", "num_examples"}
    up = next(c for c in done.ledger.crossings() if c.to == "hub")
    assert up.bytes == (5 * 3 + 3) * 4 + 8


def test_trunks_may_differ(plain_net: Callable[..., nn.Module]) -> None:
    """Even in what they take: only the width of their output must agree."""
    nodes = tiny()
    narrow = {n: (s.x[:, :4], s.y) for n, s in nodes[2].data.items() if s.y is not None}
    net = Model.split(plain_net(inputs=4), trunk="trunk", head="head")
    nodes[2] = Node("M2", type(nodes[2].data)(**narrow), net, nodes[2].classes)
    done = run(LGFedAvg(rounds=1), nodes, progress=False)
    heads = [node.model.state("head")["head.weight"] for node in done.nodes.values()]
    assert all(torch.equal(head, heads[0]) for head in heads)


def test_one_node_is_local_training() -> None:
    alone = tiny()[:1]
    one = run(LGFedAvg(rounds=2, batch=8), alone, progress=False).nodes["M0"].model.state()
    method = Local(rounds=2, batch=8, local_epochs=1, patience=0, rollback=False)
    for name, tensor in run(method, alone, progress=False).nodes["M0"].model.state().items():
        assert torch.equal(tensor, one[name]), name


def test_different_heads_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(classes=4)[2]]
    with pytest.raises(ModelError, match=r"part 'head' of node M2 .*'head\.weight'"):
        run(LGFedAvg(), nodes, progress=False)


def test_different_classes_are_an_error() -> None:
    nodes = tiny()
    nodes[1].classes = ("a", "b", "d")
    with pytest.raises(ConfigError, match=r"lg-fedavg averages heads, but .* M1 mean \{a, b, d\}"):
        run(LGFedAvg(), nodes, progress=False)


def test_parts_of_other_names_are_an_error_that_names_the_node() -> None:
    nodes = tiny()
    nodes[1] = replace(nodes[1], model=Model.split(nodes[1].model.net, trunk="trunk", top="head"))
    with pytest.raises(ModelError, match="the parts head of M0, but node M1 has top"):
        run(LGFedAvg(), nodes, progress=False)


def test_a_negative_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"LGFedAvg\.local_epochs must be >= 0"):
        LGFedAvg(local_epochs=-1)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError
from polyfed.methods.fedrep import FedRep
from polyfed.testing import CHECKS, tiny
from polyfed.train import fit


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](FedRep(batch=8, lr=1e-2, head_epochs=2, trunk_epochs=1), tiny)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_equals_the_literal_rounds(
    weighting: Any,
    literal_rounds: Callable[..., dict[str, nn.Module]],
    assert_close: Callable[..., None],
) -> None:
    """Algorithm 1: the head on the received representation, then the representation; mean of it."""
    nets = literal_rounds(
        tiny(),
        2,
        [(("head",), 3), (("trunk",), 2)],
        "trunk",
        by_examples=weighting == "examples",
        batch=11,
        lr=5e-3,
    )
    method = FedRep(rounds=2, batch=11, lr=5e-3, head_epochs=3, trunk_epochs=2, weighting=weighting)
    for name, node in run(method, tiny(), progress=False).nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_the_mean_is_uniform_unless_asked_otherwise() -> None:
    """Algorithm 1 divides by the number of clients; and no count needs to be sent."""
    assert FedRep().weighting == "uniform"
    assert set(FedRep().sends(tiny()[0])) == set(tiny()[0].model.names("trunk"))


def test_each_phase_leaves_the_other_part_as_it_was_bit_for_bit() -> None:
    node = tiny()[0]
    moved = []
    for i, phase in enumerate(FedRep(batch=8, lr=0.1, head_epochs=2).local(node)):
        before = node.model.state()
        fit(node, phase, "here", i)
        after = node.model.state()
        moved.append({name for name in before if not torch.equal(before[name], after[name])})
    assert moved == [set(node.model.names("head")), set(node.model.names("trunk"))]


def test_every_part_beside_the_trunk_is_head() -> None:
    """Two parts after the trunk, or one before it: they are trained together and stay."""

    def three_parts(node: Node) -> Node:
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 3))
        for p in net.parameters():
            nn.init.constant_(p, 0.1)
        return Node(node.name, node.data, Model.split(net, first="0", trunk="1", last="2"))

    done = run(FedRep(rounds=1, batch=8), [three_parts(node) for node in tiny()], progress=False)
    first, second, _ = (node.model.state() for node in done.nodes.values())
    equal = {name for name in first if torch.equal(first[name], second[name])}
    assert equal == {"1.weight", "1.bias"}
    assert {t["name"] for c in done.ledger.crossings() for t in c.tensors} == equal


def test_without_head_epochs_heads_never_move() -> None:
    done = run(FedRep(rounds=2, batch=8, head_epochs=0), tiny(), progress=False)
    for node in done.nodes.values():
        for name, tensor in node.model.state("head").items():
            assert torch.equal(tensor, tiny()[0].model.state()[name])


@pytest.mark.parametrize("name", ["head_epochs", "trunk_epochs"])
def test_negative_options_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=f"FedRep.{name} must be >= 0"):
        FedRep(**{name: -1})

"""CWT: the ring written out, one model for all, and what cannot be. See also test_li.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods.cwt import CWT
from polyfed.testing import CHECKS, tiny

SMALL = CWT(rounds=3, batch=9, lr=5e-3, local_epochs=2)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](CWT(batch=8, lr=1e-2), tiny)


def test_equals_the_literal_ring(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """One network goes round; what a node has at the end is the network as it left."""
    nodes = tiny()
    net = copy.deepcopy(nodes[0].model.net)
    left = {}
    for t in range(1, 4):
        for node in nodes:
            split = node.data["train"]
            literal_train(
                net, [net], split.x, split.y, name=node.name, path=("tick", t, "local", 0),
                epochs=2, batch=9, lr=5e-3,
            )  # fmt: skip
            left[node.name] = copy.deepcopy(net)
    done = run(SMALL, tiny(), progress=False)
    for name, node in done.nodes.items():
        assert_close(node, left[name], 2e-5)


def test_the_whole_network_travels_once_a_visit() -> None:
    done = run(replace(SMALL, weighting="uniform"), tiny(), progress=False)
    size = sum(t.numel() * t.element_size() for t in tiny()[0].model.state().values())
    ways = [("M0", "M1"), ("M1", "M2"), ("M2", "M0")] * 3
    crossings = done.ledger.crossings()
    assert [(c.source, c.to, c.bytes) for c in crossings] == [(*way, size) for way in ways[:-1]]


def test_parts_of_a_broken_ring_meet_in_the_mean() -> None:
    """Two nodes have one link: cut, both train alone; healed, M0 begins with the mean."""
    pair = replace(SMALL, rounds=2, local_epochs=1)
    apart = run(pair, tiny()[:2], topology="dual-ring", fail="cut 0-1 @1", progress=False)
    assert len(apart.ledger) == 0
    m0, m1 = (apart.nodes[n].model.state() for n in ("M0", "M1"))
    still = replace(pair, rounds=3, local_epochs=1, lr=1e-12)
    nodes = tiny()[:2]
    for node, state in zip(nodes, (m0, m1), strict=True):
        node.model.load(state)
    healed = run(still, nodes, topology="dual-ring", fail="cut 0-1 @1; heal @3", progress=False)
    assert [(c.tick, c.source, c.to) for c in healed.ledger.crossings()] == [
        (3, "M1", "M0"), (3, "M0", "M1"),
    ]  # fmt: skip
    for name, tensor in healed.nodes["M0"].model.state().items():
        if "running" not in name and tensor.is_floating_point():  # statistics move all the same
            wanted = (25 * m0[name] + 18 * m1[name]) / 43
            torch.testing.assert_close(tensor, wanted, atol=1e-6, rtol=0)


def test_networks_must_be_alike_and_mean_the_same(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=4)[2]]
    with pytest.raises(ModelError, match=r"network of node M2 .*'trunk\.2\.weight'"):
        run(CWT(), nodes, progress=False)
    nodes = [*tiny()[:2], replace(tiny()[2], classes=("x", "y", "z"))]
    with pytest.raises(ConfigError, match=r"outputs of M0 mean \{a, b, c\} and those of M2"):
        run(CWT(), nodes, progress=False)


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="local_epochs"):
        CWT(local_epochs=-1)


def test_the_learning_rate_may_fall_in_steps() -> None:
    node = tiny()[0]

    def rates(**options: float) -> list[float]:
        node.memory.clear()
        method = replace(CWT(lr=0.8), **options)  # type: ignore[arg-type]
        return [phase.optimiser.lr for _ in range(5) for phase in method.local(node)]

    assert rates() == [0.8] * 5
    assert rates(decay_every=2) == [0.8, 0.8, 0.4, 0.4, 0.2]
    assert rates(decay_every=3, decay=0.25) == [0.8, 0.8, 0.8, 0.2, 0.2]

"""What the method tests share: the literal training loop, and a federation without noise."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.random import ambient, stream
from polyfed.testing import tiny

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


def _literal_train(
    net: nn.Module,
    moving: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    *,
    name: str,
    path: tuple[Any, ...],
    epochs: int,
    batch: int,
    lr: float,
    loss: Loss = _cross_entropy,
    stop: tuple[Tensor, Tensor, int] | None = None,
    seed: int = 0,
) -> None:
    """A bare PyTorch loop with Adam; only the random streams have our names.

    What does not move is in eval mode. `stop` is (validation inputs, labels, patience).
    """
    parameters = [p for module in moving for p in module.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=lr)
    order = stream(seed, "node", name, "batches", *path)
    best, kept, waited = math.inf, copy.deepcopy(net.state_dict()), 0
    with ambient(seed, "node", name, "noise", *path):
        for _ in range(epochs):
            net.eval()
            for module in moving:
                module.train()
            shuffled = torch.randperm(len(x), generator=order)
            for start in range(0, len(x), batch):
                rows = shuffled[start : start + batch]
                optimiser.zero_grad()
                loss(net, x[rows], y[rows]).backward()
                optimiser.step()
            if stop is not None:
                net.eval()
                with torch.no_grad():
                    now = float(loss(net, stop[0], stop[1]))
                waited = 0 if now < best else waited + 1
                if now < best:
                    best, kept = now, copy.deepcopy(net.state_dict())
                if waited == stop[2]:
                    break
    if stop is not None:
        net.load_state_dict(kept)
    net.eval()


@pytest.fixture(scope="session")
def literal_train() -> Callable[..., None]:
    return _literal_train


def _literal_rounds(
    nodes: Sequence[Node],
    rounds: int,
    phases: Sequence[tuple[Sequence[str], int]],
    averaged: str,
    *,
    by_examples: bool,
    batch: int,
    lr: float,
) -> dict[str, nn.Module]:
    """Each round: train these children for these epochs, one after another; average one child."""
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    data = {node.name: node.data["train"] for node in nodes}
    total = sum(len(split) for split in data.values())
    for t in range(1, rounds + 1):
        for name, net in nets.items():
            for i, (children, epochs) in enumerate(phases):
                _literal_train(
                    net,
                    [net.get_submodule(child) for child in children],
                    data[name].x,
                    data[name].y,
                    name=name,
                    path=("tick", t, "local", i),
                    epochs=epochs,
                    batch=batch,
                    lr=lr,
                )
        mean: dict[str, Tensor] = {}
        for name, net in nets.items():
            weight = len(data[name]) / total if by_examples else 1 / len(nets)
            for key, value in net.get_submodule(averaged).state_dict().items():
                mean[key] = mean.get(key, 0) + weight * value.double()
        for net in nets.values():
            child = net.get_submodule(averaged)
            for key, value in child.state_dict().items():
                exact = mean[key] if value.is_floating_point() else mean[key].round()
                value.copy_(exact.to(value.dtype))
    return nets


@pytest.fixture(scope="session")
def literal_rounds() -> Callable[..., dict[str, nn.Module]]:
    return _literal_rounds


def _plain_net(inputs: int = 6, width: int = 5, classes: int = 3) -> nn.Module:
    trunk = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, width))
    return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(width, classes)))


@pytest.fixture(scope="session")
def plain_net() -> Callable[..., nn.Module]:
    return _plain_net


@pytest.fixture(scope="session")
def plain_nodes() -> Callable[..., list[Node]]:
    """The tiny federation with networks without BatchNorm and dropout, each with own weights."""

    def make(*, common: bool = False, **sizes: int) -> list[Node]:
        made = []
        for node in tiny():
            with ambient(0, "plain", "" if common else node.name):
                model = Model.split(_plain_net(**sizes), trunk="trunk", head="head")
            made.append(Node(node.name, node.data, model, node.classes))
        return made

    return make


@pytest.fixture(scope="session")
def without() -> Callable[..., Node]:
    """A node without some of its splits."""

    def strip(node: Node, *splits: str) -> Node:
        kept = {n: s for n, s in node.data.items() if n not in splits}
        return Node(node.name, Data(**kept), node.model, node.classes)

    return strip


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    def check(node: Node, net: nn.Module, atol: float) -> None:
        """Parameters and buffers agree, name by name."""
        got, wanted = node.model.state(), net.state_dict()
        assert list(got) == list(wanted)
        for name in got:
            torch.testing.assert_close(
                got[name], wanted[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )

    return check

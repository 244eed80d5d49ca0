"""Where it is faster, filters have their channels last for a while; nobody else notices."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.model import Model, Precision
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Optimiser, Phase, cross_entropy
from polyfed.models.siamese import siamese
from polyfed.random import ambient, stream
from polyfed.train import fit
from polyfed.train.evaluate import accuracy, mean_loss, outputs
from polyfed.train.ssl import BYOL, SimCLR, SimSiam

LAST = torch.channels_last


def _node(precision: Precision, side: int = 8, dtype: torch.dtype = torch.float32) -> Node:
    with ambient(0, "init"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten())
        net.append(nn.Linear(5 * (side - 4) ** 2, 2))
    x = torch.randn(12, 3, side, side, generator=stream(0, "x")).to(dtype)
    model = Model.split(net.to(dtype), all=...)
    model.precision = precision
    split = Split(x, torch.arange(12) % 2)
    return Node("N", Data(train=split, test=split), model)


def _phase(objective: Any = cross_entropy, **settings: Any) -> Phase:
    sgd = Optimiser(name="sgd", lr=0.1, momentum=0.9)
    return Phase(**{"label": "p", "objective": objective, "steps": 2, "optimiser": sgd} | settings)


def _filters(node: Node) -> list[nn.Parameter]:
    return [p for p in node.model.net.parameters() if p.dim() == 4]


KINDS: list[tuple[Precision, int, torch.dtype, bool]] = [
    ("bfloat16", 8, torch.float32, True),
    ("float32", 8, torch.float32, False),  # small images: as ever
    ("float32", 15, torch.float32, False),
    ("float32", 16, torch.float32, True),
    ("float32", 16, torch.float64, False),
]


@pytest.mark.parametrize(("precision", "side", "dtype", "last"), KINDS)
@pytest.mark.parametrize("breaks", [False, True])
def test_filters_are_laid_out_for_the_phase_only(
    precision: Precision, side: int, dtype: torch.dtype, last: bool, breaks: bool
) -> None:
    node = _node(precision, side, dtype)
    before = node.model.state()
    places = [p.data_ptr() for p in node.model.net.parameters()]
    seen: list[tuple[bool, bool]] = []

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.extend(
            (f.is_contiguous(memory_format=LAST), f.is_contiguous()) for f in _filters(node)
        )
        if breaks and len(seen) > 2:
            raise KeyError
        return cross_entropy(model, x, y)

    if breaks:
        with pytest.raises(KeyError):
            fit(node, _phase(objective))
    else:
        fit(node, _phase(objective))
    assert set(seen) == {(last, not last)}
    assert [p.data_ptr() for p in node.model.net.parameters()] == places
    assert all(f.is_contiguous() for f in _filters(node))
    after = node.model.state()
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("precision", "side", "atol"), [("bfloat16", 8, 2e-3), ("float32", 16, 1e-6)]
)
def test_a_step_is_the_same_in_either_layout(
    precision: Precision, side: int, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a number lies decides nothing but the order of sums."""
    laid, plain = _node(precision, side), _node(precision, side)
    fit(laid, _phase())
    monkeypatch.setattr(torch, "channels_last", torch.contiguous_format)
    fit(plain, _phase())
    for ours, theirs in zip(laid.model.state().values(), plain.model.state().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("side", [8, 16])
def test_an_evaluation_has_the_layout_of_a_phase_and_leaves_it(side: int) -> None:
    node, seen = _node("float32", side), list[bool]()
    before, places = node.model.state(), [p.data_ptr() for p in node.model.net.parameters()]
    plain = [node.model.net(x).detach() for x in node.data["test"].x.split(5)]
    handle = node.model.net[2].register_forward_hook(
        lambda module, x, y: seen.append(y.is_contiguous(memory_format=LAST))
    )
    found = outputs(node.model, node.data["test"].x)
    accuracy(node.model, node.data["test"])
    mean_loss(node.model, node.data["test"], cross_entropy)
    handle.remove()
    assert seen == [side == 16] * 3
    torch.testing.assert_close(found, torch.cat(plain), rtol=0, atol=1e-5)
    assert [p.data_ptr() for p in node.model.net.parameters()] == places
    assert all(torch.equal(before[name], t) for name, t in node.model.state().items())
    assert all(f.is_contiguous() for f in _filters(node))


@pytest.mark.parametrize("side", [8, 16])
def test_pictures_of_one_channel_have_it_last_too(side: int) -> None:
    """Their filters are contiguous in both layouts: what counts is what comes out."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, side - 2), nn.Flatten())
    x, seen = torch.randn(12, 1, side, side, generator=stream(0, "x")), list[bool]()
    net[0].register_forward_hook(
        lambda module, x, y: seen.append(y.is_contiguous(memory_format=LAST))
    )
    node = Node("N", Data(train=Split(x, torch.arange(12) % 2)), Model.split(net, all=...))
    fit(node, _phase())
    outputs(node.model, x)
    assert seen == [side == 16] * 3
    assert [p.stride() for p in _filters(node)] == [
        (9, 9, 3, 1),
        (4 * (side - 2) ** 2, (side - 2) ** 2, side - 2, 1),
    ]


def test_early_stopping_looks_at_networks_as_they_train() -> None:
    """An evaluation within a phase does not put filters back before the phase is over."""
    node, seen = _node("float32", 16), list[bool]()

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.extend(f.is_contiguous(memory_format=LAST) for f in _filters(node))
        return cross_entropy(model, x, y)

    stop = EarlyStop(split="test", patience=9)
    fit(node, _phase(objective, steps=None, epochs=3, batch=12, stop=stop))
    assert len(seen) == 3 * 2 * 2
    assert all(seen)


@pytest.mark.parametrize(("precision", "side"), [("bfloat16", 8), ("float32", 16)])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_an_optimiser_keeps_has_the_layout_of_all_else(
    name: Literal["sgd", "adam"], precision: Precision, side: int
) -> None:
    """Two phases that keep it are one of twice the steps: its numbers meet their filters."""
    optimiser = Optimiser(name=name, lr=0.01, momentum=0.9 if name == "sgd" else 0.0)
    whole = {"optimiser": optimiser, "keep": "all", "batch": 12}
    twice, once = _node(precision, side), _node(precision, side)
    for _ in range(2):
        fit(twice, _phase(steps=2, **whole))
        assert all(t.is_contiguous() for t in twice.memory.values())
    fit(once, _phase(steps=4, **whole))
    for ours, theirs in zip(twice.model.state().values(), once.model.state().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("kind", "passes"), [("byol", 4), ("simsiam", 2), ("simclr", 2)])
def test_self_supervision_enters_a_precision_once_a_pass(
    kind: Literal["byol", "simsiam", "simclr"], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ambient(0, "init"):
        model = siamese(kind, nn.Linear(6, 8), 8, projection=4, hidden=5).as_model()
    entered = []
    plain = Model.compute
    monkeypatch.setattr(Model, "compute", lambda *a: entered.append(1) or plain(*a))
    {"byol": BYOL, "simsiam": SimSiam, "simclr": SimCLR}[kind](views=lambda x: x).see(
        model, torch.randn(7, 6, generator=stream(0, "x"))
    )
    assert len(entered) == passes

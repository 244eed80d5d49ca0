"""One model of all heads: SPEC 5.6 (11 and 12), training pooled and in loops, what cannot be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError, UnknownNameError
from polyfed.methods.li import LI
from polyfed.methods.local import Local
from polyfed.models.integrate import (
    Integrator,
    Mixture,
    Stacked,
    as_nodes,
    mixture,
    pool_outputs,
    stack_heads,
)
from polyfed.random import ambient, stream
from polyfed.testing import tiny

LOOPS: dict[str, Any] = {"rounds": 4, "batch": 9, "lr": 0.01, "head_epochs": 0, "decay_every": 0}


def trained() -> list[Node]:
    """Nodes with a common trunk, and heads of their own."""
    nodes = tiny()
    for node in nodes:
        weight = torch.randn(3, 5, generator=stream(0, "heads", node.name))
        node.model.load({"head.weight": weight})
        node.model.net.eval()
    return nodes


def own_outputs(nodes: list[Node], x: Tensor) -> Tensor:
    """What every node's own network says, slowly."""
    with torch.no_grad():
        return torch.stack([node.model(x) for node in nodes], dim=1)


X = torch.randn(7, 6, generator=stream(0, "inputs"))


# ---- stacking ------------------------------------------------------------------------------------


def test_an_integrator_that_does_nothing_shows_what_all_heads_say() -> None:
    """Invariant 11, and finding 8: all heads, in the order of the nodes."""
    nodes = trained()
    stacked = stack_heads(nodes, integrator=nn.Identity()).eval()
    torch.testing.assert_close(stacked(X), own_outputs(nodes, X))
    assert stacked(X).shape == (7, 3, 3)


@given(st.integers(1, 6), st.integers(0, 6))
def test_a_sample_does_not_depend_on_its_batch(size: int, first: int) -> None:
    """Invariant 12, finding 8: the authors' code attends across the batch."""
    stacked = stack_heads(trained()).eval()
    rows = torch.arange(first, first + size) % 7
    with torch.no_grad():
        torch.testing.assert_close(stacked(X[rows]), stacked(X)[rows], atol=1e-5, rtol=1e-4)


def test_in_training_too_heads_meet_and_samples_do_not() -> None:
    with ambient(0, "integrator"):
        integrator = Integrator(3, width=8, dropout=0.0).train()
    outputs = own_outputs(trained(), X).requires_grad_()
    integrator(outputs)[2].sum().backward()
    assert outputs.grad is not None
    touched = outputs.grad.abs().sum(2) > 0
    assert touched.nonzero()[:, 0].unique().tolist() == [2]
    assert touched[2].all()


def test_the_integrator_is_the_literal_transformer() -> None:
    """Attention over heads, mean over heads, one linear layer (SPEC 5.3d), sample by sample."""
    with ambient(0, "integrator"):
        integrator = Integrator(4, layers=1, attention=2, dropout=0.0).train()
    outputs = torch.randn(5, 3, 4, generator=stream(0, "outputs"))
    layer = integrator.encoder.layers[0]
    attention, found = layer.self_attn, []
    for heads in outputs:
        q, k, v = (heads @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
        parts = []
        for i in (0, 1):
            a, b, c = (t[:, 2 * i : 2 * i + 2] for t in (q, k, v))
            parts.append((a @ b.T / 2**0.5).softmax(1) @ c)
        seen = layer.norm1(heads + attention.out_proj(torch.cat(parts, dim=1)))
        seen = layer.norm2(seen + layer.linear2(layer.linear1(seen).relu()))
        found.append(integrator.out(seen.mean(0)))
    torch.testing.assert_close(integrator(outputs), torch.stack(found), atol=1e-5, rtol=1e-4)


def test_pooled_outputs_are_what_heads_say_to_all_labelled_inputs() -> None:
    nodes = trained()
    stacked = stack_heads(nodes).train()
    pooled = pool_outputs(stacked, nodes[::-1])
    assert set(pooled.data) == {"train", "val_es", "val_rb", "test"}  # public has no labels
    train = pooled.data["train"]
    inputs = torch.cat([node.data["train"].x for node in nodes])
    torch.testing.assert_close(train.x, own_outputs(nodes, inputs))
    assert train.y is not None
    assert train.y.tolist() == [int(y) for node in nodes for y in node.data["train"].y]  # type: ignore[union-attr]
    assert stacked.trunk.training  # the mode is as it was


def test_training_on_pooled_outputs_moves_the_integrator_alone() -> None:
    nodes = trained()
    stacked = stack_heads(nodes, seed=3)
    before = {name: t.clone() for name, t in stacked.state_dict().items()}
    done = run(Local(rounds=1, local_epochs=30, batch=16, lr=3e-3, patience=0, rollback=False),
               [pool_outputs(stacked, nodes)], progress=False)  # fmt: skip
    stacked.integrator = done.nodes["pooled"].model.net
    moved = {n for n, t in stacked.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {n for n in before if n.startswith("integrator.")}
    right = [stacked.eval()(n.data["test"].x).argmax(1) == n.data["test"].y for n in nodes]
    assert float(torch.cat(right).double().mean()) == pytest.approx(done.mean_accuracy)


@pytest.mark.parametrize(("make", "part"), [(stack_heads, "integrator"), (mixture, "gate")])
def test_in_loops_that_part_alone_travels_and_moves(
    make: Callable[..., Stacked | Mixture], part: str
) -> None:
    nodes = trained()
    whole = make(nodes)
    done = run(LI(share=part, visit_steps=1, **LOOPS), as_nodes(whole, nodes), progress=False)
    names = {t["name"] for c in done.ledger.crossings() for t in c.tensors}
    own = {f"{part}.{n}" for n in getattr(whole, part).state_dict()}
    assert names == own | {"num_examples"}
    before, after = whole.state_dict(), done.nodes["M2"].model.net.state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == own


# ---- mixture -------------------------------------------------------------------------------------


class OneHot(nn.Module):
    """A gate that is sure of one head."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head

    def forward(self, z: Tensor) -> Tensor:
        scores = torch.full((len(z), 3), -torch.inf)
        scores[:, self.head] = 0.0
        return scores


@pytest.mark.parametrize("head", [0, 1, 2])
def test_a_gate_that_is_sure_of_a_head_gives_that_head(head: int) -> None:
    """Invariant 11."""
    nodes = trained()
    mixed = mixture(nodes, gate=OneHot(head)).eval()
    torch.testing.assert_close(mixed(X), own_outputs(nodes, X)[:, head].log_softmax(-1))


def test_a_mixture_is_the_weighted_sum_of_probabilities() -> None:
    """Eq. (2), sample by sample and head by head."""
    nodes = trained()
    mixed = mixture(nodes, seed=5).eval()
    with torch.no_grad():
        z, outputs = mixed.trunk(X), own_outputs(nodes, X)
        for i in range(len(X)):
            weights = mixed.gate(z[i]).softmax(0)
            wanted = sum(weights[c] * outputs[i, c].softmax(0) for c in range(3))
            torch.testing.assert_close(mixed(X)[i].exp(), wanted)
    torch.testing.assert_close(mixed(X).exp().sum(1), torch.ones(7))


# ---- plain modules -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [stack_heads, mixture])
def test_the_whole_is_a_plain_module_of_its_own(
    make: Callable[..., nn.Module], tmp_path: Any
) -> None:
    nodes = trained()
    whole = make(nodes).eval()
    before = whole(X)
    nodes[0].model.load({"head.weight": torch.zeros(3, 5)})
    assert torch.equal(whole(X), before)
    exported = torch.export.export(whole, (X,)).module()
    torch.testing.assert_close(exported(X), before, atol=1e-5, rtol=1e-4)
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    other = make(trained(), seed=9).eval()
    assert not torch.equal(other(X), before)
    other.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    assert torch.equal(other(X), before)


def test_heads_of_several_modules() -> None:
    nodes = trained()
    for node in nodes:
        layers = OrderedDict(trunk=nn.Linear(6, 5), act=nn.Tanh(), head=nn.Linear(5, 3))
        node.model = Model.split(nn.Sequential(layers), trunk="trunk", last=("act", "head"))
        node.model.load({"trunk.weight": torch.ones(5, 6), "trunk.bias": torch.zeros(5)})
    stacked = stack_heads(nodes, integrator=nn.Identity())
    torch.testing.assert_close(stacked(X), own_outputs(nodes, X))


# ---- what cannot be ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Something is done to what leaves the head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.scale = (
            nn.Linear(6, 5),
            nn.Linear(5, 3),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.scale * self.head(self.trunk(x))


def test_what_cannot_be_stacked() -> None:
    nodes = trained()
    nodes[2].model.load({"trunk.0.weight": torch.zeros(8, 6)})
    with pytest.raises(ModelError, match=r"trunks of M0 and M2 differ.*finetune_epochs"):
        stack_heads(nodes)
    nodes = trained()
    nodes[1].classes = ("x", "y", "z")
    with pytest.raises(ConfigError, match="heads of M0 and M1 are for different classes"):
        mixture(nodes)
    nodes = trained()
    nodes[0].model = Model.split(nodes[0].model.net, body="trunk", head="head")
    with pytest.raises(UnknownNameError, match="first part of node M0: 'trunk'"):
        stack_heads(nodes)
    for head in ("head", ("head", "scale")):
        node = trained()[0]
        node.model = Model.split(Scaled(), trunk=..., head=head)
        with pytest.raises(ModelError, match=r"head of node M0 .* is not simply applied"):
            stack_heads([node])
    with pytest.raises(ConfigError, match="4 heads of attention do not divide a width of 10"):
        Integrator(10)

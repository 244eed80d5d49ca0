"""Binary vectors: the generator written out, who is modified, what counts as recalled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from polyfed import options
from polyfed.core.data import Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.engines.gate import check_federation
from polyfed.errors import ConfigError, DataError
from polyfed.models.associative import AssociativeMemory, Hebbian
from polyfed.tasks.binary_vectors import (
    Associative,
    BinaryVectors,
    is_recalled,
    recalled,
    score,
)
from polyfed.train import fit

K = st.lists(st.integers(0, 5000), min_size=1, max_size=8)


def _literal(
    k: int, n: int, m: int, s: int, z: int, *, parts: tuple[int, ...], noisy: bool
) -> list[float]:
    """Section V.5: ones in the named thirds of the block of k, then z bits flipped."""
    v = [0] * n
    for part in parts:
        for i in range(part * m, (part + 1) * m):
            v[(3 * m * (k % s) + i) % n] = 1
    if noisy:
        for i in range(z):
            place = (k // s + i * (n // z)) % n
            v[place] = 1 - v[place]
    return [float(bit) for bit in v]


@given(
    k=K,
    m=st.integers(1, 8),
    s=st.integers(1, 4),
    z=st.integers(0, 5),
    n=st.sampled_from([24, 50, 51]),
    modified=st.booleans(),
)
def test_equals_the_literal_generator(
    k: list[int], m: int, s: int, z: int, n: int, modified: bool
) -> None:
    vectors = BinaryVectors(length=n, ones=m, period=s, noise=z, wrap=True)
    index = torch.tensor(k)

    def literal(noisy: bool, cue: bool) -> list[list[float]]:
        rest = [() if cue else (2,) if modified and i % s == 0 else (1,) for i in k]
        return [
            _literal(i, n, m, s, z, parts=(0, *part), noisy=noisy)
            for i, part in zip(k, rest, strict=True)
        ]

    complete = vectors.complete(index, modified=modified)
    assert complete.tolist() == literal(noisy=False, cue=False)
    assert vectors.cue(index).tolist() == literal(noisy=False, cue=True)
    assert vectors.flipped(complete, index).tolist() == literal(noisy=True, cue=False)


def test_without_need_wrapping_changes_nothing() -> None:
    k = torch.arange(30)
    plain, wrapped = BinaryVectors(), BinaryVectors(wrap=True)
    assert torch.equal(plain.complete(k, modified=True), wrapped.complete(k, modified=True))


@given(k=K)
def test_a_complete_vector_has_twice_the_ones_of_its_cue(k: list[int]) -> None:
    vectors, index = BinaryVectors(), torch.tensor(k)
    cue, whole = vectors.cue(index), vectors.complete(index)
    assert cue.sum(1).tolist() == [4.0] * len(k)
    assert whole.sum(1).tolist() == [8.0] * len(k)
    assert torch.equal(cue * whole, cue)
    assert (vectors.flipped(whole, index) != whole).sum(1).tolist() == [2] * len(k)
    assert torch.equal(vectors.flipped(vectors.flipped(whole, index), index), whole)


def test_a_modified_node_guesses_other_ones_in_one_vector_of_three() -> None:
    vectors, k = BinaryVectors(), torch.arange(9)
    ours, theirs = vectors.complete(k), vectors.complete(k, modified=True)
    differ = (ours != theirs).sum(1)
    assert differ.tolist() == [8, 0, 0, 8, 0, 0, 8, 0, 0]  # 4 ones gone, 4 others come
    assert torch.equal(ours[0].nonzero().flatten(), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]))
    assert torch.equal(theirs[0].nonzero().flatten(), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]))


def test_vectors_are_made_where_k_is() -> None:
    vectors, k = BinaryVectors(), torch.arange(9, device="meta")
    whole = vectors.complete(k, modified=True)
    assert whole.device == vectors.flipped(whole, k).device == k.device


@pytest.mark.parametrize(
    ("actual", "target", "good"),
    [
        ("1100", "1100", True),
        ("1110", "1101", True),  # 2 agree, 2 differ
        ("1010", "1100", False),  # 1 agrees, 2 differ
        ("0000", "1100", False),
        ("1111", "1100", True),  # 2 agree, 2 differ
        ("0000", "0000", True),  # zeros that agree count for nothing
        ("0011", "0001", True),
        ("0111", "0001", False),
    ],
)
def test_success(actual: str, target: str, good: bool) -> None:
    a, c = (torch.tensor([[float(bit) for bit in text]]) for text in (actual, target))
    assert is_recalled(a, c).tolist() == [good]


class _Echo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_recalled_is_a_share() -> None:
    model = Model(_Echo(), {})
    target = torch.tensor([[1.0, 1.0, 0.0]]).expand(4, 3)
    x = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert recalled(model, x, target) == 0.5
    assert score(model, Split(x, target)) == 0.5
    with pytest.raises(DataError, match="recall needs the complete vectors as labels"):
        score(model, Split(x))


# ---- the federation ------------------------------------------------------------------------------


def test_fifteen_nodes_two_modified() -> None:
    nodes = Associative().nodes(0)
    check_federation(nodes)
    assert [n.name for n in nodes] == [f"M{i:02d}" for i in range(15)]
    vectors, k, tests = BinaryVectors(), torch.arange(9), torch.arange(1000, 1100)
    for i, node in enumerate(nodes):
        modified = i >= 13
        train, test = node.data["train"], node.data["test"]
        assert train.y is None
        assert test.y is not None
        assert torch.equal(train.x, vectors.flipped(vectors.complete(k, modified=modified), k))
        assert torch.equal(test.x, vectors.flipped(vectors.cue(tests), tests))
        assert torch.equal(test.y, vectors.complete(tests, modified=modified))
        assert isinstance(node.model.net, AssociativeMemory)
        assert list(node.model.parts) == ["hidden", "visible"]
        assert node.model.spec()["hidden.weight"].shape == (400, 50)
        assert node.score is score


def test_options_reach_the_data() -> None:
    task = Associative(num_nodes=3, modified=1, ones=8, flips=0, wrap=True, cells=20)
    nodes = task.nodes(0)
    x, y = nodes[0].data["test"].x, nodes[0].data["test"].y
    assert len(nodes) == 3
    assert y is not None
    assert x.sum(1).tolist() == [8.0] * 100
    assert y.sum(1).tolist() == [16.0] * 100
    assert nodes[0].model.spec()["visible.weight"].shape == (50, 20)
    differs = [not torch.equal(n.data["train"].x, nodes[0].data["train"].x) for n in nodes]
    assert differs == [False, False, True]


def _weights(nodes: list[Node]) -> list[Tensor]:
    return [n.model.state()["visible.weight"] for n in nodes]


def test_initial_weights_are_common_or_own_and_follow_the_seed() -> None:
    common, own = (Associative(init=i, num_nodes=2) for i in ("common", "own"))
    a, b = _weights(common.nodes(0))
    assert torch.equal(a, b)
    assert torch.equal(a, _weights(common.nodes(0))[0])
    assert not torch.equal(a, _weights(common.nodes(1))[0])
    a, b = _weights(own.nodes(0))
    assert not torch.equal(a, b)


def test_a_node_learns_its_own_completion() -> None:
    """Without noise, wide apart: trained long enough, both kinds of node recall their own."""
    for node in Associative(num_nodes=2, modified=1, flips=0).nodes(0):
        assert node.score is not None
        before = node.score(node.model, node.data["test"])
        for _ in range(40):
            Hebbian().update(node.model, node.data["train"].x, None)
        assert before < 0.5
        assert node.score(node.model, node.data["test"]) == 1.0


def test_a_phase_takes_the_rule_in_the_place_of_a_loss() -> None:
    """One epoch in blocks of 3 is the 9 vectors in some order; only the part that moves does."""
    node, fresh = (Associative(num_nodes=1, modified=0).nodes(0)[0] for _ in range(2))
    phase = Phase(label="local", objective=Hebbian(), parts=("hidden",), epochs=1, batch=3)
    fitted = fit(node, phase, "tick", 1)
    assert (fitted.steps, fitted.epochs) == (3, 1)
    assert 0 < fitted.loss < 1
    order = torch.randperm(9, generator=fresh.stream("batches", "tick", 1))
    with fresh.model.moving("hidden"):
        Hebbian().update(fresh.model, fresh.data["train"].x[order], None)
    assert all(torch.equal(t, fresh.model.state()[n]) for n, t in node.model.state().items())


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ones": 8}, r"need 3 \* 8 \* 3 = 72 places, but there are 50. Use fewer ones, or wrap"),
        ({"ones": 6}, r"need 3 \* 6 \* 3 = 54 places"),
        ({"ones": 0}, "BinaryVectors.ones must be between 1 and 16, got 0"),
        ({"ones": 17, "wrap": True}, "BinaryVectors.ones must be between 1 and 16, got 17"),
        ({"flips": -1}, "BinaryVectors.noise must be between 0 and 50, got -1"),
        ({"modified": 16}, "Associative.modified must be between 0 and 15, got 16"),
        ({"num_nodes": 0}, "Associative.num_nodes must be >= 1, got 0"),
        ({"cells": 0}, "Associative.cells must be >= 1, got 0"),
    ],
)
def test_options_that_cannot_be(values: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        options.build(Associative, values, "task associative")


def test_the_most_ones_that_fit() -> None:
    assert BinaryVectors(ones=5).complete(torch.tensor([2]))[0, 30:40].tolist() == [1.0] * 10
    last = BinaryVectors(length=36).complete(torch.tensor([2]))  # 3 * 4 * 3 places, all used
    assert last.nonzero()[:, 1].tolist() == list(range(24, 32))


def test_every_option_has_its_help() -> None:
    assert set(options.help_of(Associative)) == set(options.fields_of(Associative))

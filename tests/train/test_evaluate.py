from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Split
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Node
from polyfed.core.phase import cross_entropy
from polyfed.errors import DataError
from polyfed.random import stream
from polyfed.testing import tiny
from polyfed.train import accuracy, mean_loss, outputs
from polyfed.train.evaluate import auc, judged, rows_per_batch


@pytest.fixture
def node() -> Node:
    """A node whose modules are in mixed modes, and whose BatchNorm has seen data."""
    node = tiny()[2]
    node.model.net.train()
    node.model.net(node.data["train"].x)
    for module in list(node.model.net.modules())[::2]:
        module.training = False
    return node


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def cut(rows: int) -> None:
        monkeypatch.setattr("polyfed.train.evaluate.rows_per_batch", lambda x: rows)

    return cut


def _modes(node: Node) -> list[bool]:
    return [module.training for module in node.model.net.modules()]


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda node: accuracy(node.model, node.data["test"]),
        lambda node: outputs(node.model, node.data["test"].x),
        lambda node: outputs(node.model, node.data["test"].x, "trunk"),
        lambda node: mean_loss(node.model, node.data["test"], cross_entropy),
        lambda node: node.model.output_size(node.data["test"].x, "trunk"),
    ],
    ids=["accuracy", "outputs", "part", "mean_loss", "output_size"],
)
def test_evaluation_leaves_no_trace(evaluate: Callable[[Node], object], node: Node) -> None:
    """Every module's mode, every value, the generator; and gradients are on again."""
    modes, state, generator = _modes(node), node.model.state(), torch.random.get_rng_state()
    assert len(set(modes)) == 2
    evaluate(node)
    assert _modes(node) == modes
    assert all(torch.equal(t, state[n]) for n, t in node.model.state().items())
    assert torch.equal(generator, torch.random.get_rng_state())
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in node.model.net.parameters())


def test_modes_are_put_back_after_an_error_too(node: Node) -> None:
    modes = _modes(node)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        outputs(node.model, torch.zeros(2, 99))
    assert _modes(node) == modes
    assert torch.is_grad_enabled()


def test_evaluating_is_eval_mode_without_gradients(node: Node) -> None:
    with evaluating(node.model.net):
        assert not any(_modes(node))
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("rows", [1, 2, 4, 9, 100])
def test_chunks_change_nothing(rows: int, node: Node, in_chunks: Callable[[int], None]) -> None:
    """33 samples in chunks of any size, the last one smaller."""
    split = node.data["train"]
    whole = outputs(node.model, split.x), outputs(node.model, split.x, "trunk")
    right, loss = accuracy(node.model, split), mean_loss(node.model, split, cross_entropy)
    in_chunks(rows)
    torch.testing.assert_close(outputs(node.model, split.x), whole[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs(node.model, split.x, "trunk"), whole[1], rtol=0, atol=1e-6)
    assert accuracy(node.model, split) == right
    assert mean_loss(node.model, split, cross_entropy) == pytest.approx(loss, abs=1e-6)


def test_outputs_are_those_of_eval_mode(node: Node) -> None:
    x = node.data["test"].x
    got = outputs(node.model, x), outputs(node.model, x, "trunk"), outputs(node.model, x, "head")
    net = node.model.net.eval()
    with torch.no_grad():
        assert torch.equal(got[0], net(x))
        assert torch.equal(got[1], net.trunk(x))
        assert torch.equal(got[2], net(x))
    assert not any(g.requires_grad for g in got)


def test_mean_loss_is_that_of_the_whole_split(node: Node) -> None:
    split = node.data["test"]
    got = mean_loss(node.model, split, cross_entropy)
    with torch.no_grad():
        wanted = functional.cross_entropy(node.model.net.eval()(split.x), split.y)
    assert got == pytest.approx(float(wanted), abs=1e-6)


def test_mean_loss_weighs_chunks_by_their_size(in_chunks: Callable[[int], None]) -> None:
    """Chunks of 3 and 1 with mean x of 1 and 9: (3 * 1 + 1 * 9) / 4 = 3, not 5."""
    in_chunks(3)
    split = Split(torch.tensor([[0.0], [1.0], [2.0], [9.0]]))

    def mean(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        assert y is None
        return x.mean()

    assert mean_loss(Model.none(), split, mean) == 3.0


def test_accuracy_counts() -> None:
    """The identity network predicts the largest input: three of four are right."""
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [5.0, 1.0], [0.0, 3.0]])
    assert accuracy(Model.none(), Split(scores, torch.tensor([0, 1, 1, 1]))) == 0.75


def test_accuracy_needs_labels() -> None:
    with pytest.raises(DataError, match="needs labels"):
        accuracy(Model.none(), Split(torch.zeros(3, 2)))


def test_auc_ranks_class_1_above_class_0() -> None:
    """By the difference of two outputs: of four pairs three are in order."""
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [5.0, 4.5], [0.0, 3.0]])
    assert auc(Model.none(), Split(scores, torch.tensor([0, 0, 1, 1]))) == 0.75
    with pytest.raises(DataError, match="needs labels of both classes"):
        auc(Model.none(), Split(scores, torch.zeros(4)))


def test_a_node_is_judged_by_its_own_score(node: Node) -> None:
    assert judged(node, "test") == accuracy(node.model, node.data["test"])
    node.score = lambda model, split: len(split) / 100
    assert judged(node, "test") == len(node.data["test"]) / 100


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((5, 8), (8 << 20) // 32), ((5, 3, 1000, 1000), 256), ((5,), (8 << 20) // 4)],
)
def test_large_batches_within_a_memory_limit(shape: tuple[int, ...], rows: int) -> None:
    assert rows_per_batch(torch.zeros(shape)) == rows


def test_batchnorm_evaluates_a_sample_the_same_in_any_company() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    net(torch.randn(8, 3, generator=stream(0, "seen")))
    model = Model.split(net, all=...)
    x = torch.randn(8, 3, generator=stream(0, "x"))
    assert torch.equal(outputs(model, x)[:1], outputs(model, x[:1]))


def test_one_output_says_1_from_a_half_on() -> None:
    model = Model.split(nn.Sequential(nn.Identity(), nn.Linear(1, 1)), trunk="0", head="1")
    model.load({"1.weight": torch.ones(1, 1), "1.bias": torch.zeros(1)})
    split = Split(torch.tensor([[0.1], [0.5], [0.9], [0.4]]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert accuracy(model, split) == 0.5

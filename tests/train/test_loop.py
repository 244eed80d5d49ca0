from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, MatchOutput, Optimiser, Phase, cross_entropy
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.random import ambient, stream
from polyfed.testing import tiny
from polyfed.train import Fitted, fit
from polyfed.train.course import batch_sizes

Record = list[list[int]]


def _node(n: int = 10, *, norm: bool = False, drop: float = 0.0, name: str = "N") -> Node:
    """Input row i begins with the number i, so that a batch says whom it holds."""
    x = torch.randn(n, 3, generator=stream(0, "x"))
    x[:, 0] = torch.arange(n)
    with ambient(0, "init"):
        layers: list[nn.Module] = [nn.Linear(3, 4, bias=not norm)]
        layers += [nn.BatchNorm1d(4)] if norm else []
        layers += [nn.Dropout(drop), nn.ReLU()]
        net = nn.Sequential(OrderedDict(trunk=nn.Sequential(*layers), head=nn.Linear(4, 2)))
    held = Split(torch.randn(4, 3, generator=stream(0, "held")), torch.tensor([0, 1, 0, 1]))
    data = Data(train=Split(x, torch.arange(n) % 2), val_es=held)
    return Node(name, data, Model.split(net, trunk="trunk", head="head"))


def _recording(seen: Record) -> Callable[[Model, Tensor, Tensor | None], Tensor]:
    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.append([int(i) for i in x[:, 0]])
        return cross_entropy(model, x, y)

    return objective


def _joined(batches: Record) -> list[int]:
    return [i for batch in batches for i in batch]


def _phase(**settings: Any) -> Phase:
    plain: dict[str, Any] = {"label": "p", "objective": cross_entropy, "batch": 4}
    if "steps" not in settings:
        plain["epochs"] = 1
    return Phase(**(plain | settings))


def _batches(node: Node, **settings: Any) -> tuple[Record, Fitted]:
    seen: Record = []
    return seen, fit(node, _phase(objective=_recording(seen), **settings), "path")


# --- batches ------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), size=st.integers(1, 70), pairs=st.booleans())
def test_batch_sizes_cut_an_epoch(n: int, size: int, pairs: bool) -> None:
    sizes = batch_sizes(n, size, pairs=pairs)
    assert sum(sizes) == n
    assert all(s == size for s in sizes[:-1])
    assert 1 <= sizes[-1] <= size + 1
    if pairs and n > 1 and size > 1:
        assert min(sizes) > 1
    if not pairs:
        assert sizes == [min(size, n - start) for start in range(0, n, size)]


@pytest.mark.parametrize(
    ("n", "batch", "sizes"),
    [
        (10, 4, [4, 4, 2]),
        (10, 5, [5, 5]),
        (10, 1, [1] * 10),
        (10, 64, [10]),
        (10, 0.3, [3, 3, 3, 1]),
        (10, 0.02, [1] * 10),  # max(1, round(0.2))
        (50, 0.02, [1] * 50),
        (200, 0.02, [4] * 50),
        (10, 0.99, [10]),
        (25, 0.4, [10, 10, 5]),
    ],
)
def test_the_loop_trains_on_batches_of_the_phase(n: int, batch: float, sizes: list[int]) -> None:
    """SPEC 1.4 k: a share of the data is max(1, round(ratio * n))."""
    seen, done = _batches(_node(n), batch=batch)
    assert [len(b) for b in seen] == sizes
    assert done.steps == len(sizes)


def test_a_short_last_batch_can_be_left_out() -> None:
    seen, done = _batches(_node(10), epochs=2, drop_last=True)
    assert [len(batch) for batch in seen] == [4, 4, 4, 4]
    assert (done.epochs, done.steps) == (2, 4)
    seen, _ = _batches(_node(3), batch=8, drop_last=True)
    assert [len(batch) for batch in seen] == [3]


def test_an_epoch_sees_every_sample_once_in_a_new_order() -> None:
    seen, done = _batches(_node(10), epochs=3)
    epochs = [_joined(seen[i : i + 3]) for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert (done.epochs, done.steps) == (3, 9)


def test_inputs_and_labels_stay_together() -> None:
    def check(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        assert y is not None
        assert torch.equal(x[:, 0].long() % 2, y)
        return cross_entropy(model, x, y)

    fit(_node(10), _phase(objective=check, epochs=2), "path")


def test_the_order_is_the_named_stream_of_the_node() -> None:
    seen, _ = _batches(_node(10), batch=10)
    wanted = torch.randperm(10, generator=stream(0, "node", "N", "batches", "path"))
    assert seen == [wanted.tolist()]


@pytest.mark.parametrize(
    ("steps", "epochs", "sizes"),
    [(0, 0, []), (2, 1, [4, 4]), (3, 1, [4, 4, 2]), (7, 3, [4, 4, 2, 4, 4, 2, 4])],
)
def test_steps_cut_the_last_epoch_short(steps: int, epochs: int, sizes: list[int]) -> None:
    seen, done = _batches(_node(10), steps=steps)
    assert [len(b) for b in seen] == sizes
    assert (done.epochs, done.steps) == (epochs, steps)


def test_steps_are_a_prefix_of_epochs() -> None:
    seven, _ = _batches(_node(10), steps=7)
    nine, _ = _batches(_node(10), epochs=3)
    assert seven == nine[:7]


@pytest.mark.parametrize("gather", [1, 13, 100, 12 * 4, 12 * 4 * 2, 10_000])
@pytest.mark.parametrize("norm", [False, True])
def test_gathering_in_chunks_changes_nothing(
    gather: int, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a last batch of one that joined the one before it."""
    whole = _node(21, norm=norm)
    seen, _ = _batches(whole, epochs=2)
    monkeypatch.setattr("polyfed.train.loop._GATHER_BYTES", gather)
    cut = _node(21, norm=norm)
    chunked, _ = _batches(cut, epochs=2)
    assert chunked == seen
    for name, tensor in cut.model.state().items():
        torch.testing.assert_close(tensor, whole.model.state()[name], rtol=0, atol=1e-6)


# --- BatchNorm ----------------------------------------------------------------------------------


def test_with_batchnorm_a_last_batch_of_one_joins_the_one_before() -> None:
    seen, done = _batches(_node(9, norm=True))
    assert [len(b) for b in seen] == [4, 5]
    assert sorted(_joined(seen)) == list(range(9))
    assert done.steps == 2


def test_without_batchnorm_it_does_not() -> None:
    assert [len(b) for b in _batches(_node(9))[0]] == [4, 4, 1]


def test_nor_does_it_when_batchnorm_is_frozen() -> None:
    assert [len(b) for b in _batches(_node(9, norm=True), parts=("head",))[0]] == [4, 4, 1]


def test_batchnorm_rests_on_a_single_sample() -> None:
    node = _node(1, norm=True)
    buffers = {n: t for n, t in node.model.state().items() if "running" in n or "tracked" in n}
    before = node.model.state()
    done = fit(node, _phase(epochs=2, optimiser=Optimiser(lr=0.1)), "path")
    assert math.isfinite(done.loss)
    after = node.model.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in buffers.items())
    assert not torch.equal(after["head.bias"], before["head.bias"])
    assert node.model.net.trunk[1].training


# --- what moves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "other"), [(("head",), "trunk"), (("trunk",), "head")])
def test_parts_that_do_not_move_stay_bit_for_bit(parts: tuple[str, ...], other: str) -> None:
    node = _node(10, norm=True, drop=0.5)
    before = node.model.state()
    fit(node, _phase(parts=parts, epochs=2), "path")
    for name, tensor in node.model.state().items():
        assert torch.equal(tensor, before[name]) == name.startswith(other), name
    assert all(p.requires_grad for p in node.model.net.parameters())


def test_a_frozen_trunk_has_no_dropout() -> None:
    """Its outputs in training are those of evaluation."""
    node = _node(10, drop=0.9)
    with torch.no_grad():
        wanted = node.model.net.eval().trunk(node.data["train"].x)
    node.model.net.train()

    def check(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        z = model.output(x, "trunk")
        torch.testing.assert_close(z, wanted[x[:, 0].long()])
        return cross_entropy(model, x, y)

    fit(node, _phase(objective=check, parts=("head",)), "path")


def test_no_epochs_no_change() -> None:
    node = _node(10, norm=True)
    before = node.model.state()
    done = fit(node, _phase(epochs=0, stop=EarlyStop()), "path")
    assert (done.epochs, done.steps) == (0, 0)
    assert math.isnan(done.loss)
    assert all(torch.equal(t, before[n]) for n, t in node.model.state().items())


def test_one_step_of_sgd_is_its_formula() -> None:
    """theta - lr * (grad + weight_decay * theta)."""
    node = _node(10)
    split, net = node.data["train"], node.model.copy().net
    functional.cross_entropy(net(split.x), split.y).backward()
    sgd = Optimiser(name="sgd", lr=0.5, weight_decay=0.1)
    fit(node, _phase(batch=10, optimiser=sgd), "path")
    for name, p in net.named_parameters():
        assert p.grad is not None
        wanted = p.detach() - 0.5 * (p.grad + 0.1 * p.detach())
        torch.testing.assert_close(node.model.state()[name], wanted, rtol=0, atol=1e-6)


def test_the_optimiser_is_made_afresh_for_a_phase() -> None:
    """Momentum is not carried over: two phases of one step are two first steps."""
    sgd = Optimiser(name="sgd", lr=0.1, momentum=0.9)
    one = _node(10)
    fit(one, _phase(batch=10, optimiser=sgd), "a")
    fit(one, _phase(batch=10, optimiser=sgd), "b")
    plain = _node(10)
    without = Optimiser(name="sgd", lr=0.1)
    fit(plain, _phase(batch=10, optimiser=without), "a")
    fit(plain, _phase(batch=10, optimiser=without), "b")
    for name, tensor in one.model.state().items():
        torch.testing.assert_close(tensor, plain.model.state()[name], rtol=0, atol=1e-6)


# --- targets ------------------------------------------------------------------------------------


def test_a_target_in_memory_takes_the_labels_place() -> None:
    node = _node(10)
    node.memory["goal"] = torch.arange(10.0)[:, None].expand(10, 4).clone()

    def check(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        assert y is not None
        assert torch.equal(y[:, 0], x[:, 0])
        return MatchOutput("trunk")(model, x, y)

    fit(node, _phase(objective=check, target="goal", parts=("trunk",)), "path")


def test_a_missing_target_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="memory of node N 'goal'"):
        fit(_node(), _phase(target="goal"), "path")


def test_a_target_of_another_length_is_an_error() -> None:
    node = _node(10)
    node.memory["goal"] = torch.zeros(9, 4)
    with pytest.raises(DataError, match="node N: 9 targets for the 10 samples of split 'train'"):
        fit(node, _phase(target="goal"), "path")


def test_a_missing_split_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="public"):
        fit(_node(), _phase(split="public"), "path")


def test_labels_that_are_needed_and_missing_are_an_error() -> None:
    node = _node()
    node.data = Data(train=node.data["train"].x)
    with pytest.raises(ConfigError, match="needs labels"):
        fit(node, _phase(), "path")


# --- what it reports ----------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_the_samples_of_the_last_epoch() -> None:
    """Batch losses 1, 2, 3 | 4, 5, 6 of 4, 4 and 2 samples: (4*4 + 4*5 + 2*6) / 10."""
    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def scripted(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return 0.0 * model(x).sum() + next(losses)

    done = fit(_node(10), _phase(objective=scripted, epochs=2), "path")
    assert (done.label, done.epochs, done.steps) == ("p", 2, 6)
    assert done.loss == pytest.approx(4.8)


def test_the_loss_of_a_cut_epoch_counts_the_batches_it_had() -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0, 6.0])

    def scripted(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return 0.0 * model(x).sum() + next(losses)

    assert fit(_node(10), _phase(objective=scripted, steps=5), "path").loss == pytest.approx(5.0)


# --- early stopping -----------------------------------------------------------------------------


def _counting(script: list[float]) -> Callable[[Model, Tensor, Tensor | None], Tensor]:
    """Each epoch of one batch adds 1 to the head's first bias; validation reads a script by it."""

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        bias = model.net.head.bias[0]
        return -bias if torch.is_grad_enabled() else torch.tensor(script[round(bias.item()) - 1])

    return objective


@pytest.mark.parametrize(
    ("script", "patience", "epochs", "best"),
    [
        ([3, 2, 1, 0], 1, 4, 4),
        ([3, 2, 2, 0], 1, 3, 2),
        ([3, 4, 2, 5], 1, 2, 1),
        ([3, 4, 2, 5], 2, 4, 3),
        ([3, 4, 2, 5, 1], 2, 5, 5),
        ([1, 1, 1, 1], 3, 4, 1),
    ],
)
def test_early_stopping_restores_the_best_epoch(
    script: list[float], patience: int, epochs: int, best: int
) -> None:
    node = _node(10)
    node.model.load({"head.bias": torch.zeros(2)})
    phase = _phase(
        objective=_counting(script),
        batch=10,
        epochs=len(script),
        parts=("head",),
        optimiser=Optimiser(name="sgd", lr=1.0),
        stop=EarlyStop(patience=patience),
    )
    done = fit(node, phase, "path")
    assert done.epochs == epochs
    assert round(node.model.state()["head.bias"][0].item()) == best


def test_early_stopping_does_not_disturb_training() -> None:
    """Validation happens in eval mode and draws no noise: the model is that of plain epochs."""
    plain, watched = _node(10, norm=True, drop=0.5), _node(10, norm=True, drop=0.5)
    fit(plain, _phase(epochs=1), "path")
    fit(watched, _phase(epochs=1, stop=EarlyStop()), "path")
    for name, tensor in watched.model.state().items():
        assert torch.equal(tensor, plain.model.state()[name]), name


def test_early_stopping_restores_buffers_too() -> None:
    node, one = _node(10, norm=True), _node(10, norm=True)
    fit(one, _phase(epochs=1), "path")
    rising = iter([1.0, 2.0])

    def objective(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            return cross_entropy(model, x, y)
        return torch.tensor(next(rising))

    done = fit(node, _phase(objective=objective, epochs=5, stop=EarlyStop(patience=1)), "path")
    assert done.epochs == 2
    for name, tensor in node.model.state().items():
        assert torch.equal(tensor, one.model.state()[name]), name


# --- named streams ------------------------------------------------------------------------------


def _trained(node: Node, *path: str | int, seed: int = 0) -> dict[str, Tensor]:
    node = replace(node, model=node.model.copy(), seed=seed)
    fit(node, _phase(epochs=2), *path)
    return node.model.state()


def test_another_nodes_training_does_not_shift_this_ones() -> None:
    alone = _trained(_node(10, drop=0.5), "tick", 1)
    _trained(_node(33, drop=0.5, name="other"), "tick", 1)
    torch.rand(5)
    after = _trained(_node(10, drop=0.5), "tick", 1)
    assert all(torch.equal(t, alone[n]) for n, t in after.items())


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"path": ("tick", 2)}, {"name": "other"}], ids=["seed", "path", "name"]
)
@pytest.mark.parametrize(("drop", "batch"), [(0.0, 4), (0.5, 10)], ids=["batches", "dropout"])
def test_seed_path_and_name_each_name_other_streams(
    change: dict[str, Any], drop: float, batch: int
) -> None:
    def result(seed: int = 0, path: tuple[Any, ...] = ("tick", 1), name: str = "N") -> Tensor:
        node = replace(_node(10, drop=drop, name=name), seed=seed)
        fit(node, _phase(batch=batch, epochs=2), *path)
        return node.model.state()["head.weight"]

    assert torch.equal(result(), result())
    assert (result() - result(**change)).abs().max() > 1e-5


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    _trained(tiny()[0], "path")
    assert torch.equal(before, torch.random.get_rng_state())

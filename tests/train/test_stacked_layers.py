"""Layers of a stack that torch's vmap would take apart, or do row by row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.train.stepper import StackedLayers, _losses


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


SCORES, LABELS = draw(3, 5, 4).requires_grad_(), torch.arange(15).reshape(3, 5) % 4


def stacked(scores: Tensor, labels: Tensor, dims: Any = 0, **how: Any) -> Tensor:
    def one(scores: Tensor, labels: Tensor) -> Tensor:
        with StackedLayers():
            return functional.cross_entropy(scores, labels, **how)

    return vmap(one, in_dims=dims)(scores, labels)


def assert_same(found: Tensor, wanted: Tensor, of: Tensor) -> None:
    pull = draw(*wanted.shape, seed=1)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(each, of, pull)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("how", "is_ours"),
    [
        ({}, True),
        ({"reduction": "none"}, True),
        ({"reduction": "mean"}, True),
        ({"reduction": "sum"}, False),
        ({"label_smoothing": 0.1}, False),
        ({"ignore_index": 2}, False),
        ({"weight": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)}, False),
    ],
    ids=str,
)
def test_is_that_of_every_row(how: dict[str, Any], is_ours: bool) -> None:
    with _Count() as count:
        found = stacked(SCORES, LABELS, **how)
    assert count.found["nll_loss_forward"] == is_ours
    rows = zip(SCORES, LABELS, strict=True)
    assert_same(found, torch.stack([functional.cross_entropy(*own, **how) for own in rows]), SCORES)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_labels_that_do_not_count(reduction: str) -> None:
    labels = LABELS.clone()
    labels[0, 1] = labels[2, 0] = labels[2, 3] = -100
    rows = zip(SCORES, labels, strict=True)
    wanted = [functional.cross_entropy(*own, reduction=reduction) for own in rows]
    assert_same(stacked(SCORES, labels, reduction=reduction), torch.stack(wanted), SCORES)


def test_rows_may_share_labels_or_scores() -> None:
    same = torch.stack([functional.cross_entropy(own, LABELS[0]) for own in SCORES])
    assert_same(stacked(SCORES, LABELS[0], (0, None)), same, SCORES)
    scores = SCORES[0].detach().requires_grad_()
    same = torch.stack([functional.cross_entropy(scores, own) for own in LABELS])
    assert_same(stacked(scores, LABELS, (None, 0)), same, scores)


@pytest.mark.parametrize("targets", [draw(3, 5, 4).softmax(2), draw(3, 5, 4, 2).softmax(2)])
def test_other_targets_are_left_to_torch(targets: Tensor) -> None:
    scores = draw(*targets.shape, seed=2).requires_grad_()
    wanted = torch.stack(
        [functional.cross_entropy(*own) for own in zip(scores, targets, strict=True)]
    )
    assert_same(stacked(scores, targets), wanted, scores)


def test_a_row_alone() -> None:
    labels = LABELS[0].clone()
    labels[1] = -100
    wanted = functional.cross_entropy(SCORES[0], labels, reduction="none")
    assert_same(_losses(SCORES[0], labels), wanted, SCORES)


@pytest.mark.parametrize("size", [1, (1, 1), 2])
def test_pooling_to_a_pixel_is_of_all_rows_at_once(size: Any) -> None:
    x = draw(3, 4, 2, 2, 8).permute(0, 1, 4, 2, 3).requires_grad_()  # channels last

    def one(own: Tensor) -> Tensor:
        with StackedLayers():
            return nn.AdaptiveAvgPool2d(size)(own)

    wanted = torch.stack([functional.adaptive_avg_pool2d(own, size) for own in x])
    torch._C._functorch._set_vmap_fallback_enabled(size == 2)  # else it would only warn
    try:
        found = vmap(one)(x)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    assert_same(found, wanted, x)

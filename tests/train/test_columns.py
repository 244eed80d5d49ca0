"""Convolutions by columns are convolutions; small ones, stacked, are one by one to rounding."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, Objective, Optimiser, PerSample, Phase, cross_entropy
from polyfed.models import fedavg_cnn
from polyfed.random import ambient
from polyfed.train import columns, together
from polyfed.train.cohort import Kept, fit_cohort
from polyfed.train.columns import Columns, Window, by_columns, column_bytes, conv2d, seeing
from polyfed.train.lanes import Lanes
from polyfed.train.loop import Fitted, fit
from polyfed.train.stepper import StackedLayers
from polyfed.train.together import Exam, StackWarning, Trainer
from polyfed.train.track import Job

LITERAL = Path(__file__).parent / "literal_windows.py"
IMAGE = (2, 16, 17)
SETTINGS: list[tuple[tuple[int, ...], dict[str, Any]]] = [  # filters, and how they are applied
    ((4, 3, 3, 3), {}),
    ((40, 3, 3, 3), {}),  # few places for as many filters: one product for all samples
    ((4, 3, 2, 5), {"stride": 2}),
    ((4, 3, 3, 2), {"stride": (1, 3), "padding": (2, 0)}),
    ((40, 3, 3, 3), {"stride": (2, 1), "padding": 1, "dilation": (1, 2)}),
    ((4, 3, 2, 3), {"dilation": 3, "padding": (1,)}),
    ((4, 3, 1, 1), {}),
    ((4, 3, 1, 1), {"stride": 2, "padding": (0, 1)}),
]


def double(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("filters", "how"), SETTINGS, ids=str)
def test_columns_and_their_gradients_are_those_of_a_convolution(
    filters: tuple[int, ...], how: dict[str, Any], has_bias: bool
) -> None:
    """In a stack of two rows, each with its own pictures and filters."""
    rows = 2
    x, weight = double(rows, 3, 3, 9, 8), double(rows, *filters, seed=1)
    bias = double(rows, filters[0], seed=2) if has_bias else None
    given = [t for t in (x, weight, bias) if t is not None]
    stacked = vmap(lambda *own: conv2d(*own, **how))(*given)
    alone = torch.stack([functional.conv2d(*own, **how) for own in zip(*given, strict=True)])
    torch.testing.assert_close(stacked, alone)
    pull = double(*alone.shape, seed=3).detach()
    wanted = torch.autograd.grad((alone * pull).sum(), given)
    found = torch.autograd.grad((stacked * pull).sum(), given)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("sides", "how", "size"),
    [
        ((1, 1), {"padding": 1}, (1, 1)),
        ((2, 2), {"padding": 1}, (3, 3)),
        ((2, 2), {"padding": 1, "stride": 2}, (2, 2)),
        ((1, 2), {"padding": 1, "stride": 2}, (1, 2)),
        ((3, 1), {"padding": (1, 2), "dilation": (1, 2)}, (3, 1)),
        ((4, 2), {"padding": 2, "dilation": 2}, (3, 1)),
        ((1, 3), {"padding": (3, 1), "stride": 4}, (3, 2)),  # no line sees anything
        ((2, 1), {"padding": (3, 1), "stride": 3}, (3, 3)),  # fewer lines would fit more often
    ],
    ids=str,
)
def test_what_sees_nothing_but_padding_is_left_out(
    sides: tuple[int, int], how: dict[str, Any], size: tuple[int, int]
) -> None:
    """And has a gradient of zeros."""
    x, weight = double(2, 3, 3, *sides), double(2, 4, 3, 3, 3, seed=1)
    window = Window.of(weight[0], *(how.get(n, d) for n, d in PLAIN.items()))
    assert seeing(window, sides)[0].size == size
    alone = torch.stack([functional.conv2d(a, b, **how) for a, b in zip(x, weight, strict=True)])
    stacked = vmap(lambda a, b: conv2d(a, b, **how))(x, weight)
    torch.testing.assert_close(stacked, alone)
    pull = double(*alone.shape, seed=3).detach()
    wanted = torch.autograd.grad((alone * pull).sum(), (x, weight))
    found = torch.autograd.grad((stacked * pull).sum(), (x, weight))
    torch.testing.assert_close(found, wanted)


PLAIN = {"stride": 1, "padding": 0, "dilation": 1}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_are_convolutions_and_pooling() -> None:
    """By Triton's interpreter, in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(LITERAL), json.dumps(SETTINGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [float(line) for line in done.stdout.split()]
    assert len(found) == 2 * len(SETTINGS) + 4 + 5
    assert max(found) < 5e-5
    assert max(found[-5:]) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("filters", "how"), SETTINGS, ids=str)
def test_cuda_kernels_are_convolutions_and_pooling(
    filters: tuple[int, ...], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    given = [double(2, 3, 3, 19, 18), double(2, *filters, seed=1), double(2, filters[0], seed=2)]
    given = [t.detach().float().cuda().requires_grad_() for t in given]

    def layers(*own: Tensor) -> Tensor:
        return functional.max_pool2d(functional.conv2d(*own, **how), 2)

    def stacked(*own: Tensor) -> Tensor:
        with StackedLayers():
            return layers(*own)

    alone = torch.stack([layers(*own) for own in zip(*given, strict=True)])
    found = vmap(stacked)(*given)
    pull = torch.randn_like(alone)
    ours, theirs = (torch.autograd.grad(out, given, pull) for out in (found, alone))
    for a, b in zip((found, *ours), (alone, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "how", "is_ours"),
    [
        (2, {}, True),
        ((2, 3), {"stride": (2, 3)}, True),
        (2, {"stride": 2}, True),
        (2, {"stride": 1}, False),
        (2, {"padding": 1}, False),
        (2, {"dilation": 2}, False),
        (2, {"ceil_mode": True}, False),
        (2, {"return_indices": True}, False),
    ],
    ids=str,
)
def test_windows_that_overlap_are_left_to_torch(
    size: Any, how: dict[str, Any], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And channels that are not last in memory."""
    pooled = torch.zeros(())
    kernels = Mock(max_pool=Mock(return_value=pooled))
    monkeypatch.setattr(columns, "_kernels", lambda x: kernels)
    x = torch.zeros(2, 7, 7, 5).permute(0, 3, 1, 2)
    with StackedLayers():
        assert (functional.max_pool2d(x, size, **how) is pooled) == is_ours
        assert functional.max_pool2d(x.contiguous(), size, **how) is not pooled
        assert functional.max_pool2d(x[0], size, **how) is not pooled
    assert kernels.max_pool.call_args_list == [call(x, *_sides(size))] * is_ours


def _sides(size: Any) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def test_kernels_are_for_gpus_and_single_precision() -> None:
    assert columns._kernels(torch.zeros(1)) is None
    assert columns._kernels(torch.zeros(1, device="meta")) is None


class _Rounding(TorchDispatchMode):
    """Notes whether the factors of each product would be rounded on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.noted.append(torch.backends.cuda.matmul.allow_tf32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounds", [True, False])
def test_products_are_rounded_where_convolutions_are(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: what was set for products before is set again."""
    products, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", rounds)
    products.allow_tf32 = not rounds
    x, weight = double(2, 3, 9, 8), double(4, 3, 3, 3, seed=1)
    try:
        with _Rounding() as seen:
            torch.autograd.grad(conv2d(x, weight).sum(), [x, weight])
            assert seen.noted == [rounds] * 3
            _ = x.flatten(1) @ x.flatten(1).mT
    finally:
        products.allow_tf32 = before
    assert seen.noted[3:] == [not rounds]


@pytest.mark.parametrize(("filters", "how"), SETTINGS, ids=str)
def test_how_many_columns_there_are(filters: tuple[int, ...], how: dict[str, Any]) -> None:
    x, weight = double(5, 3, 9, 8).detach().float(), double(*filters).detach().float()
    held = functional.unfold(x, filters[2:], **_whole(how))
    assert column_bytes(x, weight, None, **how) == held.numel() * 4
    assert column_bytes(x.double(), weight, None, **how) == held.numel() * 8


def _whole(how: dict[str, Any]) -> dict[str, Any]:
    return {n: v * 2 if isinstance(v, tuple) and len(v) == 1 else v for n, v in how.items()}


@pytest.mark.parametrize(
    ("x", "filters", "how"),
    [
        ((1, 4, 5, 5), (4, 2, 3, 3), {"groups": 2}),
        ((1, 4, 5, 5), (4, 4, 3, 3), {"padding": "same"}),
        ((4, 5, 5), (4, 4, 3, 3), {}),
    ],
)
def test_what_cannot_be_columns_is_left_to_torch(
    everywhere: Noted, x: tuple[int, ...], filters: tuple[int, ...], how: dict[str, Any]
) -> None:
    given = double(*x), double(*filters)
    assert column_bytes(*given, **how) == math.inf
    with StackedLayers():
        found = functional.conv2d(*given, **how)
    assert torch.equal(found, functional.conv2d(*given, **how))
    assert not everywhere


Noted = list[tuple[int, ...]]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Columns on a CPU, too; the shapes of the pictures that came to be columns."""
    seen: Noted = []

    def noted(x: Tensor, *others: Any, **named: Any) -> Tensor:
        seen.append(tuple(x.shape))
        return conv2d(x, *others, **named)

    monkeypatch.setattr(columns, "_DEVICES", ("cpu",))
    monkeypatch.setattr(columns, "conv2d", noted)
    return seen


def test_on_a_cpu_a_convolution_in_groups_is_faster() -> None:
    assert not by_columns(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 2, 2))


def test_large_columns_are_left_to_torch(
    everywhere: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four places times eight numbers of four bytes; without gradients they may be larger."""
    x, weight = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 2, 2)
    monkeypatch.setattr(columns, "_LIMIT", 128)
    with StackedLayers():
        functional.conv2d(x, weight)
        functional.conv2d(x.expand(2, -1, -1, -1), weight=weight)
        with torch.no_grad():
            functional.conv2d(x.expand(8, -1, -1, -1), weight, stride=1)
            functional.conv2d(x.expand(9, -1, -1, -1), weight)
        functional.conv2d(input=x, weight=weight)
    assert everywhere == [(1, 2, 3, 3), (8, 2, 3, 3)]


def test_in_bfloat16_convolutions_stay_what_they_are(everywhere: Noted) -> None:
    x, weight = torch.ones(1, 2, 3, 3), torch.full((1, 2, 2, 2), 1 / 3)
    with torch.autocast("cpu", torch.bfloat16), StackedLayers():
        found = functional.conv2d(x, weight)
    assert found.dtype == torch.bfloat16
    assert not everywhere


# ---- stacked = one by one -----------------------------------------------------------------------


def strange() -> nn.Module:
    """Stride, padding, dilation, no bias, filters of one pixel, groups, and dropout at rest."""
    trunk = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, dilation=2, padding="same", groups=2),
        nn.Conv2d(4, 3, 2, dilation=2),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 1),
        nn.Flatten(),
    )
    return nn.Sequential(trunk, nn.Linear(18, 3))


def normed() -> nn.Module:
    """BatchNorm of pictures and of vectors, with weights and without, kept and not kept.

    Nothing before it has a bias: its gradient would be rounding, and Adam would make steps of it.
    """
    trunk = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2, bias=False),
        nn.BatchNorm2d(3, affine=False, momentum=0.3, eps=1e-3),
        nn.Tanh(),
        nn.Conv2d(3, 3, 2, bias=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Tanh(),
        nn.Flatten(),
    )
    head = nn.Sequential(nn.Linear(18, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return nn.Sequential(trunk, head).double()


def cnn() -> nn.Module:
    return fedavg_cnn(IMAGE, 3, width=2)


def node(k: int, size: int, make: Callable[[], nn.Module] = cnn) -> Node:
    draw = torch.Generator().manual_seed(k)
    data = {}
    with ambient(k):
        net = make()
    for name, count in {"train": size, "val_es": 5 + k, "test": 7}.items():
        x = torch.randn(count, *IMAGE, generator=draw)
        labels = x.flatten(1)[:, :3].argmax(1)
        data[name] = (x.to(next(net.parameters()).dtype), labels)
    first, second = [name for name, _ in net.named_children()]
    model = Model.split(net, trunk=first, head=second)
    return Node(f"N{k}", Data(may_miss_classes=True, **data), model)


SGD = Optimiser(name="sgd", lr=0.05, momentum=0.5)
PHASE = Phase(label="p", objective=cross_entropy, epochs=2, batch=4, optimiser=SGD)


def jobs(*sizes: int, phase: Phase = PHASE, make: Callable[[], nn.Module] = cnn) -> list[Job]:
    return [Job(node(k, n, make), phase, ("path",)) for k, n in enumerate(sizes)]


def assert_close(ours: Sequence[Job], theirs: Sequence[Job]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name, t in b.node.model.state().items():
            torch.testing.assert_close(a.node.model.state()[name], t, rtol=1e-4, atol=2e-5)
        assert a.node.memory.keys() == b.node.memory.keys()
        for name, t in b.node.memory.items():
            torch.testing.assert_close(a.node.memory[name], t, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("make", [cnn, strange, normed])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"parts": ("head",)},
        {"parts": ("trunk",)},
        {"keep": "here"},
        {"epochs": 6, "stop": EarlyStop(patience=1)},
        {"optimiser": Optimiser(name="adam", lr=0.01)},
    ],
    ids=str,
)
def test_stacked_is_one_by_one(
    everywhere: Noted, make: Callable[[], nn.Module], change: dict[str, Any]
) -> None:
    if make is normed and "stop" in change:
        pytest.skip("BatchNorm and early stopping are for lanes")
    phase, sizes = replace(PHASE, **change), (12, 9, 14)
    ours, theirs = jobs(*sizes, phase=phase, make=make), jobs(*sizes, phase=phase, make=make)
    start = [job.node.model.state() for job in jobs(*sizes, phase=phase, make=make)]
    kept: Kept = {}
    for _ in range(2):
        found = fit_cohort(ours, kept=kept)
        wanted = [fit(job.node, job.phase, *job.path) for job in theirs]
        for a, b in zip(found, wanted, strict=True):
            assert (a.epochs, a.steps) == (b.epochs, b.steps)
            assert a.loss == pytest.approx(b.loss, rel=1e-4)
    assert everywhere
    assert_close(ours, theirs)
    for job, before in zip(ours, start, strict=True):
        state = job.node.model.state().items()
        moved = {name.split(".")[0] for name, t in state if not torch.equal(t, before[name])}
        assert len(moved) == (1 if phase.parts else 2)


@pytest.mark.parametrize("sizes", [(13, 13, 13), (9, 14, 17, 2), (30, 5, 6, 7)], ids=str)
def test_batchnorm_is_of_what_counts(everywhere: Noted, sizes: tuple[int, ...]) -> None:
    """Of every row by itself; where a last batch of one joins the one before it, as in the loop."""
    ours, theirs = jobs(*sizes, make=normed), jobs(*sizes, make=normed)
    fit_cohort(ours)
    for job in theirs:
        fit(job.node, job.phase, *job.path)
    assert_close(ours, theirs)
    steps = [job.node.model.net.get_buffer("0.1.num_batches_tracked") for job in ours]
    assert steps == [2 * max(1, -(-n // 4) - (n % 4 == 1)) for n in sizes]


def test_graphs_are_of_whole_batches(everywhere: Noted) -> None:
    """Also where the last batch is the larger one, which has a sample more."""
    kept: Kept = {}
    fit_cohort(jobs(13, 13, make=normed), kept=kept)
    (stack,) = kept.values()
    assert stack.stepper is not None
    assert (stack.stepper.width, stack.stepper.usual) == (5, 4)


def test_a_stacks_filters_lie_as_products_read_them(
    everywhere: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do their gradients, so that no step copies them where nothing has a bias.

    What nodes keep lies as usual.
    """
    monkeypatch.setattr(columns, "_PICTURES", math.inf)  # or few filters would be summed up
    phase = replace(
        PHASE, epochs=None, steps=2, batch=7, keep="here", optimiser=Optimiser(name="adam")
    )
    kept: Kept = {}
    work, counts = jobs(14, 14, phase=phase, make=normed), []
    for steps in (2, 2, 6):
        work = [replace(job, phase=replace(phase, steps=steps)) for job in work]
        with _Count() as count:
            fit_cohort(work, kept=kept)
        counts.append(count.copied)
    (stack,) = kept.values()
    filters = [t for t in stack.moving.values() if t.dim() == 5]
    assert [t.movedim(2, -1).is_contiguous() for t in filters] == [True] * 3
    assert not any(t.is_contiguous() for t in filters)
    for t in filters:
        assert counts[1][t.numel()] == counts[2][t.numel()] > 0  # as the nodes move in and out
    for job in work:
        for tensors in (job.node.model.state(), job.node.recall("optimiser here")):
            assert all(t.is_contiguous() for t in tensors.values())


class _Count(TorchDispatchMode):
    """Counts what is computed, below vmap and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.products = Counter[str](), list[tuple[int, ...]]()
        self.copied = Counter[int]()  # by how many numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        self.found[name] += 1
        if name == "bmm":
            self.products.append(tuple(found.shape))
        if name in ("clone", "copy_"):
            self.copied[found.numel()] += 1
        return found


def computed(*sizes: int, parts: tuple[str, ...] = ()) -> Counter[str]:
    """What two steps of a stack are made of."""
    phase = replace(PHASE, epochs=None, steps=2, parts=parts)
    with _Count() as count:
        fit_cohort(jobs(*sizes, phase=phase))
    return count.found


def test_a_step_is_as_many_products_for_any_number_of_rows(everywhere: Noted) -> None:
    found = computed(8, 8)
    assert found["convolution"] == 2  # of one sample, before the first step: see `unseen`
    assert found["bmm"] == 2 * (2 + 3 + 3 + 3)  # the first layer needs no gradient of its input
    assert found["unfold_backward"] == 2 * 2
    many = computed(8, 8, 8, 8, 8)
    for name in ("bmm", "unfold_backward", "clone", "relu", "add", "max_pool2d_with_indices"):
        assert many[name] == found[name], name


@pytest.mark.parametrize(("filters", "products"), [(9, (2 * 3, 36, 9)), (10, (2, 3 * 36, 10))])
def test_few_filters_have_a_product_for_every_picture(
    filters: int, products: tuple[int, ...]
) -> None:
    """The gradient of few filters would be a sum of many products by few programs."""
    with _Count() as count:
        vmap(conv2d)(torch.zeros(2, 3, 1, 6, 6), torch.zeros(2, filters, 1, 1, 1))
    assert count.products == [products]


def test_a_trunk_at_rest_needs_no_backward_pass(everywhere: Noted) -> None:
    found = computed(8, 8, parts=("head",))
    assert found["bmm"] == 2 * (1 + 1 + 1 + 2)
    assert found["unfold_backward"] == found["max_pool2d_with_indices_backward"] == 0


# ---- who is stacked, and who gets a lane ---------------------------------------------------------


@dataclass
class Seen:
    lanes: list[int]
    stacks: list[int]
    exams: list[int]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, everywhere: Noted) -> Seen:
    """What a trainer does that believes it is on a GPU: how many jobs in lanes, in stacks."""
    found = Seen([], [], [])

    class Slow(Lanes):
        def __init__(self, jobs: Sequence[Job], count: int, *, graph: bool) -> None:
            super().__init__(jobs, count, graph=False)

        def fit(self, jobs: Sequence[Job]) -> list[Fitted]:
            found.lanes.append(len(jobs))
            return super().fit(jobs)

    def stacked(jobs: Sequence[Job], **settings: Any) -> list[Fitted]:
        found.stacks.append(len(jobs))
        return fit_cohort(jobs, **settings)

    def together_judged(nodes: Sequence[Node], split: str) -> list[float]:
        found.exams.append(len(nodes))
        return [0.0] * len(nodes)

    def never(jobs: Sequence[Job]) -> bool:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(together, "_on_gpu", lambda job: True)
    monkeypatch.setattr(together, "Lanes", Slow)
    monkeypatch.setattr(together, "fit_cohort", stacked)
    monkeypatch.setattr(together, "score_cohort", together_judged)
    monkeypatch.setattr(together, "measure", never)
    return found


LONG = replace(PHASE, epochs=None, steps=60)


def train(trainer: Trainer, work: Sequence[Job]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(work)


@pytest.mark.parametrize("stack", ["auto", "always"])
def test_small_convolutions_of_alike_networks_are_stacked(stack: Any, seen: Seen) -> None:
    ours, theirs = jobs(9, 12, 14, phase=LONG), jobs(9, 12, 14, phase=LONG)
    trainer = Trainer(stack)
    train(trainer, ours)
    Trainer("never").train(theirs)
    assert (seen.lanes, seen.stacks) == ([], [3])
    assert_close(ours, theirs)
    trainer.examine([Exam(job.node) for job in ours])
    assert not seen.exams, "their exams are large batches, for which each has its convolutions"


def change_of(job: Job, **settings: Any) -> Job:
    return replace(job, phase=replace(job.phase, **settings))


def test_one_network_and_networks_that_are_not_alike_get_lanes(seen: Seen) -> None:
    train(Trainer(), jobs(9, phase=LONG))
    assert (seen.lanes, seen.stacks) == ([1], [])
    a, b, c = jobs(9, 12, 14, phase=LONG)
    train(Trainer(), [a, change_of(b, steps=61), c])
    assert (seen.lanes, seen.stacks) == ([1, 1], [2])
    a, b = jobs(9, 12, phase=LONG)
    train(Trainer(), [a, change_of(b, steps=61)])  # lanes take jobs of any length
    assert (seen.lanes, seen.stacks) == ([1, 1, 2], [2])


class Mean:
    """An objective without `losses`: only data of equal size can be stacked."""

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return cross_entropy(model, x, y)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mean)

    def __hash__(self) -> int:
        return 0


def test_rows_that_cannot_be_one_stack_share_lanes(seen: Seen) -> None:
    train(Trainer(), jobs(9, 12, phase=replace(LONG, objective=Mean())))
    assert (seen.lanes, seen.stacks) == ([2], [])
    stops = replace(PHASE, epochs=30, stop=EarlyStop(), objective=Mean())
    train(Trainer(), jobs(9, 9, phase=stops))
    assert (seen.lanes, seen.stacks) == ([2, 2], [])


def other(*layers: nn.Module) -> Callable[[], nn.Module]:
    trunk = nn.Sequential(*layers, nn.Flatten())
    width = trunk(torch.zeros(2, *IMAGE)).shape[1]
    return lambda: copy.deepcopy(nn.Sequential(trunk, nn.Linear(width, 3)))


@pytest.mark.parametrize(
    "make",
    [
        other(nn.Conv2d(2, 2, 3, groups=2)),
        other(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, padding="same")),
        other(nn.Flatten(2), nn.Conv1d(2, 2, 3)),
        other(nn.ConvTranspose2d(2, 2, 3)),
    ],
    ids=["groups", "same", "sequence", "transposed"],
)
@pytest.mark.parametrize("parts", [(), ("head",)])
def test_other_convolutions_keep_their_lanes(
    seen: Seen, make: Callable[[], nn.Module], parts: tuple[str, ...]
) -> None:
    train(Trainer(), jobs(9, 12, phase=replace(LONG, parts=parts, steps=20), make=make))
    assert (seen.lanes, seen.stacks) == ([2], [])


@pytest.mark.parametrize(("stop", "is_stacked"), [(None, True), (EarlyStop(), False)])
def test_batchnorm_is_stacked_where_nothing_stops_early(
    seen: Seen, stop: EarlyStop | None, is_stacked: bool
) -> None:
    """What is kept of the best epoch would have to have its statistics."""
    phase = replace(PHASE, epochs=10, stop=stop)
    work, alone = jobs(9, 12, phase=phase, make=normed), jobs(9, 12, phase=phase, make=normed)
    train(Trainer(), work)
    assert (seen.lanes, seen.stacks) == (([], [2]) if is_stacked else ([2], []))
    train(Trainer("never"), alone)
    assert_close(work, alone)


def test_so_do_networks_in_bfloat16(seen: Seen) -> None:
    work = jobs(9, 12, phase=replace(LONG, steps=20))
    for job in work:
        job.node.model.precision = "bfloat16"
    train(Trainer(), work)
    assert (seen.lanes, seen.stacks) == ([2], [])


@pytest.mark.parametrize(("room", "is_stacked"), [(0, True), (-1, False)])
def test_large_columns_keep_their_lanes(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, room: int, is_stacked: bool
) -> None:
    """The first layer: 12 x 13 places of 2 x 25 numbers; the second: 2 x 2 places of as many."""
    monkeypatch.setattr(columns, "_LIMIT", 4 * 12 * 13 * 50 * 4 + room)
    train(Trainer(), jobs(9, 12, phase=replace(LONG, steps=20)))
    assert (seen.lanes, seen.stacks) == (([], [2]) if is_stacked else ([2], []))


@dataclass(frozen=True)
class Judging(PerSample):
    """Looks at a number, which vmap forbids."""

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        found = cross_entropy.losses(model, x, y)
        return found if found.sum() > -1 else -found


def test_what_cannot_be_stacked_gets_a_lane_and_is_not_tried_again(seen: Seen) -> None:
    trainer = Trainer("always")
    work = jobs(9, 12, phase=replace(LONG, objective=Judging(), steps=20))
    with pytest.warns(StackWarning, match="it cannot be stacked"):
        trainer.train(work)
    assert (seen.lanes, seen.stacks) == ([1, 1], [2])
    train(trainer, work)
    assert (seen.lanes, seen.stacks) == ([1, 1, 2], [2])


def test_what_is_known_of_a_network_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By structure, shape and kind of objective, for one sample."""
    known, (job,) = Columns(), jobs(9)
    assert known.are_few(job, "net")
    sizes = 4 * 4 * 50 * (12 * 13 + 2 * 2)
    assert known.bytes_of(job, "net") == sizes
    monkeypatch.setattr(columns, "noted", lambda job: None)
    assert known.bytes_of(change_of(job, batch=2), "net") == sizes // 2
    assert not known.are_few(job, "another")
    assert not known.are_few(change_of(job, objective=Mean()), "net")
    assert not known.are_few(change_of(job, parts=("head",)), "net")


def test_to_look_at_a_network_changes_nothing() -> None:
    """Nothing is noted of its one sample, nobody else's chance used up."""
    (job,) = jobs(9)
    seen: list[tuple[bool, bool, int]] = []

    def drawing(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        seen.append((model.net.training, torch.is_grad_enabled(), len(x)))
        return torch.rand(()) + cross_entropy(model, x, y)

    chance = torch.random.get_rng_state()
    assert Columns().are_few(change_of(job, objective=drawing), "net")
    assert seen == [(False, False, 1)]
    assert job.node.model.net.training
    assert torch.equal(chance, torch.random.get_rng_state())


def refuse(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
    raise ValueError("never one sample")


def test_an_objective_that_takes_no_single_sample_keeps_to_lanes() -> None:
    (job,) = jobs(9)
    objective: Objective = refuse
    assert not Columns().are_few(change_of(job, objective=objective), "net")


@pytest.mark.parametrize("count", [1, 3])
def test_columns_are_part_of_what_must_fit_in_memory(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    work = jobs(9, 9, 9, 9, 9, 9, phase=LONG)
    weights = 4 * 4 * sum(p.numel() for p in work[0].node.model.net.parameters())
    inputs = 4 * 9 * math.prod(IMAGE)
    room = weights + inputs + 2 * 4 * 4 * 50 * (12 * 13 + 2 * 2)
    monkeypatch.setattr(together, "_CPU_BYTES", room * 3 - (count == 1))
    train(Trainer(), work)
    assert seen.stacks == ([3, 3] if count == 3 else [2, 2, 2])


SLOW = Optimiser(name="sgd", lr=0.01)  # BatchNorm blows rounding up


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("make", "change"),
    [(cnn, {}), (lambda: normed().float(), {"steps": 30, "optimiser": SLOW})],
    ids=["plain", "BatchNorm"],
)
def test_cuda_graphs_of_stacked_convolutions_are_the_loop(
    make: Callable[[], nn.Module], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: rounded to TF32 by other kernels, a hundred steps come to something else."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    ends = []
    for stack in ("always", "never"):
        work = jobs(40, 33, 47, phase=replace(LONG, batch=8, **change), make=make)
        work = [replace(j, node=j.node.working_copy(0, device, {})) for j in work]
        trainer = Trainer(stack)
        for _ in range(2):
            train(trainer, work)
        assert bool(trainer._kept) == (stack == "always")
        ends.append([t.cpu() for j in work for t in j.node.model.state().values()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)

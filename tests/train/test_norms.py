"""BatchNorm of a stack is that of each row, by torch, whatever of a batch counts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polyfed.train import norms
from polyfed.train.norms import batch_norm, rectified
from polyfed.train.stepper import StackedLayers

LITERAL = Path(__file__).parent / "literal_norms.py"
SHAPES = [(4, 3, 5), (4, 7), (2, 1, 1), (3,)]
KEPT = ("running_mean", "running_var", "num_batches_tracked")


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rows(shape: tuple[int, ...], count: int, **how: Any) -> list[nn.Module]:
    kind = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
    made = [kind(shape[0], **how).double() for _ in range(count)]
    for k, norm in enumerate(made):
        for i, t in enumerate(norm.parameters()):
            t.data += draw(*t.shape, seed=10 * k + i)
    return made


def stacked(nets: list[nn.Module], x: Tensor, weight: Tensor | None = None) -> list[Tensor]:
    """Outputs, gradients of the input and parameters, and what is kept, of a training step."""
    own = [dict((*net.named_parameters(), *net.named_buffers())) for net in nets]
    tensors = {name: torch.stack([each[name].detach() for each in own]) for name in own[0]}
    leaves = [x.detach().clone().requires_grad_()]
    for name, _ in nets[0].named_parameters():
        leaves.append(tensors[name].requires_grad_())

    def one(tensors: dict[str, Tensor], x: Tensor, weight: Tensor | None) -> Tensor:
        with StackedLayers(weight):
            out: Tensor = functional_call(nets[0], tensors, (x,))
        return out

    dims = (0, 0, None if weight is None else 0)
    out = vmap(one, in_dims=dims)(tensors, leaves[0], weight)
    pull = draw(*out.shape, seed=3).to(out)
    if weight is not None:  # what does not count pulls nothing
        pull = pull * (weight > 0).view(*weight.shape, *[1] * (out.dim() - 2))
    gradients = torch.autograd.grad(out, leaves, pull)
    return [out, *gradients, *(tensors[n] for n in KEPT if n in tensors)]


def one_by_one(nets: list[nn.Module], x: Tensor, counts: list[int]) -> list[list[Tensor]]:
    """The same of each row's first samples."""
    found = []
    pulls = draw(*x.shape, seed=3)
    for net, own, count, pull in zip(nets, x, counts, pulls, strict=True):
        first = own[:count].detach().clone().requires_grad_()
        out = net(first)
        gradients = torch.autograd.grad(out, [first, *net.parameters()], pull[:count])
        found.append([out, *gradients, *(t for _, t in net.named_buffers())])
    return found


@pytest.mark.parametrize("how", [{}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}], ids=str)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_is_normalised_by_itself(
    shape: tuple[int, ...], keeps: bool, how: dict[str, Any]
) -> None:
    nets = rows(shape, 3, track_running_stats=keeps, **how)
    x = 2 + draw(3, 6, *shape)
    found = stacked(nets, x)
    for k, wanted in enumerate(one_by_one(nets, x, [6, 6, 6])):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[k], theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_that_do_not_count_change_nothing(shape: tuple[int, ...]) -> None:
    """They are normalised by what does count, and have no gradient of their own."""
    nets, x, counts = rows(shape, 3), 2 + draw(3, 6, *shape), [6, 2, 4]
    weight = torch.tensor([[i < count for i in range(6)] for count in counts]) / 6.0
    found = stacked(nets, x, weight)
    for k, wanted in enumerate(one_by_one(nets, x, counts)):
        for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            own = ours[k][: counts[k]] if i < 2 else ours[k]
            torch.testing.assert_close(own, theirs)
        assert not found[1][k][counts[k] :].any()


def test_what_does_not_count_is_pulled_by_what_does() -> None:
    """As anything that is normalised: the gradient is that of the formula."""
    x, inside = draw(2, 4, 3).requires_grad_(), torch.tensor([[1.0, 0, 1, 1], [1, 1, 0, 0]])

    def literal(x: Tensor, inside: Tensor) -> Tensor:
        n = inside.sum()
        mean = (x * inside[:, None]).sum(0) / n
        variance = ((x - mean) ** 2 * inside[:, None]).sum(0) / n
        return (x - mean) / (variance + 1e-5).sqrt()

    def ours(x: Tensor, inside: Tensor) -> Tensor:
        return batch_norm(x, None, None, inside=inside)

    pull = draw(2, 4, 3, seed=1)
    wanted = torch.stack([literal(a, b) for a, b in zip(x, inside, strict=True)])
    found = vmap(ours)(x, inside)
    torch.testing.assert_close(found, wanted)
    (a,), (b,) = (torch.autograd.grad(out, x, pull) for out in (found, wanted))
    torch.testing.assert_close(a, b)


def test_a_row_that_is_done_stays_finite() -> None:
    """Nothing of its batch counts."""
    mean, variance = torch.zeros(2, 3), torch.ones(2, 3)

    def ours(x: Tensor, mean: Tensor, variance: Tensor, inside: Tensor) -> Tensor:
        return batch_norm(x, mean, variance, inside=inside)

    out = vmap(ours)(torch.ones(2, 4, 3), mean, variance, torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert out.isfinite().all()
    assert mean.isfinite().all()
    assert variance.isfinite().all()


def test_at_rest_it_is_torchs() -> None:
    """By what was kept, which stays."""
    nets, x = [net.eval() for net in rows((3, 2, 2), 2)], draw(2, 4, 3, 2, 2)
    for k, net in enumerate(nets):
        net.get_buffer("running_mean").fill_(k)
    found = stacked(nets, x)
    for k, wanted in enumerate(one_by_one(nets, x, [4, 4])):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[k], theirs)
    assert found[-1].tolist() == [0, 0]


class Rectified(nn.Module):
    """What follows a normalisation in a residual network."""

    def __init__(self, norm: nn.Module, is_beside: bool) -> None:
        super().__init__()
        self.norm, self.is_beside = norm, is_beside

    def forward(self, x: Tensor) -> Tensor:
        return rectified(self.norm, x, x.sin() if self.is_beside else None)


@pytest.mark.parametrize("kind", ["training", "at rest", "another norm"])
@pytest.mark.parametrize("is_beside", [True, False])
def test_what_follows_is_done_with_it(is_beside: bool, kind: str) -> None:
    """And BatchNorm that comes later is plain again."""
    nets = list[nn.Module]()
    for norm, later in zip(rows((4, 3, 5), 3), rows((4, 3, 5), 3), strict=True):
        own = nn.GroupNorm(2, 4).double() if kind == "another norm" else norm
        nets.append(nn.Sequential(Rectified(own, is_beside), later))
    if kind == "at rest":
        nets = [net.eval() for net in nets]
    x = draw(3, 6, 4, 3, 5)
    found = stacked(nets, x)
    for k, wanted in enumerate(one_by_one(nets, x, [6, 6, 6])):
        for ours, theirs in zip(found[: len(wanted) - 3], wanted, strict=False):
            torch.testing.assert_close(ours[k], theirs)


def test_what_follows_is_one_step_where_a_row_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[dict[str, Any]]()

    def noted(*given: Any, **how: Any) -> Tensor:
        made.append(how)
        return batch_norm(*given, **how)

    monkeypatch.setattr(norms, "batch_norm", noted)
    nets = [nn.Sequential(Rectified(norm, True), norm) for norm in rows((4, 3, 5), 2)]
    stacked(list[nn.Module](nets), draw(2, 6, 4, 3, 5))
    assert [how.get("rectify", False) for how in made] == [True, False]


def test_it_is_for_a_stack() -> None:
    def ours(x: Tensor) -> Tensor:
        return batch_norm(x, None, None)

    for refused in (ours, vmap(vmap(ours))):
        with pytest.raises(NotImplementedError, match="for a stack of them"):
            refused(draw(2, 3, 4, 5))


def test_a_single_number_is_refused_as_torch_does() -> None:
    def ours(x: Tensor) -> Tensor:
        return batch_norm(x, None, None)

    with pytest.raises(ValueError, match="more than one number"):
        vmap(ours)(draw(2, 1, 4, 1, 1))
    with pytest.raises(ValueError, match="more than 1 value"):
        nn.BatchNorm2d(4)(draw(1, 4, 1, 1).float())
    assert vmap(ours)(draw(2, 1, 4, 1, 2)).shape == (2, 1, 4, 1, 2)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_are_batchnorm() -> None:
    """By Triton's interpreter, in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(LITERAL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [float(line) for line in done.stdout.split()]
    assert len(found) == 64
    assert max(found) < 5e-6


def test_kernels_are_for_gpus_and_single_precision() -> None:
    assert norms._kernels(torch.zeros(1)) is None
    assert norms._kernels(torch.zeros(1, device="meta")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", [None, [6, 2, 4]], ids=["all", "some"])
@pytest.mark.parametrize("shape", [(64, 16, 16), (512, 1, 1), (130, 3, 5), (7,)], ids=str)
def test_cuda_kernels_are_batchnorm(shape: tuple[int, ...], counts: list[int] | None) -> None:
    nets = [net.float().cuda() for net in rows(shape, 3)]
    x = (2 + draw(3, 6, *shape)).float().cuda()
    weight = None
    if counts is not None:
        inside = [[i < count for i in range(6)] for count in counts]
        weight = torch.tensor(inside, device="cuda") / 6.0
        x[:, 1] += 1  # two samples are not all but equal, which rounding would blow up
    found = stacked(nets, x, weight)
    norms_of_torch = [net.cpu().double() for net in nets]
    wanted = stacked(norms_of_torch, x.cpu().double(), None if weight is None else weight.cpu())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            ours.cpu().double(), theirs.double(), rtol=1e-3, atol=1e-3, check_dtype=False
        )

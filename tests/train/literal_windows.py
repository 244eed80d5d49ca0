"""`windows` against torch's convolutions and pooling; prints the largest differences.

Run by test_columns.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from polyfed.train import columns, windows
from polyfed.train.stepper import StackedLayers

ROWS, BATCH = 2, 3


def main() -> None:
    """Of convolutions as given on the command line, and of pooling."""
    windows._BLOCK = 64  # several programs for each sample, the last of them not full
    columns._kernels = lambda x: windows
    columns._DEVICES = ("cpu",)
    for name in ("columns", "max_pool"):
        setattr(windows, name, noted(name))
    settings: list[tuple[list[int], dict[str, Any]]] = json.loads(sys.argv[1])
    for filters, how in settings:
        own = {name: tuple(v) if isinstance(v, list) else v for name, v in how.items()}
        for has_bias in (True, False):
            print(convolution(filters, own, has_bias))
    for sides in ((1, 1), (2, 1)):  # filters see padding, some of them nothing else
        for stride in (1, 2):
            how = {"padding": 1, "stride": stride}
            print(convolution([4, 3, 3, 3], how, True, sides))
    for size, side in ((2, 8), (2, 7), (3, 9), ((2, 3), 8), (1, 4)):
        print(pooling(size, side))


def convolution(
    filters: list[int], how: dict[str, Any], has_bias: bool, sides: tuple[int, int] = (9, 8)
) -> float:
    """The largest difference of outputs and gradients; pictures with their channels last."""
    x = draw(ROWS, BATCH, *sides, 3).permute(0, 1, 4, 2, 3).requires_grad_()
    given = [x, draw(ROWS, *filters, seed=1).requires_grad_()]
    if has_bias:
        given.append(draw(ROWS, filters[0], seed=2).requires_grad_())
    return difference(given, lambda *own: functional.conv2d(*own, **how))


def pooling(size: Any, side: int) -> float:
    """The same of pooling, where many numbers are equal, as after ReLU, and one is none."""
    x = draw(ROWS, BATCH, side, side + 1, 5).relu()
    x[0, 0, 0, 1, 2] = torch.nan
    x = x.permute(0, 1, 4, 2, 3).requires_grad_()
    return difference([x], lambda own: functional.max_pool2d(own, size))


def difference(given: list[Tensor], layer: Callable[..., Tensor]) -> float:
    """Between a layer of the rows one by one and stacked: of outputs and of gradients."""

    def by_kernels(*own: Tensor) -> Tensor:
        with StackedLayers():
            return layer(*own)

    before = len(used)
    stacked = vmap(by_kernels)(*given)
    assert len(used) > before, "it was left to torch"
    alone = torch.stack([layer(*own) for own in zip(*given, strict=True)])
    pull = draw(*alone.shape, seed=3)
    ours, theirs = (torch.autograd.grad(out, given, pull) for out in (stacked, alone))
    pairs = [(stacked, alone), *zip(ours, theirs, strict=True)]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in pairs)
    assert_once_differentiable(vmap(by_kernels)(*given), given[0])
    return max(float((a - b).detach().nan_to_num().abs().max()) for a, b in pairs)


def assert_once_differentiable(out: Tensor, x: Tensor) -> None:
    """A gradient's gradient would have to be written, and is refused."""
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


used: list[str] = []


def noted(name: str) -> Callable[..., Tensor]:
    """A kernel's function that notes its use."""
    own = getattr(windows, name)

    def function(*given: Any) -> Tensor:
        used.append(name)
        found: Tensor = own(*given)
        return found

    return function


if __name__ == "__main__":
    main()

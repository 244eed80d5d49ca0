"""Adam for a network that computes in bfloat16, in one pass over its weights, on a GPU.

Autocast makes a bfloat16 copy of every weight in every step, and a float32 copy of its gradient; an
L1 penalty takes four passes more. For a network of fourteen million weights that is more than half
of a step's memory traffic. Here the copies stay, layers use them in their weights' place, and one
kernel reads the gradient and the weight once:

    g <- g + c sign(w)
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),   copy <- w

in float32, as torch.optim.Adam does. Symbols: c = weight of the penalty, m, v = moments,
b1, b2 = 0.9, 0.999, eps = 1e-8.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.core.model import Model
from polyfed.core.phase import Objective
from polyfed.train.augment import Rotated
from polyfed.train.kernels import compiling
from polyfed.train.lanes import _strided
from polyfed.train.surrogate import L1Penalty

B1, B2, EPS = 0.9, 0.999, 1e-8
_BLOCK = 2048  # weights of one program
_LAYERS = functional.linear, functional.conv1d, functional.conv2d, functional.conv3d


def without_l1(objective: Objective) -> tuple[Objective, float]:
    """An objective without its penalty, and the penalty's weight."""
    if isinstance(objective, L1Penalty):
        plain, weight = without_l1(objective.objective)
        return plain, weight + objective.weight
    if isinstance(objective, Rotated):
        plain, weight = without_l1(objective.objective)
        return replace(objective, objective=plain), weight
    return objective, 0.0


class NarrowAdam:
    """The steps of one network.

    Args:
        parameters: what moves, in float32; those of more than one dimension get a bfloat16 copy.
        objective: the loss.
        most_steps: steps until the next `begin`.

    Raises:
        RuntimeError: its kernel cannot be made for this device.
    """

    def __init__(self, parameters: Sequence[Tensor], objective: Objective, most_steps: int) -> None:
        self.parameters = list(parameters)
        self.objective, self.l1 = without_l1(objective)
        self.copies = {
            i: p.detach().bfloat16().requires_grad_()
            for i, p in enumerate(parameters)
            if p.dim() > 1
        }
        self.first, self.second = (
            [torch.zeros_like(p, requires_grad=False) for p in parameters] for _ in range(2)
        )
        t = torch.arange(1, most_steps + 1, dtype=torch.float64)
        factors = torch.stack([1 / (1 - B1**t), (1 - B2**t).rsqrt()], 1)
        self.factors = factors.float().to(parameters[0].device)
        self.rate = self.factors.new_zeros(1)
        self.blocks = [-(-p.numel() // _BLOCK) for p in parameters]
        self.sums = parameters[0].new_zeros(sum(self.blocks), requires_grad=False)
        self.at = torch.zeros(1, dtype=torch.int64, device=parameters[0].device)
        self._make_kernels()

    def _make_kernels(self) -> None:
        """Take a step that `begin` makes undone, to see now whether there is a kernel."""
        narrow = [torch.zeros_like(copy) for copy in self.copies.values()]
        wide = [
            None if i in self.copies else torch.zeros_like(p) for i, p in enumerate(self.parameters)
        ]
        with compiling():
            self._move(narrow, wide)

    def begin(self, lr: float) -> None:
        """Begin with the parameters as they are, this learning rate, and no moments."""
        self.rate.fill_(lr)
        torch._foreach_zero_([*self.first, *self.second, self.at])
        for i, copy in self.copies.items():
            copy.detach().copy_(self.parameters[i])

    def step(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """One step; the loss before it."""
        used = {id(self.parameters[i]): copy for i, copy in self.copies.items()}
        with _InPlaceOf(used):
            loss = self.objective(model, x, y)
        wanted = [*self.copies.values(), *self.parameters]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        self._move(gradients[: len(self.copies)], gradients[len(self.copies) :])
        return loss.detach() + self.l1 * self.sums.sum()

    def _move(self, narrow: Sequence[Tensor | None], wide: Sequence[Tensor | None]) -> None:
        of = dict(zip(self.copies, narrow, strict=True))
        at = 0
        for i, (p, blocks) in enumerate(zip(self.parameters, self.blocks, strict=True)):
            _kernel[(blocks,)](
                p.detach(),
                None if i not in self.copies else self.copies[i].detach(),
                _strided(of.get(i), p),
                _strided(wide[i], p),
                self.first[i],
                self.second[i],
                self.factors,
                self.rate,
                self.at,
                self.sums[at:],
                self.l1,
                p.numel(),
                FIRST=B1,
                SECOND=B2,
                SMALL=EPS,
                BLOCK=_BLOCK,
            )
            at += blocks
        self.at += 1


class _InPlaceOf(TorchFunctionMode):
    """Layers that compute with other tensors in the place of their weights."""

    def __init__(self, used: dict[int, Tensor]) -> None:
        super().__init__()
        self.used = used  # by the id of a weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the weight of a layer; leave all else."""
        if func in _LAYERS and id(args[1]) in self.used:
            args = args[0], self.used[id(args[1])], *args[2:]
        return func(*args, **(kwargs or {}))


@triton.jit
@no_type_check  # tests wrap what is checked, and no kernel survives that
def _kernel(
    weights, copies, narrow, wide, first, second, factors, rate, steps, sums, l1, size,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weights + at, mask=inside, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.abs(w), 0))
    g = l1 * ((w > 0).to(tl.float32) - (w < 0).to(tl.float32))
    if narrow is not None:
        g += tl.load(narrow + at, mask=inside, other=0.0).to(tl.float32)
    if wide is not None:
        g += tl.load(wide + at, mask=inside, other=0.0)
    m = FIRST * tl.load(first + at, mask=inside, other=0.0) + (1 - FIRST) * g
    v = SECOND * tl.load(second + at, mask=inside, other=0.0) + (1 - SECOND) * g * g
    t = tl.load(steps)
    size_of_step = tl.load(rate) * tl.load(factors + 2 * t)
    w -= size_of_step * m / (tl.sqrt(v) * tl.load(factors + 2 * t + 1) + SMALL)
    tl.store(weights + at, w, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    if copies is not None:
        tl.store(copies + at, w.to(tl.bfloat16), mask=inside)

"""Adam of the rows of a stack, in one pass over them, on a GPU.

Torch's fused Adam reaches less than half of a GPU's memory bandwidth, and counts the steps of a
tensor, all of it. Here one kernel moves every row of many tensors, each row with a learning rate, a
weight decay and a count of its own:

    Adam:   g <- g + decay w                    AdamW:   w <- w - lr decay w
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    w <- w - lr m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

in float32, as torch.optim.Adam and AdamW do. But for the powers of t: 1 - b^t has few digits left
where b^t is near one, so each program computes it once in float64.
Symbols: m, v = moments, t = count, b1, b2, eps as in `narrow`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.core.phase import Optimiser
from polyfed.train.kernels import compiling
from polyfed.train.narrow import B1, B2, EPS

_BLOCK = 1024  # weights of one program
_MOST = 16  # tensors that one launch moves


class StackedAdam:
    """Adam or AdamW, used as torch's are; of every row it keeps a count.

    Args:
        parts: what moves, float32 (rows, ...), row by row in memory without gaps; without a
            gradient, which lies as it does, it stays.
        settings: of each row; their names are the same.

    Attributes:
        state: as torch's, of each part that has moved, but that `step` is (rows,).
    """

    def __init__(self, parts: Sequence[Tensor], settings: Sequence[Optimiser]) -> None:
        self.parts = list(parts)
        self.state = defaultdict[Tensor, dict[str, Tensor]](dict)
        self.is_decoupled = settings[0].name == "adamw"
        self.rates = parts[0].new_empty(len(settings), 2)
        self.settle(settings)

    def settle(self, settings: Sequence[Optimiser]) -> None:
        """Go on with other learning rates and decays; a CUDA graph of steps has them, too."""
        self.rates.copy_(self.rates.new_tensor([[s.lr, s.weight_decay] for s in settings]))

    def step(self) -> None:
        """One step of every row.

        Raises:
            RuntimeError: there can be no kernel for this device.
        """
        moving = [part for part in self.parts if part.grad is not None]
        for part in moving:
            if not self.state[part]:
                self.state[part] = {
                    "step": self.rates.new_zeros(len(self.rates)),
                    "exp_avg": torch.zeros_like(part),
                    "exp_avg_sq": torch.zeros_like(part),
                }
        for first in range(0, len(moving), _MOST):
            self._move(moving[first : first + _MOST])

    def _move(self, parts: Sequence[Tensor]) -> None:
        states = [self.state[part] for part in parts]
        torch._foreach_add_([state["step"] for state in states], 1)
        sizes = tuple(part[0].numel() for part in parts)
        with compiling(), torch.cuda.device_of(self.rates):
            _kernel[(sum(triton.cdiv(size, _BLOCK) for size in sizes), len(self.rates))](
                tuple(parts),
                tuple(part.grad for part in parts),
                tuple(state["exp_avg"] for state in states),
                tuple(state["exp_avg_sq"] for state in states),
                tuple(state["step"] for state in states),
                self.rates,
                SIZES=sizes,
                DECOUPLED=self.is_decoupled,
                FIRST=B1,
                SECOND=B2,
                LOG_FIRST=math.log2(B1),
                LOG_SECOND=math.log2(B2),
                SMALL=EPS,
                BLOCK=_BLOCK,
            )


@triton.jit
@no_type_check  # tests wrap what is checked, and no kernel survives that
def _kernel(
    weights, gradients, first, second, counts, rates,
    SIZES: tl.constexpr, DECOUPLED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    LOG_FIRST: tl.constexpr, LOG_SECOND: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rate, decay = tl.load(rates + 2 * row), tl.load(rates + 2 * row + 1)
    for i in tl.static_range(len(SIZES)):
        if (block >= 0) & (block < tl.cdiv(SIZES[i], BLOCK)):
            within = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside, at = within < SIZES[i], row * SIZES[i] + within
            w = tl.load(weights[i] + at, mask=inside, other=0.0)
            g = tl.load(gradients[i] + at, mask=inside, other=0.0)
            m = tl.load(first[i] + at, mask=inside, other=0.0)
            v = tl.load(second[i] + at, mask=inside, other=0.0)
            t = tl.load(counts[i] + row).to(tl.float64)
            size_of_step = rate / (1 - tl.exp2(t * LOG_FIRST)).to(tl.float32)
            root = tl.sqrt((1 - tl.exp2(t * LOG_SECOND)).to(tl.float32))
            if DECOUPLED:
                w -= rate * decay * w
            else:
                g += decay * w
            m = FIRST * m + (1 - FIRST) * g
            v = SECOND * v + (1 - SECOND) * g * g
            w -= size_of_step * m / (tl.sqrt(v) / root + SMALL)
            tl.store(weights[i] + at, w, mask=inside)
            tl.store(first[i] + at, m, mask=inside)
            tl.store(second[i] + at, v, mask=inside)
        block -= tl.cdiv(SIZES[i], BLOCK)

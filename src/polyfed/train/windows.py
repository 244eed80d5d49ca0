"""What lies under the windows of filters and of pooling: one kernel each, on a GPU.

    columns     (N, C, H, W) -> (N, H' W', width): the k k C numbers of each place, then 1, then 0
    max_pool    (N, C, H, W) -> (N, C, H / k, W / k): windows that do not overlap

Both are done sample by sample, so a stack is but more samples. Torch takes a pass for each side of
the window to undo columns, and its pooling of channels that come last in memory is slow.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyfed.train.columns import Window
from polyfed.train.kernels import compiling

_BLOCK = 1024  # numbers that one program writes


def _merged(t: Tensor, at: int) -> Tensor:
    """Rows of a stack as more samples."""
    return t.movedim(at, 0).flatten(0, 1)


def _programs(out: Tensor) -> tuple[int]:
    """A grid in which every sample has its own programs."""
    return (len(out) * triton.cdiv(out[0].numel(), _BLOCK),)


class _Columns(torch.autograd.Function):
    """Columns; their gradient is, for each pixel, a sum over the places that see it."""

    @staticmethod
    def forward(x: Tensor, window: Window, width: int) -> Tensor:
        """What lies under every place."""
        columns = x.new_empty(len(x), math.prod(window.places(x.shape[2:])), width)
        with compiling():
            _gather[_programs(columns)](x, columns, *x.stride(), **_constants(x, window, width))
        return columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Shapes are all that is wanted again."""
        x, ctx.window, ctx.width = inputs
        ctx.shape = x.shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Channels come out last in memory."""
        count, channels, height, width = ctx.shape
        x = gradient.new_empty(count, height, width, channels).permute(0, 3, 1, 2)
        with compiling():
            _scatter[_programs(x)](gradient.contiguous(), x, **_constants(x, ctx.window, ctx.width))
        return x, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, window: Window, width: int) -> tuple[Tensor, int]:
        """Of a stack."""
        found = columns(_merged(x, in_dims[0]), window, width)
        return found.unflatten(0, (info.batch_size, -1)), 0


columns: Callable[[Tensor, Window, int], Tensor] = _Columns.apply


def _constants(x: Tensor, window: Window, width: int) -> dict[str, int]:
    (tall, wide), (down, right), (above, left), (gap_h, gap_w) = window
    _, places = window.places(x.shape[2:])
    return {
        "CHANNELS": x.shape[1], "HEIGHT": x.shape[2], "WIDTH": x.shape[3], "PLACES": places,
        "ALL": math.prod(window.places(x.shape[2:])), "SIZE": width, "TALL": tall, "WIDE": wide,
        "DOWN": down, "RIGHT": right, "ABOVE": above, "LEFT": left, "GAP_H": gap_h,
        "GAP_W": gap_w, "BLOCK": _BLOCK,
    }  # fmt: skip


@triton.jit
@no_type_check  # tests wrap what is checked, and no kernel survives that
def _gather(
    x, columns, by_sample, by_channel, by_line, by_pixel,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    ALL: tl.constexpr, SIZE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr,
    GAP_H: tl.constexpr, GAP_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (ALL * SIZE + BLOCK - 1) // BLOCK
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    place, number = at // SIZE, at % SIZE
    channel, seen = number % CHANNELS, number // CHANNELS
    line = place // PLACES * DOWN + seen // WIDE * GAP_H - ABOVE
    pixel = place % PLACES * RIGHT + seen % WIDE * GAP_W - LEFT
    inside = (seen < TALL * WIDE) & (place < ALL)
    inside &= (line >= 0) & (line < HEIGHT) & (pixel >= 0) & (pixel < WIDTH)
    where = channel * by_channel + line * by_line + pixel * by_pixel
    found = tl.load(x + sample * by_sample + where, mask=inside, other=0.0)
    found = tl.where(number == TALL * WIDE * CHANNELS, 1.0, found)
    tl.store(columns + sample * ALL * SIZE + at, found, mask=place < ALL)


@triton.jit
@no_type_check
def _scatter(
    columns, x,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    ALL: tl.constexpr, SIZE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr,
    GAP_H: tl.constexpr, GAP_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total: tl.constexpr = HEIGHT * WIDTH * CHANNELS
    blocks: tl.constexpr = (total + BLOCK - 1) // BLOCK
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel, line = at % CHANNELS, at // CHANNELS % WIDTH, at // (CHANNELS * WIDTH)
    own = columns + sample * ALL * SIZE + channel
    found = tl.zeros((BLOCK,), tl.float32)
    for seen in range(TALL * WIDE):
        down = line + ABOVE - seen // WIDE * GAP_H
        right = pixel + LEFT - seen % WIDE * GAP_W
        sees = (at < total) & (down >= 0) & (down < ALL // PLACES * DOWN) & (down % DOWN == 0)
        sees &= (right >= 0) & (right < PLACES * RIGHT) & (right % RIGHT == 0)
        place = down // DOWN * PLACES + right // RIGHT
        found += tl.load(own + place * SIZE + seen * CHANNELS, mask=sees, other=0.0)
    tl.store(x + sample * total + at, found, mask=at < total)


class _MaxPool(torch.autograd.Function):
    """The largest number of every window; of equal ones the first has the gradient, as in torch."""

    @staticmethod
    def forward(x: Tensor, tall: int, wide: int) -> Tensor:
        """Channels stay last in memory."""
        count, channels, height, width = x.shape
        shape = count, height // tall, width // wide, channels
        out = x.new_empty(shape).permute(0, 3, 1, 2)
        with compiling():
            _largest[_programs(out)](
                x, out, None, None, *x.stride(), *x.stride(), **_sizes(out, tall, wide)
            )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """What was largest is looked up again."""
        x, ctx.tall, ctx.wide = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Zeros, but where the largest was."""
        (x,) = ctx.saved_tensors
        is_covered = x.shape[2] % ctx.tall == 0 and x.shape[3] % ctx.wide == 0
        back = torch.empty_like(x) if is_covered else torch.zeros_like(x)
        own = gradient.contiguous(memory_format=torch.channels_last)
        with compiling():
            _largest[_programs(own)](
                x, None, own, back, *x.stride(), *back.stride(), **_sizes(own, ctx.tall, ctx.wide)
            )
        return back, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, tall: int, wide: int) -> tuple[Tensor, int]:
        """Of a stack."""
        pooled = max_pool(_merged(x, in_dims[0]), tall, wide)
        return pooled.unflatten(0, (info.batch_size, -1)), 0


max_pool: Callable[[Tensor, int, int], Tensor] = _MaxPool.apply


def _sizes(out: Tensor, tall: int, wide: int) -> dict[str, int]:
    _, channels, height, width = out.shape
    return {
        "CHANNELS": channels, "HEIGHT": height, "WIDTH": width, "TALL": tall, "WIDE": wide,
        "BLOCK": _BLOCK,
    }  # fmt: skip


@triton.jit
@no_type_check
def _largest(
    x, out, gradient, back, by_sample, by_channel, by_line, by_pixel,
    back_by_sample, back_by_channel, back_by_line, back_by_pixel,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the largest of each window; or, where it lies, the gradient, and zeros around it."""
    total: tl.constexpr = HEIGHT * WIDTH * CHANNELS
    blocks: tl.constexpr = (total + BLOCK - 1) // BLOCK
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel, pixel, line = at % CHANNELS, at // CHANNELS % WIDTH, at // (CHANNELS * WIDTH)
    first = sample * by_sample + channel * by_channel
    first += line * TALL * by_line + pixel * WIDE * by_pixel
    best = tl.load(x + first, mask=inside, other=0.0)
    which = tl.zeros((BLOCK,), tl.int32)
    for seen in tl.static_range(1, TALL * WIDE):
        there = first + seen // WIDE * by_line + seen % WIDE * by_pixel
        found = tl.load(x + there, mask=inside, other=0.0)
        is_larger = (found > best) | (found != found)  # as torch has it, not a number is largest
        best = tl.where(is_larger, found, best)
        which = tl.where(is_larger, seen, which)
    if out is not None:
        tl.store(out + sample * total + at, best, mask=inside)
    if back is not None:
        pull = tl.load(gradient + sample * total + at, mask=inside, other=0.0)
        first = sample * back_by_sample + channel * back_by_channel
        first += line * TALL * back_by_line + pixel * WIDE * back_by_pixel
        for seen in tl.static_range(TALL * WIDE):
            there = first + seen // WIDE * back_by_line + seen % WIDE * back_by_pixel
            tl.store(back + there, tl.where(which == seen, pull, 0.0), mask=inside)

"""BatchNorm of a stack as one kernel for each direction, on a GPU; what it computes: see `norms`.

A program has some channels of a row, and goes over all their samples and places: for the mean, for
the variance, and to write. Channels come last in memory, as `columns` leaves them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.train.kernels import compiling

_NUMBERS = 4096  # that one program reads at once
_FEWEST, _MOST = 8, 64  # channels of a program: more of them where places are few


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    kept_mean: Tensor | None,
    kept_variance: Tensor | None,
    inside: Tensor | None,
    momentum: float,
    eps: float,
    beside: Tensor | None = None,
    rectify: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `norms.forward`."""
    x, beside = _last(x), None if beside is None else _last(beside)
    y = torch.empty_like(x)
    mean, root = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    grid, shape = _shape(x)
    with compiling(), torch.cuda.device_of(x):
        _normalise[grid](
            x, y, weight.contiguous(), bias.contiguous(), mean, root,
            kept_mean, kept_variance, _numbers(inside, x), momentum, eps, beside,
            RECTIFY=rectify, **shape,
        )  # fmt: skip
    return y.movedim(-1, 2), mean, root


def backward(
    pull: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    root: Tensor,
    inside: Tensor | None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `norms.backward`."""
    x, pull, y = _last(x), _last(pull), None if y is None else _last(y)
    passed = None if y is None else torch.empty_like(pull)
    of_x, of_weight = torch.empty_like(x), torch.empty_like(mean)
    of_bias = torch.empty_like(mean)
    grid, shape = _shape(x)
    with compiling(), torch.cuda.device_of(x):
        _pull_back[grid](
            x, pull, weight.contiguous(), mean, root, _numbers(inside, x), y,
            of_x, of_weight, of_bias, passed, **shape,
        )  # fmt: skip
    of_beside = pull if passed is None else passed
    return of_x.movedim(-1, 2), of_weight, of_bias, of_beside.movedim(-1, 2)


def _last(x: Tensor) -> Tensor:
    """Channels last, in memory and in shape."""
    return x.movedim(2, -1).contiguous()


def _numbers(inside: Tensor | None, x: Tensor) -> Tensor | None:
    return None if inside is None else inside.to(x.dtype).contiguous()


def _shape(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and sizes: x is (rows, samples, ..., channels)."""
    rows, samples, channels = x.shape[0], x.shape[1], x.shape[-1]
    places = math.prod(x.shape[2:-1])
    height = max(1, samples * places)
    own = min(_MOST, max(_FEWEST, _NUMBERS // triton.next_power_of_2(height)))
    wide = min(own, triton.next_power_of_2(channels))
    block = min(_NUMBERS // wide, triton.next_power_of_2(height))
    sizes = {"CHANNELS": channels, "HEIGHT": height, "PLACES": places, "SAMPLES": samples}
    return (triton.cdiv(channels, wide), rows), {**sizes, "BLOCK": block, "WIDE": wide}


@triton.jit
@no_type_check  # tests wrap what is checked, and no kernel survives that
def _normalise(
    x, y, weight, bias, mean, root, kept_mean, kept_variance, inside, momentum, eps, beside,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, PLACES: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, RECTIFY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    is_one = channel < CHANNELS
    own = row * CHANNELS + channel
    total, n = tl.zeros((WIDE,), tl.float32), 0.0
    for first in range(0, HEIGHT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = (at < HEIGHT).to(tl.float32)
        if inside is not None:
            counts = tl.load(inside + row * SAMPLES + at // PLACES, mask=at < HEIGHT, other=0.0)
        there = (row * HEIGHT + at)[:, None] * CHANNELS + channel[None, :]
        seen = (at < HEIGHT)[:, None] & is_one[None, :]
        total += tl.sum(tl.load(x + there, mask=seen, other=0.0) * counts[:, None], 0)
        n += tl.sum(counts, 0)
    n = tl.maximum(n, 1.0)
    middle = total / n
    total = tl.zeros((WIDE,), tl.float32)
    for first in range(0, HEIGHT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = (at < HEIGHT).to(tl.float32)
        if inside is not None:
            counts = tl.load(inside + row * SAMPLES + at // PLACES, mask=at < HEIGHT, other=0.0)
        there = (row * HEIGHT + at)[:, None] * CHANNELS + channel[None, :]
        seen = (at < HEIGHT)[:, None] & is_one[None, :]
        apart = tl.load(x + there, mask=seen, other=0.0) - middle[None, :]
        total += tl.sum(apart * apart * counts[:, None], 0)
    variance = total / n
    inverse = 1.0 / tl.sqrt(variance + eps)
    tl.store(mean + own, middle, mask=is_one)
    tl.store(root + own, inverse, mask=is_one)
    if kept_mean is not None:
        before = tl.load(kept_mean + own, mask=is_one, other=0.0)
        tl.store(kept_mean + own, before + momentum * (middle - before), mask=is_one)
    if kept_variance is not None:
        before = tl.load(kept_variance + own, mask=is_one, other=0.0)
        now = variance * (n / tl.maximum(n - 1.0, 1.0))
        tl.store(kept_variance + own, before + momentum * (now - before), mask=is_one)
    scale = inverse * tl.load(weight + own, mask=is_one, other=0.0)
    shift = tl.load(bias + own, mask=is_one, other=0.0)
    for first in range(0, HEIGHT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = (row * HEIGHT + at)[:, None] * CHANNELS + channel[None, :]
        seen = (at < HEIGHT)[:, None] & is_one[None, :]
        apart = tl.load(x + there, mask=seen, other=0.0) - middle[None, :]
        found = apart * scale[None, :] + shift[None, :]
        if beside is not None:
            found += tl.load(beside + there, mask=seen, other=0.0)
        if RECTIFY:
            found = tl.where(found < 0, 0.0, found)  # not a number stays that
        tl.store(y + there, found, mask=seen)


@triton.jit
@no_type_check
def _pull_back(
    x, pull, weight, mean, root, inside, y, of_x, of_weight, of_bias, passed,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, PLACES: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    is_one = channel < CHANNELS
    own = row * CHANNELS + channel
    middle = tl.load(mean + own, mask=is_one, other=0.0)
    inverse = tl.load(root + own, mask=is_one, other=0.0)
    plain, by_z, n = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32), 0.0
    for first in range(0, HEIGHT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = (at < HEIGHT).to(tl.float32)
        if inside is not None:
            counts = tl.load(inside + row * SAMPLES + at // PLACES, mask=at < HEIGHT, other=0.0)
        there = (row * HEIGHT + at)[:, None] * CHANNELS + channel[None, :]
        seen = (at < HEIGHT)[:, None] & is_one[None, :]
        g = tl.load(pull + there, mask=seen, other=0.0)
        if y is not None:
            g = tl.where(tl.load(y + there, mask=seen, other=0.0) > 0, g, 0.0)
        z = (tl.load(x + there, mask=seen, other=0.0) - middle[None, :]) * inverse[None, :]
        plain += tl.sum(g, 0)
        by_z += tl.sum(g * z, 0)
        n += tl.sum(counts, 0)
    tl.store(of_bias + own, plain, mask=is_one)
    tl.store(of_weight + own, by_z, mask=is_one)
    n = tl.maximum(n, 1.0)
    plain, by_z = plain / n, by_z / n
    scale = inverse * tl.load(weight + own, mask=is_one, other=0.0)
    for first in range(0, HEIGHT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts = (at < HEIGHT).to(tl.float32)
        if inside is not None:
            counts = tl.load(inside + row * SAMPLES + at // PLACES, mask=at < HEIGHT, other=0.0)
        there = (row * HEIGHT + at)[:, None] * CHANNELS + channel[None, :]
        seen = (at < HEIGHT)[:, None] & is_one[None, :]
        g = tl.load(pull + there, mask=seen, other=0.0)
        if y is not None:
            g = tl.where(tl.load(y + there, mask=seen, other=0.0) > 0, g, 0.0)
        z = (tl.load(x + there, mask=seen, other=0.0) - middle[None, :]) * inverse[None, :]
        if passed is not None:
            tl.store(passed + there, g, mask=seen)
        shared = plain[None, :] + z * by_z[None, :]
        tl.store(of_x + there, (g - counts[:, None] * shared) * scale[None, :], mask=seen)

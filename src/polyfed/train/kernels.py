"""A chunk of steps as one kernel: sigmoid networks, plain SGD, one sample at a time, on a GPU.

One program for each network keeps the layers after the first in registers through all samples of a
chunk, so that nothing but the chunk's own numbers is read or written meanwhile. What it is given
and what it leaves is that of `deferred`:

    z_k = o_k - sum_{j<k} g_kj delta_j + b       the first layer's output, its updates put off
    a = s(z), h = s(W2 a + b2), ..., p = s(W h + b), loss 1/2 |p - e_y|^2
    every weight and bias but the first layer's weight moves by -lr times its gradient

Symbols of code: o = outputs, g = inner (with lr), delta = deltas, s = the sigmoid.

What takes the time is threads that wait for each other, so it matters where numbers lie. The
threads are a grid of Q by P, with eight warps along P. The first layer's numbers are cut into
pieces of P, the second's into pieces of Q, and W2 becomes a tensor (Q, P, pieces of Q, pieces of
P): each thread holds one weight for every two pieces. Then sums over pieces stay in a thread, sums
over Q in a warp, and only those over P wait for other warps. The later layers, which are small, lie
in the same way on a grid of M by N: W3 as (M, N, pieces of the second, pieces of the third), W4 as
(M, N, pieces of the fourth, pieces of the third). The samples come Q at a time, z as one tensor
(Q, P, pieces): a step moves z of the samples that follow, and leaves delta in the place of its own
z. The first layer is cut in two (`a`, `b`), because numbers of pieces are powers of two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, possibly-undefined, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

_WARPS = 8  # with 16, a thread has too few registers
_Q, _M = 8, 16  # _M is at least _Q, _P and _N at least 16, as `tl.dot` asks
_P, _N = 32 * _WARPS // _Q, 32 * _WARPS // _M
_PAST = 4  # samples that are looked back on at a time; divides _Q


def run_chunk(
    layers: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor,
    rates: Tensor,
    outputs: Tensor,
    inner: Tensor,
    labels: Tensor,
    deltas: Tensor,
    losses: Tensor,
    size: int,
) -> None:
    """Take the steps of a chunk; `layers`, `bias`, `deltas` and `losses` are written.

    Args:
        layers: weight (rows, out, in) and bias (rows, out) of two or three layers after the first.
        bias: of the first layer, (rows, width).
        rates: learning rates, (rows,).
        outputs: what the first weight makes of the samples, (rows, chunk, width).
        inner: lr times the samples' inner products, (rows, chunk, chunk).
        labels: classes, (rows, chunk).
        deltas: gradients at the first layer's output, (rows, chunk, width).
        losses: (rows, size), any stride between rows.
        size: samples in this chunk.

    Raises:
        RuntimeError: it cannot be compiled for this device; nothing was done.
    """
    rows, chunk, width = outputs.shape
    (w2, b2), *later = layers
    first, last = later[0], later[-1]
    pieces, hidden = triton.cdiv(width, _P), _power(triton.cdiv(w2.shape[1], _M))
    low = 1 << (pieces.bit_length() - 1)
    with compiling():
        _kernel[(rows,)](
            outputs,
            inner,
            deltas,
            labels,
            losses,
            losses.stride(0),
            rates,
            bias,
            w2,
            b2,
            *first,
            *last,
            size,
            WIDTH=width,
            HIDDEN=w2.shape[1],
            NEXT=first[0].shape[1],
            CLASSES=last[0].shape[1],
            LOW=low,
            HIGH=_power(pieces - low),
            HS=hidden * _M // _Q,
            MS=hidden,
            NS=_power(triton.cdiv(first[0].shape[1], _N)),
            CS=_power(triton.cdiv(last[0].shape[1], _M)),
            P=_P,
            Q=_Q,
            M=_M,
            N=_N,
            CHUNK=chunk,
            PAST=_PAST,
            DEEP=len(later) == 2,
            num_warps=_WARPS,
        )


@contextmanager
def compiling() -> Iterator[None]:
    """If a kernel cannot be compiled: a RuntimeError, before anything was done."""
    try:
        yield
    except TritonError as error:
        raise RuntimeError(str(error) or type(error).__name__) from error


def _power(pieces: int) -> int:
    return 1 << max(0, pieces - 1).bit_length()


@triton.jit
@no_type_check  # tests wrap what is checked, and no kernel survives that
def _places(LENGTH: tl.constexpr, PIECES: tl.constexpr):
    """Places of a vector's numbers, (LENGTH, PIECES).

    Triton lays threads along the axis of which it knows that it is contiguous in memory; here it
    shall know of none, and take the axes in their order.
    """
    within = tl.max_contiguous(tl.arange(0, LENGTH), 1)
    return within[:, None] + LENGTH * tl.arange(0, PIECES)


@triton.jit
@no_type_check
def _sigmoid(z):
    return 1 / (1 + tl.exp2(z * -1.4426950408889634))  # fewer instructions than tl.sigmoid


@triton.jit
@no_type_check
def _at(z, i):
    """Sample i of z (Q, P, pieces)."""
    place = tl.zeros((1, z.shape[1], z.shape[2]), tl.int32) + i % z.shape[0]
    return tl.sum(tl.gather(z, place, 0), 0)


@triton.jit
@no_type_check
def _times(w, a):
    """W times a vector of pieces of P, without the sum over P: (Q, P, pieces of Q)."""
    return tl.sum(w * a[None, :, None, :], 3)


@triton.jit
@no_type_check
def _back(w, d):
    """W' times a vector of pieces of Q."""
    return tl.sum(tl.sum(w * d[:, None, :, None], 2), 0)


@triton.jit
@no_type_check
def _moved(w, d, a):
    return w - d[:, None, :, None] * a[None, :, None, :]


@triton.jit
@no_type_check
def _flat_sum(x):
    """The sum over P of x (Q, P, pieces), (1, Q * pieces): one number for a thread.

    As a product with ones: `tl.sum` would give every thread all of them, and with them the work
    on each.
    """
    P: tl.constexpr = x.shape[1]
    FLAT: tl.constexpr = x.shape[0] * x.shape[2]
    ones = tl.full((1, P), 1.0, tl.float32)
    return tl.dot(ones, tl.reshape(tl.permute(x, (1, 2, 0)), (P, FLAT)), input_precision="ieee")


@triton.jit(do_not_specialize=["loss_stride", "size"])
@no_type_check
def _kernel(
    outputs, inner, deltas, labels, losses, loss_stride, rates, bias,
    w2, b2, w3, b3, w4, b4, size,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, NEXT: tl.constexpr, CLASSES: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, HS: tl.constexpr, MS: tl.constexpr,
    NS: tl.constexpr, CS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CHUNK: tl.constexpr, PAST: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    outputs += row * CHUNK * WIDTH
    deltas += row * CHUNK * WIDTH
    inner += row * CHUNK * CHUNK
    labels += row * CHUNK
    losses += row * loss_stride
    bias += row * WIDTH
    rate = tl.load(rates + row)
    s, r = tl.max_contiguous(tl.arange(0, Q), 1), tl.arange(0, M)  # samples, on either grid
    ea, eb, h = _places(P, LOW), P * LOW + _places(P, HIGH), _places(Q, HS)
    m, n, c, flat = _places(M, MS), _places(N, NS), _places(M, CS), tl.arange(0, Q * HS)[None, :]
    in_a, in_b, in_h, in_n, in_c = ea < WIDTH, eb < WIDTH, h < HIDDEN, n < NEXT, c < CLASSES
    at_2 = w2 + row * HIDDEN * WIDTH + h[:, None, :, None] * WIDTH
    at_2a, at_2b = at_2 + ea[None, :, None, :], at_2 + eb[None, :, None, :]
    in_2a = in_h[:, None, :, None] & in_a[None, :, None, :]
    in_2b = in_h[:, None, :, None] & in_b[None, :, None, :]
    at_3 = w3 + row * NEXT * HIDDEN + n[None, :, None, :] * HIDDEN + m[:, None, :, None]
    in_3 = (m < HIDDEN)[:, None, :, None] & in_n[None, :, None, :]
    at_b2, at_b3 = b2 + row * HIDDEN + flat, b3 + row * NEXT + n
    none = -float("inf")  # as the bias of what is not there: then its sigmoid and delta are zero
    ba = tl.load(bias + ea, mask=in_a, other=none)
    bb = tl.load(bias + eb, mask=in_b, other=none)
    w2a = tl.load(at_2a, mask=in_2a, other=0.0)
    w2b = tl.load(at_2b, mask=in_2b, other=0.0)
    own_2 = tl.load(at_b2, mask=flat < HIDDEN, other=none)
    own_w3 = tl.load(at_3, mask=in_3, other=0.0)
    own_3 = tl.load(at_b3, mask=in_n, other=none)
    if DEEP:
        at_4 = w4 + row * CLASSES * NEXT + c[:, None, :, None] * NEXT + n[None, :, None, :]
        in_4, at_b4 = in_c[:, None, :, None] & in_n[None, :, None, :], b4 + row * CLASSES + c
        own_w4 = tl.load(at_4, mask=in_4, other=0.0)
        own_4 = tl.load(at_b4, mask=in_c, other=none)
    first = 0
    while first < size:
        count = min(size - first, Q)
        is_there = s < count
        there = is_there[:, None, None]
        at_z, in_za, in_zb = (first + s)[:, None, None] * WIDTH, there & in_a, there & in_b
        za = tl.load(outputs + at_z + ea, mask=in_za, other=0.0) + ba
        zb = tl.load(outputs + at_z + eb, mask=in_zb, other=0.0) + bb
        j = 0
        while j < first:
            past = j + tl.arange(0, PAST)
            at_g = inner + (first + s)[:, None] * CHUNK + past
            g = tl.load(at_g, mask=is_there[:, None], other=0.0)[:, None, None, :]
            at = deltas + past * WIDTH + tl.zeros((Q, 1, 1, 1), tl.int32)
            da = tl.load(at + ea[:, :, None], mask=in_a[:, :, None], other=0.0)
            db = tl.load(at + eb[:, :, None], mask=in_b[:, :, None], other=0.0)
            za -= tl.sum(g * da, 3)
            zb -= tl.sum(g * db, 3)
            j += PAST
        squares = tl.zeros((M, N, NS), tl.float32)
        i = 0
        while i < count:
            k = first + i
            here, later = (s == i)[:, None, None], is_there & (s > i)
            label = tl.load(labels + k)
            g = tl.load(inner + k * CHUNK + first + s, mask=later, other=0.0)
            g = tl.where(later, g + rate, 0.0)[:, None, None]  # the bias moves, too
            aa, ab = _sigmoid(_at(za, i)), _sigmoid(_at(zb, i))
            flat_a2 = _sigmoid(_flat_sum(_times(w2a, aa) + _times(w2b, ab)) + own_2)
            a2 = tl.trans(tl.reshape(flat_a2, (MS, M)))
            a3 = _sigmoid(_back(own_w3, a2) + own_3)
            if DEEP:
                a4 = _sigmoid(tl.sum(_times(own_w4, a3), 1) + own_4)
                off = a4 - tl.where(c == label, 1.0, 0.0)
                d4 = off * a4 * (1 - a4)
                d3 = _back(own_w4, d4) * a3 * (1 - a3)
                own_w4 = _moved(own_w4, d4, rate * a3)
                own_4 -= rate * d4
                tl.store(losses + k, tl.sum(tl.sum(off * off, 1), 0) / 2)
            else:
                off = a3 - tl.where(n == label, 1.0, 0.0)
                d3 = off * a3 * (1 - a3)
                squares = tl.where((r == i)[:, None, None], off * off, squares)  # summed later
            flat_d2 = _flat_sum(_times(own_w3, d3)) * flat_a2 * (1 - flat_a2)
            d2 = tl.trans(tl.reshape(flat_d2, (HS, Q)))
            da = _back(w2a, d2) * aa * (1 - aa)
            db = _back(w2b, d2) * ab * (1 - ab)
            own_w3 = _moved(own_w3, a2, rate * d3)
            own_3 -= rate * d3
            w2a = _moved(w2a, d2, rate * aa)
            w2b = _moved(w2b, d2, rate * ab)
            own_2 -= rate * flat_d2
            za = tl.where(here, da, za - g * da)
            zb = tl.where(here, db, zb - g * db)
            i += 1
        if not DEEP:
            tl.store(losses + first + r, tl.sum(tl.sum(squares, 2), 1) / 2, mask=r < count)
        tl.store(deltas + at_z + ea, za, mask=in_za)
        tl.store(deltas + at_z + eb, zb, mask=in_zb)
        ba -= rate * tl.sum(tl.where(there, za, 0.0), 0)
        bb -= rate * tl.sum(tl.where(there, zb, 0.0), 0)
        tl.debug_barrier()  # the next samples read these
        first += Q
    tl.store(bias + ea, ba, mask=in_a)
    tl.store(bias + eb, bb, mask=in_b)
    tl.store(at_2a, w2a, mask=in_2a)
    tl.store(at_2b, w2b, mask=in_2b)
    tl.store(at_b2, own_2, mask=flat < HIDDEN)
    tl.store(at_3, own_w3, mask=in_3)
    tl.store(at_b3, own_3, mask=in_n)
    if DEEP:
        tl.store(at_4, own_w4, mask=in_4)
        tl.store(at_b4, own_4, mask=in_c)

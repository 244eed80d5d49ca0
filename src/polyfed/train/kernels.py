"""A chunk of steps as one kernel: sigmoid networks, plain SGD, one sample at a time, on a GPU.

One program for each network keeps the layers after the first in registers through all samples of a
chunk, so that nothing but the chunk's own numbers is read or written meanwhile. What it is given
and what it leaves is that of `deferred`:

    z_k = o_k - sum_{j<k} g_kj delta_j + b       the first layer's output, its updates put off
    a = s(z), h = s(W2 a + b2), ..., p = s(W h + b), loss 1/2 |p - e_y|^2
    every weight and bias but the first layer's weight moves by -lr times its gradient

Symbols of code: o = outputs, g = inner (with lr), delta = deltas, s = the sigmoid. The first
layer's width is cut in two, because blocks are powers of two and 300 would become 512.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, possibly-undefined, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

_WARPS = 16
_PAST = 16  # samples that are looked back on at a time


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
    low = 1 << (width.bit_length() - 1)
    try:
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
            HIGH=_block(width - low),
            BLOCK=_block(w2.shape[1]),
            NEXT_BLOCK=_block(first[0].shape[1]),
            CLASS_BLOCK=_block(last[0].shape[1]),
            CHUNK=chunk,
            PAST=_PAST,
            DEEP=len(later) == 2,
            num_warps=_WARPS,
        )
    except TritonError as error:
        raise RuntimeError(str(error) or type(error).__name__) from error


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def _moved(w, rate, delta, a):
    return w - (rate * delta)[:, None] * a[None, :]


@triton.jit
def _kernel(
    outputs, inner, deltas, labels, losses, loss_stride, rates, bias,
    w2, b2, w3, b3, w4, b4, size,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, NEXT: tl.constexpr, CLASSES: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr, NEXT_BLOCK: tl.constexpr,
    CLASS_BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAST: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    outputs += row * CHUNK * WIDTH
    deltas += row * CHUNK * WIDTH
    inner += row * CHUNK * CHUNK
    labels += row * CHUNK
    losses += row * loss_stride
    rate = tl.load(rates + row)
    ea, eb, h = tl.arange(0, LOW), LOW + tl.arange(0, HIGH), tl.arange(0, BLOCK)
    n, c, past = tl.arange(0, NEXT_BLOCK), tl.arange(0, CLASS_BLOCK), tl.arange(0, PAST)
    in_b, in_h, in_n, in_c = eb < WIDTH, h < HIDDEN, n < NEXT, c < CLASSES
    at_a, at_b = bias + row * WIDTH + ea, bias + row * WIDTH + eb
    at_2 = w2 + row * HIDDEN * WIDTH + h[:, None] * WIDTH
    at_2a, at_2b = at_2 + ea[None, :], at_2 + eb[None, :]
    in_2a, in_2b = in_h[:, None] & (ea < WIDTH)[None, :], in_h[:, None] & in_b[None, :]
    at_3 = w3 + row * NEXT * HIDDEN + n[:, None] * HIDDEN + h[None, :]
    in_3 = in_n[:, None] & in_h[None, :]
    at_b2, at_b3 = b2 + row * HIDDEN + h, b3 + row * NEXT + n
    ba, bb = tl.load(at_a), tl.load(at_b, mask=in_b, other=0.0)
    w2a = tl.load(at_2a, mask=in_2a, other=0.0)
    w2b = tl.load(at_2b, mask=in_2b, other=0.0)
    own_2 = tl.load(at_b2, mask=in_h, other=0.0)
    own_w3 = tl.load(at_3, mask=in_3, other=0.0)
    own_3 = tl.load(at_b3, mask=in_n, other=0.0)
    if DEEP:
        at_4 = w4 + row * CLASSES * NEXT + c[:, None] * NEXT + n[None, :]
        in_4, at_b4 = in_c[:, None] & in_n[None, :], b4 + row * CLASSES + c
        own_w4 = tl.load(at_4, mask=in_4, other=0.0)
        own_4 = tl.load(at_b4, mask=in_c, other=0.0)
    k = 0
    while k < size:
        za = tl.load(outputs + k * WIDTH + ea) + ba
        zb = tl.load(outputs + k * WIDTH + eb, mask=in_b, other=0.0) + bb
        j = 0
        while j < k:
            at = j + past
            before = at < k
            g = tl.load(inner + k * CHUNK + at, mask=before, other=0.0)[:, None]
            at_past = deltas + at[:, None] * WIDTH
            in_past = before[:, None] & in_b[None, :]
            za -= tl.sum(g * tl.load(at_past + ea[None, :], mask=before[:, None], other=0.0), 0)
            zb -= tl.sum(g * tl.load(at_past + eb[None, :], mask=in_past, other=0.0), 0)
            j += PAST
        aa, ab = tl.sigmoid(za), tl.where(in_b, tl.sigmoid(zb), 0.0)
        z2 = tl.sum(w2a * aa[None, :], 1) + tl.sum(w2b * ab[None, :], 1) + own_2
        a2 = tl.where(in_h, tl.sigmoid(z2), 0.0)
        a3 = tl.where(in_n, tl.sigmoid(tl.sum(own_w3 * a2[None, :], 1) + own_3), 0.0)
        label = tl.load(labels + k)
        if DEEP:
            a4 = tl.where(in_c, tl.sigmoid(tl.sum(own_w4 * a3[None, :], 1) + own_4), 0.0)
            off = a4 - tl.where(c == label, 1.0, 0.0)
            d4 = off * a4 * (1 - a4)
            d3 = tl.sum(own_w4 * d4[:, None], 0) * a3 * (1 - a3)
            own_w4 = _moved(own_w4, rate, d4, a3)
            own_4 -= rate * d4
        else:
            off = a3 - tl.where(n == label, 1.0, 0.0)
            d3 = off * a3 * (1 - a3)
        tl.store(losses + k, tl.sum(off * off, 0) / 2)
        d2 = tl.sum(own_w3 * d3[:, None], 0) * a2 * (1 - a2)
        da = tl.sum(w2a * d2[:, None], 0) * aa * (1 - aa)
        db = tl.sum(w2b * d2[:, None], 0) * ab * (1 - ab)
        own_w3 = _moved(own_w3, rate, d3, a2)
        own_3 -= rate * d3
        w2a = _moved(w2a, rate, d2, aa)
        w2b = _moved(w2b, rate, d2, ab)
        own_2 -= rate * d2
        ba -= rate * da
        bb -= rate * db
        tl.store(deltas + k * WIDTH + ea, da)
        tl.store(deltas + k * WIDTH + eb, db, mask=in_b)
        tl.debug_barrier()  # the next sample reads these
        k += 1
    tl.store(at_a, ba)
    tl.store(at_b, bb, mask=in_b)
    tl.store(at_2a, w2a, mask=in_2a)
    tl.store(at_2b, w2b, mask=in_2b)
    tl.store(at_b2, own_2, mask=in_h)
    tl.store(at_3, own_w3, mask=in_3)
    tl.store(at_b3, own_3, mask=in_n)
    if DEEP:
        tl.store(at_4, own_w4, mask=in_4)
        tl.store(at_b4, own_4, mask=in_c)

"""`kernels.run_chunk` against autograd, sample by sample; prints the largest difference.

Run by test_kernels.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.random import stream
from polyfed.train.kernels import run_chunk

ROWS, SIZE, CHUNK, FIRST = 3, 37, 64, 2


def literal(
    tensors: list[Tensor], rates: Tensor, x: Tensor, y: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Every parameter after SIZE steps, and the losses, in float64."""
    moving, losses = [t.double() for t in tensors], []
    for k in range(SIZE):
        moving = [t.detach().requires_grad_() for t in moving]
        h = x[:, k].double()
        for weight, bias in zip(moving[::2], moving[1::2], strict=True):
            h = torch.sigmoid(torch.einsum("roi,ri->ro", weight, h) + bias)
        wanted = functional.one_hot(y[:, k], h.shape[1])
        loss = (h - wanted).square().sum(1) / 2
        gradients = torch.autograd.grad(loss.sum(), moving)
        losses.append(loss.detach())
        steps = [rates.double().view(-1, *[1] * (t.dim() - 1)) for t in moving]
        moving = [t - s * g for t, s, g in zip(moving, steps, gradients, strict=True)]
    return moving, torch.stack(losses, 1)


def main() -> None:
    """Compare."""
    draw = stream(0, "chunk")
    widths = [int(width) for width in sys.argv[1].split("-")]
    weights = [torch.randn(ROWS, o, i, generator=draw) / i**0.5 for i, o in pairwise(widths)]
    biases = [torch.randn(ROWS, width, generator=draw) / 10 for width in widths[1:]]
    own = [t for pair in zip(weights, biases, strict=True) for t in pair]
    x = torch.rand(ROWS, SIZE, widths[0], generator=draw)
    y = torch.randint(widths[-1], (ROWS, SIZE), generator=draw)
    rates = torch.tensor([0.1, 0.5, 0.3])
    wanted, wanted_losses = literal(own, rates, x, y)

    # what is not of this chunk is not a number: nobody may use it
    outputs, deltas = (torch.full((ROWS, CHUNK, widths[1]), torch.nan) for _ in range(2))
    outputs[:, :SIZE] = x @ weights[0].mT
    inner = torch.full((ROWS, CHUNK, CHUNK), torch.nan)
    inner[:, :SIZE, :SIZE] = rates[:, None, None] * (x @ x.mT)
    labels = torch.zeros(ROWS, CHUNK, dtype=torch.int64)
    labels[:, :SIZE] = y
    losses = torch.ones(ROWS, 3 * CHUNK)
    run_chunk(
        list(zip(weights[1:], biases[1:], strict=True)),
        biases[0],
        rates,
        outputs,
        inner,
        labels,
        deltas,
        losses[:, FIRST : FIRST + SIZE],
        SIZE,
    )
    assert deltas[:, SIZE:].isnan().all()
    weights[0] = own[0] = weights[0] - (deltas[:, :SIZE] * rates[:, None, None]).mT @ x
    found = losses[:, FIRST : FIRST + SIZE].clone()
    losses[:, FIRST : FIRST + SIZE] = 1
    pairs = [*zip(own, wanted, strict=True), (found, wanted_losses), (losses, torch.tensor(1))]
    print(float(torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max()))


if __name__ == "__main__":
    main()

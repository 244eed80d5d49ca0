"""BatchNorm of a stack: the rows are normalised each by itself (Ioffe and Szegedy, 2015).

    m, v = mean and variance of a channel over the samples and places of a row's batch, n in all
    y = w (x - m) / sqrt(v + eps) + b
    running mean <- (1 - a) itself + a m,   running variance <- (1 - a) itself + a v n / (n - 1)

What follows in residual networks is done with it, where a network asks for it by `rectified`:

    y <- max(y + what lies beside, 0)

Rows of unequal size have samples in their batches that do not count: m, v and n are of those that
do. What a row keeps, its running mean and variance, is changed in place.
On a GPU each direction is one kernel (`norm_kernels`); vmap would make many of it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

Normed = tuple[Tensor, Tensor, Tensor]  # y, m and 1 / sqrt(v + eps)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    inside: Tensor | None = None,
    beside: Tensor | None = None,
    rectify: bool = False,
) -> Tensor:
    """`functional.batch_norm` while a network trains; only inside a `vmap` over rows.

    Args:
        x: the batch of a row, (samples, channels, ...).
        running_mean: what is kept of the mean, by channel, if it is kept.
        running_var: and of the variance.
        weight: w, by channel; else 1.
        bias: b; else 0.
        momentum: a.
        eps: as above.
        inside: 1 for samples that count, else 0; without it all do.
        beside: is added to y.
        rectify: whether only what is positive is left of that.

    Raises:
        NotImplementedError: there is no stack, or one of stacks.
        ValueError: a channel has a single number, as torch has it.
    """
    if x[:, :1].numel() == 1:
        raise ValueError("BatchNorm needs more than one number of a channel while it trains.")
    w = x.new_ones(x.shape[1]) if weight is None else weight
    b = x.new_zeros(x.shape[1]) if bias is None else bias
    kept = running_mean, running_var
    y, _, _ = _normed(x, w, b, *kept, inside, momentum, eps, beside, rectify)
    return y


def rectified(norm: nn.Module, x: Tensor, beside: Tensor | None = None) -> Tensor:
    """`relu(norm(x) + beside)`, of which a stack makes one step; for any network.

    >>> norm = nn.BatchNorm1d(1, eps=0).eval()
    >>> rectified(norm, torch.tensor([[-3.0], [2.0]]), torch.ones(2, 1)).tolist()
    [[0.0], [3.0]]
    """
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(rectified, (x,), norm, x, beside)
        return found
    y = norm(x)
    return functional.relu(y if beside is None else y + beside)


class _Normed(torch.autograd.Function):
    """The same, of a stack: x is (rows, samples, channels, ...), the others (rows, channels)."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        kept_mean: Tensor | None,
        kept_variance: Tensor | None,
        inside: Tensor | None,
        momentum: float,
        eps: float,
        beside: Tensor | None,
        rectify: bool,
    ) -> Normed:
        """Normalise, and note the statistics."""
        if weight.dim() != 2:
            raise NotImplementedError("BatchNorm of rows is for a stack of them.")
        given = x, weight, bias, kept_mean, kept_variance, inside, momentum, eps, beside, rectify
        kernels = _kernels(x)
        found: Normed = forward(*given) if kernels is None else kernels.forward(*given)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Normed) -> None:
        """Statistics are wanted again, and are not for others."""
        x, weight, _, _, _, inside, _, _, beside, rectify = inputs
        y, mean, root = output
        ctx.mark_non_differentiable(mean, root)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, root, inside, y if rectify else None)
        ctx.is_beside = beside is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Through y, m and v."""
        kernels = _kernels(ctx.saved_tensors[0])
        how = backward if kernels is None else kernels.backward
        *back, of_beside = how(pull, *ctx.saved_tensors)
        return *back, *[None] * 5, of_beside if ctx.is_beside else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Normed, tuple[int, int, int]]:
        """Make the stack; what is the same in all rows is made one of each."""
        rows = [
            each
            if not isinstance(each, Tensor)
            else each.expand(info.batch_size, *each.shape)
            if at is None
            else each.movedim(at, 0)
            for each, at in zip(given, in_dims, strict=True)
        ]
        return _normed(*rows), (0, 0, 0)


_normed: Callable[..., Normed] = _Normed.apply


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
) -> Normed:
    """Of a stack, by torch."""
    flat, counts, n = _flat(x, inside)
    mean = (flat * counts).sum((1, 3)) / n
    apart = flat - mean[:, None, :, None]
    variance = (apart.square() * counts).sum((1, 3)) / n
    root = (variance + eps).rsqrt()
    y = apart * (root * weight)[:, None, :, None] + bias[:, None, :, None]
    if kept_mean is not None:
        kept_mean.lerp_(mean, momentum)
    if kept_variance is not None:
        kept_variance.lerp_(variance * (n / (n - 1).clamp(min=1)), momentum)
    y = y.view(x.shape) if beside is None else y.view(x.shape) + beside
    return y.clamp(min=0) if rectify else y, mean, root


def backward(
    pull: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    root: Tensor,
    inside: Tensor | None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w and b of a stack, and of what lies beside, by torch.

    With y, of which only what is positive was left, g is that of the others 0; else all of it:

    dL/dx = w / s (g - [counts] (sum g + z sum g z) / n),  z = (x - m) / s,  s = sqrt(v + eps)
    """
    flat, counts, n = _flat(x, inside)
    z = (flat - mean[:, None, :, None]) * root[:, None, :, None]
    g = pull.reshape(flat.shape)
    if y is not None:
        g = g * (y.reshape(flat.shape) > 0)
    of_bias, of_weight = g.sum((1, 3)), (g * z).sum((1, 3))
    shared = (of_bias / n)[:, None, :, None] + z * (of_weight / n)[:, None, :, None]
    of_x = (g - counts * shared) * (weight * root)[:, None, :, None]
    return of_x.view(x.shape), of_weight, of_bias, g.view(x.shape)


def _flat(x: Tensor, inside: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The batches as (rows, samples, channels, places), what counts, and how much that is."""
    flat = x.reshape(*x.shape[:3], -1)
    counts = x.new_ones(*x.shape[:2]) if inside is None else inside.to(x.dtype)
    n = (counts.sum(1, keepdim=True) * flat.shape[3]).clamp(min=1)  # a row that is done has none
    return flat, counts[:, :, None, None], n


def _kernels(x: Tensor) -> Any:
    """The module of kernels for such a batch, if they can be used; who has no GPU need not."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or find_spec("triton") is None:
        return None
    from polyfed.train import norm_kernels

    return norm_kernels

"""Plain SGD one sample at a time on a CPU, for networks of sigmoids: the same steps, written out.

By autograd such a step is many small operators, which take longer to call than to compute. Here it
is a few calls of numpy and BLAS. The first layer, which sees the data, moves at the end of a chunk
of samples: see `deferred`, whose formulas these are,

    z_k = W x_k + b - sum_{j<k} (x_j . x_k + 1) e_j        e = lr times the gradient at z
    a = s(z), h = s(W2 a + b2), ..., p = s(W h + b), loss 1/2 |p - t|^2

with the bias counted as a weight of an input 1. Symbols of code: s = sigmoid, e = move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Split
from polyfed.core.model import Model
from polyfed.core.phase import Phase, SquaredError

SHAPES = (nn.Flatten, nn.Identity)  # modules that leave the data as they are
_CHUNK = 64
_KINDS = {torch.float32, torch.float64}
Array = NDArray[Any]


def can_write_out(model: Model, phase: Phase, split: Split) -> bool:
    """Whether a phase is of plain SGD on single samples, of a network whose steps are written out.

    The squared error, layers that are sigmoids with biases, at least two of them, all of them
    moving; on a CPU.
    """
    sgd = phase.optimiser
    if (
        type(phase.objective) is not SquaredError
        or phase.batch_size(len(split)) != 1
        or sgd.name != "sgd"
        or sgd.momentum + sgd.weight_decay
        or split.x.device.type != "cpu"
        or model.precision != "float32"
    ):
        return False
    layers = sigmoid_layers(model.net)
    own = {id(p): p for layer in layers for p in _both(layer)}
    moving = {id(p) for p in model.parameters(*(phase.parts or model.parts)) if p.requires_grad}
    kinds = {p.dtype for p in own.values()} | {split.x.dtype}
    return (
        len(layers) > 1
        and len(own) == 2 * len(layers)
        and moving == own.keys()
        and len(kinds) == 1
        and kinds <= _KINDS
        and all(p.detach().numpy().flags.carray for p in own.values())  # BLAS writes into them
        and split.x[0].numel() == layers[0].in_features
        and _are_targets(split.y, layers[-1].out_features)
    )


def _are_targets(y: Tensor | None, outputs: int) -> bool:
    """Whether these are classes, or as many numbers for each sample as there are outputs."""
    if y is None or not y.is_floating_point():
        return y is not None and y.dim() == 1
    return y[0].numel() == outputs


def sigmoid_layers(net: nn.Module) -> list[nn.Linear]:
    """The layers of a network that is linear, sigmoid, linear, sigmoid and so on; else none.

    >>> sigmoid_layers(nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Sigmoid()))
    [Linear(in_features=3, out_features=2, bias=True)]
    >>> sigmoid_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    []
    """
    plain = [m for m in net.modules() if type(m) is not nn.Sequential and type(m) not in SHAPES]
    layers = [m for m in plain[::2] if type(m) is nn.Linear and m.bias is not None]
    gates = [m for m in plain[1::2] if type(m) is nn.Sigmoid]
    return layers if len(layers) == len(gates) and 2 * len(layers) == len(plain) else []


class BySample:
    """The steps of one node; ask `can_write_out` first."""

    def __init__(self, net: nn.Module, phase: Phase) -> None:
        from scipy.linalg.blas import dger, sger  # here: importing takes a quarter of a second
        from scipy.special import expit

        self.first, *later = sigmoid_layers(net)
        self.layers = [tuple(p.detach().numpy() for p in _both(layer)) for layer in later]
        self.rate, self.sigmoid = phase.optimiser.lr, expit
        self.outer = sger if self.first.weight.dtype == torch.float32 else dger

    @torch.no_grad()
    def train(self, x: Tensor, y: Tensor, order: Tensor) -> Tensor:
        """A step for each sample that is named, in this order; the losses before them."""
        losses = [self._chunk(x[part].flatten(1), y[part]) for part in order.split(_CHUNK)]
        return torch.from_numpy(np.concatenate(losses))

    def _chunk(self, x: Tensor, y: Tensor) -> Array:
        weight, bias = self.first.weight, self.first.bias
        z = torch.addmm(bias, x, weight.T)
        inner, targets = (x @ x.T + 1).numpy(), self._targets(y, x.dtype)
        with np.errstate(all="ignore"), _blas().limit(limits=1, user_api="blas"):
            losses = self._steps(z.numpy(), inner, targets)
        moves = z  # `_steps` leaves them in its place
        weight.addmm_(moves.T, x, alpha=-1)
        bias.sub_(moves.sum(0))
        return losses

    def _targets(self, y: Tensor, dtype: torch.dtype) -> Array:
        """A vector for each sample: its own, or one-hot by its class."""
        if not y.is_floating_point():
            y = functional.one_hot(y, self.layers[-1][1].size)
        found: Array = y.to(dtype).reshape(len(y), -1).numpy()
        return found

    def _steps(self, z: Array, inner: Array, targets: Array) -> Array:
        """Take the steps; the later layers are written, and the first one's moves in z's place."""
        sigmoid, losses = self.sigmoid, np.empty(len(z), z.dtype)
        for k, target in enumerate(targets):
            a = z[k]
            if k:
                a -= np.dot(inner[k, :k], z[:k])
            ins: list[Array] = [sigmoid(a)]
            for weight, bias in self.layers:
                ins.append(sigmoid(np.dot(weight, ins[-1]) + bias))
            out = ins.pop()
            off = out - target
            losses[k] = np.dot(off, off) / 2
            move = off * self.rate
            move *= out * (1 - out)
            for (weight, bias), a in zip(reversed(self.layers), reversed(ins), strict=True):
                back = np.dot(move, weight)
                self.outer(-1, a, move, a=weight.T, overwrite_a=1)  # weight -= move a'
                bias -= move
                move = back
                move *= a * (1 - a)
            z[k] = move
        return losses


def _both(layer: nn.Linear) -> Sequence[Tensor]:
    return layer.weight, layer.bias


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """Its threads: for vectors this short one is best, as waking others takes longer."""
    return ThreadpoolController()

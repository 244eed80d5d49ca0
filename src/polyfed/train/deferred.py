"""Plain SGD one sample at a time, with the updates of the first layer put off: the same numbers.

The first layer sees the data, which do not change: after samples j < k its weight is
W - sum_j lr delta_j x_j', so its output for sample k is

    W x_k - sum_j lr (x_j . x_k) delta_j

with delta_j the gradient at its output for sample j. For a chunk of samples all W x_k and all inner
products are two matrix products; each step then moves only the later layers, and W moves at the end
of the chunk by a third. The first layer of 784-300-100-10 has nine tenths of the weights, and one
sample at a time, reading and writing them is what takes the time. On a GPU the steps of a chunk are
one kernel where the network is of sigmoids (`kernels`): then the later layers stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.core.phase import CrossEntropy, SquaredError
from polyfed.errors import first_line
from polyfed.train.by_sample import SHAPES, sigmoid_layers
from polyfed.train.stepper import StackedLayers, Stepper
from polyfed.train.track import Tensors

if TYPE_CHECKING:
    from polyfed.train.cohort import Cohort

_CHUNK = 64
_WIDE = 4 * _CHUNK  # inputs from which it pays: below, the inner products cost as much
_MOST_HELD = 48 << 10  # weights of one layer that fit into registers


def can_defer(cohort: Cohort) -> bool:
    """Whether a cohort trains by plain SGD, one sample at a time, from a wide linear layer on."""
    first = first_layer(cohort.loss.net)
    return (
        first is not None
        and first.in_features >= _WIDE
        and cohort.loss.model.precision == "float32"
        and type(cohort.phase.objective) in (CrossEntropy, SquaredError)
        and all(t.course.sizes[0] == 1 and t.split.y is not None for t in cohort.rows)
        and all(s.name == "sgd" and not s.momentum + s.weight_decay for s in cohort.settings)
        and _name_of(first.weight, cohort.loss.net) in cohort.moving
    )


def first_layer(net: nn.Module) -> nn.Linear | None:
    """The linear layer that sees the data, if that is what the network begins with.

    >>> first_layer(nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Sigmoid()))
    Linear(in_features=3, out_features=2, bias=True)
    >>> first_layer(nn.Sequential(nn.Dropout(), nn.Linear(3, 2)))
    """
    if type(net) is nn.Sequential:
        later = (child for child in net if not isinstance(child, SHAPES))
        child = next(later, None)
        return None if child is None else first_layer(child)
    return net if type(net) is nn.Linear else None


def can_fuse(cohort: Cohort) -> bool:
    """Whether a cohort that can be deferred is of networks for which there is a kernel."""
    layers, moving = sigmoid_layers(cohort.loss.net), cohort.moving
    return (
        cohort.graph
        and find_spec("triton") is not None
        and type(cohort.phase.objective) is SquaredError
        and all(_are_classes(t.split.y) for t in cohort.rows)
        and len(layers) in (3, 4)
        and all(t.dtype == torch.float32 for t in moving.values())
        and all(name in moving for name, _ in cohort.loss.net.named_parameters())
        and layers[1].weight.numel() <= _MOST_HELD
        and all(layer.weight.numel() <= _MOST_HELD // 8 for layer in layers[2:])
    )


class DeferredStepper(Stepper):
    """Steps of all rows, chunk by chunk."""

    can_leave_out = False

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        layer = first_layer(cohort.loss.net)
        if layer is None or self.pool.y is None:
            raise ValueError("these rows cannot be deferred; ask `can_defer` first.")
        self.name = _name_of(layer.weight, cohort.loss.net)
        self.chunk = _CHUNK
        weight, shape = cohort.moving[self.name].detach(), (len(self.tracks), self.chunk)
        self.rates = weight.new_tensor([t.job.phase.optimiser.lr for t in self.tracks])[
            :, None, None
        ]
        self.outputs = weight.new_zeros(*shape, layer.out_features)
        self.deltas = torch.zeros_like(self.outputs)
        self.inner = weight.new_zeros(*shape, self.chunk)  # lr x_j . x_k
        self.labels = self.pool.y.new_zeros(*shape, *self.pool.y.shape[1:])
        self.blank = weight.new_zeros(1, *self.pool.x.shape[1:])
        self.within = torch.zeros_like(self.at)

    def _run(self, widths: Sequence[int]) -> None:
        self.at.zero_()
        for first in range(0, len(widths), self.chunk):
            size = min(self.chunk, len(widths) - first)
            x = self._open(first, size)
            self._take(first, widths[first : first + size])
            weight = self.cohort.moving[self.name].detach()
            weight.baddbmm_((self.deltas[:, :size] * self.rates).mT, x, alpha=-1)

    def _open(self, first: int, size: int) -> Tensor:
        """Begin a chunk: its data, what W makes of them, and their inner products."""
        x, y = self.pool.take(self.index[:, first : first + size, 0])
        x = x.flatten(2)
        self.outputs[:, :size] = x @ self.cohort.moving[self.name].detach().mT
        self.inner[:, :size, :size] = self.rates * (x @ x.mT)
        if y is not None:
            self.labels[:, :size] = y
        self.deltas.zero_()
        self.within.zero_()
        return x

    def _take(self, first: int, widths: Sequence[int]) -> None:
        """The steps of a chunk."""
        self._steps(widths)

    def _step(self, width: int) -> None:
        cohort, at = self.cohort, self.within
        before = self.inner.index_select(1, at)  # of later samples the deltas are zero
        z = torch.baddbmm(self.outputs.index_select(1, at), before, self.deltas, alpha=-1)
        losses = self._losses(z.requires_grad_(), self.labels.index_select(1, at))
        others = [t for name, t in cohort.moving.items() if name != self.name]
        delta, *gradients = torch.autograd.grad(losses.sum(), [z, *others])
        self.deltas.index_copy_(1, at, delta)
        if cohort.optimisers is not None:
            own = iter(gradients)
            cohort.optimisers.step(
                [None if name == self.name else next(own) for name in cohort.moving], self.count
            )
        self.losses.index_copy_(1, self.at, losses.detach().to(self.losses.dtype).unsqueeze(1))
        self.at += 1
        self.within += 1

    def _losses(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of every row, with `z` as what its first layer's weight makes of the sample."""
        loss, blank, weight = self.cohort.loss, self.blank, self.name

        def one(own: Tensors, z: Tensor, y: Tensor) -> Tensor:
            named = {f"net.{name}": t for name, t in own.items()}
            with StackedLayers(), _Given(own[weight], z):
                found: Tensor = functional_call(loss, named, (blank, y, None))
            return found

        tensors = {**self.cohort.moving, **self.cohort.resting}
        tensors[weight] = tensors[weight].detach()
        losses: Tensor = vmap(one, randomness="different")(tensors, z, y)
        return losses


class FusedStepper(DeferredStepper):
    """The steps of a chunk as one kernel; if that cannot be made here, one after the other.

    Attributes:
        works: whether it could be made so far.
    """

    works: ClassVar[bool] = True

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort)
        layers = sigmoid_layers(cohort.loss.net)
        name = {id(p): name for name, p in cohort.loss.net.named_parameters()}
        of = {id(p): cohort.moving[name[id(p)]].detach() for layer in layers for p in _both(layer)}
        self.bias = of[id(layers[0].bias)]
        self.layers = [(of[id(layer.weight)], of[id(layer.bias)]) for layer in layers[1:]]

    def _take(self, first: int, widths: Sequence[int]) -> None:
        if self.works:
            try:
                self._launch(first, len(widths))
                return
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ImportError) as error:
                FusedStepper.works = False  # nothing was done: it says so before it begins
                text = f"no kernel for these networks here ({first_line(error)})."
                warnings.warn(text, stacklevel=2)
        super()._take(first, widths)

    def _launch(self, first: int, size: int) -> None:
        from polyfed.train.kernels import run_chunk

        run_chunk(
            self.layers,
            self.bias,
            self.rates.flatten(),
            self.outputs,
            self.inner,
            self.labels,
            self.deltas,
            self.losses[:, first : first + size],
            size,
        )


def _are_classes(y: Tensor | None) -> bool:
    return y is not None and y.dtype == torch.int64 and y.dim() == 1


def _both(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


class _Given(TorchFunctionMode):
    """A linear layer whose product of weight and input is known."""

    def __init__(self, weight: Tensor, product: Tensor) -> None:
        super().__init__()
        self.weight, self.product = weight, product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the layer with this weight; leave all else."""
        if func is functional.linear and args[1] is self.weight:
            bias = args[2] if len(args) > 2 else None
            return self.product if bias is None else self.product + bias
        return func(*args, **(kwargs or {}))


def _name_of(weight: Tensor, net: nn.Module) -> str:
    return next(name for name, p in net.named_parameters() if p is weight)

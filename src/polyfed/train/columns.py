"""Convolutions of a stack as one matrix product of what lies under the filter (im2col).

    x (batch, C, H, W)  ->  columns (batch H' W', k k C + 1)  ->  columns W'  (batch H' W', O)

The last number of a column is 1, that of a filter in W its bias: so the product adds the biases,
and its gradient sums theirs.

Stacked, a convolution with a filter per row becomes one in groups, which GPUs do badly; this is one
product for all rows, and its gradient two. The columns hold every pixel as often as filters touch
it, so it pays where they are small: with small batches, whose many small kernels take the time.
Channels come out last in memory, as the product leaves them; pooling takes them as they are. The
stack's filters have them last, too, and so have their gradients: nothing is copied for a product.
On a GPU columns and pooling are kernels of our own (`windows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.core.model import evaluating
from polyfed.core.phase import Rule
from polyfed.random import ambient
from polyfed.train.loop import training_split
from polyfed.train.track import Job

_LIMIT = 8 << 20  # bytes of the columns of one row's batch
_UNKEPT = 8  # times as many without gradients, where they are let go at once
_DEVICES = ("cuda",)  # a CPU's own convolutions in groups are faster
_WIDE = 4  # numbers that products read at once: widths are multiples of it
_PICTURES = 4  # from so many times as many places as filters on, every picture has its product
_CONVOLUTIONS = tuple(
    getattr(functional, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)
)

Pair = int | tuple[int, ...]


class Window(NamedTuple):
    """What a filter sees at once: height and width of each."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Window:
        """Of a layer with filters (O, C, height, width)."""
        return cls(
            as_pair(tuple(weight.shape[2:])), as_pair(stride), as_pair(padding), as_pair(dilation)
        )

    def places(self, sides: Sequence[int]) -> tuple[int, int]:
        """How often it fits in the height and in the width of a picture."""
        high, wide = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(sides, *self, strict=True)
        )
        return high, wide


_PIXEL = Window((1, 1), (1, 1), (0, 0), (1, 1))


@lru_cache
def seeing(window: Window, sides: tuple[int, ...]) -> tuple[Window, tuple[slice, slice]]:
    """A window without the lines and columns that see nothing but padding, and which it has left.

    As where a filter of three by three, with padding, lies on a picture of one pixel.

    >>> seeing(Window((3, 3), (1, 1), (1, 1), (1, 1)), (1, 2))
    (Window(size=(1, 3), stride=(1, 1), padding=(0, 1), dilation=(1, 1)), (slice(1, 2, None), ...
    """
    places = window.places(sides)
    left, padding = list[slice](), list[int]()
    for n, count, k, s, p, d in zip(sides, places, *window, strict=True):
        sees = [i for i in range(k) if any(0 <= j * s + i * d - p < n for j in range(count))]
        left.append(slice(sees[0], sees[-1] + 1) if sees else slice(0, k))
        padding.append(p - left[-1].start * d if sees else p)
    height, width = (own.stop - own.start for own in left)
    less = window._replace(size=(height, width), padding=(padding[0], padding[1]))
    if min(padding) < 0 or less.places(sides) != places:
        return window, (slice(0, window.size[0]), slice(0, window.size[1]))
    return less, (left[0], left[1])


def by_columns(x: Tensor, *others: Any, **named: Any) -> bool:
    """Whether `conv2d` is to be computed by columns; takes what `functional.conv2d` takes."""
    kind = x.device.type
    limit = _LIMIT if torch.is_grad_enabled() else _LIMIT * _UNKEPT
    is_due = kind in _DEVICES and not torch.is_autocast_enabled(kind)
    return is_due and column_bytes(x, *others, **named) <= limit


def column_bytes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> float:
    """What the columns of a convolution take; infinite if it cannot be computed by them.

    >>> column_bytes(torch.zeros(10, 32, 14, 14), torch.zeros(64, 32, 5, 5))
    3200000
    """
    if groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return math.inf
    places = Window.of(weight, stride, padding, dilation).places(x.shape[2:])
    return x.element_size() * len(x) * math.prod(places) * math.prod(weight.shape[1:])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """`functional.conv2d` by columns, where `column_bytes` says how many."""
    window = Window.of(weight, stride, padding, dilation)
    (height, width), batch, out = window.places(x.shape[2:]), len(x), len(weight)
    columns, filters = _factors(x, weight, bias, window)
    if height * width >= _PICTURES * out:  # a long sum for small filters: more, shorter ones
        product = _product(columns, filters.mT.expand(batch, -1, -1))
    else:
        product = _product(columns.flatten(0, 1), filters.mT)
    return product.view(batch, height, width, out).permute(0, 3, 1, 2)


def _factors(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window
) -> tuple[Tensor, Tensor]:
    """Columns (batch, places, width) and filters (O, width)."""
    window, (lines, pixels) = seeing(window, tuple(x.shape[2:]))
    own = weight.permute(0, 2, 3, 1)[:, lines, pixels]
    parts, kernels = [own.flatten(1)], _kernels(x)
    if bias is not None:
        parts.append(bias[:, None])
    numbers = parts[0].shape[1] + (bias is not None)
    width = numbers if kernels is None else -(-numbers // _WIDE) * _WIDE
    if width > numbers:
        parts.append(weight.new_zeros(len(weight), width - numbers))
    filters = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    if width == x.shape[1] and window == _PIXEL:
        return x.permute(0, 2, 3, 1).flatten(1, 2), filters
    if kernels is None:
        return _unfolded(x, window, width), filters
    return kernels.columns(x, window, width), filters


def stacks_filters(device: torch.device) -> bool:
    """Whether stacks of convolutions are computed by columns on such a device."""
    return device.type in _DEVICES


def laid_out(filters: Tensor) -> Tensor:
    """A stack of filters (rows, O, C, height, width) as products by columns read them."""
    is_due = filters.dim() == 5 and stacks_filters(filters.device)
    return filters.movedim(2, -1).contiguous().movedim(-1, 2) if is_due else filters


def is_laid_out(t: Tensor) -> bool:
    """Whether a stack lies in memory row by row, without gaps, as usual or as `laid_out` has it."""
    return t.is_contiguous() or (t.dim() == 5 and t.movedim(2, -1).is_contiguous())


def _unfolded(x: Tensor, window: Window, width: int) -> Tensor:
    """What lies under every place, by torch; then 1, if there is room for it."""
    size, stride, (above, left), dilation = window
    under = functional.pad(x, (left, left, above, above)).permute(0, 2, 3, 1)
    for axis, (long, step, gap) in enumerate(zip(size, stride, dilation, strict=True), 1):
        under = under.unfold(axis, gap * (long - 1) + 1, step)[..., ::gap]
    columns = under.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
    return functional.pad(columns, (0, width - columns.shape[2]), value=1.0)


def max_pool2d(x: Tensor, size: Pair, *, stride: Pair | None, **how: Any) -> Tensor | None:
    """`functional.max_pool2d` of channels that are last in memory; None if there is no kernel."""
    kernels, own = _kernels(x), as_pair(size)
    is_plain = how == {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    is_apart = own == as_pair(size if stride is None else stride)
    if kernels is None or not is_plain or not is_apart or x.dim() != 4 or x.stride(1) != 1:
        return None
    pooled: Tensor | None = kernels.max_pool(x, *own)
    return pooled


def _kernels(x: Tensor) -> Any:
    """The module of kernels for such pictures, if they can be used; who has no GPU need not."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or find_spec("triton") is None:
        return None
    from polyfed.train import windows

    return windows


class _Product(torch.autograd.Function):
    """A matrix product, and its gradient, as exact as torch's own convolutions are on a GPU."""

    generate_vmap_rule = True

    @staticmethod
    def forward(columns: Tensor, filters: Tensor) -> Tensor:
        """The product."""
        with _as_convolutions():
            return columns @ filters

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Both factors are wanted again."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of those factors that need one: pictures do not."""
        columns, filters = ctx.saved_tensors
        of_columns, of_filters = ctx.needs_input_grad
        with _as_convolutions():
            return (
                gradient @ filters.mT if of_columns else None,
                (gradient.mT @ columns).mT if of_filters else None,  # as filters lie in memory
            )


_product: Callable[[Tensor, Tensor], Tensor] = _Product.apply


@contextmanager
def _as_convolutions() -> Iterator[None]:
    """Round the factors of products to TF32 where those of convolutions are: torch's default."""
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        products.allow_tf32 = before


class Call(NamedTuple):
    """A use of filters: what the columns take, the filters, and how they lie on the picture.

    Without a window it is no convolution by columns.
    """

    size: float
    weight: Tensor | None = None
    window: Window | None = None
    sides: tuple[int, ...] = ()


class Columns:
    """Remembers what the columns of networks take."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[float]] = {}

    def are_few(self, job: Job, net: Hashable) -> bool:
        """Whether the steps of a job are better computed by columns; `net` is its structure."""
        is_plain = job.node.model.precision == "float32"
        return is_plain and max(self._of(job, net), default=0) <= _LIMIT

    def bytes_of(self, job: Job, net: Hashable) -> int:
        """What the columns of a step take, if they are few."""
        return int(sum(self._of(job, net)))

    def _of(self, job: Job, net: Hashable) -> list[float]:
        """Of every convolution, for a batch."""
        phase, split = job.phase, training_split(job.node, job.phase)
        key = net, type(phase.objective), phase.parts, split.x.shape[1:]
        if key not in self._known:
            calls = noted(job)
            self._known[key] = [math.inf] if calls is None else [call.size for call in calls]
        return [size * phase.batch_size(len(split)) for size in self._known[key]]


def noted(job: Job) -> list[Call] | None:
    """The convolutions of a job's objective, for one sample; None if that cannot be computed."""
    model, objective, calls = job.node.model, job.phase.objective, _Noted()
    if isinstance(objective, Rule):
        return None
    split = training_split(job.node, job.phase)
    y = None if split.y is None else split.y[:1]
    chance = ambient(job.node.seed, "columns", device=split.x.device)
    with chance, evaluating(model.net), calls:
        try:
            objective(model, split.x[:1], y)
        except (RuntimeError, ValueError, TypeError):  # one sample, or no gradients, will not do
            return None
    return calls.found


def as_pair(given: Pair) -> tuple[int, int]:
    """Height and width."""
    first, *others = (given,) if isinstance(given, int) else given
    return first, others[0] if others else first


class _Noted(TorchFunctionMode):
    """Notes every convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a convolution, and what else is done with parameters; do all as it is."""
        kwargs = kwargs or {}
        if func is functional.conv2d and len(args) > 1:
            self.found.append(_call(*args, **kwargs))
            return func(*args, **kwargs)
        if func in _CONVOLUTIONS:
            self.found.append(Call(math.inf))
        used = (a for a in (*args, *kwargs.values()) if isinstance(a, nn.Parameter))
        self.found += [Call(0, a) for a in used]
        return func(*args, **kwargs)


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Call:
    size = column_bytes(x, weight, bias, stride, padding, dilation, groups)
    if isinstance(padding, str) or math.isinf(size):
        return Call(size)
    return Call(size, weight, Window.of(weight, stride, padding, dilation), tuple(x.shape[2:]))

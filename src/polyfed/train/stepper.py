"""Steps of a stack: the loss of every row at once, batches from a table on the device.

On a GPU the step becomes a CUDA graph, which finds its batch by a counter on the device.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.train import columns, norms
from polyfed.train.track import Job, Losses, Pool, Tensors, Track
from polyfed.train.unseen import Lines, arguments

if TYPE_CHECKING:
    from polyfed.train.cohort import Cohort

_TABLE = 1 << 22  # batch indices prepared at a time
_AHEAD = 1 << 18  # of these, where the device works on while the next are prepared
_FEW = 4  # steps that are prepared at least, if there are as many
_WARM = 3  # real steps before a CUDA graph is captured
_WORTH_A_GRAPH = 12
_FEW_ROWS = 8  # below, fewer of them take a GPU as long
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError)  # what vmap raises
_IGNORED = -100  # a label that does not count, by torch's default
_USUAL = {"ignore_index": _IGNORED, "label_smoothing": 0.0}  # of cross-entropy; else None
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HIDDEN = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)


class CannotStackError(Exception):
    """These networks or this objective cannot be computed as a stack; nothing has changed."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: a graph that is let go during a capture would ruin it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Stepper:
    """Steps of all rows: batches from a table, by a counter that lives on the device.

    Attributes:
        count: how many rows take a step, from the first on.
    """

    can_leave_out: ClassVar[bool] = True

    def __init__(self, cohort: Cohort) -> None:
        self.cohort: Cohort = weakref.proxy(cohort)  # who has it: a stack that is let go is gone
        self.tracks = cohort.rows
        self.count = len(self.tracks)
        self.pool = Pool([track.split for track in self.tracks], own=cohort.is_lent)
        self.width = max(track.course.widest for track in self.tracks)
        self.usual = self._usual()  # the width of which there are graphs
        rows, device = len(self.tracks), self.pool.x.device
        longest = max(track.steps_left for track in self.tracks)
        self.capacity = min(longest, max(1, _TABLE // (rows * self.width)))
        is_ahead = device.type == "cuda" and self.width > 1
        at_once = max(_FEW, (_AHEAD if is_ahead else _TABLE) // (rows * self.width))
        self.piece = min(self.capacity, at_once)
        shape = (rows, self.capacity, self.width)
        self.index = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weight = torch.zeros(shape, device=device) if cohort.weighted else None
        self.losses = torch.zeros(rows, self.capacity, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by `count`
        self.graph_from = _WARM if cohort.graph and longest >= _WORTH_A_GRAPH else None
        self.taken = Counter[int]()  # steps, by `count`

    def begin(self, tracks: Sequence[Track]) -> bool:
        """Use it for a new phase of the same rows; False if it does not suit."""
        widest = max(track.course.widest for track in tracks)
        fits = widest == self.width and (self.weight is not None) == self.cohort.weighted
        self.tracks, self.count = list(tracks), len(tracks)
        fits = fits and self._usual() == self.usual
        return fits and self.pool.refill([track.split for track in tracks])

    def _usual(self) -> int:
        """The width of most batches: of whole ones, unless all are filled up to the same."""
        return self.width if self.cohort.weighted else self.tracks[0].course.sizes[0]

    def leave_out(self, needed: int) -> None:
        """Leave out the rows that follow the first ones that are needed: they are done.

        With graphs half of them at a time: each number of rows has its own.
        """
        if not self.can_leave_out or not self.taken:  # no state yet of which to take a part
            return
        if self.graph_from is None:
            self.count = needed
        while self.count > _FEW_ROWS and -(-self.count // 2) >= needed:
            self.count = -(-self.count // 2)

    def advance(self, steps: int) -> None:
        """So many steps of every row that is not done."""
        while steps > 0:
            count = min(steps, self.piece)
            self._run(self._fill(count))
            losses = Losses(self.losses[:, :count].clone())
            for row, track in enumerate(self.tracks):
                if not track.is_done:
                    track.add(losses, row)
            steps -= count

    def _fill(self, count: int) -> list[int]:
        """Write the next batches into the table; their widths."""
        moving = [(row, track) for row, track in enumerate(self.tracks) if not track.is_done]
        tables = [t[: self.count, :count] for t in (self.index, self.weight) if t is not None]
        written = [_on_host(table) for table in tables]
        if self.weight is not None or len(moving) < self.count:
            for table in written:
                table.zero_()
        widths = [self.width] * count if self.weight is not None else moving[0][1].widths(count)
        places, *inside = [table.numpy() for table in written]
        for row, track in moving:
            track.take(count, places[row], *(own[row] for own in inside))
        for table, source in zip(tables, written, strict=True):
            if source is not table:
                table.copy_(source, non_blocking=True)
        return widths

    def _run(self, widths: Sequence[int]) -> None:
        self.at.zero_()
        self._steps(widths)

    def _steps(self, widths: Sequence[int]) -> None:
        for width in widths:
            if self._is_due(width):
                self._capture()
            if self.count in self.graphs and width == self.usual:
                self.graphs[self.count].replay()
            elif self.cohort.has_stepped:
                self._step(width)
            else:
                self._first_step(width)
            self.taken[self.count] += 1

    def _first_step(self, width: int) -> None:
        try:
            self._step(width)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            raise CannotStackError(str(error)) from error
        self.cohort.has_stepped = True

    def _is_due(self, width: int) -> bool:
        """Whether to capture the graph now; the first steps have warmed everything up."""
        ready = self.graph_from is not None and self.taken[self.count] >= self.graph_from
        return ready and self.count not in self.graphs and width == self.usual

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        known = next(iter(self.graphs.values()), None)  # one at a time is replayed
        torch.cuda.synchronize()
        with undisturbed(), torch.cuda.graph(graph, pool=None if known is None else known.pool()):
            self._step(self.usual)
        self.graphs[self.count] = graph

    def _step(self, width: int) -> None:
        cohort, count = self.cohort, self.count
        moving, resting = cohort.first(count)
        index = self.index[:count].index_select(1, self.at).squeeze(1)[:, :width]
        weight = None
        if self.weight is not None:
            weight = self.weight[:count].index_select(1, self.at).squeeze(1)
            weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
        x, y = self.pool.take(index)
        losses = cohort.loss.of_rows({**moving, **resting}, x, y, weight)
        gradients = torch.autograd.grad(losses.sum(), list(moving.values()))
        if cohort.optimisers is not None:
            cohort.optimisers.step(gradients, count)
        if cohort.loss.counts:
            torch._foreach_add_([resting[name] for name in cohort.loss.counts], 1)
        noted = losses.detach().to(self.losses.dtype).unsqueeze(1)
        self.losses[:count].index_copy_(1, self.at, noted)
        self.at += 1


class Loss(nn.Module):
    """The objective of one row, as a module, so that its network can be given other tensors."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.net = job.node.model, job.node.model.net
        self.objective: Any = job.phase.objective
        self.lines: Mapping[str, Lines] = {}  # of filters that are there in part
        self.counts: Sequence[str] = ()  # BatchNorm's counts of batches: who steps keeps them

    def forward(self, x: Tensor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        """The mean loss, or the sum of the samples' losses times their weights."""
        loss: Tensor
        if weight is None:
            loss = self.objective(self.model, x, y)
        else:
            loss = (self.objective.losses(self.model, x, y) * weight).sum()
        return loss

    def of_rows(
        self, tensors: Tensors, x: Tensor, y: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The loss of every row."""

        def one(own: Tensors, x: Tensor, y: Tensor | None, weight: Tensor | None) -> Tensor:
            named = {f"net.{name}": t for name, t in own.items()}
            lines = {id(own[name]): lines for name, lines in self.lines.items()}
            with StackedLayers(weight, lines, {id(own[name]) for name in self.counts}):
                loss: Tensor = functional_call(self, named, (x, y, weight))
            return loss

        dims = (0, 0, None if y is None else 0, None if weight is None else 0)
        losses: Tensor = vmap(one, in_dims=dims, randomness="different")(tensors, x, y, weight)
        return losses


class StackedLayers(TorchFunctionMode):
    """Layers in the form that suits a stack.

    Linear layers as (W x')': then the gradient of W comes in W's own layout, without a copy; small
    convolutions, and their pooling, by `columns`; BatchNorm, and ReLU after it, by `norms`;
    cross-entropy as that of more samples, for which vmap takes it apart. It also does autocast's
    work for the layers that vmap takes apart before autocast sees them.

    Args:
        weight: of the samples of a batch; those with none do not count for BatchNorm.
        lines: of filters, by id, that are there in part: see `unseen`.
        counts: BatchNorm's counts of batches, by id, which are kept elsewhere.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        lines: Mapping[int, Lines] | None = None,
        counts: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.weight, self.lines, self.counts = weight, lines or {}, counts
        self._then: dict[str, Any] = {}  # what is done with the next BatchNorm's output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what suits a stack in another form; leave all else."""
        kwargs = kwargs or {}
        if func is functional.conv2d and len(args) > 1 and id(args[1]) in self.lines:
            args, kwargs = arguments(self.lines[id(args[1])], *args, **kwargs), {}
        if func is Tensor.add_ and id(args[0]) in self.counts:
            return args[0]
        if func in _HIDDEN and args and torch.is_autocast_enabled(args[0].device.type):
            args = [a.bfloat16() if isinstance(a, Tensor) else a for a in args]
        if func is functional.conv2d and args and columns.by_columns(*args, **kwargs):
            return columns.conv2d(*args, **kwargs)
        if func is functional.max_pool2d and len(args) == 2:
            pooled = columns.max_pool2d(*args, **kwargs)
            if pooled is not None:
                return pooled
        if func is functional.adaptive_avg_pool2d and args[1] in (1, (1, 1)):  # else row by row
            return args[0].mean((-2, -1), keepdim=True)
        if func is functional.batch_norm and kwargs.get("training"):
            how = {name: given for name, given in kwargs.items() if name != "training"}
            if self.weight is not None:
                how["inside"] = (self.weight > 0).to(args[0].dtype)
            how, self._then = {**how, **self._then}, {}
            return norms.batch_norm(*args, **how)
        if func is norms.rectified:
            return self._rectified(*args)
        if func is functional.cross_entropy and _is_plain(*args, **kwargs):
            losses, counts = _losses(*args), args[1] != _IGNORED
            return losses if kwargs["reduction"] == "none" else losses.sum() / counts.sum()
        if func is functional.linear and not kwargs and args[0].dim() == 2:
            x, weight, *bias = args
            product = weight @ x.mT
            if bias and bias[0] is not None:  # vmap makes more of addmm: it takes the bias times 1
                product = product + bias[0][:, None]
            return product.mT
        return func(*args, **kwargs)

    def _rectified(self, norm: nn.Module, x: Tensor, beside: Tensor | None) -> Tensor:
        """Of a BatchNorm that trains, in one step."""
        if type(norm) not in _NORMS or not norm.training:
            with self:
                y: Tensor = norm(x)
            return functional.relu(y if beside is None else y + beside)
        self._then = {"beside": beside, "rectify": True}
        with self:
            done: Tensor = norm(x)
        return done


class _Losses(torch.autograd.Function):
    """Cross-entropy of every sample; rows of a stack are but more samples."""

    @staticmethod
    def forward(scores: Tensor, labels: Tensor) -> Tensor:
        """As torch has it."""
        return functional.cross_entropy(scores, labels, reduction="none")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Both are wanted again."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Of the scores."""
        scores, labels = ctx.saved_tensors
        counts = labels != _IGNORED
        wanted = functional.one_hot(labels * counts, scores.shape[1])
        return (scores.softmax(1) - wanted) * (gradient * counts)[:, None], None

    @staticmethod
    def vmap(info: Any, in_dims: Any, scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Of a stack."""
        rows = [
            t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)
            for t, at in zip((scores, labels), in_dims, strict=True)
        ]
        first, second = (t.flatten(0, 1) for t in rows)
        losses = functional.cross_entropy(first, second, reduction="none")
        return losses.unflatten(0, (info.batch_size, -1)), 0


_losses: Callable[[Tensor, Tensor], Tensor] = _Losses.apply


def _is_plain(scores: Tensor, labels: Tensor, *, reduction: str = "mean", **how: Any) -> bool:
    """Whether it is cross-entropy of vectors of scores with classes, as a mean or of each."""
    is_usual = reduction in ("mean", "none") and all(how[n] == _USUAL.get(n) for n in how)
    return is_usual and scores.dim() == 2 and labels.dim() == 1


def _on_host(target: Tensor) -> Tensor:
    """Where to write what a tensor is to hold: itself, or memory that its device can read."""
    if target.device.type != "cuda":
        return target
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=True)

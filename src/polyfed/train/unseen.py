"""Lines of filters that see nothing but padding stay out of a stack.

Where a picture is smaller than the filters on it, as a single pixel under filters of three by
three, most of what a filter has never meets a number that is not zero. Such weights have gradients
of zero, and so have their moments: all that moves them is AdamW's decay, and n steps of that are

    w <- (1 - lr decay)^n w                                                                    (1)

So a stack takes the lines that see something, and the others get Eq. (1) at the end of the phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.phase import CrossEntropy, Optimiser, Phase, SquaredError
from polyfed.train.columns import Pair, as_pair, noted, seeing, stacks_filters
from polyfed.train.loop import training_split
from polyfed.train.track import Job

Lines = tuple[slice, slice]  # of the height and of the width of a filter: those that see something
_OF_OUTPUTS = (CrossEntropy, SquaredError)  # objectives that see the network's output only


def seeing_lines(job: Job) -> dict[str, Lines]:
    """The filters of a job's network that have lines which see only padding, and those that do not.

    Empty where what is left out could move otherwise than by Eq. (1).
    """
    device = training_split(job.node, job.phase).x.device
    if not _is_plain(job.phase) or not _rests(job.phase.optimiser) or not stacks_filters(device):
        return {}
    found: dict[int, list[Lines | None]] = {}
    for call in noted(job) or ():
        less = None if call.window is None else seeing(call.window, call.sides)
        is_less = less is not None and less[0] != call.window
        found.setdefault(id(call.weight), []).append(less[1] if less and is_less else None)
    lines = dict[str, Lines]()
    for name, p in job.node.model.net.named_parameters():
        first, *others = found.get(id(p), [None])
        if first is not None and all(other == first for other in others):
            lines[name] = first
    return lines


def _is_plain(phase: Phase) -> bool:
    """Whether a phase sees one kind of picture, and weights by what they put out alone."""
    return type(phase.objective) in _OF_OUTPUTS and phase.stop is None


def _rests(optimiser: Optimiser) -> bool:
    """Whether a weight that never has a gradient moves by Eq. (1), if at all."""
    return optimiser.name == "adamw" or (
        type(optimiser) is Optimiser and not optimiser.weight_decay
    )


def can_leave_out(jobs: Sequence[Job], lines: Mapping[str, Lines]) -> bool:
    """Whether that holds of all of them, too: no moment of what is left out is more than zero."""
    if not lines:
        return True
    if not all(_rests(job.phase.optimiser) for job in jobs):
        return False
    kept = f"optimiser {jobs[0].phase.keep}"
    left = list[Tensor]()
    for job in jobs if jobs[0].phase.keep is not None else ():
        for path, t in job.node.recall(kept).items():
            own = lines.get(path.rpartition("/")[0])
            if own is not None and t.dim() == 4:
                left.append(t.count_nonzero() - seen(t, own).count_nonzero())
    return not left or not bool(torch.stack(left).any())


def seen(t: Tensor, lines: Lines | None) -> Tensor:
    """The lines of filters that see something, as a view; all of them if there are no others."""
    if lines is None:
        return t
    height, width = lines
    return t[..., height, width]


def put_back(t: Tensor, lines: Lines | None, whole: Tensor) -> Tensor:
    """What an optimiser keeps of a stack's filter, as of the whole one: with zeros elsewhere."""
    if lines is None or t.dim() != whole.dim():
        return t
    full = torch.zeros_like(whole, dtype=t.dtype, memory_format=torch.contiguous_format)
    seen(full, lines).copy_(t)
    return full


@torch.no_grad()
def decay(t: Tensor, lines: Lines, optimiser: Optimiser, steps: int) -> None:
    """Eq. (1) on the lines of a filter that see nothing, in place."""
    if not optimiser.weight_decay or not steps:
        return
    factor = (1 - optimiser.lr * optimiser.weight_decay) ** steps
    factors = t.new_full(t.shape[-2:], factor)
    seen(factors, lines).fill_(1)
    t.mul_(factors)


def arguments(
    lines: Lines,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    """Those of `functional.conv2d`, for a filter of which only these lines are there."""
    gaps, around = as_pair(dilation), as_pair(padding)
    less = tuple(p - own.start * d for p, own, d in zip(around, lines, gaps, strict=True))
    return x, weight, bias, stride, less, dilation, groups

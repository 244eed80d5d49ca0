"""Which jobs can be one computation: equal networks, equal phases, batches of like size."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from polyfed.core.node import Node
from polyfed.train.loop import training_split
from polyfed.train.track import Job

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def structure(net: nn.Module) -> Hashable:
    """Equal for networks that compute the same function of their parameters and buffers.

    Modules by type and plain attributes; what cannot be compared counts as different.
    """
    modules = tuple((name, type(m), _attributes(m)) for name, m in net.named_modules())
    tensors = [*net.named_parameters(), *net.named_buffers()]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return modules, shapes


def job_key(job: Job, net: Hashable) -> tuple[Hashable, ...]:
    """Equal for jobs that can be one computation; `net` is the structure of the network."""
    phase, split = job.phase, training_split(job.node, job.phase)
    shape = split.x.shape
    size = phase.batch_size(shape[0])
    sizes: Hashable = (size - 1).bit_length() if _has_losses(job) else (shape[0], size)
    target = None if split.y is None else (split.y.shape[1:], split.y.dtype)
    return (
        net,
        (*job.node.model.parts.items(), job.node.model.precision),
        (phase.objective, phase.parts, phase.epochs, phase.steps, phase.walk, phase.stop),
        (phase.optimiser.name, phase.keep, _has_kept(job)),
        (shape[1:], split.x.dtype, split.x.device, target, sizes),
        phase.stop is not None and phase.stop.split in job.node.data,
    )


def exam_key(node: Node, split: str, net: Hashable) -> Hashable:
    """Equal for nodes whose accuracy can be one computation."""
    data = node.data[split]
    return net, node.model.precision, data.x.shape[1:], data.x.dtype, data.x.device


def why_alone(job: Job) -> str:
    """Why a job cannot be part of a stack; empty if it can."""
    objective = job.phase.objective
    if hasattr(objective, "update"):  # a Rule; isinstance of a protocol takes ten times as long
        return "it learns by a rule of its own"
    if hasattr(objective, "after_step"):
        return "its objective acts after every step"
    if job.phase.stop is not None and not _has_losses(job):
        return "its objective has no `losses`, which early stopping needs"
    return ""


def _has_losses(job: Job) -> bool:
    return hasattr(job.phase.objective, "losses")


def _has_kept(job: Job) -> bool:
    """Whether a node has an optimiser to go on with."""
    keep = job.phase.keep
    return keep is not None and bool(job.node.recall(f"optimiser {keep}"))


def _attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if name != "training" and not name.startswith("_")
    )


def _comparable(value: Any) -> Hashable:
    if isinstance(value, _PLAIN) or callable(value):
        return value if isinstance(value, Hashable) else id(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    return (type(value), value) if not isinstance(value, Tensor) and _hashes(value) else id(value)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True

"""Message: named tensors, the only thing that leaves a node.

On the wire a message is safetensors. On arrival it is checked against what the method says it
sends: names, shapes, dtypes, finite values. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from polyfed.errors import MessageError


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor in a message, and the least value it may hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    least: float | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The specification that `tensor` meets."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Spec = Mapping[str, TensorSpec]
T = TypeVar("T")


def about(named: Mapping[str, T], topic: str) -> Mapping[str, T]:
    """What belongs to a topic: the name itself, or names that begin with it and a slash.

    >>> about({"fr": 1, "fr/count": 2, "global": 3}, "fr")
    {'fr': 1, 'fr/count': 2}
    """
    if not topic:
        return named
    return {n: t for n, t in named.items() if n == topic or n.startswith(f"{topic}/")}


@dataclass(frozen=True)
class Message:
    """Named tensors.

    >>> Message({"trunk.weight": torch.zeros(2, 3)}).nbytes
    24
    """

    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Payload in bytes: the tensors' own, as the ledger counts them."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def about(self, topic: str) -> Message:
        """What belongs to a topic; of a message that was looked at, it need not be again."""
        if not topic:
            return self
        part = Message(about(self.tensors, topic))
        if self.__dict__.get("_not_finite") == "":
            part.__dict__["_not_finite"] = ""
        return part

    def to_bytes(self) -> bytes:
        """The message as safetensors."""
        from safetensors.torch import save

        # Clones, because safetensors refuses tensors that share memory.
        tensors = {name: t.detach().cpu() for name, t in self.tensors.items()}
        return save({n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Message:
        """Read what `to_bytes` wrote; anything else is refused."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            message = cls(load(raw))
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            # KeyError: a dtype that torch has not; the others: sizes that no tensor has
            why = str(error).partition("\n")[0]
            raise MessageError(f"these {len(raw)} bytes are not a message: {why}") from error
        for name, tensor in message.tensors.items():
            if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise MessageError(f"'{name}' is neither true nor false")
        return message

    def check(self, expected: Spec) -> None:
        """Raise MessageError unless the message is exactly what `expected` announces."""
        got = self.tensors
        if expected.keys() != got.keys():
            missing, extra = expected.keys() - got.keys(), got.keys() - expected.keys()
            raise MessageError(
                f"tensors missing: {_names(missing)}; not announced: {_names(extra)}"
            )
        for name, spec in expected.items():
            tensor = got[name]
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                raise MessageError(f"'{name}' is {TensorSpec.of(tensor)}, expected {spec}")
            if spec.least is not None and bool((tensor < spec.least).any()):
                raise MessageError(
                    f"'{name}' holds {float(tensor.min()):g}, expected at least {spec.least:g}"
                )
        if self._not_finite:
            raise MessageError(self._not_finite)

    @cached_property
    def _not_finite(self) -> str:
        """What is not finite, or nothing; worked out once, however many nodes it goes to."""
        for name, tensor in self.tensors.items():
            # A sum is finite only if all its terms are, and costs a tenth of looking at each.
            if bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all()):
                continue
            bad = int((~torch.isfinite(tensor)).sum())
            return f"NaN or infinity in '{name}' ({bad} of {tensor.numel()} values)"
        return ""


def look_at(messages: Iterable[Message]) -> None:
    """Find out for many messages at once whether all numbers are finite.

    On a GPU a single answer is waited for, instead of one for every message.
    """
    real = [m for m in messages if not any(t.is_complex() for t in m.tensors.values())]
    sums = [(m, t.sum()) for m in real for t in m.tensors.values() if t.is_floating_point()]
    if len({total.device for _, total in sums}) != 1:
        return
    totals = [total for _, total in sums]
    if any(total.dtype != totals[0].dtype for total in totals):
        totals = [total.double() for total in totals]
    is_finite = torch.stack(totals).isfinite().tolist()
    doubtful = {id(m) for (m, _), fine in zip(sums, is_finite, strict=True) if not fine}
    for message, _ in sums:
        if id(message) not in doubtful:
            message.__dict__["_not_finite"] = ""


def _names(names: object) -> str:
    return ", ".join(sorted(names)) or "none"  # type: ignore[call-overload]

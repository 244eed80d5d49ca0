r"""The numbers of one network, laid end to end, and where those of each topic are among them.

Parameters of one kind become pieces of one tensor, so that what a node sends is picked out of it,
and what it hears put into it, in one step each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from polyfed.core.message import Spec

_ALIGNED = 32  # numbers: where products of matrices begin has a bearing on their last bits

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Flat = Float[Tensor, " numbers"]


class State(dict[str, Tensor]):
    """The tensors of a network by name.

    Attributes:
        shapes: names and shapes of its tensors, in order.
        flat: the one tensor that all of them are pieces of, if there is one.
        plans: what was worked out for it, by what that depends on besides.
    """

    def __init__(self, tensors: Mapping[str, Tensor], flat: Flat | None = None) -> None:
        super().__init__(tensors)
        self.shapes: Shapes = tuple((name, tuple(t.shape)) for name, t in tensors.items())
        self.flat = flat
        self.plans: dict[Hashable, Plan] = {}


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the numbers of each topic are in a network, laid end to end.

    Attributes:
        shapes: names and shapes of its tensors, in order.
        index: the places of each topic's numbers, in an order that all who share it agree on.
        spec: what is sent.
    """

    shapes: Shapes
    index: Mapping[str, Int64[Tensor, " _"]]
    spec: Spec

    def pack(self, state: State) -> dict[str, Tensor]:
        """The numbers of each topic."""
        flat = self._flat(state)
        return {topic: flat.index_select(0, where) for topic, where in self.index.items()}

    def unpack(self, state: State, vectors: Mapping[str, Tensor]) -> None:
        """Put the numbers of these topics into the tensors; all others stay as they are."""
        flat = self._flat(state)
        for topic, vector in vectors.items():
            flat.index_copy_(0, self.index[topic], vector)
        self._load(state, flat)

    def begin_own(self, state: State, streams: Mapping[str, torch.Generator]) -> None:
        """Draw the numbers of topics anew, each from all numbers of its tensor.

        Nodes whose networks began alike agree on what they draw, wherever they have it, and it is
        distributed as the network's own initialisation is.

        Args:
            state: the network's own tensors.
            streams: for each topic that is drawn its source of chance; "" is what nobody shares.
        """
        flat = self._flat(state)
        sizes = torch.tensor([prod(shape) for _, shape in self.shapes])
        starts = torch.tensor(_starts(self.shapes)[0])
        drawn = flat.clone()
        for topic, chance in streams.items():
            where = self.index[topic].cpu() if topic else self._local()
            of = torch.bucketize(where, starts, right=True) - 1
            place = torch.rand(len(where), dtype=torch.float64, generator=chance) * sizes[of]
            pick = starts[of] + place.long()
            drawn[where.to(flat.device)] = flat[pick.to(flat.device)]
        self._load(state, drawn)

    def _flat(self, state: State) -> Flat:
        """The tensors end to end: themselves, where they are pieces of one, else a copy."""
        return _end_to_end(state) if state.flat is None else state.flat

    def _load(self, state: State, flat: Flat) -> None:
        """Copy numbers into the tensors; counters, which belong to no cell, stay."""
        if state.flat is None:
            found = [(state[n], own) for n, own in _pieces(flat, self.shapes).items() if own.dim()]
            torch._foreach_copy_([t for t, _ in found], [own for _, own in found])
        elif flat is not state.flat:
            state.flat.copy_(flat)

    def _local(self) -> Tensor:
        """Places that no topic has."""
        starts, total = _starts(self.shapes)
        is_local = torch.zeros(total, dtype=torch.bool)
        for start, (_, shape) in zip(starts, self.shapes, strict=True):
            is_local[start : start + prod(shape)] = True
        for where in self.index.values():
            is_local[where.cpu()] = False
        return is_local.nonzero().flatten()


@lru_cache(maxsize=1024)
def _starts(shapes: Shapes) -> tuple[tuple[int, ...], int]:
    """Where each tensor begins, and the length of all: as aligned as tensors of their own."""
    lengths = [-(-prod(shape) // _ALIGNED) * _ALIGNED for _, shape in shapes]
    ends = list(accumulate(lengths, initial=0))
    return tuple(ends[:-1]), ends[-1]


def _pieces(flat: Flat, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors in what is laid end to end."""
    starts = _starts(shapes)[0]
    return {
        name: flat[start : start + prod(shape)].view(shape)
        for start, (name, shape) in zip(starts, shapes, strict=True)
    }


def _end_to_end(state: State) -> Flat:
    """A copy of the tensors, laid end to end."""
    first = next(t for t in state.values() if t.is_floating_point())
    flat = first.new_zeros(_starts(state.shapes)[1])
    for name, piece in _pieces(flat, state.shapes).items():
        piece.copy_(state[name])
    return flat


_KNOWN: WeakKeyDictionary[nn.Module, tuple[State, Flat, nn.Parameter]] = WeakKeyDictionary()


def state_of(net: nn.Module) -> State:
    """The tensors of a network: pieces of one, from now on, if they are parameters of a kind."""
    known = _KNOWN.get(net)
    if known is not None and known[1].data_ptr() == known[2].data_ptr():  # it was not moved since
        return known[0]
    state, own = State(net.state_dict()), dict(net.named_parameters())
    kinds = {(p.dtype, p.device) for p in own.values()}
    is_plain = len(kinds) == 1 and all(p.is_contiguous() for p in own.values())
    if not is_plain or list(own) != list(state):
        return state  # buffers, which may be replaced; parameters in two places; other layouts
    flat = _end_to_end(state)
    state = State(_pieces(flat, state.shapes), flat)
    for name, parameter in own.items():
        parameter.data = state[name]
    _KNOWN[net] = state, flat, next(iter(own.values()))
    return state


def aligned(where: Tensor, shapes: Shapes) -> Tensor:
    """Places among tensors without gaps between them, as places among tensors that are aligned."""
    sizes = torch.tensor([prod(shape) for _, shape in shapes])
    ends = sizes.cumsum(0)
    moved = torch.tensor(_starts(shapes)[0]) - (ends - sizes)
    return where + moved[torch.bucketize(where, ends, right=True)]

"""The optimisers of the rows of a stack.

Torch's Adam counts the steps of a tensor, all of it. So the rows are cut into stretches that have
the same settings, have made as many steps and will go on together. Where that is each row for
itself, as when nodes of unequal size keep their optimisers, the stretches still share one
optimiser, which moves all of them at once.

On a GPU large stacks have the Adam of `moments`, which counts the steps of every row: then all rows
are one stretch.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core.phase import Optimiser
from polyfed.errors import first_line
from polyfed.train.columns import is_laid_out
from polyfed.train.track import Tensors
from polyfed.train.unseen import seen

if TYPE_CHECKING:
    from polyfed.train.cohort import Cohort
    from polyfed.train.moments import StackedAdam

Settings = tuple[Optimiser, ...]  # of each row of a stretch
Cut = tuple[Settings, int, int]  # these, the first row, and the one after the last
State = Mapping[str, Tensors]  # of a stretch: of each name, what the optimiser keeps
_COUNTING = ("adam", "adamw")
_DEVICES = ("cuda",)  # where `moments` has its kernel
_WORTH_IT = 1 << 20  # weights: fewer take torch as long
_PLAIN = torch.contiguous_format


@dataclass(frozen=True)
class _Stretch:
    """Rows from `first` to before `last`: a part of every tensor that moves."""

    settings: Settings
    first: int
    last: int
    parts: list[Tensor]


@dataclass(frozen=True)
class _Group:
    """Stretches with the same settings that follow each other, and their optimiser."""

    optimiser: torch.optim.Optimizer | StackedAdam
    stretches: list[_Stretch]


class Optimisers:
    """All of them, as few as can be."""

    def __init__(self, cohort: Cohort) -> None:
        self.names, self.capturable = cohort.names, cohort.graph
        self.in_one_pass = _is_for_one_pass(cohort)
        self._make(cohort.moving, *self._found(cohort))

    def _found(self, cohort: Cohort) -> tuple[list[Cut], list[State]]:
        """Where the rows of a cohort are cut into stretches, and what its nodes kept of each."""
        cuts = _cuts(cohort, self.in_one_pass)
        return cuts, [_kept(cohort, first, last, self.in_one_pass) for _, first, last in cuts]

    def _make(self, moving: Tensors, cuts: Sequence[Cut], states: Sequence[State]) -> None:
        """The optimisers over these tensors, with these states."""
        self.cuts, self.groups = list(cuts), list[_Group]()
        self._first: dict[int, list[_Group]] = {}
        known = iter(states)
        for _, group in itertools.groupby(cuts, key=lambda cut: cut[0][0]):
            stretches = [
                _Stretch(*cut, [moving[name].detach()[cut[1] : cut[2]] for name in self.names])
                for cut in group
            ]
            made = self._group(stretches)
            for each, state in zip(stretches, known, strict=False):
                for name, part in zip(self.names, each.parts, strict=True):
                    if name in state:
                        made.optimiser.state[part] = {
                            entry: _laid_as(part, t) for entry, t in state[name].items()
                        }
            self.groups.append(made)

    def _group(self, stretches: list[_Stretch]) -> _Group:
        """These with their optimiser, which has no state yet."""
        parts, settings = [p for each in stretches for p in each.parts], stretches[0].settings
        if not self.in_one_pass:
            return _Group(settings[0].build(parts, capturable=self.capturable), stretches)
        from polyfed.train.moments import StackedAdam

        return _Group(StackedAdam(parts, settings), stretches)

    def step(self, gradients: Sequence[Tensor | None], count: int) -> None:
        """One step of the first rows; what has no gradient stays."""
        for group in self._of_first(count):
            for each in group.stretches:
                for part, gradient in zip(each.parts, gradients, strict=True):
                    own = None if gradient is None else gradient[each.first : each.last]
                    part.grad = None if own is None else _as_lies(own, part)
            group.optimiser.step()

    def _of_first(self, count: int) -> list[_Group]:
        if count >= self.cuts[-1][2]:
            return self.groups
        if count not in self._first:
            self._first[count] = [
                self._among(group, count)
                for group in self.groups
                if group.stretches[0].first < count
            ]
        return self._first[count]

    def _among(self, group: _Group, count: int) -> _Group:
        """Those of its rows that are among the first of the stack, with their part of the state."""
        here = [each for each in group.stretches if each.first < count]
        fewer = []
        for each in here:
            own = slice(count - each.first)  # may end beyond it: the gradients do not
            parts = [part[own] for part in each.parts]
            fewer.append(_Stretch(each.settings[own], each.first, each.last, parts))
        made = self._group(fewer)
        for whole, some in zip(here, fewer, strict=True):
            for old, new in zip(whole.parts, some.parts, strict=True):
                made.optimiser.state[new] = _rows(group.optimiser.state[old], slice(len(new)))
        return made

    def begin(self, cohort: Cohort) -> bool:
        """Take what the nodes kept, else zeros, in place; False if new tensors had to be made."""
        cuts, states = self._found(cohort)
        if self.in_one_pass:
            self._settle(cuts)
        if cuts == self.cuts and self._takes(states):
            return True
        self._make(cohort.moving, cuts, states)
        return False

    def _settle(self, cuts: Sequence[Cut]) -> None:
        """Other settings of the same rows, in place, also where only the first of them go on."""
        from polyfed.train.moments import StackedAdam

        self.cuts = list(cuts)
        ((settings, *_),), (group,) = self.cuts, self.groups
        self.groups = [replace(group, stretches=[replace(group.stretches[0], settings=settings)])]
        for each in itertools.chain(self.groups, *self._first.values()):
            if isinstance(each.optimiser, StackedAdam):
                each.optimiser.settle(settings[: len(each.optimiser.rates)])

    def _takes(self, states: Sequence[State]) -> bool:
        in_place = True
        for (group, each), kept in zip(self._stretches(), states, strict=True):
            for name, part in zip(self.names, each.parts, strict=True):
                state = group.optimiser.state[part]
                for entry, t in state.items():
                    if isinstance(t, Tensor):
                        t.zero_() if name not in kept else t.copy_(kept[name][entry])
                in_place &= bool(state) or name not in kept
        return in_place

    def state_of(self, row: int) -> Tensors:
        """What is kept of one row: `parameter/entry`."""
        group, each = next((g, e) for g, e in self._stretches() if e.first <= row < e.last)
        return {
            f"{name}/{entry}": (t[row - each.first] if t.dim() else t).clone(memory_format=_PLAIN)
            for name, part in zip(self.names, each.parts, strict=True)
            for entry, t in group.optimiser.state[part].items()
            if isinstance(t, Tensor)
        }

    def shrink(self, left: Sequence[int], moving: Tensors) -> None:
        """Keep these rows only, which are now those of these tensors."""
        cuts, states, start = list[Cut](), list[State](), 0
        for group, each in self._stretches():
            own = [row - each.first for row in left if each.first <= row < each.last]
            if own:
                settings = tuple(each.settings[row] for row in own)
                cuts.append((settings, start, start + len(own)))
                start += len(own)
                states.append(
                    {
                        name: _rows(group.optimiser.state[part], own)
                        for name, part in zip(self.names, each.parts, strict=True)
                        if group.optimiser.state[part]
                    }
                )
        self._make(moving, cuts, states)

    def _stretches(self) -> Iterator[tuple[_Group, _Stretch]]:
        return ((group, each) for group in self.groups for each in group.stretches)


def _is_for_one_pass(cohort: Cohort) -> bool:
    """Whether the rows are for `moments`: a large stack, all of it by Adam or by AdamW."""
    moving, kinds = cohort.moving.values(), {s.name for s in cohort.settings}
    return (
        len(kinds) == 1
        and kinds <= set(_COUNTING)
        and sum(t.numel() for t in moving) >= _WORTH_IT
        and all(t.dtype == torch.float32 and is_laid_out(t) for t in moving)
        and all(t.device.type in _DEVICES and _has_kernel(t.device) for t in moving)
    )


@lru_cache
def _has_kernel(device: torch.device) -> bool:
    """Whether a step of `moments` can be taken there."""
    if find_spec("triton") is None:
        return False
    from polyfed.train.moments import StackedAdam

    part = torch.zeros(1, 1, device=device)
    part.grad = torch.zeros_like(part)
    try:
        StackedAdam([part], [Optimiser()]).step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        warnings.warn(f"stacks have torch's Adam here ({first_line(error)}).", stacklevel=2)
        return False
    return True


def _as_lies(gradient: Tensor, part: Tensor) -> Tensor:
    """A gradient as its part lies in memory, without a copy where they differ in name only."""
    pairs = zip(gradient.stride(), part.stride(), part.shape, strict=True)
    if all(own == other or size == 1 for own, other, size in pairs):
        return gradient.as_strided(part.shape, part.stride())
    return torch.empty_like(part, dtype=gradient.dtype).copy_(gradient)


def _laid_as(part: Tensor, kept: Any) -> Any:
    """What an optimiser keeps of a part, as that lies in memory."""
    if not isinstance(kept, Tensor) or kept.shape != part.shape or kept.stride() == part.stride():
        return kept
    return torch.empty_like(part, dtype=kept.dtype).copy_(kept)


def _rows(state: Mapping[str, Any], rows: slice | list[int]) -> dict[str, Any]:
    """The part of a state that is of these rows."""
    return {
        entry: t[rows] if isinstance(t, Tensor) and t.dim() else t for entry, t in state.items()
    }


def _cuts(cohort: Cohort, by_row: bool) -> list[Cut]:
    """Where the rows are cut into stretches; not at all if settings and counts are by row."""
    if by_row:
        return [(tuple(cohort.settings), 0, len(cohort.rows))]
    keys = list(zip(cohort.settings, _counts(cohort), strict=True))
    sizes = [(key, len(list(group))) for key, group in itertools.groupby(keys)]
    ends = list(itertools.accumulate(size for _, size in sizes))
    return [
        ((key[0],) * size, end - size, end) for (key, size), end in zip(sizes, ends, strict=True)
    ]


def _counts(cohort: Cohort) -> list[int]:
    """Equal for rows next to each other that can share a count of steps."""
    rows, group = cohort.rows, f"optimiser {cohort.phase.keep}"
    if cohort.phase.keep is None or not {s.name for s in cohort.settings} & set(_COUNTING):
        return [0] * len(rows)
    if len({track.steps_left for track in rows}) > 1:
        return list(range(len(rows)))
    made = [t for track in rows for t in _steps(track.job.node.recall(group))]
    return [int(n) for n in torch.stack(made).tolist()] if made else [0] * len(rows)


def _steps(kept: Tensors) -> list[Tensor]:
    """The steps an optimiser has made, if it counts them."""
    return [t for name, t in kept.items() if name.endswith("/step")][:1]


def _kept(cohort: Cohort, first: int, last: int, by_row: bool) -> State:
    """What the nodes of these rows kept from an earlier phase; counts by row, or one of all."""
    if cohort.phase.keep is None:
        return {}
    group = f"optimiser {cohort.phase.keep}"
    kept = [track.job.node.recall(group) for track in cohort.rows[first:last]]
    state: dict[str, Tensors] = {}
    for path in kept[0]:
        name, _, entry = path.rpartition("/")
        is_one = entry == "step" and not by_row
        lines = None if entry == "step" else cohort.lines.get(name)
        t = (
            kept[0][path].clone()
            if is_one
            else torch.stack([seen(own[path], lines) for own in kept])
        )
        state.setdefault(name, {})[entry] = t
    return state

"""The optimisers of the rows of a stack.

Torch's Adam counts the steps of a tensor, all of it. So the rows are cut into stretches that have
the same settings, have made as many steps and will go on together. Where that is each row for
itself, as when nodes of unequal size keep their optimisers, the stretches still share one
optimiser, which moves all of them at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.phase import Optimiser
from polyfed.train.track import Tensors

if TYPE_CHECKING:
    from polyfed.train.cohort import Cohort

Cut = tuple[Optimiser, int, int]  # settings, the first row, and the one after the last
State = Mapping[str, Tensors]  # of a stretch: of each name, what the optimiser keeps
_COUNTING = ("adam", "adamw")


@dataclass(frozen=True)
class _Stretch:
    """Rows from `first` to before `last`: a part of every tensor that moves."""

    first: int
    last: int
    parts: list[Tensor]


@dataclass(frozen=True)
class _Group:
    """Stretches with the same settings that follow each other, and their optimiser."""

    settings: Optimiser
    optimiser: torch.optim.Optimizer
    stretches: list[_Stretch]

    def among(self, count: int, capturable: bool) -> _Group:
        """Those of its rows that are among the first of the stack, with their part of the state."""
        here = [each for each in self.stretches if each.first < count]
        fewer = [  # `last` may lie beyond: then the gradients of the first rows end before it
            _Stretch(each.first, each.last, [part[: count - each.first] for part in each.parts])
            for each in here
        ]
        made = self.settings.build([p for each in fewer for p in each.parts], capturable=capturable)
        for whole, some in zip(here, fewer, strict=True):
            for old, new in zip(whole.parts, some.parts, strict=True):
                made.state[new] = {
                    entry: t[: len(new)] if isinstance(t, Tensor) and t.dim() else t
                    for entry, t in self.optimiser.state[old].items()
                }
        return _Group(self.settings, made, fewer)


class Optimisers:
    """All of them, as few as can be."""

    def __init__(self, cohort: Cohort) -> None:
        self.names, self.capturable = cohort.names, cohort.graph
        cuts = _cuts(cohort)
        self._make(cohort.moving, cuts, [_kept(cohort, *rows) for _, *rows in cuts])

    def _make(self, moving: Tensors, cuts: Sequence[Cut], states: Sequence[State]) -> None:
        """The optimisers over these tensors, with these states."""
        self.cuts, self.groups = list(cuts), list[_Group]()
        self._first: dict[int, list[_Group]] = {}
        known = iter(states)
        for settings, group in itertools.groupby(cuts, key=lambda cut: cut[0]):
            stretches = [
                _Stretch(first, last, [moving[name].detach()[first:last] for name in self.names])
                for _, first, last in group
            ]
            parts = [part for each in stretches for part in each.parts]
            optimiser = settings.build(parts, capturable=self.capturable)
            for each, state in zip(stretches, known, strict=False):
                for name, part in zip(self.names, each.parts, strict=True):
                    if name in state:
                        optimiser.state[part] = state[name]
            self.groups.append(_Group(settings, optimiser, stretches))

    def step(self, gradients: Sequence[Tensor | None], count: int) -> None:
        """One step of the first rows; what has no gradient stays."""
        for group in self._of_first(count):
            for each in group.stretches:
                for part, gradient in zip(each.parts, gradients, strict=True):
                    if gradient is not None:
                        own = gradient[each.first : each.last]
                        part.grad = own if own.stride() == part.stride() else own.contiguous()
            group.optimiser.step()

    def _of_first(self, count: int) -> list[_Group]:
        if count >= self.cuts[-1][2]:
            return self.groups
        if count not in self._first:
            self._first[count] = [
                group.among(count, self.capturable)
                for group in self.groups
                if group.stretches[0].first < count
            ]
        return self._first[count]

    def begin(self, cohort: Cohort) -> bool:
        """Take what the nodes kept, else zeros, in place; False if new tensors had to be made."""
        cuts = _cuts(cohort)
        states = [_kept(cohort, *rows) for _, *rows in cuts]
        if cuts == self.cuts and self._takes(states):
            return True
        self._make(cohort.moving, cuts, states)
        return False

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
            f"{name}/{entry}": (t[row - each.first] if t.dim() else t).clone()
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
                cuts.append((group.settings, start, start + len(own)))
                start += len(own)
                states.append(
                    {
                        name: {
                            entry: t[own] if isinstance(t, Tensor) and t.dim() else t
                            for entry, t in group.optimiser.state[part].items()
                        }
                        for name, part in zip(self.names, each.parts, strict=True)
                        if group.optimiser.state[part]
                    }
                )
        self._make(moving, cuts, states)

    def _stretches(self) -> Iterator[tuple[_Group, _Stretch]]:
        return ((group, each) for group in self.groups for each in group.stretches)


def _cuts(cohort: Cohort) -> list[Cut]:
    """Where the rows are cut into stretches."""
    keys = list(zip(cohort.settings, _counts(cohort), strict=True))
    sizes = [(key, len(list(group))) for key, group in itertools.groupby(keys)]
    ends = list(itertools.accumulate(size for _, size in sizes))
    return [(key[0], end - size, end) for (key, size), end in zip(sizes, ends, strict=True)]


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


def _kept(cohort: Cohort, first: int, last: int) -> State:
    """What the nodes of these rows kept from an earlier phase."""
    if cohort.phase.keep is None:
        return {}
    group = f"optimiser {cohort.phase.keep}"
    kept = [track.job.node.recall(group) for track in cohort.rows[first:last]]
    state: dict[str, Tensors] = {}
    for path in kept[0]:
        name, _, entry = path.rpartition("/")
        t = kept[0][path] if entry == "step" else torch.stack([own[path] for own in kept])
        state.setdefault(name, {})[entry] = t.clone()
    return state

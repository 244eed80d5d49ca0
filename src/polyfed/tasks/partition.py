r"""Partitions: which node holds which samples.

    iid             a random equal share of everything
    dirichlet:A     for each class in turn, p ~ Dir(A) over the nodes that hold fewer than n / K
                    samples so far; the class is cut in those proportions. Drawn again until every
                    node has min_size. (The usual code draws p over all nodes, sets full ones to
                    zero and renormalises: the same distribution, because the rest of a Dirichlet
                    vector, renormalised, is Dirichlet.)
    pathological:S  S classes a node, every class held by equally many nodes (give or take one)
    classes:G/G/..  the classes named, e.g. classes:0,1,2/2,3,4
    writer          whole writers, balanced by number of samples
    permute:8,9@7   iid, and the first 7 nodes call an 8 a 9 and a 9 an 8 (any cycle of labels)

A class that several nodes hold is dealt equally among them. Parts are disjoint, sorted, and a
function of the labels and the generator alone.
Hsu et al., arXiv:1909.06335 (Dirichlet); McMahan et al., arXiv:1602.05629 (pathological).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed import check
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.tasks.labels import Labels, whole_labels

ATTEMPTS = 10_000


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that deals samples to nodes."""

    def assign(
        self,
        y: Tensor,
        nodes: int,
        generator: torch.Generator,
        *,
        writers: Labels | None = None,
    ) -> list[Tensor]:
        """Deal the samples.

        Args:
            y: Label of each sample.
            nodes: How many nodes there are.
            generator: The only source of chance.
            writers: Who wrote each sample, -1 for unknown; only `ByWriter` looks at it.

        Returns:
            For each node the sorted indices of its samples; no index occurs twice.
        """
        y = whole_labels(y)
        if nodes < 1:
            raise ConfigError(f"a partition needs at least 1 node, got nodes={nodes}.")
        if len(y) < nodes:
            raise DataError(
                f"{len(y)} samples cannot be dealt to {nodes} nodes: each needs at least one. "
                "Fix: fewer nodes or more samples."
            )
        return [part.sort().values for part in self._deal(y, nodes, generator, writers)]

    def relabel(self, node: int, y: Labels) -> Labels:
        """What the node calls these labels: the same, unless the partition says otherwise."""
        return y

    @abstractmethod
    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class IID(Partition):
    """A random equal share of everything: sizes differ by at most one."""

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        return torch.randperm(len(y), generator=generator).tensor_split(nodes)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Class proportions drawn from Dir(alpha): small alpha, few classes a node; large, IID.

    Attributes:
        alpha: Concentration.
        min_size: Every node gets at least so many samples.
    """

    alpha: float
    min_size: int = 10

    def __post_init__(self) -> None:
        check.positive(self, "alpha")
        check.at_least(self, "min_size", 1.0, hint="A node without samples cannot train.")

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        members = list(by_value(y, generator).values())
        table = self._table([len(m) for m in members], nodes, generator)
        ends = table.cumsum(1)[:, :-1].tolist()
        cuts = [m.tensor_split(at) for m, at in zip(members, ends, strict=True)]
        return [torch.cat([cut[node] for cut in cuts]) for node in range(nodes)]

    def _table(
        self, totals: list[int], nodes: int, generator: torch.Generator
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Counts, class by node, drawn until the smallest node is large enough."""
        self._check_possible(sum(totals), nodes)
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        best = 0
        for _ in range(ATTEMPTS):
            table = _dirichlet_counts(totals, nodes, self.alpha, rng)
            smallest = int(table.sum(0).min())
            if smallest >= self.min_size:
                return table
            best = max(best, smallest)
        raise DataError(
            f"Dirichlet(alpha={self.alpha:g}): none of {ATTEMPTS} draws gave each of {nodes} nodes "
            f"min_size={self.min_size} of {sum(totals)} samples in {len(totals)} classes; the best "
            f"left a node with {best}. Fix: a larger alpha, fewer nodes, or a smaller min_size."
        )

    def _check_possible(self, n: int, nodes: int) -> None:
        if nodes * self.min_size > n:
            raise DataError(
                f"Dirichlet(min_size={self.min_size}) asks for {nodes} x {self.min_size} = "
                f"{nodes * self.min_size} samples, there are {n}. "
                f"Fix: fewer nodes, or min_size of at most {n // nodes}."
            )


def _dirichlet_counts(
    totals: Sequence[int], nodes: int, alpha: float, rng: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """One draw: for each class, Dir(alpha) over the nodes below an equal share."""
    table = np.zeros((len(totals), nodes), np.int64)
    share = sum(totals) / nodes
    for row, total in zip(table, totals, strict=True):
        open_nodes = np.flatnonzero(table.sum(0) < share)
        p = rng.dirichlet(np.full(len(open_nodes), alpha))
        ends = np.floor(np.cumsum(p) * total + 1e-9).astype(np.int64)
        ends[-1] = total
        row[open_nodes] = np.diff(ends, prepend=0)
    return table


@dataclass(frozen=True)
class Pathological(Partition):
    """A few classes a node.

    With nodes x classes_per_node equal to the number of classes nobody shares a class; with less
    some classes are held by nobody; with more each class is dealt equally among its holders.
    """

    classes_per_node: int

    def __post_init__(self) -> None:
        check.at_least(self, "classes_per_node", 1.0)

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        classes = sorted(set(y.tolist()))
        if self.classes_per_node > len(classes):
            raise DataError(
                f"Pathological(classes_per_node={self.classes_per_node}) but the labels have "
                f"{len(classes)} classes. Fix: at most {len(classes)}."
            )
        groups = _draw_groups(classes, nodes, self.classes_per_node, generator)
        return _deal_classes(y, groups, generator)


def _draw_groups(
    classes: list[int], nodes: int, each: int, generator: torch.Generator
) -> list[list[int]]:
    """Deal shuffled packs of the classes; a class the node already has goes to the pack's end."""
    groups: list[list[int]] = []
    pack: list[int] = []
    for _ in range(nodes):
        hand, pack = pack[:each], pack[each:]
        if len(hand) < each:
            fresh = [classes[i] for i in torch.randperm(len(classes), generator=generator).tolist()]
            pack = [c for c in fresh if c not in hand] + [c for c in fresh if c in hand]
            missing = each - len(hand)
            hand, pack = hand + pack[:missing], pack[missing:]
        groups.append(hand)
    return groups


@dataclass(frozen=True)
class ByClasses(Partition):
    """Each node the classes named; classes nobody names are left out."""

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for node, group in enumerate(self.groups):
            if not group or len(set(group)) < len(group) or min(group) < 0:
                raise ConfigError(
                    f"ByClasses.groups[{node}] must name one or more different classes from 0 on, "
                    f"got {group}."
                )
        if not self.groups:
            raise ConfigError("ByClasses.groups must name the classes of each node, got none.")

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        if nodes != len(self.groups):
            raise ConfigError(
                f"ByClasses names the classes of {len(self.groups)} nodes, there are {nodes}. "
                "Fix: one group of classes for each node."
            )
        return _deal_classes(y, self.groups, generator)


@dataclass(frozen=True)
class ByWriter(Partition):
    """Whole writers, so that nobody's hand is at two nodes; unknown writers are left out.

    Writers go from the most prolific to the least, each to the node that has the fewest samples.
    """

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        if writers is None:
            raise DataError(
                "ByWriter needs to know who wrote each sample, and this data does not say. Fix: "
                "put writers.npz beside MNIST's files, or use another partition."
            )
        if len(writers) != len(y):
            raise DataError(f"got {len(writers)} writers for {len(y)} samples.")
        work = [m for writer, m in by_value(writers, generator).items() if writer >= 0]
        if len(work) < nodes:
            raise DataError(
                f"{len(work)} writers cannot be dealt whole to {nodes} nodes. "
                f"Fix: at most {len(work)} nodes."
            )
        return _balance(work, nodes, generator)


def _balance(work: list[Tensor], nodes: int, generator: torch.Generator) -> list[Tensor]:
    """Longest first, each to the node with the least so far; ties in a random order."""
    order = torch.randperm(len(work), generator=generator).tolist()
    held: list[list[Tensor]] = [[] for _ in range(nodes)]
    sizes = [(0, node) for node in range(nodes)]
    for i in sorted(order, key=lambda i: -len(work[i])):
        size, node = heapq.heappop(sizes)
        held[node].append(work[i])
        heapq.heappush(sizes, (size + len(work[i]), node))
    return [torch.cat(parts) for parts in held]


@dataclass(frozen=True)
class LabelPermutation(Partition):
    """IID samples, but some nodes call the classes by other names.

    Attributes:
        permutations: For the first nodes, one after another: the node's name of class 0, 1, ...
            Classes past the end of a permutation, and nodes past the last one, keep their names.
    """

    permutations: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for node, names in enumerate(self.permutations):
            if sorted(names) != list(range(len(names))):
                raise ConfigError(
                    f"LabelPermutation.permutations[{node}] must hold each of 0 to "
                    f"{len(names) - 1} once, got {names}."
                )

    @classmethod
    def cycle(cls, swap: tuple[int, ...], nodes: int) -> LabelPermutation:
        """The first `nodes` nodes call swap[0] swap[1], swap[1] swap[2], ..., the last swap[0].

        >>> LabelPermutation.cycle((1, 2), nodes=1).permutations
        ((0, 2, 1),)
        """
        if len(swap) < 2 or len(set(swap)) < len(swap) or min(swap) < 0:
            raise ConfigError(
                f"a cycle must name two or more different classes from 0 on, got {swap}."
            )
        if nodes < 1:
            raise ConfigError(f"a label permutation needs at least 1 node, got nodes={nodes}.")
        names = list(range(max(swap) + 1))
        for old, new in zip(swap, (*swap[1:], swap[0]), strict=True):
            names[old] = new
        return cls((tuple(names),) * nodes)

    def relabel(self, node: int, y: Labels) -> Labels:
        """The labels under the node's own names."""
        if node >= len(self.permutations) or not len(y):
            return y
        names = self.permutations[node]
        table = torch.arange(max(int(y.max()) + 1, len(names)), device=y.device)
        table[: len(names)] = torch.tensor(names, device=y.device)
        return table[y]

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        if nodes < len(self.permutations):
            raise ConfigError(
                f"LabelPermutation renames the classes of {len(self.permutations)} nodes, there "
                f"are {nodes}. Fix: more nodes, or fewer that rename."
            )
        if int(y.max()) + 1 < max(map(len, self.permutations), default=0):
            raise DataError(
                f"LabelPermutation renames class {max(map(len, self.permutations)) - 1}, the "
                f"highest label is {int(y.max())}. Fix: permute classes that exist."
            )
        return IID()._deal(y, nodes, generator, writers)


def by_value(values: Labels, generator: torch.Generator) -> dict[int, Tensor]:
    """For each value that occurs, in ascending order, the indices where it does, shuffled."""
    order = torch.randperm(len(values), generator=generator)
    order = order[values[order].argsort(stable=True)]
    found, starts = np.unique(values[order].numpy(), return_index=True)
    return dict(zip(found.tolist(), order.tensor_split(starts[1:].tolist()), strict=True))


def _deal_classes(
    y: Labels, groups: Sequence[Sequence[int]], generator: torch.Generator
) -> list[Tensor]:
    """Each class dealt equally among the nodes whose group names it."""
    members = by_value(y, generator)
    held: list[list[Tensor]] = [[] for _ in groups]
    for c in sorted({c for group in groups for c in group}):
        holders = [node for node, group in enumerate(groups) if c in group]
        samples = members.get(c, torch.empty(0, dtype=torch.int64))
        if len(samples) < len(holders):
            raise DataError(
                f"class {c} has {len(samples)} samples for the {len(holders)} nodes that hold it. "
                f"Fix: fewer holders, or more samples; there are classes {sorted(members)}."
            )
        for node, share in zip(holders, samples.tensor_split(len(holders)), strict=True):
            held[node].append(share)
    return [torch.cat(parts) for parts in held]


# ---- the command line ----------------------------------------------------------------------------


def parse(text: str) -> Partition:
    """A partition from its command-line form.

    >>> parse("dirichlet:0.1")
    Dirichlet(alpha=0.1, min_size=10)
    >>> parse("classes:0,1,2/2,3,4")
    ByClasses(groups=((0, 1, 2), (2, 3, 4)))
    """
    name, colon, rest = text.strip().partition(":")
    if name not in _FORMS:
        raise UnknownNameError("partition", name, _FORMS)
    form, build = _FORMS[name]
    if bool(colon) != (":" in form):
        raise ConfigError(f"partition '{text}' is not understood. Expected: {form}.")
    try:
        return build(rest)
    except ConfigError:
        raise
    except ValueError as error:
        problem = f"partition '{text}' is not understood ({error}). Expected: {form}."
        raise ConfigError(problem) from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _dirichlet(text: str) -> Partition:
    alpha, comma, size = text.partition(",")
    return Dirichlet(float(alpha), int(size)) if comma else Dirichlet(float(alpha))


def _permute(text: str) -> Partition:
    swap, _, nodes = text.partition("@")
    return LabelPermutation.cycle(_numbers(swap), int(nodes))


_FORMS: dict[str, tuple[str, Callable[[str], Partition]]] = {
    "iid": ("iid", lambda _: IID()),
    "dirichlet": ("dirichlet:ALPHA or dirichlet:ALPHA,MIN_SIZE, e.g. dirichlet:0.1", _dirichlet),
    "pathological": (
        "pathological:CLASSES_PER_NODE, e.g. pathological:2",
        lambda text: Pathological(int(text)),
    ),
    "classes": (
        "classes:GROUP/GROUP/..., e.g. classes:0,1,2/2,3,4",
        lambda text: ByClasses(tuple(_numbers(group) for group in text.split("/"))),
    ),
    "writer": ("writer", lambda _: ByWriter()),
    "permute": ("permute:CLASS,CLASS@NODES, e.g. permute:8,9@7", _permute),
}

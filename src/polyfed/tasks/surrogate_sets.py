r"""Unlabelled sets with known class proportions, made from labelled data as FedUL makes them.

    theta[i, k] ~ U(.1, 1), times 10 where k = i mod K, rows divided by their sum
    IID      theta = sum over nodes of their draws, columns divided by their sum; the same for all
             nodes; samples: a random equal share of everything
    non-IID  theta = the node's own draw; samples: of class k a share w[c, k] of n / C, where
             w ~ U(.45, .55), times 80 where k is 2c or 2c + 1 (mod K), divided by its sum; classes
             are cut from the front, so later nodes may find one exhausted
    set i    takes floor(floor(n_c / M) theta[i, k]) samples of class k, or all there are, from a
             fresh shuffle: sets of one node overlap
    Pi       is recomputed from what was taken

Lu et al., ICLR 2022 (FedUL); rules read from lunanbit/FedUL@3d49211, utils/data_utils.py.
Symbols: C nodes, M sets a node, K classes, n samples in all, n_c at node c.
Deviations from that code: classes are shuffled before non-IID nodes cut from them; `overlap=False`
makes a node's sets disjoint (where a class does not suffice, every set gets less of it); `noise`
makes Pi known only approximately. As there, columns of the IID theta sum to 1 for any M: of 20 or
40 sets and 10 classes a node takes but half or a quarter of as many samples as it has.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed import check
from polyfed.errors import DataError, UnknownNameError
from polyfed.random import stream
from polyfed.tasks.labels import Labels
from polyfed.tasks.partition import IID, Partition, by_value
from polyfed.train.surrogate import checked_proportions

_DOMINANT = 4 / (1 - 0.95)  # how much more weight a non-IID node's two classes have
_COLUMNS = ("set", "class", "proportion")


@dataclass(frozen=True, eq=False)
class Sets:
    """The unlabelled sets of one node.

    Attributes:
        index: Samples, set by set; with overlap some occur in several sets.
        sets: Number of the set of each.
        counts: Samples of each class in each set, which nobody knows.
        Pi: Class proportions as the node knows them.
    """

    index: Int64[Tensor, " n"]
    sets: Int64[Tensor, " n"]
    counts: Int64[Tensor, "M K"]
    Pi: Float[Tensor, "M K"]


@dataclass(frozen=True, kw_only=True)
class SurrogateSets:
    """How labelled samples become the sets of several nodes.

    Attributes:
        nodes: number of nodes.
        sets: number of sets of each.
        iid: nodes hold all classes alike, or two of them mostly.
        overlap: a sample may be in several sets of its node.
        noise: error of the known proportions, as of a survey of 1 / noise^2 samples a set.
    """

    nodes: int = 5
    sets: int = 10
    iid: bool = True
    overlap: bool = True
    noise: float = 0.0

    def __post_init__(self) -> None:
        check.at_least(self, "nodes", 1)
        check.at_least(self, "sets", 1)
        check.between(self, "noise", 0, 0.99)

    def deal(self, y: Labels, seed: int, classes: int | None = None) -> list[Sets]:
        """The sets of every node.

        Args:
            y: Label of each sample; nothing of it but counts is kept.
            seed: Root of the streams; a node's sets do not depend on those of others.
            classes: K; if None, the highest label and one.
        """
        K = int(y.max()) + 1 if classes is None else classes
        rule: Partition = IID() if self.iid else Dominated()
        shares = rule.assign(y, self.nodes, stream(seed, "sets", "shares"))
        return [
            self._node(y, share, theta, seed, c)
            for c, (share, theta) in enumerate(zip(shares, self._thetas(K, seed), strict=True))
        ]

    def _thetas(self, K: int, seed: int) -> list[Tensor]:
        streams = [stream(seed, "sets", "theta", c) for c in range(self.nodes)]
        drawn = [draw_theta(self.sets, K, generator) for generator in streams]
        return [common_theta(drawn)] * self.nodes if self.iid else drawn

    def _node(self, y: Labels, share: Tensor, theta: Tensor, seed: int, c: int) -> Sets:
        generator = stream(seed, "sets", "draw", c)
        taken, counts = draw_sets(y[share], theta, generator, overlap=self.overlap)
        empty = (counts.sum(1) == 0).nonzero().flatten().tolist()
        if empty:
            raise DataError(
                f"node {c}: no sample for set {', '.join(map(str, empty))} of {self.sets}: its "
                f"{len(share)} samples do not suffice. Fix: fewer sets, or more samples."
            )
        Pi = counts.double() / counts.sum(1, keepdim=True)
        if self.noise:
            Pi = surveyed(Pi, self.noise, stream(seed, "sets", "noise", c))
        number = torch.arange(self.sets).repeat_interleave(counts.sum(1))
        return Sets(share[taken], number, counts, Pi)


@dataclass(frozen=True)
class Dominated(Partition):
    """Non-IID shares: two classes a node have 80 times the weight of the others."""

    def _deal(
        self, y: Labels, nodes: int, generator: torch.Generator, writers: Labels | None
    ) -> Sequence[Tensor]:
        K = int(y.max()) + 1
        members = by_value(y, generator)
        wanted = (self._weights(nodes, K, generator) * (len(y) // nodes)).long()
        shares = _cut([members.get(k, y.new_empty(0)) for k in range(K)], wanted)
        for c, share in enumerate(shares):
            if not len(share):
                raise DataError(
                    f"node {c} of {nodes} finds all its classes exhausted. Fix: fewer nodes."
                )
        return shares

    def _weights(self, nodes: int, K: int, generator: torch.Generator) -> Tensor:
        w = 0.45 + 0.1 * torch.rand(nodes, K, generator=generator, dtype=torch.float64)
        for c in range(nodes):
            w[c, 2 * c % K] *= _DOMINANT
            w[c, (2 * c + 1) % K] *= _DOMINANT
        return w / w.sum(1, keepdim=True)


def draw_theta(M: int, K: int, generator: torch.Generator) -> Float[Tensor, "M K"]:
    """What one node wants its sets to be: every set has one class of about ten times the weight."""
    theta = 0.1 + 0.9 * torch.rand(M, K, generator=generator, dtype=torch.float64)
    i = torch.arange(M)
    theta[i, i % K] *= 10
    return theta / theta.sum(1, keepdim=True)


def common_theta(drawn: Sequence[Float[Tensor, "M K"]]) -> Float[Tensor, "M K"]:
    """What IID nodes want their sets to be: the sum of all draws, columns divided by their sum."""
    total = torch.stack(list(drawn)).sum(0)
    return total / total.sum(0)


def draw_sets(
    y: Labels, theta: Float[Tensor, "M K"], generator: torch.Generator, *, overlap: bool
) -> tuple[Int64[Tensor, " taken"], Int64[Tensor, "M K"]]:
    """Take the samples of one node's sets.

    Args:
        y: Labels of the node's samples.
        theta: What the sets are to be.
        generator: The only source of chance.
        overlap: Every set takes from all samples, or from those that are left.

    Returns:
        Indices set by set, class by class; and how many of each class each set got.
    """
    members = by_value(y, generator)
    lists = [members.get(k, y.new_empty(0)) for k in range(theta.shape[1])]
    there = torch.tensor([len(m) for m in lists])
    wanted = (len(y) // len(theta) * theta).long()
    if overlap:
        counts = wanted.minimum(there)
        taken = [
            m[torch.randperm(len(m), generator=generator)[:n]]
            for row in counts.tolist()
            for m, n in zip(lists, row, strict=True)
        ]
        return torch.cat(taken), counts
    asked = wanted.sum(0)
    counts = torch.where(asked > there, wanted * there // asked.clamp_min(1), wanted)
    return torch.cat(_cut(lists, counts)), counts


def _cut(lists: Sequence[Tensor], counts: Int64[Tensor, "rows K"]) -> list[Tensor]:
    """For each row, the next counts[row, k] entries of list k; fewer where it ends."""
    ends = counts.cumsum(0)
    return [
        torch.cat([m[e - n : e] for m, n, e in zip(lists, row, stops, strict=True)])
        for row, stops in zip(counts.tolist(), ends.tolist(), strict=True)
    ]


def surveyed(
    Pi: Float[Tensor, "M K"], noise: float, generator: torch.Generator
) -> Float[Tensor, "M K"]:
    """Proportions known approximately: each row from a Dirichlet with the true row as its mean.

    An entry p has standard deviation noise * sqrt(p (1 - p)), that of its frequency among 1/noise^2
    samples of the set; what is 0 remains 0.

    Args:
        Pi: The truth.
        noise: Between 0 and 1, exclusively.
        generator: The only source of chance.
    """
    rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    known = torch.zeros_like(Pi)
    for row, out in zip(Pi, known, strict=True):
        held = row > 0
        drawn = rng.dirichlet(row[held].numpy() * (noise**-2 - 1))
        out[held] = torch.from_numpy(drawn).to(Pi)
    return known


def uniform_shares(y: Labels, nodes: int, generator: torch.Generator) -> list[Tensor]:
    """Test samples of each node: equally many of every class, from a fresh shuffle for each node.

    Args:
        y: Labels of all test samples.
        nodes: Each gets about a share of 1 / nodes; shares may overlap.
        generator: The only source of chance.
    """
    classes = len(y.unique())
    size = len(y) // nodes // classes
    return [
        torch.cat([index[:size] for index in by_value(y, generator).values()]) for _ in range(nodes)
    ]


# ---- a person's own sets -------------------------------------------------------------------------


def read_proportions(path: Path, classes: Sequence[str] = ()) -> Float[Tensor, "M K"]:
    """Proportions from a CSV file with the columns set, class and proportion.

    Sets are numbered from 0; a pair of set and class that is not listed has proportion 0.

    Args:
        path: The file.
        classes: Names of the classes, if the file has names instead of numbers from 0.
    """
    entries: dict[tuple[int, int], float] = {}
    for line, row in _rows(path):
        where = f"{path}, line {line}"
        k = _class_of(row["class"], classes, where)
        m = _number(row["set"], where, "set")
        if (m, k) in entries:
            raise DataError(f"{where}: set {m} and class {row['class']} are listed twice.")
        entries[m, k] = _share(row["proportion"], where)
    M = 1 + max((m for m, _ in entries), default=-1)
    K = len(classes) or 1 + max((k for _, k in entries), default=-1)
    Pi = torch.zeros(M, K, dtype=torch.float64)
    for (m, k), share in entries.items():
        Pi[m, k] = share
    return checked_proportions(Pi, str(path))


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [c for c in _COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}. Its first line must be "
                    f"{','.join(_COLUMNS)}; it is {','.join(reader.fieldnames or ())!r}."
                )
            return [(reader.line_num, {c: row[c] or "" for c in _COLUMNS}) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _class_of(text: str, classes: Sequence[str], where: str) -> int:
    if not classes:
        return _number(text, where, "class")
    if text not in classes:
        raise UnknownNameError(f"class in {where}", text, classes)
    return list(classes).index(text)


def _number(text: str, where: str, column: str) -> int:
    if not text.strip().isdecimal():
        raise DataError(f"{where}: {column} must be a number from 0, got {text!r}.")
    return int(text)


def _share(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{where}: proportion must be a number, got {text!r}.") from error

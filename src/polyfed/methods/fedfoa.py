r"""FedFoA: nodes share how their features correlate, and learn to understand each other's.

    Z       = projections of a batch, first view                     m samples x n numbers
    Z       = Q R,   diag(R) > 0                                                             (4)
    l       = l_byol + lam sum_j |Z - Q*_j Rbar_j|   over the peers j with tr(Rbar_j) > tr(R),
              if t > warm_up                                                        (7, 13)
    Rbar_k  = mean of R over the batches of round t, sent at its end                        (12)

Liu, Guo, Zhang, Zhou, Wang, Zhao. Feature Correlation-guided Knowledge Transfer for Federated
Self-supervised Learning. 2022, arXiv:2211.07364, Algorithm 1. The arithmetic is in
`polyfed.maths.correlation`.
Without a base it shares nothing but the triangles, so trunks may differ: a linear projector brings
all to n numbers. On top of fedbyol, fedu or fedema the online networks are averaged too.
Symbols: Q*_j = the best orthonormal basis for Rbar_j; t = round, from 1; m = `batch`, n =
`projection`, lam = lambda, warm_up = t_warm. All read the Rbar_j of the round before.
Limits: lam = 0, or t <= warm_up, is the base bit for bit (byol, without one). A node whose trace is
the largest hears nobody. One node: byol.
Deviations from the paper: diag(R) > 0 is imposed, and the norm is Frobenius', as its proof has it;
short batches are left out, as R grows with the square root of m. `peers` is its "another client".
`triangle_noise` is ours: what is added to R before it leaves. `normalise_rows` is another reading:
rows of Z have length 1, as in the cosines of l_byol, so that a trace tells how independent features
are and not how large, and a term of lam is at most lam sqrt(2 m).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec, about
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Phase
from polyfed.errors import ConfigError, DataError, MessageError
from polyfed.maths.correlation import (
    Bank,
    Begun,
    check_triangle,
    pack_triangle,
    triangular,
    unpack_triangle,
)
from polyfed.methods._self_taught import PROJECTOR, SelfTaught, round_of
from polyfed.methods.fedbyol import Blend, Divergence, NearPredictor, Sharing
from polyfed.train.ssl import SelfSupervised

MODEL, CORRELATION = "model", "correlation"
_WANTED, _BANK, _ENTRIES, _MEETINGS = "correlation/wanted", "bank", "entries", "meetings"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Nothing(Sharing):
    """Networks may differ, and stay where they are."""

    def check(self, nodes: Sequence[Node]) -> None:
        """Anything goes."""
        return

    def hears(self, node: Node) -> Spec:
        """Nothing."""
        return {}

    def sends(self, node: Node) -> Spec:
        """Nothing."""
        return {}

    def send(self, node: Node) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def mean(self, got: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Nothing."""
        return {}


@dataclass(eq=False)
class Correlated:
    """A self-supervised objective with FedFoA's term; sums up R while it trains.

    Attributes:
        inner: the self-supervised objective.
        lam: weight of the term; with 0 the objective is the inner one, bit for bit.
        bank: the peers' triangles.
        per_sample: divide Z by the square root of the batch size.
        normalise_rows: scale every row of Z to length 1.
        total: sum of R over the batches so far.
        heard: how often a peer had the larger trace.
        batches: how many there were.
    """

    inner: SelfSupervised
    lam: float
    bank: Bank | Tensor
    per_sample: bool = False
    normalise_rows: bool = False
    total: Tensor | float = 0.0
    heard: Tensor | float = 0.0
    batches: int = 0

    def __call__(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """The loss of a batch; labels are not looked at."""
        if not self.lam:
            seen = self.inner.see(model, x)
            self._add(triangular(self._rows(seen.first.detach()), per_sample=self.per_sample))
            return seen.loss
        begun = list[Begun]()
        seen = self.inner.see(
            model,
            x,
            lambda Z: begun.append(Begun(self._rows(Z), self.bank, per_sample=self.per_sample)),
        )
        understood = begun[0].end()
        self._add(understood.R)
        self.heard = self.heard + understood.heard.sum()
        return seen.loss + self.lam * understood.loss

    def after_step(self, model: Model) -> None:
        """What follows an optimiser step."""
        self.inner.after_step(model)

    def _rows(self, Z: Tensor) -> Tensor:
        return functional.normalize(Z, dim=1) if self.normalise_rows else Z

    def _add(self, R: Tensor) -> None:
        self.total = self.total + R
        self.batches += 1


@dataclass(frozen=True, kw_only=True)
class FedFoA(SelfTaught):
    """Share triangles, and with a base the online networks too.

    Attributes:
        base: how networks are averaged besides: as in fedbyol, fedu or fedema; none is not at all.
        lam: weight of the mutual-understanding term.
        warm_up: rounds without it.
        peers: how many others a node hears from in a round, chosen at random; 0 is all.
        per_sample: divide projections by the square root of the batch size, so that nodes with
            batches of different sizes can be compared.
        normalise_rows: scale every projection to length 1 before its triangle is made.
        triangle_noise: standard deviation of what a node adds to its triangle before it leaves, as
            a share of the root mean square of the triangle.
        mu: of base fedu: divergence from which on a node keeps its predictor.
        tau: of base fedema: share of its own network that a node keeps in its first round.
        divergence: of base fedu and fedema: paper or drift; none takes the base's own.
    """

    name: ClassVar[str] = "fedfoa"
    title: ClassVar[str] = "self-supervision that aligns how features correlate, for any networks"
    topologies: ClassVar[tuple[str, ...]] = ("star", "mesh")

    base: Literal["fedbyol", "fedu", "fedema"] | None = None
    lam: float = 0.01
    warm_up: int = 5
    peers: int = 0
    per_sample: bool = False
    normalise_rows: bool = False
    triangle_noise: float = 0.0
    mu: float = 0.4
    tau: float = 0.7
    divergence: Divergence | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "base", (None, "fedbyol", "fedu", "fedema"))
        for name in ("lam", "warm_up", "peers", "triangle_noise", "mu"):
            check.at_least(self, name, 0)
        check.between(self, "tau", 0, 1)
        check.one_of(self, "divergence", ("paper", "drift", None))

    @property
    def rule(self) -> Sharing:
        """How online networks are shared, if they are."""
        if self.base == "fedu":
            return NearPredictor(mu=self.mu, divergence=self.divergence or "drift")
        if self.base == "fedema":
            return Blend(tau=self.tau, divergence=self.divergence or "paper")
        return Sharing() if self.base == "fedbyol" else Nothing()

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """As all of the family; and with an empty bank: triangles of zeros, which nobody hears."""
        rows = self.peers or len(nodes) - 1
        made = super().prepare(nodes)
        for node in made:
            weight = next(iter(node.model.state(PROJECTOR).values()))
            node.memory[_BANK] = weight.new_zeros(rows, _numbers(self.projection))
        return made

    def check(self, nodes: Sequence[Node]) -> None:
        """Batches are large enough for a triangle, and of one size unless scaled."""
        super().check(nodes)
        self.rule.check(nodes)
        for node in nodes:
            self._check_batch(node)
        sizes = {node.name: self._batch_size(node) for node in nodes}
        if len(set(sizes.values())) > 1 and not self.per_sample:
            listed = ", ".join(f"{name} {m}" for name, m in sizes.items())
            raise ConfigError(
                f"fedfoa compares triangles, which grow with the batch, but batches differ: "
                f"{listed}. Use per_sample=True, or a batch that all nodes can fill."
            )
        if self.peers > len(nodes) - 1:
            raise ConfigError(
                f"FedFoA.peers must be <= {len(nodes) - 1}, the number of other nodes, got "
                f"{self.peers}. 0 is all of them."
            )

    def objective(self, node: Node) -> Objective:
        """BYOL and, after the warm-up, the term."""
        lam = self.lam if round_of(node) > self.warm_up else 0.0
        bank = Bank(unpack_triangle(node.memory[_BANK]))
        return Correlated(self.byol(node), lam, bank, self.per_sample, self.normalise_rows)

    def begin(self, node: Node) -> None:
        """What the base keeps."""
        self.rule.begin(node)

    def end(self, node: Node, objective: Objective) -> None:
        """The mean triangle of the round, Eq. (12)."""
        self.rule.end(node)
        done = cast(Correlated, objective)
        R = torch.as_tensor(done.total) / done.batches
        node.memory[CORRELATION] = pack_triangle(R)
        node.notes["correlation_trace"] = float(R.trace())
        if done.lam:
            node.notes["heard"] = float(done.heard) / done.batches

    def sends(self, node: Node) -> Spec:
        """The triangle, how many others' are wanted, and what the base sends."""
        bank = node.memory[_BANK]
        return {
            **_below(MODEL, self.rule.sends(node)),
            CORRELATION: TensorSpec((bank.shape[1],), bank.dtype),
            _WANTED: TensorSpec((), torch.int64, least=0),
        }

    def hears(self, node: Node) -> Spec:
        """The triangles of others, and what the base hears."""
        bank = TensorSpec.of(node.memory[_BANK])
        return {**_below(MODEL, self.rule.hears(node)), CORRELATION: bank}

    def send(self, node: Node) -> Message:
        """The triangle, how many others' are wanted, and what the base sends."""
        return Message(
            {
                **_below(MODEL, self.rule.send(node)),
                CORRELATION: self._noisy(node, node.memory[CORRELATION]),
                _WANTED: torch.tensor(len(node.memory[_BANK])),
            }
        )

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """Keep every triangle; tell everybody those of others, and the base's mean."""
        told = _triangles_only(place, got)
        if not told:
            return {}
        place.memory[_MEETINGS] = place.memory.get(_MEETINGS, torch.tensor(0)) + 1
        place.memory |= {f"{_ENTRIES}/{n}": m[CORRELATION] for n, m in told.items()}
        like = next(iter(told.values()))
        entries = {n: t.to(like[CORRELATION]) for n, t in sorted(place.recall(_ENTRIES).items())}
        place.notes["distances"] = _distances(entries)
        mean = self.rule.mean(_above(about(m, MODEL)) for m in told.values())
        wanted = int(like[_WANTED])
        return {
            name: Message(
                {**_below(MODEL, mean), CORRELATION: _chosen(place, entries, name, wanted)}
            )
            for name in to
        }

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Keep the others' triangles; do as the base does."""
        node.memory[_BANK] = message.tensors[CORRELATION]
        self.rule.receive(node, _above(about(message.tensors, MODEL)))
        return ()

    def _noisy(self, node: Node, packed: Tensor) -> Tensor:
        """The triangle as it leaves; the diagonal stays above zero."""
        if not self.triangle_noise:
            return packed
        drawn = torch.randn(packed.shape, generator=node.stream("triangle", round_of(node)))
        scale = self.triangle_noise * packed.square().mean().sqrt()
        R = unpack_triangle(packed + scale * drawn.to(packed))
        R.diagonal().clamp_(min=0)
        return pack_triangle(R)

    def _batch_size(self, node: Node) -> int:
        return self.phase("byol", epochs=1).batch_size(len(node.data["train"]))

    def _check_batch(self, node: Node) -> None:
        n, there = self.projection, len(node.data["train"])
        if there < n:
            raise DataError(
                f"node {node.name} has {there} training samples, fewer than the projection size "
                f"{n}, so its triangle is not square. Use --projection {there} or less."
            )
        if self._batch_size(node) < n:
            raise ConfigError(
                f"FedFoA.batch={self.batch:g} gives node {node.name} batches of "
                f"{self._batch_size(node)}, fewer than the projection size {n}, so their "
                "triangles are not square. Use larger batches, or a smaller projection."
            )


def _numbers(n: int) -> int:
    """How many numbers a triangle of n rows has."""
    return n * (n + 1) // 2


def _below(topic: str, named: Mapping[str, T]) -> dict[str, T]:
    return {f"{topic}/{name}": value for name, value in named.items()}


def _above(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.partition("/")[2]: tensor for name, tensor in named.items()}


def _triangles_only(place: Node, got: Mapping[Name, Message]) -> dict[Name, Mapping[str, Tensor]]:
    """What arrived, less what cannot be the triangle of a QR decomposition; that is noted."""
    told: dict[Name, Mapping[str, Tensor]] = {}
    for name, message in got.items():
        try:
            check_triangle(unpack_triangle(message.tensors[CORRELATION]), name)
            told[name] = message.tensors
        except MessageError as error:
            place.notes["refused"] = {**place.notes.get("refused", {}), name: str(error)}
    return told


def _chosen(place: Node, entries: Mapping[Name, Tensor], name: Name, wanted: int) -> Tensor:
    """The triangles of others than `name`, or so many of them; zeros where there are fewer."""
    others = [other for other in entries if other != name]
    if wanted < len(others):
        lot = place.stream("peers", int(place.memory[_MEETINGS]), name)
        drawn = torch.randperm(len(others), generator=lot)[:wanted]
        others = [others[i] for i in sorted(drawn.tolist())]
    rows = torch.stack([next(iter(entries.values())), *(entries[other] for other in others)])[1:]
    return torch.cat([rows, rows.new_zeros(wanted - len(rows), rows.shape[1])])


def _distances(entries: Mapping[Name, Tensor]) -> dict[str, Any]:
    """|R_i - R_j| of every pair: how far nodes are from understanding each other."""
    E = torch.stack(list(entries.values()))
    rows = [(E - e).norm(dim=1).tolist() for e in E]
    return {"nodes": list(entries), "rows": rows}

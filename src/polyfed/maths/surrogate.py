r"""Learning from sets whose class proportions are known: Theorem 1 of FedUL, in log space.

    q(x) = D_pibar Pi D_pi^-1 eta(x) / (the sum of its entries)                  (Theorem 1)
    T_mk = log pibar_m + log Pi_mk - log pi_k
    log q_m = logsumexp_k(log eta_k + T_mk) - logsumexp over m of the same
    loss = -log q_m for a sample of set m
    reference loss = -log softmax(q)_m
    proportion loss = sum_m (n_m / n) KL(Pi_m || mean of eta over the n_m samples of set m)

Lu, Wang, Li, Niu, Dou, Sugiyama, ICLR 2022 (FedUL), Theorem 1; Alzahrani 2024. The proportion loss
is that of learning from label proportions (LLP), the control FedLLP.
Symbols: eta_k = p(y = k | x), the softmax of the K logits, under class prior pi; Pi_mk = share of
class k in set m; pibar_m = share of set m among the node's samples; T = -inf where Pi_mk = 0.
Limits: Pi = I and pibar = pi: q = eta, and the loss is cross-entropy. Uniform pi drops out.
Deviations from the paper: the denominator it prints lacks a tilde: q is divided by its own sum. The
authors' code takes a softmax of q once more (`reference`), which is not the likelihood of anything.
It leaves D_pi out. No product of probabilities is formed: exp(log eta) @ exp(T) underflows, and its
gradient is lost, where a network gives a set's classes 1e-45 together; this does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from polyfed.random import stream

Kind = Literal["proper", "reference"]


def log_transition(
    Pi: Float[Tensor, "M K"],
    sizes: Float[Tensor, " M"] | Int64[Tensor, " M"],
    prior: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, "M K"]:
    """T of Theorem 1.

    Args:
        Pi: Class proportions of each set.
        sizes: Samples in each set, or their shares.
        prior: Class prior under which the classifier is wanted, up to a factor; None is uniform.
    """
    pibar = sizes.to(Pi) / sizes.sum()
    pi = Pi.new_ones(Pi.shape[1]) if prior is None else prior.to(Pi)
    T = pibar.log()[:, None] + Pi.log() - (pi / pi.sum()).log()
    return T.masked_fill(Pi == 0, -torch.inf)


def surrogate_log_probs(
    logits: Float[Tensor, "B K"], T: Float[Tensor, "M K"]
) -> Float[Tensor, "B M"]:
    """The log of q for each sample, in the wider of the two dtypes.

    Logits are log eta up to a number for each sample, which the last softmax removes. A set that is
    impossible (a row of -inf) gets about the lowest number there is.
    """
    return _scores(logits, T).log_softmax(-1)


def _scores(logits: Tensor, T: Tensor) -> Tensor:
    """The log of q up to a number for each sample."""
    finite = T.clamp_min(torch.finfo(T.dtype).min / 4)  # a row of -inf would give NaN gradients
    return torch.logsumexp(logits[:, None, :] + finite, -1)


def surrogate_losses(
    logits: Float[Tensor, "B K"],
    sets: Int64[Tensor, " B"],
    T: Float[Tensor, "M K"],
    loss: Kind = "proper",
) -> Float[Tensor, " B"]:
    """How badly each sample's set is predicted.

    Args:
        logits: The network's output: classes, not sets.
        sets: Which set each sample is from.
        T: From `log_transition`.
        loss: The likelihood of the set, or the authors' double softmax.
    """
    scores = _scores(logits, T)
    if loss == "reference":
        scores = scores.softmax(-1)
    return functional.cross_entropy(scores, sets, reduction="none")


def proportion_loss(
    logits: Float[Tensor, "B K"], sets: Int64[Tensor, " B"], Pi: Float[Tensor, "M K"]
) -> Float[Tensor, ""]:
    """KL between the proportions of each set and the mean prediction over its samples in the batch.

    Sets weigh by their samples in the batch; one without any does not count.
    """
    log_eta = logits.log_softmax(-1)
    is_in = sets == torch.arange(len(Pi), device=sets.device)[:, None]
    count = is_in.sum(1)
    counted = is_in | (count == 0)[:, None]  # an absent set: any finite number, of weight 0
    total = log_eta.masked_fill(~counted[:, :, None], -torch.inf).logsumexp(1)
    mean = total - counted.sum(1, dtype=total.dtype).log()[:, None]
    kl = (torch.xlogy(Pi, Pi) - Pi * mean).sum(1)
    return (kl * count).sum() / len(sets)


# ---- identifiability -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Identifiability:
    """Whether sets determine the classifier; the numbers behind it.

    Attributes:
        classes: K.
        ranks: rank of each node's Pi; K is needed to learn from that node alone.
        sigmas: K-th singular value of each node's Pi: how firmly, 0 where the rank is lower.
        dimension: of {(u, s): Pi_c u = s_c q_c for all nodes c}; 1 is needed to learn from all.
        margin: smallest singular value of that system past the one that is always 0.
        unseen: classes that no set of any node holds.
    """

    classes: int
    ranks: tuple[int, ...]
    sigmas: tuple[float, ...]
    dimension: int
    margin: float
    unseen: tuple[int, ...]

    @property
    def is_certain(self) -> bool:
        """Whether every node alone, hence all together, determine the classifier."""
        return min(self.ranks) == self.classes

    def sentence(self, names: Sequence[str]) -> str:
        """The finding for a person, with the numbers, and what to do if it is bad.

        Args:
            names: Of the nodes.
        """
        text = f"{self._alone(names)}; {self._together()}."
        if self.unseen:
            text += f" No set holds class {', '.join(map(str, self.unseen))}."
        if self.is_certain:
            return text
        return (
            f"{text} Give the nodes more sets, of unlike proportions (at least {self.classes}, the "
            "number of classes), let them share classes, or train with labels at the hub too: "
            "fedul-m1 or fedul-m2."
        )

    def _alone(self, names: Sequence[str]) -> str:
        K = self.classes
        poor = [f"{n} (rank {r})" for n, r in zip(names, self.ranks, strict=True) if r < K]
        least = min(range(len(self.sigmas)), key=self.sigmas.__getitem__)
        figure = f"smallest singular value of Pi: {self.sigmas[least]:.2g}, at {names[least]}"
        if poor:
            who = ", ".join(poor)
            return f"alone, the sets of {who} do not tell {K} classes apart ({figure})"
        return f"the sets of each node tell {K} classes apart ({figure})"

    def _together(self) -> str:
        if self.dimension == 1:
            return f"together they determine the classifier (margin {self.margin:.2g})"
        ways = "1 way" if self.dimension == 2 else f"{self.dimension - 1} ways"
        return (
            f"together they leave it open in {ways}: classifiers that differ explain the sets "
            "equally well"
        )


@torch.no_grad()
def identifiable(Pi: Sequence[Float[Tensor, "_ K"]]) -> Identifiability:
    """What the sets of each node, and of all nodes together, say about the classifier.

    One node determines eta if Pi_c has rank K. Several nodes add an unknown scale each: what q_c
    leaves open are the (u, s) with Pi_c u = s_c q_c; one dimension of them is the classifier itself
    up to its sum. Taken for one random u > 0 with q_c = Pi_c u, so true of almost all.

    Args:
        Pi: Class proportions of the sets of each node.
    """
    K, eps = Pi[0].shape[1], torch.finfo(Pi[0].dtype).eps
    exact = [p.cpu().double() for p in Pi]
    values = [_singular_values(p, K) for p in exact]
    ranks = [_rank(v, max(p.shape), eps) for v, p in zip(values, exact, strict=True)]
    system = _joint_system(exact)
    joint = _singular_values(system, system.shape[1])
    return Identifiability(
        classes=K,
        ranks=tuple(ranks),
        sigmas=tuple(float(v[-1]) for v in values),
        dimension=system.shape[1] - _rank(joint, max(system.shape), eps),
        margin=float(joint[-2]),
        unseen=tuple((torch.cat(exact).sum(0) == 0).nonzero().flatten().tolist()),
    )


def _joint_system(Pi: Sequence[Tensor]) -> Tensor:
    """Rows (Pi_c | -q_c in column c of the scales): its null space are the (u, s)."""
    K = Pi[0].shape[1]
    u = 0.5 + torch.rand(K, generator=stream(0, "identifiable"), dtype=torch.float64)
    scales = torch.block_diag(*[-(p @ u)[:, None] for p in Pi])
    return torch.cat([torch.cat(list(Pi)), scales], 1)


def _singular_values(matrix: Tensor, width: int) -> Tensor:
    """As many as there are columns, in falling order; zeros where there are fewer rows."""
    found = torch.linalg.svdvals(matrix)
    return functional.pad(found, (0, width - len(found)))


def _rank(values: Tensor, size: int, eps: float) -> int:
    return int((values > size * eps * values[0]).sum())

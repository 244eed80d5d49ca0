r"""FedALA: each node mixes what it hears into its own head, element by element, by learnt weights.

    trunk  <- that of the mean
    head_k <- l + (g - l) * W                                                          (1)
    W      <- clip(W - eta * grad_head F_k * (g - l), 0, 1)                            (2)
    then local training of all parts, and FedAvg's mean of whole networks

Zhang, Hua, Wang, Song, Xue, Ma, Guan. AAAI 2023, arXiv:2212.01197, Algorithm 1.
Checked against TsingZ0/PFLlib@2b077c1, system/utils/ALA.py.
Symbols: l = the node's head after local training, g = the mean head, W = weights in [0, 1] of the
head's shape, ones at first, kept from round to round; F_k = cross-entropy on a random contiguous
share of the node's data; eta = step of the weights.
W is learnt for one epoch in a round; the first time until the losses of the last batch after ten
epochs have a standard deviation below 0.1, or for 100 epochs.
Limits: eta = 0 would be FedAvg; where g = l there is nothing to mix.
Deviations from the paper: the p layers that are mixed are the parts besides the trunk; batches are
shuffled, so the loss that ends the first search is that of the share's last rows, after the epoch;
the first search ends after 100 epochs; the trunk is in eval mode while W is learnt, and its buffers
are those of the mean; all nodes take part in every round; Adam is the default optimiser of local
training.
A head without buffers, last in Sequentials, is learnt as a network of W (`MixedHead`) on what the
trunk puts out, which is computed once; any other by a rule (`Mixing`). The steps are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Boxed, Phase, cross_entropy
from polyfed.methods._averaging import TRUNK, Decaying, Shares
from polyfed.train import mean_loss
from polyfed.train.agree import parts_beside
from polyfed.train.tail import cut

_MIX, _TIMES = "mix", "times_mixed"
_WINDOW, _SPREAD, _MOST = 10, 0.1, 100
_BYTES = 1 << 30  # of what the trunk puts out


@dataclass(frozen=True, eq=False)
class Mixing:
    """A rule that learns W by Eq. (2) and keeps the head at Eq. (1).

    Attributes:
        here: l, by name of the parameter.
        step: g - l.
        weights: W; changed in place.
        eta: step of the weights.
    """

    here: Mapping[str, Tensor]
    step: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    eta: float

    def update(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """One step of W, and the head that follows from it."""
        known = dict(model.net.named_parameters())
        with torch.enable_grad():
            loss = cross_entropy(model, x, y)
            gradients = torch.autograd.grad(loss, [known[name] for name in self.here])
        for name, gradient in zip(self.here, gradients, strict=True):
            self.weights[name].sub_(self.eta * gradient * self.step[name]).clamp_(0, 1)
        for name, value in self.mixed().items():
            known[name].copy_(value)
        return loss.detach()

    def mixed(self) -> dict[str, Tensor]:
        """The head of Eq. (1)."""
        return {n: here + self.step[n] * self.weights[n] for n, here in self.here.items()}


class MixedHead(nn.Module):
    """The head of Eq. (1) as a network whose parameters are W.

    Args:
        head: of the same shape; it becomes a part of this.
        names: of its parameters that are mixed.
    """

    def __init__(self, head: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.head, self.names = head.requires_grad_(False), tuple(names)
        for i, name in enumerate(names):
            ones = torch.ones_like(head.get_parameter(name))
            self.register_parameter(f"weight{i}", nn.Parameter(ones))
            self.register_buffer(f"here{i}", torch.zeros_like(ones))
            self.register_buffer(f"step{i}", torch.zeros_like(ones))

    def forward(self, x: Tensor) -> Tensor:
        """What the mixed head makes of the trunk's output."""
        here, step, weights = (self._own(kind) for kind in ("here", "step", "weight"))
        mixed = {name: here[name] + step[name] * weights[name] for name in self.names}
        out: Tensor = functional_call(self.head, mixed, (x,))
        return out

    @torch.no_grad()
    def begin(self, rule: Mixing, head: nn.Module) -> None:
        """Take l, g - l and W from a rule, and what is not mixed from the head."""
        self.head.load_state_dict(head.state_dict())
        pairs = (("here", rule.here), ("step", rule.step), ("weight", rule.weights))
        for kind, given in pairs:
            for name, t in self._own(kind).items():
                t.copy_(given[name])

    @torch.no_grad()
    def end(self, rule: Mixing) -> None:
        """Give W to the rule."""
        for name, weight in self._own("weight").items():
            rule.weights[name].copy_(weight)

    def _own(self, kind: str) -> dict[str, Tensor]:
        return {name: getattr(self, f"{kind}{i}") for i, name in enumerate(self.names)}


_HEADS: WeakKeyDictionary[nn.Module, MixedHead] = WeakKeyDictionary()


def _mixed_head(net: nn.Module, head: nn.Module, names: Sequence[str]) -> MixedHead:
    """The same in all rounds, so that a trainer's stacks of it can be used again.

    Args:
        net: the network.
        head: what of it is mixed.
        names: of the head's parameters that are mixed.
    """
    known = _HEADS.get(net)
    if known is None or known.names != tuple(names) or _kind(known.head) != _kind(head):
        known = _HEADS[net] = MixedHead(copy.deepcopy(head), names)
    return known


def _kind(net: nn.Module) -> list[tuple[Any, ...]]:
    return [(name, t.shape, t.dtype, t.device) for name, t in net.state_dict().items()]


@dataclass(frozen=True, kw_only=True)
class FedALA(Decaying):
    """Average whole networks; every node mixes the mean head with its own.

    Attributes:
        local_epochs: epochs of all parts in each round.
        eta: step of the mixing weights.
        share: share of the node's data that the mixing weights are learnt on.
    """

    name: ClassVar[str] = "fedala"
    title: ClassVar[str] = "average whole networks, mix the mean head into one's own"
    shares: ClassVar[Shares] = "all"

    local_epochs: int = 1
    eta: float = 1.0
    share: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "eta", hint="eta=0 is FedAvg: use FedAvg().")
        check.positive(self, "share")
        check.between(self, "share", 0, 1)

    def check(self, nodes: Sequence[Node]) -> None:
        """As FedAvg, and there is a head to mix."""
        for node in nodes:
            parts_beside(node, TRUNK)
        super().check(nodes)

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        optimiser = self.slowed(self.decayed(node))
        yield self.phase("local", epochs=self.local_epochs, optimiser=optimiser)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the mean, then bring back of the own head what the data asks for."""
        heads = parts_beside(node, TRUNK)
        here = _moving(node.model, heads)
        node.model.load(message.tensors)
        step = {name: message.tensors[name] - own for name, own in here.items()}
        if not any(bool(t.any()) for t in step.values()):
            return
        kept = node.recall(_MIX)
        weights = {n: kept[n] if kept else torch.ones_like(t) for n, t in here.items()}
        rule = Mixing(here, step, weights, self.eta)
        node.model.load(rule.mixed())
        yield from self._learn(node, rule, heads)
        node.model.load(rule.mixed())
        node.remember(_MIX, weights)
        flat = torch.cat([w.flatten() for w in weights.values()])
        node.notes["mixing_weight"] = float(flat.mean())

    def _learn(self, node: Node, rule: Mixing, heads: tuple[str, ...]) -> Iterable[Phase]:
        """Epochs of Eq. (2) on a share of the data: one, or the first time until the loss rests."""
        times = int(node.memory.get(_TIMES, 0))
        own, losses = (node.model, node.data), list[float]()
        node.model, sample, way = self._way(node.model, self._sample(node, times), rule, heads)
        phase = self.phase("mix", split=_MIX, epochs=1, **way)
        last = _rows(sample, slice(-phase.batch_size(len(sample)), None))
        node.data = Data(may_miss_classes=True, **{**node.data, _MIX: sample})
        while len(losses) < (1 if times else _MOST) and not _rests(losses):
            yield phase
            losses.append(mean_loss(node.model, last, cross_entropy))
        if isinstance(node.model.net, MixedHead):
            node.model.net.end(rule)
        node.model, node.data = own
        node.memory[_TIMES] = torch.tensor(times + 1)
        node.notes["mix_epochs"] = len(losses)

    def _way(
        self, model: Model, sample: Split, rule: Mixing, heads: tuple[str, ...]
    ) -> tuple[Model, Split, dict[str, Any]]:
        """What to train, on which data, and how: a mixed head if there can be one, else by rule."""
        by_rule = model, sample, {"objective": rule, "parts": heads}
        found = cut(model, heads)
        if found is None or any(True for _ in found.tail.net.buffers()):
            return by_rule
        x = found.features(sample.x, _BYTES)
        if x is None:
            return by_rule
        head = _mixed_head(model.net, found.tail.net, list(rule.here))
        head.begin(rule, found.tail.net)
        mixed = Model(head, Model.split(head, mix=...).parts, model.precision)
        return mixed, Split(x, sample.y), {"optimiser": Boxed(lr=self.eta)}

    def _sample(self, node: Node, times: int) -> Split:
        """A random contiguous share of the training data."""
        train = node.data["train"]
        size = max(1, int(self.share * len(train)))
        generator = node.stream("fedala", times)
        first = int(torch.randint(len(train) - size + 1, (), generator=generator))
        return _rows(train, slice(first, first + size))


def _moving(model: Model, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """Values of the parameters of these parts; one that its owner froze is not among them."""
    free = {name for name, p in model.net.named_parameters() if p.requires_grad}
    return {name: t for name, t in model.state(*parts).items() if name in free}


def _rows(split: Split, rows: slice) -> Split:
    return Split(split.x[rows], None if split.y is None else split.y[rows])


def _rests(losses: Sequence[float]) -> bool:
    """Whether the last losses of the first search hardly differ."""
    if len(losses) <= _WINDOW:
        return False
    return bool(torch.tensor(losses[-_WINDOW:]).std(correction=0) < _SPREAD)

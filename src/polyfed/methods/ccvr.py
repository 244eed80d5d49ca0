r"""CCVR: after FedAvg, the head is trained anew on features drawn from one Gaussian per class.

    rounds 1 to R - 1:  FedAvg
    round R:            node k sends N_ck, mu_ck, S_ck of its trunk features, for every class c
                        the hub pools them to mu_c, S_c, draws M features of N(mu_c, S_c) for
                        every class, trains the head on them, and sends it               (1)

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021, arXiv:2106.05001, Algorithm 1.
Symbols: N_ck, mu_ck, S_ck = number, mean and covariance of node k's features of class c, mu_c and
S_c = those of all nodes together (maths/gaussian.py), M = `virtual`.
Limits: calibrate_epochs = 0 is FedAvg with R - 1 rounds; one node calibrates on its own statistics.
Deviations from the paper: the head is one linear layer, trained from the averaged one; features are
not transformed before the Gaussian is fitted; all nodes take part in every round; a node that was
away in round R - 1 does not know that R is the last: it hears the result and has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.errors import DataError
from polyfed.maths.gaussian import ClassStatistics, class_statistics, draw, pooled
from polyfed.maths.mixing import weighted_mean
from polyfed.methods._averaging import TRUNK, Averaging, Shares
from polyfed.methods._linear import linear_head
from polyfed.train import outputs

_N, _MEAN, _COVARIANCE, _ROUND = "class_count", "class_mean", "class_covariance", "round"
_STATISTICS = (_N, _MEAN, _COVARIANCE)
_HEAD, _WHOLE = "head", "mean"


@dataclass(frozen=True, kw_only=True)
class CCVR(Averaging):
    """FedAvg, then a head that the hub trains on virtual features.

    Attributes:
        rounds: number of rounds, of which the last calibrates the head.
        local_epochs: epochs in each round but the last.
        virtual: features drawn for each class.
        calibrate_epochs: epochs of the head on them, at the hub.
    """

    name: ClassVar[str] = "ccvr"
    title: ClassVar[str] = "fedavg, then calibrate the head on Gaussian virtual features"
    shares: ClassVar[Shares] = "all"
    averages: ClassVar[bool] = False  # the last round's Gaussians are each node's own

    local_epochs: int = 1
    virtual: int = 2000
    calibrate_epochs: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "virtual", 1)

    def check(self, nodes: Sequence[Node]) -> None:
        """As FedAvg; the head is one linear layer, and labels are classes."""
        for node in nodes:
            linear_head(node)
            _labels(node)
        super().check(nodes)

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data, in all rounds but the last."""
        node.memory[_ROUND] = torch.tensor(_round(node) + 1)
        if not self._is_last(node):
            yield self.phase("local", epochs=self.local_epochs)

    def sends(self, node: Node) -> Spec:
        """The network and its number of examples; at last the head and the statistics."""
        if not self._is_last(node):
            return super().sends(node)
        head = self.hears(node)
        weight = head[linear_head(node)[0]]
        classes, width = weight.shape
        return {
            **head,
            _N: TensorSpec((classes,), torch.int64, least=0),
            _MEAN: TensorSpec((classes, width), weight.dtype),
            _COVARIANCE: TensorSpec((classes, width, width), weight.dtype),
        }

    def hears(self, node: Node) -> Spec:
        """The mean network and the number of its round; at last the head."""
        spec = node.model.spec()
        if not self._is_last(node):
            return {**spec, _ROUND: TensorSpec((), torch.int64)}
        return {name: spec[name] for name in linear_head(node)}

    def send(self, node: Node) -> Message:
        """The network and its number of examples; at last the head and the statistics."""
        if not self._is_last(node):
            return super().send(node)
        state = node.model.state()
        head = {name: state[name] for name in linear_head(node)}
        classes = len(next(iter(head.values())))
        features = outputs(node.model, node.data["train"].x, TRUNK)
        found = class_statistics(features, _labels(node), classes)
        return Message({**head, _N: found.count, _MEAN: found.mean, _COVARIANCE: found.covariance})

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """At last: draw virtual features, and train the head on them."""
        told = [m.tensors for m in got.values() if _MEAN in m.tensors]
        if not told:
            return
        heads = [{n: t for n, t in m.items() if n not in _STATISTICS} for m in told]
        head = weighted_mean(heads, [1.0] * len(heads))
        kinds = {name: "weight" if t.dim() == 2 else "bias" for name, t in head.items()}
        place.model = _linear({kinds[name]: t for name, t in head.items()})
        place.data = Data(train=self._virtual(place, told))
        yield self.phase("calibrate", epochs=self.calibrate_epochs)
        trained = place.model.state()
        place.remember(_HEAD, {name: trained[kind] for name, kind in kinds.items()})
        place.model, place.data = Model.none(), Data()

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The mean; at last the head, and for who does not know that, the whole network."""
        head = place.recall(_HEAD)
        if head:
            whole = {**place.recall(_WHOLE), **head}
            averaging = {n for n, m in got.items() if _MEAN not in m.tensors}
            return {n: Message(whole if n in averaging else head) for n in to}
        place.memory[_ROUND] = torch.tensor(_round(place) + 1)
        whole = {**self.mean(got), _ROUND: place.memory[_ROUND]}
        place.remember(_WHOLE, whole)
        return dict.fromkeys(to, Message(whole))

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load what was heard."""
        state = dict(message.tensors)
        heard = int(state.pop(_ROUND, 0))
        node.memory[_ROUND] = torch.tensor(max(heard, _round(node)))
        node.model.load(state)
        return ()

    def _is_last(self, node: Node) -> bool:
        return _round(node) >= self.rounds

    def _virtual(self, place: Node, told: Sequence[Mapping[str, Tensor]]) -> Split:
        """`virtual` features of every class that somebody has."""
        every = pooled([ClassStatistics(*(m[name] for name in _STATISTICS)) for m in told])
        dtype = told[0][_MEAN].dtype
        held = every.count.nonzero().flatten().tolist()
        drawn = [
            draw(every.mean[c], every.covariance[c], self.virtual, place.stream("virtual", c))
            for c in held
        ]
        labels = torch.tensor(held, device=every.mean.device).repeat_interleave(self.virtual)
        return Split(torch.cat(drawn).to(dtype), labels)


def _round(node: Node) -> int:
    """The round that a node, or the hub, believes to be in."""
    return int(node.memory.get(_ROUND, 0))


def _labels(node: Node) -> Tensor:
    y = node.data["train"].y
    if y is None or y.dim() != 1 or y.is_floating_point():
        raise DataError(
            f"node {node.name}: the labels of 'train' must be one class per sample: ccvr sends "
            "statistics of every class."
        )
    return y


def _linear(state: Mapping[str, Tensor]) -> Model:
    """A linear layer with these values."""
    weight = state["weight"]
    outs, ins = weight.shape
    net = nn.utils.skip_init(
        nn.Linear, ins, outs, bias="bias" in state, device=weight.device, dtype=weight.dtype
    )
    model = Model.split(net, head=...)
    model.load(state)
    return model

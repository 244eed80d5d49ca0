r"""MOCHA: one linear model per node, and a matrix that learns how they relate.

    F(W, Omega) = sum_t l_t(w_t) + lam1 tr(W Omega W^T) + lam2 |W|^2                   (1)
    the hub:  Omega = Sigma^-1,  Sigma = (W^T W)^(1/2) / tr((W^T W)^(1/2))             (2)
    node t:   w_t <- argmin  l_t(w) + lam1 (2 w . p_t + r_t |w - w_t|^2) + lam2 |w|^2  (3)
              p_t = sum_s Omega_ts w_s,  r_t = sum_s |Omega_ts|

Smith, Chiang, Sanjabi, Talwalkar. NeurIPS 2017, arXiv:1705.10467, Algorithm 1.
Checked against gingsmith/fmtl@53042a2, opt/run_mocha.m and util/compute_primal.m.
Symbols: w_t = weight and bias of node t's head, as one vector; W = one column per node, 0 at first;
l_t = mean cross-entropy of node t; Sigma = relation of the tasks, I/m at first.
All nodes move at once, so each minimises a bound of F that is exact where it starts:
tr(D Omega D^T) <= sum_t r_t |d_t|^2 (Gershgorin). If every node lowers its (3), F falls.
Limits: one node is ridge regression with lam1 + lam2; lam1 = 0 would be that for every node alone.
Deviations from the paper: (3) is the primal twin of its dual subproblem, by gradient steps in place
of SDCA; cross-entropy in place of the hinge loss; features are the outputs of a trunk that is never
trained; Omega is renewed every round, from (2) with a ridge (maths/relation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import PerSample, Phase, cross_entropy
from polyfed.errors import ModelError
from polyfed.maths.relation import relation
from polyfed.methods._averaging import TRUNK
from polyfed.methods._linear import linear_head
from polyfed.train.agree import check_same_parts, parts_beside

_TASK, _BEND = "task", "bend"


@dataclass(frozen=True, eq=False)
class Related(PerSample):
    """The objective of Eq. (3).

    Attributes:
        pull: p_t, by name of the parameter.
        bend: r_t.
        start: w_t.
        lam1: weight of the relation.
        lam2: weight of the squared norm.
    """

    pull: Mapping[str, Tensor]
    bend: Tensor
    start: Mapping[str, Tensor]
    lam1: float
    lam2: float

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Cross-entropy of each sample, and the penalty that they share."""
        penalty = x.new_zeros(())
        for name, w in model.net.named_parameters():
            if name in self.pull:
                apart = (w - self.start[name]).square().sum()
                related = 2 * (w * self.pull[name]).sum() + self.bend * apart
                penalty = penalty + self.lam1 * related + self.lam2 * w.square().sum()
        return cross_entropy.losses(model, x, y) + penalty


@dataclass(frozen=True, kw_only=True)
class MOCHA(Method):
    """Linear models that learn how they relate.

    Attributes:
        lam1: weight of the relation between the nodes' models.
        lam2: weight of their squared norms.
        ridge: added to the diagonal of W^T W, so that the relation can be inverted.
        local_epochs: epochs of the head in each round.
    """

    name: ClassVar[str] = "mocha"
    title: ClassVar[str] = "linear models on fixed features, tied by a learnt relation"

    lam1: float = 1e-3
    lam2: float = 1e-4
    ridge: float = 1e-3
    local_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "lam1", "ridge")
        check.at_least(self, "lam2", 0)
        check.at_least(self, "local_epochs", 0)

    def check(self, nodes: Sequence[Node]) -> None:
        """Heads are linear and alike, and all nodes see the same features."""
        for node in nodes:
            linear_head(node)
        check_same_parts(nodes, *parts_beside(nodes[0], TRUNK))
        check_same_parts(nodes, TRUNK)
        first = nodes[0].model.state(TRUNK)
        for node in nodes[1:]:
            for name, value in node.model.state(TRUNK).items():
                if not torch.equal(value, first[name]):
                    raise ModelError(
                        f"mocha relates linear models on the same features, but '{name}' of node "
                        f"{node.name} has other values than that of {nodes[0].name}. Give all "
                        "nodes the same trunk (tasks: --init common), or one without parameters."
                    )

    def start(self, node: Node) -> Iterable[Phase]:
        """W = 0."""
        state = node.model.state()
        node.model.load({name: torch.zeros_like(state[name]) for name in linear_head(node)})
        return ()

    def local(self, node: Node) -> Iterable[Phase]:
        """Nothing before the exchange: a round begins with what the last one left."""
        return ()

    def sends(self, node: Node) -> Spec:
        """w_t."""
        spec = node.model.spec()
        return {name: spec[name] for name in linear_head(node)}

    def hears(self, node: Node) -> Spec:
        """p_t, in the shape of w_t, and r_t."""
        spec = self.sends(node)
        return {**spec, _BEND: TensorSpec((), next(iter(spec.values())).dtype)}

    def send(self, node: Node) -> Message:
        """w_t."""
        return Message(self._head(node))

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """Eq. (2), then p_t and r_t; a node that is away counts with what it last sent."""
        for name, message in got.items():
            place.remember(f"{_TASK}/{name}", message.tensors)
        device = next(t.device for m in got.values() for t in m.tensors.values())
        names = sorted({key.partition("/")[0] for key in place.recall(_TASK)})
        tasks = [place.recall(f"{_TASK}/{name}") for name in names]
        W = torch.stack([_vector(task).to(device) for task in tasks], dim=1)
        sigma = relation(W, self.ridge)
        omega = torch.linalg.inv(sigma)
        place.notes["relation"] = {"nodes": names, "rows": sigma.tolist()}
        pulls = (W.double() @ omega).T
        return {
            name: Message({**_shaped(pull, task), _BEND: bend.to(W.dtype)})
            for name, task, pull, bend in zip(names, tasks, pulls, omega.abs().sum(1), strict=True)
            if name in to
        }

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Train the head by Eq. (3)."""
        pull = {name: t for name, t in message.tensors.items() if name != _BEND}
        start = self._head(node)
        objective = Related(pull, message.tensors[_BEND], start, self.lam1, self.lam2)
        heads = parts_beside(node, TRUNK)
        yield self.phase("local", objective=objective, parts=heads, epochs=self.local_epochs)

    def _head(self, node: Node) -> dict[str, Tensor]:
        state = node.model.state()
        return {name: state[name] for name in linear_head(node)}


def _vector(task: Mapping[str, Tensor]) -> Tensor:
    """A head as one vector, in the order of its names."""
    return torch.cat([task[name].flatten() for name in sorted(task)])


def _shaped(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A vector as a head: the inverse of `_vector`."""
    names = sorted(like)
    parts = vector.split([like[name].numel() for name in names])
    return {n: p.view_as(like[n]).to(like[n].dtype) for n, p in zip(names, parts, strict=True)}

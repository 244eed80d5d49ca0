r"""Joint: all data in one place, one trunk, one head per node. The upper control.

    min over trunk, head_1..K of   sum_k (n_k / n) CE_k(head_k(trunk(x)))              (1)

Multi-task learning with a shared trunk (hard parameter sharing). It shares everything, so it is
what the others would like to reach, not a way to train across parties.
Symbols: n_k = number of examples of node k, CE_k = mean cross-entropy on them.
Limits: one node is local training.
Deviations: a batch is drawn from the pooled data, whatever the node, and BatchNorm sees each node's
share of it; there is no rollback, because validation accuracies of different tasks are not
comparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed import check
from polyfed.core.data import Data, Split
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.errors import ConfigError, DataError
from polyfed.train.agree import check_same_parts

TRUNK, POOL = "trunk", "pooled"


@dataclass(frozen=True, kw_only=True)
class Joint(Method):
    """Train one trunk and all heads on the pooled data.

    Attributes:
        init_epochs: epochs before the first round.
        local_epochs: epochs over the pooled data in each round.
        patience: early stopping on the pooled `val_es`; 0 is off.
    """

    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "all data in one place, one trunk, one head per node: the upper control"
    topologies: ClassVar[tuple[str, ...]] = ("alone",)

    init_epochs: int = 0
    local_epochs: int = 5
    patience: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("init_epochs", "local_epochs", "patience"):
            check.at_least(self, name, 0)

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """One node that holds everything, in the order of the names."""
        nodes = sorted(nodes, key=lambda node: node.name)
        check_same_parts(nodes, TRUNK)
        _check_inputs(nodes)
        names = ("train", "val_es")
        pooled = {name: _pool(nodes, name) for name in names if any(name in n.data for n in nodes)}
        tests = {f"test@{n.name}": n.data["test"] for n in nodes if "test" in n.data}
        data = Data(may_miss_classes=True, **pooled, **tests)
        return [Node(POOL, data, Model(_TiedNets(nodes), {"all": ("nets",)}))]

    def start(self, node: Node) -> Iterable[Phase]:
        """Pre-training."""
        yield self._all("init", self.init_epochs)

    def local(self, node: Node) -> Iterable[Phase]:
        """The trunk and all heads on the pooled data."""
        yield self._all("local", self.local_epochs)

    def views(self, node: Node) -> Mapping[Name, Node]:
        """Every node's network, with the shared trunk, on its own test data."""
        nets = node.model.net
        if not isinstance(nets, _TiedNets):
            return {node.name: node}
        return {
            name: Node(
                name, Data(test=node.data.get(f"test@{name}")), Model(net, parts), score=score
            )
            for (name, parts, score), net in zip(nets.owners, nets.nets, strict=True)
        }

    def _all(self, label: str, epochs: int) -> Phase:
        return self.phase(
            label, objective=_joint_cross_entropy, epochs=epochs, patience=self.patience
        )


class _TiedNets(nn.Module):
    """The networks of all nodes, their trunks being one and the same set of tensors."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(node.model.copy().net for node in nodes)
        self.owners = [(node.name, node.model.parts, node.score) for node in nodes]
        self.shared = nodes[0].model.names(TRUNK)
        self._tie()

    def _tie(self) -> None:
        for name in self.shared:
            path, _, leaf = name.rpartition(".")
            first, *others = (net.get_submodule(path) for net in self.nets)
            for module in others:
                setattr(module, leaf, getattr(first, leaf))

    def _apply(self, *args: Any, **kwargs: Any) -> _TiedNets:
        """Moved to another device, buffers are made anew: tie them again."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def _joint_cross_entropy(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
    """Eq. (1) on a batch whose labels are pairs (node, class)."""
    nets = model.net
    if y is None or not isinstance(nets, _TiedNets):
        raise ConfigError("the joint objective needs the pooled data of `Joint.prepare`.")
    owner, label = y.unbind(1)
    total = x.new_zeros(())
    for k, net in enumerate(nets.nets):
        mine = (owner == k).nonzero().squeeze(1)
        if len(mine):
            scores = model.compute(partial(_output, net), x[mine])
            total = total + functional.cross_entropy(scores, label[mine], reduction="sum")
    return total / len(x)


def _output(net: nn.Module, x: Tensor) -> Tensor:
    """The network's output; as in the training loop, BatchNorm rests on a single sample."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]
    resting = norms if len(x) == 1 else []
    for norm in resting:
        norm.eval()
    out: Tensor = net(x)
    for norm in resting:
        norm.train()
    return out


def _pool(nodes: Sequence[Node], name: str) -> Split:
    xs, ys = [], []
    for k, node in enumerate(nodes):
        split = node.data.get(name)
        if split is None or split.y is None:
            continue
        xs.append(split.x)
        ys.append(torch.stack([torch.full_like(split.y, k), split.y], dim=1))
    if not xs:
        raise DataError(f"no node has labels in split '{name}': joint trains on nothing else.")
    return Split(torch.cat(xs), torch.cat(ys))


def _check_inputs(nodes: Sequence[Node]) -> None:
    for node in nodes[1:]:
        here, there = nodes[0].data["train"].x.shape[1:], node.data["train"].x.shape[1:]
        if here != there:
            raise DataError(
                f"the inputs of node {node.name} have shape {list(there)}, those of "
                f"{nodes[0].name} {list(here)}: they cannot be pooled."
            )

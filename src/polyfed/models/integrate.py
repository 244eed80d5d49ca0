r"""One model for everybody, made of the trunk in common and the heads of all nodes.

    stacked:  integrator(head_1(z), ..., head_C(z)),     z = trunk(x)                          (1)
    mixture:  log sum_c g_c(z) softmax(head_c(z)),       g = softmax(gate(z))                  (2)

Li, Loo, Liew, Liu. Loop Improvement, section 3.4 and Fig. 5, Solutions 2 and 3: trunk and heads are
trained before (by LI, its last round with finetune_epochs), and only integrator or gate learn now:

    pooled    node = pool_outputs(stacked, nodes); run(Local(...), [node])      outputs and labels
    in loops  run(LI(share="integrator", head_epochs=0, ...), as_nodes(stacked, nodes))  no outputs

Either way no input leaves its node; heads do, since every node must compute all of them.
Symbols: C = number of nodes, z = features. Both are plain modules: save them, serve them.
Deviations from the authors' code: the integrator attends over the heads of a sample, not over the
samples of a batch, and all heads are stacked. The mixture puts out logarithms, so that
cross-entropy of its output is its log loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed.core.data import Data
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Node
from polyfed.errors import ConfigError, ModelError, UnknownNameError
from polyfed.random import ambient
from polyfed.train.evaluate import rows_per_batch

TRUNK, INTEGRATOR, GATE, POOL = "trunk", "integrator", "gate", "pooled"

Outputs = Float[Tensor, "batch heads classes"]
Scores = Float[Tensor, "batch classes"]


class Integrator(nn.Module):
    """A transformer over the heads' outputs, their mean, and a linear layer.

    Samples are treated independently. Heads have no positions: which is which shows in what they
    say alone.
    """

    def __init__(
        self,
        classes: int,
        *,
        width: int | None = None,
        layers: int = 2,
        attention: int = 4,
        dropout: float = 0.1,
    ) -> None:
        """Set its size; the defaults are the paper's for 100 classes.

        Args:
            classes: outputs of every head, and of the whole.
            width: of the transformer, behind a linear layer; None attends to the outputs as they
                are, as in the paper.
            layers: of the transformer.
            attention: heads of attention.
            dropout: in the transformer.
        """
        super().__init__()
        size = classes if width is None else width
        if size % attention:
            raise ConfigError(
                f"Integrator: {attention} heads of attention do not divide a width of {size}. "
                f"Say width=..., a multiple of {attention}."
            )
        layer = nn.TransformerEncoderLayer(
            size, attention, dim_feedforward=4 * size, dropout=dropout, batch_first=True
        )
        self.embed = nn.Identity() if width is None else nn.Linear(classes, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(size, classes)

    def forward(self, outputs: Outputs) -> Scores:
        """Scores of the classes."""
        scores: Tensor = self.out(self.encoder(self.embed(outputs)).mean(1))
        return scores


class Stacked(nn.Module):
    """Eq. (1): trunk, all heads, and what makes one output of theirs."""

    def __init__(self, trunk: nn.Module, heads: Iterable[nn.Module], integrator: nn.Module) -> None:
        super().__init__()
        self.trunk, self.heads, self.integrator = trunk, nn.ModuleList(heads), integrator

    def outputs(self, x: Tensor) -> Outputs:
        """What every head says."""
        z = self.trunk(x)
        return torch.stack([head(z) for head in self.heads], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """What the integrator makes of it."""
        out: Tensor = self.integrator(self.outputs(x))
        return out


class Mixture(nn.Module):
    """Eq. (2): trunk, all heads as experts, and a gate that weighs them."""

    def __init__(self, trunk: nn.Module, heads: Iterable[nn.Module], gate: nn.Module) -> None:
        super().__init__()
        self.trunk, self.heads, self.gate = trunk, nn.ModuleList(heads), gate

    def forward(self, x: Tensor) -> Scores:
        """Logarithms of the classes' probabilities."""
        z = self.trunk(x)
        experts = torch.stack([head(z).log_softmax(-1) for head in self.heads], dim=1)
        weights = self.gate(z.flatten(1)).log_softmax(-1)
        scores: Tensor = (weights[:, :, None] + experts).logsumexp(1)
        return scores


def stack_heads(
    nodes: Iterable[Node], *, integrator: nn.Module | None = None, seed: int = 0
) -> Stacked:
    """The trunk and all heads of trained nodes, with an integrator that is yet to be trained.

    Args:
        nodes: with equal trunks, such as `run.nodes.values()`, and heads for the same classes.
        integrator: from (batch, heads, classes) to an output; None makes an `Integrator` with a
            width of 64.
        seed: of its initial weights.
    """
    trunk, heads, example = _taken_apart(list(nodes))
    if integrator is None:
        with ambient(seed, "init", INTEGRATOR):
            integrator = Integrator(heads[0](example).shape[-1], width=64)
    return Stacked(trunk, heads, integrator.to(example.device))


def mixture(nodes: Iterable[Node], *, gate: nn.Module | None = None, seed: int = 0) -> Mixture:
    """The trunk and all heads of trained nodes, with a gate that is yet to be trained.

    Args:
        nodes: with equal trunks, such as `run.nodes.values()`, and heads for the same classes.
        gate: from flat features to a score for every head; None makes a linear layer.
        seed: of its initial weights.
    """
    trunk, heads, example = _taken_apart(list(nodes))
    if gate is None:
        with ambient(seed, "init", GATE):
            gate = nn.Linear(example.flatten(1).shape[1], len(heads))
    return Mixture(trunk, heads, gate.to(example.device))


def as_nodes(whole: Stacked | Mixture, nodes: Iterable[Node]) -> list[Node]:
    """Nodes with the whole model in parts, to train the integrator or the gate in loops."""
    last = INTEGRATOR if isinstance(whole, Stacked) else GATE
    parts = {TRUNK: (TRUNK,), "heads": ("heads",), last: (last,)}
    return [
        Node(node.name, node.data, Model(copy.deepcopy(whole), parts), node.classes)
        for node in nodes
    ]


def pool_outputs(stacked: Stacked, nodes: Iterable[Node]) -> Node:
    """One node with the integrator, and with what all heads say to all labelled inputs.

    After training, put it in place: `stacked.integrator = run.nodes["pooled"].model.net`.
    """
    nodes = sorted(nodes, key=lambda node: node.name)
    names = dict.fromkeys(n for node in nodes for n, s in node.data.items() if s.y is not None)
    splits = {}
    for name in names:
        held = [node.data[name] for node in nodes if name in node.data]
        x = torch.cat([_outputs(stacked, split.x) for split in held])
        splits[name] = (x, torch.cat([split.y for split in held if split.y is not None]))
    model = Model.split(copy.deepcopy(stacked.integrator), **{INTEGRATOR: ...})
    return Node(POOL, Data(may_miss_classes=True, **splits), model, nodes[0].classes)


def _outputs(stacked: Stacked, x: Tensor) -> Tensor:
    with evaluating(stacked):
        return torch.cat([stacked.outputs(rows) for rows in x.split(rows_per_batch(x))])


def _taken_apart(nodes: Sequence[Node]) -> tuple[nn.Module, list[nn.Module], Tensor]:
    """The common trunk, the head of every node, and an example of features."""
    for node in nodes:
        if list(node.model.parts)[:1] != [TRUNK]:
            raise UnknownNameError(f"first part of node {node.name}:", TRUNK, node.model.parts)
    first, *others = nodes
    for node in others:
        if node.classes != first.classes:
            raise ConfigError(
                f"the heads of {first.name} and {node.name} are for different classes, so they "
                "cannot be stacked. Give every head all classes (--heads all)."
            )
        there = node.model.state(TRUNK)
        if any(not torch.equal(t, there[n]) for n, t in first.model.state(TRUNK).items()):
            raise ModelError(
                f"the trunks of {first.name} and {node.name} differ. Let the last one go round "
                "once more: LI(finetune_epochs=6) on a ring without faults."
            )
    pairs = [_cut(node) for node in nodes]
    with evaluating(pairs[0][0]):
        example: Tensor = pairs[0][0](first.data["train"].x[:1])
    return pairs[0][0], [head for _, head in pairs], example


def _cut(node: Node) -> tuple[nn.Module, nn.Module]:
    """A network without its head, and the head; together they compute what it does."""
    net, x = copy.deepcopy(node.model.net), node.data["train"].x[:2]
    names = [n for part, modules in node.model.parts.items() if part != TRUNK for n in modules]
    head = nn.Sequential()
    try:
        with evaluating(net):
            wanted = net(x)
        for name in names:
            head.append(_taken_out(net, name))
        with evaluating(net), evaluating(head):
            is_same = torch.allclose(head(net(x)), wanted, rtol=1e-4, atol=1e-5)
    except (AttributeError, RuntimeError):  # a bare parameter, or shapes that do not fit
        is_same = False
    if not is_same:
        raise ModelError(
            f"the head of node {node.name} ({', '.join(names)}) is not simply applied to what the "
            "trunk puts out, so heads cannot be stacked. Make it the last modules of the network."
        )
    return net, head


def _taken_out(net: nn.Module, name: str) -> nn.Module:
    """A module of a network, in whose place data passes through unchanged."""
    path, _, leaf = name.rpartition(".")
    module = net.get_submodule(name)
    setattr(net.get_submodule(path), leaf, nn.Identity())
    return module

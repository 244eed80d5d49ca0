r"""FedLinked: nodes share trunk outputs on public inputs; the hub rotates, weighs and returns them.

    Z_k = trunk_k(X0)                                    sent by node k                (3.2)
    R_kj = Z_k' Z_j = U S V',  B_kj = V U'               Procrustes rotation           (3.12)
    A_jk = eta * tr(B_kj R_kj) / sqrt(sum_u tr(B_uj R_uj)^2)         utility           (3.14)
    F_j = sum_{k != j} A_jk Z_k B_kj' / sum_{k != j} A_jk            sent to node j    (Alg. 3, 15)
    trunk_j <- argmin mean |trunk_j(x) - F_j(x)|^2       distillation on public inputs (3.6)

then the head is fine-tuned (trunk frozen, in eval mode) and everything is trained on private data
with early stopping; after the last round each node rolls back to its best round.

Kadar 2021, FedLinked: client-wise distilled representation based semi-supervised collaborative
multi-task learning, Algorithm 3. The hub's arithmetic is in `polyfed.maths.procrustes`.
Symbols: X0 = public inputs (same order everywhere), Z_k = representations (N x r), eta = norm of a
receiver's utilities.
Limits: identical nodes get F_j = Z_j; with two nodes the utilities cancel; eta cancels in F_j, so
it changes training only through `strength`.
Deviations from the paper: utilities are normalised per receiver to norm eta (as its Tables 5.1 and
5.2 are, not as Eq. 3.14 prints); the best round's accuracy is updated (Algorithm 3 forgets to);
early stopping has patience 5 and Adam is the optimiser (neither is stated).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import MatchOutput, Phase
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.procrustes import link, random_rotation
from polyfed.train import keep_best, outputs, roll_back
from polyfed.train.agree import parts_beside

TRUNK, PUBLIC = "trunk", "public"
_Z, _F, _STRENGTH = "representations", "regulariser", "strength"


@dataclass(frozen=True, kw_only=True)
class FedLinked(Method):
    """Link representations. Defaults are the paper's for CIFAR-10 (Table 4.4).

    Attributes:
        eta: norm of a receiver's utilities.
        init_epochs: epochs of pre-training on private data.
        distil_epochs: epochs of the trunk towards the regulariser, on public inputs.
        finetune_epochs: epochs of the head after distillation, trunk frozen.
        local_epochs: epochs of all parts on private data.
        transform: rotate representations onto each other (Procrustes); off is the ablation.
        normalise: utilities per receiver, or over all pairs as Eq. 3.14 prints.
        normalise_rows: scale every representation to length 1 before linking.
        strength: weigh the distillation loss by the sum of the receiver's utilities.
        secret_rotation: send representations in a basis only the node knows.
        patience: early stopping of init and local epochs on `val_es`; 0 is off.
        rollback: end with the round that was best on `val_rb`.
    """

    name: ClassVar[str] = "fedlinked"
    title: ClassVar[str] = "share trunk outputs on public inputs, rotated and weighed by utility"

    rounds: int = 7
    batch: float = 0.02
    lr: float = 2e-4
    eta: float = 2.97
    init_epochs: int = 19
    distil_epochs: int = 18
    finetune_epochs: int = 13
    local_epochs: int = 17
    transform: bool = True
    normalise: Literal["receiver", "all"] = "receiver"
    normalise_rows: bool = False
    strength: bool = False
    secret_rotation: bool = False
    patience: int = 5
    rollback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(self, "eta")
        for name in (
            "init_epochs",
            "distil_epochs",
            "finetune_epochs",
            "local_epochs",
            "patience",
        ):
            check.at_least(self, name, 0)
        check.one_of(self, "normalise", ("receiver", "all"))
        if self.secret_rotation and not self.transform:
            raise ConfigError(
                "FedLinked.secret_rotation needs transform=True: without the Procrustes rotation "
                "the hub cannot compare representations in different bases."
            )

    def check(self, nodes: Sequence[Node]) -> None:
        """Everybody holds the same public inputs in the same order, and r is the same."""
        for node in nodes:
            parts_beside(node, TRUNK)
            if PUBLIC not in node.data:
                raise DataError(
                    f"node {node.name} has no split 'public'. FedLinked compares trunk outputs on "
                    "inputs that every node holds: Data(..., public=x)."
                )
        _check_public(nodes)
        _check_sizes(nodes)

    def start(self, node: Node) -> Iterable[Phase]:
        """Pre-training on private data."""
        yield self.phase("init", epochs=self.init_epochs, patience=self.patience)

    def local(self, node: Node) -> Iterable[Phase]:
        """Nothing before the exchange: a round begins with what the last one left."""
        return ()

    def sends(self, node: Node) -> Spec:
        """Z_k: one representation per public input."""
        public = node.data[PUBLIC].x
        r = node.model.output_size(public[:1], TRUNK)
        return {_Z: TensorSpec((len(public), r))}

    def hears(self, node: Node) -> Spec:
        """F_k, and with `strength` the weight of its loss."""
        strength = {_STRENGTH: TensorSpec(())} if self.strength else {}
        return {_F: self.sends(node)[_Z], **strength}

    def send(self, node: Node) -> Message:
        """Z_k, in the node's secret basis if it has one."""
        z = outputs(node.model, node.data[PUBLIC].x, TRUNK).float()
        if self.secret_rotation:
            z = z @ _secret(node, z).T
        return Message({_Z: z})

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """B, A and F of the whole round."""
        linked = link(
            [m.tensors[_Z] for m in got.values()],
            transform=self.transform,
            eta=self.eta,
            normalise=self.normalise,
            normalise_rows=self.normalise_rows,
        )
        place.notes["utilities"] = {"nodes": list(got), "rows": linked.utilities.tolist()}
        row = {name: j for j, name in enumerate(got)}
        return {
            name: self._reply(linked.regularisers, linked.utilities, row[name])
            for name in to
            if name in row
        }

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Distil, fine-tune, train; then judge the round."""
        f = message.tensors[_F]
        node.memory[_F] = f @ _secret(node, f) if self.secret_rotation else f
        weight = float(message.tensors[_STRENGTH]) if self.strength else 1.0
        heads = parts_beside(node, TRUNK)
        yield self.phase(
            "distil",
            objective=MatchOutput(TRUNK, weight),
            parts=(TRUNK,),
            split=PUBLIC,
            target=_F,
            epochs=self.distil_epochs,
        )
        yield self.phase("finetune", parts=heads, epochs=self.finetune_epochs)
        yield self.phase("local", epochs=self.local_epochs, patience=self.patience)
        del node.memory[_F]
        if self.rollback:
            keep_best(node)

    def finish(self, node: Node) -> Iterable[Phase]:
        """Rollback to the best round."""
        roll_back(node)
        return ()

    def _reply(self, f: Tensor, a: Tensor, j: int) -> Message:
        strength = {_STRENGTH: a[j].sum().float()} if self.strength else {}
        return Message({_F: f[j], **strength})


def _secret(node: Node, like: Tensor) -> Tensor:
    """The node's secret orthogonal matrix: the same for the whole run, never sent."""
    rotation = random_rotation(like.shape[1], node.stream("secret rotation"))
    return rotation.to(like)


def _check_public(nodes: Sequence[Node]) -> None:
    first = nodes[0]
    wanted = first.data[PUBLIC]
    digest = wanted.fingerprint()
    for node in nodes[1:]:
        public = node.data[PUBLIC]
        if len(public) != len(wanted):
            raise DataError(
                f"node {node.name} holds {len(public)} public inputs, {first.name} holds "
                f"{len(wanted)}. All nodes must hold the same ones."
            )
        if public.x is not wanted.x and public.fingerprint() != digest:
            raise DataError(
                f"the public inputs of node {node.name} differ from those of {first.name}, or are "
                "in another order. The order is how the hub matches representations: give every "
                "node the same tensor."
            )


def _check_sizes(nodes: Sequence[Node]) -> None:
    sizes = {n.name: n.model.output_size(n.data[PUBLIC].x[:1], TRUNK) for n in nodes}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {r}" for name, r in sizes.items())
        raise ModelError(
            f"representation sizes differ: {listed}. FedLinked rotates representations onto each "
            "other: end every trunk with a layer of the same width."
        )

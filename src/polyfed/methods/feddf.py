r"""FedDF: the hub averages networks of a kind, then distils what all of them say into each mean.

    node k     f_k <- f_a(k), trained on the data of node k
    hub        f_a <- sum over k of kind a of (n_k / n_a) f_k                                  (1)
               q(x) = (1/K) sum_k f_k(x)   over all nodes, scores before the softmax           (2)
               f_a <- argmin mean KL(softmax(q(x)) || softmax(f_a(x)))  on public inputs       (3)
    feddf-ssl  the same with BYOL for training and projections z for scores:
               f_a <- argmin mean |z_a(x) - q(x)|^2 / n,   q = (1/K) sum_k z_k                 (4)

Lin, Kong, Stich, Jaggi. NeurIPS 2020, arXiv:2006.07242, Algorithms 1 and 3. feddf-ssl is how
FedFoA's paper (Liu et al., section 4.1) uses it.
Symbols: f_k = network of node k (feddf-ssl: trunk, projector and predictor), a(k) = its kind: equal
names and shapes; n_k = its number of samples, n_a = that of all nodes of its kind, K = nodes that
answer, n = numbers in a projection.
The hub needs the public inputs and a network of every kind: `polyfed.train.kinds.with_hub(nodes)`.
Limits: distil_steps = 0 is fedavg (fedbyol) within each kind. One node distils its own scores.
Deviations from the paper: the learning rate of (3) is constant and its steps are a fixed number,
where the paper has a cosine and stops early on a labelled validation split; buffers are averaged
with the parameters; all nodes take part in every round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed import check
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Optimiser, PerSample, Phase
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.mixing import weighted_mean
from polyfed.methods._consensus import check_classes
from polyfed.methods._self_taught import PREDICTOR, PROJECTOR, TRUNK, SelfTaught
from polyfed.models.siamese import siamese
from polyfed.random import ambient
from polyfed.train import outputs
from polyfed.train.kinds import HUB, PUBLIC

_COUNT, _TEACHER, _STUDENT, _KIND = "num_examples", "teacher", "student", "kind"
_ONLINE = (TRUNK, PROJECTOR, PREDICTOR)


@dataclass(frozen=True)
class Scores(PerSample):
    """KL divergence of one child's scores from given ones, after a softmax of both: Eq. (3)."""

    child: str

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Of each sample."""
        said = model.compute(model.net.get_submodule(self.child), x).log_softmax(-1)
        wanted = _given(y).log_softmax(-1)
        return functional.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)


@dataclass(frozen=True)
class Projections(PerSample):
    """Mean squared distance of one child's projections from given ones: Eq. (4)."""

    child: str

    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        """Of each sample."""
        said = model.compute(partial(_projection, model.net.get_submodule(self.child)), x)
        return (said - _given(y)).square().mean(-1)


@dataclass(frozen=True, kw_only=True)
class Distilled(Method):
    """Average networks of a kind, then distil at the hub.

    Attributes:
        distil_steps: optimiser steps of each kind at the hub.
        distil_lr: learning rate of these steps, by Adam.
        public_batch: samples in a batch of public inputs.
    """

    hub_trains: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ()  # parts that travel; empty is all

    distil_steps: int = 1000
    distil_lr: float = 1e-3
    public_batch: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "distil_steps", 0)
        check.positive(self, "distil_lr")
        check.at_least(self, "public_batch", 1)

    @abstractmethod
    def students(self, hub: Node) -> nn.ModuleDict:
        """Networks like those of the nodes, one of each kind."""

    @abstractmethod
    def said(self, net: nn.Module, x: Tensor) -> Tensor:
        """What is distilled of a network, for inputs."""

    @abstractmethod
    def loss(self, kind: str) -> Objective:
        """How far a student is from that."""

    def check(self, nodes: Sequence[Node]) -> None:
        """There is a hub with public inputs and all kinds of networks."""
        hubs = [node for node in nodes if node.name == HUB]
        if not hubs:
            raise ConfigError(
                f"{self.name} distils at the hub, but no node is called 'hub'. Add one with the "
                "public inputs and a network of every kind: polyfed.train.kinds.with_hub(nodes), "
                "or the option 'hub' of a task: --hub."
            )
        if PUBLIC not in hubs[0].data:
            raise DataError(
                f"the hub has no split 'public'. {self.name} distils on inputs without labels: "
                "give the nodes Data(..., public=x) before with_hub(nodes)."
            )
        students = self.students(hubs[0])
        for node in _parties(nodes):
            if _kind(students, node.model.spec(*self.shared)) is None:
                raise ModelError(
                    f"the hub has no network like that of node {node.name}. Make the hub with "
                    "polyfed.train.kinds.with_hub(nodes)."
                )

    def sends(self, node: Node) -> Spec:
        """The network, and the number of examples it was trained on."""
        return {**self.hears(node), _COUNT: TensorSpec((), torch.int64, least=1)}

    def hears(self, node: Node) -> Spec:
        """The network of its kind."""
        return node.model.spec(*self.shared)

    def send(self, node: Node) -> Message:
        """The network, and the number of examples it was trained on."""
        count = torch.tensor(len(node.data["train"]))
        return Message({**node.model.state(*self.shared), _COUNT: count})

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """Eq. (1) to (3), kind by kind; what comes of it is remembered until all are answered."""
        own, students = place.model, self.students(place)
        place.model = Model.split(students, **{kind: kind for kind in students})
        place.model.precision = own.precision
        told = self._told(place, students, got)
        scores = [self._scores(place, kind, s) for kind, each in told.items() for s, _ in each]
        place.memory[_TEACHER] = torch.stack(scores).mean(0)
        for kind, members in told.items():
            mean = weighted_mean([state for state, _ in members], [count for _, count in members])
            students[kind].load_state_dict(mean)
            yield self._distil(kind)
            place.remember(f"{_STUDENT}/{kind}", place.model.net.get_submodule(kind).state_dict())
        del place.memory[_TEACHER]
        place.model = own

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """To every node the network of its kind."""
        kinds = {name: f"{_KIND}{int(i)}" for name, i in place.recall(_KIND).items()}
        return {
            name: Message(place.recall(f"{_STUDENT}/{kinds[name]}")) for name in to if name in kinds
        }

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load it."""
        node.model.load(message.tensors)
        return ()

    def _told(
        self, place: Node, students: nn.ModuleDict, got: Mapping[Name, Message]
    ) -> dict[str, list[tuple[dict[str, Tensor], float]]]:
        """For each kind the networks that arrived, with their numbers of examples."""
        told: dict[str, list[tuple[dict[str, Tensor], float]]] = {}
        for name, message in got.items():
            state = dict(message.tensors)
            count = float(state.pop(_COUNT))
            kind = _kind(students, {n: TensorSpec.of(t) for n, t in state.items()})
            if kind is not None:  # it never is: `check` has seen all kinds
                told.setdefault(kind, []).append((state, count))
                place.memory[f"{_KIND}/{name}"] = torch.tensor(int(kind.removeprefix(_KIND)))
        return told

    def _scores(self, place: Node, kind: str, state: Mapping[str, Tensor]) -> Tensor:
        """What a node's network makes of the public inputs."""
        net = place.model.net.get_submodule(kind)
        net.load_state_dict(dict(state))
        speaker = Model.split(_Says(net, self.said), network=...)
        speaker.precision = place.model.precision
        return outputs(speaker, place.data[PUBLIC].x)

    def _distil(self, kind: str) -> Phase:
        return Phase(
            label=f"distil_{kind}",
            objective=self.loss(kind),
            parts=(kind,),
            split=PUBLIC,
            target=_TEACHER,
            steps=self.distil_steps,
            batch=self.public_batch,
            optimiser=Optimiser(name="adam", lr=self.distil_lr),
        )


@dataclass(frozen=True, kw_only=True)
class FedDF(Distilled):
    """Distil scores.

    Attributes:
        local_epochs: epochs on the node's own data in each round.
    """

    name: ClassVar[str] = "feddf"
    title: ClassVar[str] = "average networks of a kind; the hub distils all into each"

    local_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "local_epochs", 0)

    def check(self, nodes: Sequence[Node]) -> None:
        """As all of the family; and outputs mean the same classes."""
        check_classes(self.name, nodes)
        super().check(nodes)

    def local(self, node: Node) -> Iterable[Phase]:
        """All parts on the node's own data."""
        yield self.phase("local", epochs=self.local_epochs)

    def students(self, hub: Node) -> nn.ModuleDict:
        """The hub's networks, as they are."""
        return cast(nn.ModuleDict, hub.model.copy().net)

    def said(self, net: nn.Module, x: Tensor) -> Tensor:
        """Scores before the softmax."""
        return cast(Tensor, net(x))

    def loss(self, kind: str) -> Objective:
        """Eq. (3)."""
        return Scores(kind)


@dataclass(frozen=True, kw_only=True)
class FedDFSSL(SelfTaught, Distilled):
    """Distil projections; no labels."""

    name: ClassVar[str] = "feddf-ssl"
    title: ClassVar[str] = "fedbyol within each kind; the hub distils all projections into each"
    shared: ClassVar[tuple[str, ...]] = _ONLINE

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """As all that teach themselves; a hub stays as it is."""
        hubs = [node for node in nodes if node.name == HUB]
        return [*super().prepare(_parties(nodes)), *hubs]

    def check(self, nodes: Sequence[Node]) -> None:
        """As both families."""
        SelfTaught.check(self, _parties(nodes))
        Distilled.check(self, nodes)

    def students(self, hub: Node) -> nn.ModuleDict:
        """The trunks of the hub's networks, with the heads that the nodes have."""
        x = hub.data[PUBLIC].x[:1]
        made = {}
        for kind, net in cast(nn.ModuleDict, hub.model.copy().net).items():
            trunk = dict(net.named_children()).get(TRUNK)
            if trunk is None:
                raise ModelError(
                    f"{self.name} puts heads on the trunks of the hub's networks, but {kind} has "
                    "no child called 'trunk'. Call it so in the networks of the nodes."
                )
            with evaluating(trunk):
                out = trunk(x)
            with ambient(hub.seed, "init", "heads"):
                heads = siamese(
                    "byol",
                    trunk,
                    out.shape[1],
                    projection=self.projection,
                    hidden=self.predictor_hidden,
                    projector_hidden=self.projector_hidden,
                ).to(out)
            parts = [(name, heads.get_submodule(name)) for name in _ONLINE]
            made[kind] = nn.Sequential(OrderedDict(parts))
        return nn.ModuleDict(made)

    def said(self, net: nn.Module, x: Tensor) -> Tensor:
        """Projections."""
        return _projection(net, x)

    def loss(self, kind: str) -> Objective:
        """Eq. (4)."""
        return Projections(kind)


class _Says(nn.Module):
    """A network of which one output is looked at."""

    def __init__(self, net: nn.Module, said: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.said = net, said

    def forward(self, x: Tensor) -> Tensor:
        """That output."""
        return self.said(self.net, x)


def _parties(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.name != HUB]


def _projection(net: nn.Module, x: Tensor) -> Tensor:
    for name in (TRUNK, PROJECTOR):
        x = net.get_submodule(name)(x)
    return x


def _kind(students: nn.ModuleDict, spec: Spec) -> str | None:
    """The network that has these names and shapes."""
    for kind, net in students.items():
        if {n: TensorSpec.of(t) for n, t in net.state_dict().items()} == dict(spec):
            return str(kind)
    return None


def _given(y: Tensor | None) -> Tensor:
    if y is None:
        raise ConfigError("distillation needs targets: set Phase.target.")
    return y

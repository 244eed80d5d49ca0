"""The conformance suite must be able to fail: each bad method is caught by the check named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from polyfed.core.data import Data
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import CrossEntropy, Phase, cross_entropy
from polyfed.maths.mixing import weighted_mean
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedavg_trunk import FedAvgTrunk
from polyfed.random import stream
from polyfed.testing import CHECKS, ConformanceError, check_method, one_class, one_sample, tiny

_GOOD: dict[str, Any] = {"batch": 8, "weighting": "uniform"}
BAD: list[tuple[str, str, type[FedAvg], str]] = []


def caught_by(check: str, says: str) -> Callable[[type], type]:
    def register(cls: type) -> type:
        made = dataclass(frozen=True, kw_only=True)(cls)
        BAD.append((cls.__name__, check, made, says))
        return made

    return register


@caught_by("deterministic", "global generator")
class DrawsGlobally(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        node.model.load({n: t + torch.rand(1) for n, t in node.model.state("head").items()})
        yield from super().local(node)


@caught_by("deterministic", "two runs with the same seed differ")
class RemembersRuns(FedAvg):
    runs: ClassVar[list[str]] = []

    def send(self, node: Node) -> Message:
        self.runs.append(node.name)
        state = node.model.state()
        return Message({n: t * (1 + len(self.runs) * 1e-3) for n, t in _floats(state).items()})

    def sends(self, node: Node) -> Spec:
        return {n: TensorSpec.of(t) for n, t in _floats(node.model.state()).items()}

    def hears(self, node: Node) -> Spec:
        return self.sends(node)


@caught_by("seeds", "same models")
class IgnoresTheSeed(FedAvg):
    def finish(self, node: Node) -> Iterable[Phase]:
        node.model.load({n: torch.zeros_like(t) for n, t in node.model.state().items()})
        return ()


@caught_by("resume", "continued after tick 1 differs")
class KeepsStateInAField(FedAvg):
    visits: dict[str, int] = field(default_factory=dict)

    def local(self, node: Node) -> Iterable[Phase]:
        self.visits[node.name] = self.visits.get(node.name, 0) + 1
        yield self.phase("local", epochs=1 + (self.visits[node.name] > 1))


@caught_by("resume", "differs")
class KeepsStateInTheClass(FedAvg):
    rounds_seen: ClassVar[dict[str, int]] = {}

    def start(self, node: Node) -> Iterable[Phase]:
        self.rounds_seen[node.name] = 0
        return ()

    def local(self, node: Node) -> Iterable[Phase]:
        self.rounds_seen[node.name] += 1
        yield self.phase("local", epochs=self.rounds_seen[node.name])


@caught_by("resume", "differs")
class KeepsStateOnTheNode(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        node.count = getattr(node, "count", 0) + 1  # type: ignore[attr-defined]
        yield self.phase("local", epochs=node.count)  # type: ignore[attr-defined]


@caught_by("declared", "not announced: extra")
class SendsMore(FedAvg):
    def send(self, node: Node) -> Message:
        return Message({**super().send(node).tensors, "extra": torch.zeros(1)})


@caught_by("declared", "expected float64")
class SendsAnotherType(FedAvg):
    def sends(self, node: Node) -> Spec:
        return {**super().sends(node), "head.bias": TensorSpec((3,), torch.float64)}


@caught_by("declared", "not announced: extra")
class RepliesMore(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        replies = super().combine(place, got, to)
        return {n: Message({**m.tensors, "extra": torch.zeros(1)}) for n, m in replies.items()}


class _SendsAlso(FedAvg):
    """Announces, and sends, one tensor more."""

    def _also(self, node: Node) -> Tensor:
        raise NotImplementedError

    def sends(self, node: Node) -> Spec:
        return {**super().sends(node), "also": TensorSpec.of(self._also(node))}

    def send(self, node: Node) -> Message:
        return Message({**super().send(node).tensors, "also": self._also(node)})

    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        kept = {
            k: Message({n: t for n, t in m.tensors.items() if n != "also"}) for k, m in got.items()
        }
        return super().combine(place, kept, to)


@caught_by("private", "'also', sent by M0, holds values of its private split 'train'")
class SendsInputs(_SendsAlso):
    def _also(self, node: Node) -> Tensor:
        return node.data["train"].x.clone()


@caught_by("private", "private split 'test'")
class SendsATransposedRow(_SendsAlso):
    def _also(self, node: Node) -> Tensor:
        x = node.data["test"].x
        return torch.stack([torch.zeros(6), x[3].clone()]).T.contiguous()


@caught_by("private", "private split 'train'")
class SendsLabels(_SendsAlso):
    def _also(self, node: Node) -> Tensor:
        return torch.cat([torch.zeros(1), node.data["train"].y.float()])


@caught_by("private", "private split 'train'")
class SendsAView(_SendsAlso):
    def _also(self, node: Node) -> Tensor:
        return node.data["train"].x[0, :1]


@caught_by("arrival order", "when messages arrive in reverse")
class TakesTheFirst(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        return dict.fromkeys(to, next(iter(got.values())))


@caught_by("arrival order", "'head.weight'")
class WeighsByPlace(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        states = [m.tensors for m in got.values()]
        mean = weighted_mean(states, [1.0] * len(states))
        head = weighted_mean(states, list(range(1, len(states) + 1)))["head.weight"]
        return dict.fromkeys(to, Message({**mean, "head.weight": head}))


@caught_by("node order", "in reverse")
class FavoursTheFirst(FedAvg):
    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        first = nodes[0]
        return [replace(first, memory={"favoured": torch.ones(1)}), *nodes[1:]]

    def local(self, node: Node) -> Iterable[Phase]:
        yield self.phase("local", epochs=2 if node.memory else 1)


@caught_by("frozen", "changed trunk.1.running_mean")
class LetsTheTrunkDrift(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        def drifting(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            model.net.train()
            return cross_entropy(model, x, y)

        yield self.phase("head", objective=drifting, parts=("head",), epochs=1, batch=11)


@caught_by("frozen", "changed head.bias")
class WritesToTheHead(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        def writing(model: Model, x: Tensor, y: Tensor | None) -> Tensor:
            model.load({"head.bias": torch.zeros(3)})
            return cross_entropy(model, x, y)

        yield self.phase("trunk", objective=writing, parts=("trunk",), epochs=1)


@caught_by("one sample", "NaN or infinity")
class DividesByTheSpread(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        x = node.data["train"].x
        spread = torch.stack([x[::2].mean(), x[1::2].mean()]).mean()
        node.memory["spread"] = spread.reshape(1)
        yield from super().local(node)


@caught_by("one class", "IndexError")
class NeedsTwoClasses(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        node.memory["second"] = node.data["train"].y.unique()[1].reshape(1)
        yield from super().local(node)


@caught_by("absent", "KeyError: 'M0'")
class NeedsEverybody(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        return dict.fromkeys(to, got["M0"])


@caught_by("absent", "answers ['M0'], not asked")
class AnswersTheAbsent(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        return super().combine(place, got, ["M0", "M1", "M2"])


@caught_by("nan", "KeyError")
class NeedsEveryMessage(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        return super().combine(place, {name: got[name] for name in to}, to)


@caught_by("nan", "fell out")
class GivesUp(FedAvg):
    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        return super().combine(place, got, to) if len(got) == len(to) else {}


@caught_by("zero rounds", "`prepare` changed 'head.weight'")
class TrainsInPrepare(FedAvg):
    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        copies = [replace(node, model=node.model.copy()) for node in nodes]
        for node in copies:
            node.model.load({"head.weight": node.model.state()["head.weight"] + 1})
        return copies


@caught_by("zero rounds", "'head.weight' of M0 changed")
class TrainsWhenViewed(FedAvg):
    def views(self, node: Node) -> Mapping[str, Node]:
        node.model.load({"head.weight": node.model.state()["head.weight"] + 1})
        return {node.name: node}


@caught_by("options", "RepresenterError")
class HasAnUnwritableOption(FedAvg):
    scale: Tensor = field(default_factory=lambda: torch.ones(2))


@caught_by("options", "read again")
class ForgetsAnOption(FedAvg):
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", self.scale + 1)


@caught_by("nodes", "the inputs of 'train' of the caller's M0 differs")
class StandardisesInPlace(FedAvg):
    def start(self, node: Node) -> Iterable[Phase]:
        node.data["train"].x.sub_(node.data["train"].x.mean(0))
        return ()


@caught_by("nodes", "'head.bias' of the caller's M0 differs")
class PreparesInPlace(FedAvg):
    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        for node in nodes:
            node.model.load({"head.bias": torch.zeros(3)})
        return nodes


@caught_by("nodes", "the mode of 'trunk' of the caller's M0")
class ChangesModes(FedAvg):
    def check(self, nodes: Sequence[Node]) -> None:
        nodes[0].model.net.train()


@dataclass(frozen=True)
class _TwoLosses(CrossEntropy):
    def losses(self, model: Model, x: Tensor, y: Tensor | None) -> Tensor:
        return super().losses(model, x, y).square()


@caught_by("stacked", "is `losses` of an objective")
class ObjectiveIsNotTheMean(FedAvg):
    def local(self, node: Node) -> Iterable[Phase]:
        yield self.phase("local", objective=_TwoLosses(), epochs=1)


def _floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in state.items() if t.is_floating_point()}


@pytest.mark.parametrize(("check", "bad", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_method_is_caught(check: str, bad: type[FedAvg], says: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        CHECKS[check](bad(**_GOOD), tiny)
    assert f"fedavg fails '{check}'" in str(caught.value)
    assert says in str(caught.value)


def test_every_check_catches_something() -> None:
    assert {check for _, check, _, _ in BAD} == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_the_good_method_the_bad_ones_are_made_of_passes(check: str) -> None:
    CHECKS[check](FedAvg(**_GOOD), tiny)


def test_check_method_runs_every_check_and_stops_at_the_first_failure() -> None:
    check_method(FedAvg(**_GOOD))
    with pytest.raises(ConformanceError, match="fails 'seeds'"):
        check_method(IgnoresTheSeed(**_GOOD))


def test_check_method_takes_another_federation() -> None:
    """Own initial weights, other sizes, no public split."""

    def nodes(seed: int) -> list[Node]:
        made = []
        for i, node in enumerate(tiny(seed)):
            model = tiny(seed + i)[0].model
            splits = {n: s for n, s in node.data.items() if n not in ("public", "val_rb")}
            made.append(Node(f"site-{i}", Data(**splits), model, node.classes))
        return made

    check_method(FedAvgTrunk(batch=8, local_epochs=1, finetune_epochs=1), nodes)


def test_the_callers_method_and_generator_are_left_alone() -> None:
    method = KeepsStateInAField(**_GOOD)
    before = torch.random.get_rng_state()
    with pytest.raises(ConformanceError):
        check_method(method)
    assert not method.visits
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_conformance_error_is_an_assertion_and_keeps_its_cause() -> None:
    with pytest.raises(AssertionError) as caught:
        CHECKS["one class"](NeedsTwoClasses(**_GOOD), tiny)
    assert isinstance(caught.value.__cause__, IndexError)


def test_tiny_is_a_function_of_its_seed() -> None:
    one, again, other = tiny(3), tiny(3), tiny(4)
    assert torch.equal(one[1].data["train"].x, again[1].data["train"].x)
    assert torch.equal(one[1].model.state()["head.weight"], again[1].model.state()["head.weight"])
    assert not torch.equal(one[1].data["train"].x, other[1].data["train"].x)
    assert not torch.equal(
        one[1].model.state()["head.weight"], other[1].model.state()["head.weight"]
    )


def test_tiny_has_what_a_method_can_trip_over() -> None:
    nodes = tiny()
    assert len({len(n.data["train"]) for n in nodes}) == 3
    assert any(len(n.data["train"]) % 8 == 1 for n in nodes)
    assert all(n.data["public"].x is nodes[0].data["public"].x for n in nodes)
    states = [n.model.state() for n in nodes]
    assert all(torch.equal(s["trunk.0.weight"], states[0]["trunk.0.weight"]) for s in states)
    assert {"trunk.1.running_mean", "trunk.1.num_batches_tracked"} <= states[0].keys()


def test_one_sample_and_one_class_change_the_first_node_only() -> None:
    nodes = tiny()
    first, *rest = one_sample(nodes)
    assert len(first.data["train"]) == 1
    assert len(first.data["val_es"]) == 9
    assert rest == nodes[1:]
    first, *rest = one_class(nodes)
    assert first.data["train"].y is not None
    assert first.data["train"].y.unique().tolist() == [0]
    assert first.data["test"].y is not None
    assert first.data["test"].y.unique().tolist() == [0]
    assert len(first.data["public"]) == 20
    assert rest == nodes[1:]


def test_one_class_leaves_a_federation_without_classes_as_it_is() -> None:
    x = torch.randn(4, 2, generator=stream(0, "x"))
    nodes = [Node("A", Data(train=(x, x)), Model.none())]
    assert one_class(nodes) == nodes

r"""One network for all, trained by nodes without labels and by a hub that may have some.

    round    node c trains f from where it stands and sends f_c
             the hub makes the next f of what arrived, looks how it does on its own validation
             split, and sends f to all
    at last  every node goes back to the f that the hub found best, of equal ones to the later  (1)

The family of FedUL: a method says what nodes train and what the hub makes of it; the rest is here.
The hub is a node called `hub`, with the same network as the others: `train` holds its labelled
samples, `val_rb` its validation split. Methods that train nothing there do without it.
Symbols: f = parameters and buffers of the network, f_c = those of node c.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from polyfed import check
from polyfed.core.data import Split
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Objective, Phase, cross_entropy
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.mixing import weighted_mean
from polyfed.maths.surrogate import identifiable
from polyfed.train import outputs
from polyfed.train.agree import check_same_parts
from polyfed.train.augment import Rotated
from polyfed.train.evaluate import mean_loss
from polyfed.train.rollback import SPLIT
from polyfed.train.surrogate import SETS, L1Penalty, SurrogateLoss, examine, set_proportions

HUB = "hub"
_IS_BEST, _BEST = "is_best", "best"
_TASKS = "Use a task with unlabelled sets (--task digits-sets, --task mnist-sets)"


class IdentifiabilityWarning(UserWarning):
    """The sets of some nodes do not determine the classifier."""


@dataclass(frozen=True, kw_only=True)
class HubJudged(Method):
    """Apply Eq. (1).

    Attributes:
        rotate: turn every training image at random by up to so many degrees either way.
        fill: what a turned image shows where nothing was: the value of the background.
    """

    own_tasks: ClassVar[Mapping[str, str]] = {"digits": "digits-sets", "mnist": "mnist-sets"}
    hub_trains: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False  # at the hub

    rotate: float = 0.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(self, "rotate", 0, 180)
        for field in fields(self):
            if field.name.endswith("_epochs"):
                check.at_least(self, field.name, 0)

    @abstractmethod
    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """Turn the hub's network, which is the last f, into the next one."""

    def check(self, nodes: Sequence[Node]) -> None:
        """Equal networks and classes, images if they are turned, and a hub that can do its part.

        Args:
            nodes: all of them; the hub is the one of that name.
        """
        hubs = [node for node in nodes if node.name == HUB]
        if self.needs_labels:
            self._check_labels(hubs)
        for hub in hubs:
            _check_validation(hub)
        own = [hub for hub in hubs if hub.model.parts]
        equal = [*parties(nodes), *own]
        check_same_parts(equal)
        for node in equal[1:]:
            if node.classes != equal[0].classes:
                raise ConfigError(
                    f"{self.name} trains one network, but the outputs of {equal[0].name} mean "
                    f"{{{', '.join(equal[0].classes)}}} and those of {node.name} mean "
                    f"{{{', '.join(node.classes)}}}. Name the same classes in the same order."
                )
        for node in nodes:
            if self.rotate and "train" in node.data:
                self._check_images(node)

    def sends(self, node: Node) -> Spec:
        """The network."""
        return node.model.spec()

    def hears(self, node: Node) -> Spec:
        """The network, and whether the hub finds it the best so far."""
        return {**node.model.spec(), _IS_BEST: TensorSpec((), torch.bool)}

    def send(self, node: Node) -> Message:
        """The network."""
        return Message(node.model.state())

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """The next network, and how it does on the hub's validation split."""
        yield from self.improve(place, got)
        if SPLIT in place.data:
            _judge(place)

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """The hub's network for everybody; the mean, where the hub has none."""
        state = place.model.state() or mean_of(got)
        is_best = place.memory.get(_IS_BEST, torch.tensor(False))
        return dict.fromkeys(to, Message({**state, _IS_BEST: is_best}))

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """Load the network, and keep it if it is the best."""
        state = dict(message.tensors)
        is_best = bool(state.pop(_IS_BEST))
        node.model.load(state)
        if is_best:
            node.remember(_BEST, state)
        return ()

    def finish(self, node: Node) -> Iterable[Phase]:
        """Back to the best; what its loss is on the node's sets goes to the notes."""
        node.model.load(node.recall(_BEST))
        if SETS in node.memory:
            sets = Split(node.data["train"].x, node.memory[SETS])
            node.notes["surrogate_loss"] = mean_loss(node.model, sets, SurrogateLoss())
        return ()

    def supervised(self, epochs: int) -> Phase:
        """The hub's own training, on its labels."""
        return self.phase("supervised", objective=self.turned(cross_entropy), epochs=epochs)

    def turned(self, objective: Objective) -> Objective:
        """The objective on images that are turned at random, if they are to be."""
        return Rotated(objective, self.rotate, self.fill) if self.rotate else objective

    def _check_images(self, node: Node) -> None:
        shape = list(node.data["train"].x.shape[1:])
        if len(shape) != 3:
            raise ConfigError(
                f"{self.name}: rotate={self.rotate:g} turns images (channels, height, width), "
                f"but an input of node {node.name} has shape {shape}. Use rotate=0."
            )

    def _check_labels(self, hubs: Sequence[Node]) -> None:
        form = "Node('hub', Data(train=(x, labels), val_rb=(x, labels)), model)"
        if not hubs:
            raise ConfigError(
                f"{self.name} trains on labels at the hub, but no node is called 'hub'. {_TASKS}, "
                f"or add {form}."
            )
        train = hubs[0].data.get("train")
        y = None if train is None else train.y
        if y is None or y.dim() != 1 or y.is_floating_point():
            raise DataError(
                f"{self.name} trains on labels at the hub, but its split 'train' "
                f"{'is missing' if train is None else 'has none'}. Give it one class per sample: "
                f"{form}."
            )
        if not hubs[0].model.parts:
            raise ModelError(f"{self.name} trains at the hub, but the hub has no network: {form}.")


@dataclass(frozen=True, kw_only=True)
class OnSets(HubJudged):
    """Nodes that train on sets whose class proportions they know.

    Attributes:
        local_epochs: epochs in each round.
        l1: weight of the sum of all parameters' absolute values in a node's loss.
    """

    averages: ClassVar[bool] = True
    needs_identifiable: ClassVar[bool] = False  # nothing but the sets determines the classifier

    local_epochs: int = 1
    l1: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "l1", 0)

    @abstractmethod
    def loss_on_sets(self) -> Objective:
        """What a node minimises, but for the penalty."""

    def check(self, nodes: Sequence[Node]) -> None:
        """As every method of the family; and nodes know sets, of as many classes as outputs."""
        super().check(nodes)
        for node in parties(nodes):
            _check_sets(node)
        found = examine(parties(nodes))
        if self.needs_identifiable and not found.is_certain:
            _warn_once(f"{self.name}: {found.sentence([node.name for node in parties(nodes)])}")

    def start(self, node: Node) -> Iterable[Phase]:
        """How well the node's own sets tell the classes apart."""
        found = identifiable([set_proportions(node.model)])
        node.notes |= {"set_rank": found.ranks[0], "set_sigma": found.sigmas[0]}
        return ()

    def local(self, node: Node) -> Iterable[Phase]:
        """The network on the node's own sets."""
        yield self.on_sets(self.loss_on_sets(), SETS)

    def on_sets(self, objective: Objective, target: str) -> Phase:
        """A node's training, with the penalty and turned images."""
        loss = L1Penalty(objective, self.l1) if self.l1 else objective
        return self.phase(
            "local", objective=self.turned(loss), target=target, epochs=self.local_epochs
        )

    def improve(self, hub: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """The mean."""
        if hub.model.parts:
            hub.model.load(mean_of(got))
        return ()


@cache
def _warn_once(text: str) -> None:
    """A comparison checks every method twice; the same words again would tell nothing new."""
    warnings.warn(text, IdentifiabilityWarning, stacklevel=4)


def parties(nodes: Sequence[Node]) -> list[Node]:
    """The nodes but the hub."""
    return [node for node in nodes if node.name != HUB]


def mean_of(got: Mapping[Name, Message]) -> dict[str, Tensor]:
    """The uniform mean of all networks."""
    return weighted_mean([m.tensors for m in got.values()], [1.0] * len(got))


def validation_loss(hub: Node) -> float:
    """Cross-entropy of the hub's network on its validation split."""
    return mean_loss(hub.model, hub.data[SPLIT], cross_entropy)


def _judge(hub: Node) -> None:
    """Note how the hub's network does; remember whether it is the best so far."""
    x, y = hub.data[SPLIT].x, cast(Tensor, hub.data[SPLIT].y)
    scores = outputs(hub.model, x)
    now = float((scores.argmax(-1) == y).double().mean())
    is_best = now >= float(hub.memory.get(_BEST, 0))
    hub.memory[_IS_BEST] = torch.tensor(is_best)
    if is_best:
        hub.memory[_BEST] = torch.tensor(now, dtype=torch.float64)
    loss = float(functional.cross_entropy(scores, y))
    hub.notes |= {f"{SPLIT}_accuracy": now, f"{SPLIT}_loss": loss}


def _check_validation(hub: Node) -> None:
    split = hub.data.get(SPLIT)
    if split is not None and split.y is None:
        raise DataError(f"the hub's split '{SPLIT}' has no labels: accuracy needs them.")
    if split is not None and not hub.model.parts:
        raise ModelError(f"the hub has a split '{SPLIT}', but no network to judge by it.")


def _check_sets(node: Node) -> None:
    if SETS not in node.memory:
        raise ConfigError(
            f"node {node.name} knows no sets. {_TASKS}, or tell it: "
            "polyfed.train.surrogate.attach_sets(node, sets, proportions)."
        )
    there, known = len(node.data["train"]), len(node.memory[SETS])
    if there != known:
        raise DataError(
            f"node {node.name} knows the sets of {known} samples, but its split 'train' has "
            f"{there}. Tell it anew with attach_sets after its data change."
        )
    width = outputs(node.model, node.data["train"].x[:1]).shape[-1]
    classes = set_proportions(node.model).shape[1]
    if width != classes:
        raise DataError(
            f"node {node.name} knows proportions of {classes} classes, but its network has "
            f"{width} outputs. Give one column of proportions for each output."
        )

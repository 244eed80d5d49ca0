"""The charter: what all parties of a run agree on, and what each tells about itself at the start.

Data and networks stay where they are. What others need to know of a party before it speaks is its
card: names and shapes of what it will send; the shapes of its network, where the method deals with
topics; and a digest of its public inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from polyfed import check
from polyfed.core.message import Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Name, Node
from polyfed.core.topology import Topology
from polyfed.engines.gate import check_federation
from polyfed.errors import ConfigError, DataError, MessageError, PolyfedError, UnknownNameError
from polyfed.methods._guard import guarded

Card = dict[str, Any]
_PARTS = 100_000  # modules that a card may describe
_MOST = 1 << 48  # what a card can name: sizes of tensors, and their least values
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True, kw_only=True)
class Charter:
    """What all parties of a run agree on.

    Attributes:
        run: name of the run, part of every address.
        method: with its hyper-parameters.
        topology: with its options.
        nodes: the names of all nodes.
        host: who plays the places of the topology, a node or a party of its own; None if it has
            none.
        seed: of the run.
        evaluate_every: rounds between evaluations.
        grace: seconds that a party may be gone before the others go on without it.
        patience: seconds without any progress after which a party ends, to go on later.
        resend: seconds after which a small message that was not confirmed is sent again.
        largest: bytes of the largest message that is taken.
    """

    run: str
    method: Method
    topology: Topology
    nodes: tuple[Name, ...]
    host: Name | None = None
    seed: int = 0
    evaluate_every: int = 1
    grace: float = 10.0
    patience: float = 600.0
    resend: float = 1.0
    largest: int = 1 << 31

    def __post_init__(self) -> None:
        check.positive(self, "grace", "patience", "resend", "largest")
        check.at_least(self, "evaluate_every", 1)
        if self.topology.name not in self.method.topologies:
            raise ConfigError(
                f"{self.method.name} runs on {', '.join(self.method.topologies)}, not on "
                f"{self.topology.name}."
            )
        has_places = type(self.topology).places is not Topology.places
        if has_places and self.host is None:
            raise ConfigError(
                f"the topology {self.topology.name} has a place where messages meet. Name the "
                "party that plays it: host: hub, or one of the nodes."
            )
        if not has_places and self.host is not None:
            raise ConfigError(f"the topology {self.topology.name} has no place for a host.")
        guarded(self.method, self.topology)

    @cached_property
    def guarded(self) -> Method:
        """The method as it is played: with its guard."""
        return guarded(self.method, self.topology)[0]

    @cached_property
    def parties(self) -> tuple[Name, ...]:
        """Everybody: the nodes, and the host where it is no node."""
        return tuple(sorted({*self.nodes, *([self.host] if self.host else [])}))

    def plays(self, place: Name) -> Name:
        """The party that plays a node or a place."""
        return place if place in self.nodes or self.host is None else self.host

    def joined(self, roster: Mapping[Name, Card]) -> Topology:
        """The topology among all nodes, once all have told about themselves."""
        _check_public(roster)
        nodes = [_stand_in(name, roster[name]) for name in sorted(self.nodes)]
        topology = guarded(self.method, self.topology)[1]
        return topology.joined(self.seed, self.nodes, self.method.topics(nodes))

    def enter(self, name: Name, node: Node | None, device: torch.device) -> Node | None:
        """The node as the method prepares it; raises where the method cannot work so."""
        if name not in self.parties:
            raise UnknownNameError("party", name, self.parties)
        if name not in self.nodes:
            return None if node is None else node.working_copy(self.seed, device, {})
        if node is None:
            raise ConfigError(f"party {name} is a node: it needs data and a network.")
        check_federation([node])
        alike = [replace(node, name=each, seed=self.seed) for each in sorted(self.nodes)]
        made = {each.name: each for each in self.guarded.prepare(alike)}
        if name not in made:
            raise ConfigError(
                f"{self.method.name} puts the data of all nodes in one place: it cannot run across "
                "machines. It is a control for comparisons in one process."
            )
        if not self.method.hub_trains:
            self.guarded.check(list(made.values()))
        return made[name].working_copy(self.seed, device, {})

    def card(self, node: Node | None) -> Card:
        """What a party tells about itself."""
        if node is None or node.name not in self.nodes:
            return {}
        public = node.data.get("public")
        card: Card = {
            "sends": plain(self.guarded.sends(node)),
            "public": None if public is None else public.fingerprint(),
        }
        if type(self.method).topics is not Method.topics:
            card["shapes"] = plain(node.model.spec())
            card["parts"] = {part: node.model.names(part) for part in node.model.parts}
        return card


def check_card(card: Any, *, is_node: bool) -> None:
    """Raise MessageError unless this is a card as `Charter.card` makes them."""
    if not isinstance(card, dict) or (is_node and "sends" not in card):
        raise MessageError(f"not a card: {card!r}"[:200])
    if not isinstance(card.get("public"), str | None):
        raise MessageError("a card whose digest of public inputs is no text")
    try:
        read_spec(card.get("sends", {}))
        _stand_in("card", card)
    except (
        PolyfedError,
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        raise MessageError(f"a card that describes nothing: {error}") from error


def check_cards(charter: Charter, sender: Name, note: Mapping[str, Any]) -> None:
    """Raise MessageError if a note holds what parties cannot tell about themselves."""
    roster = note.get("roster") or {}
    cards = dict(roster) if isinstance(roster, dict) else {}
    if note["kind"] == "hello":
        cards[sender] = note.get("card")
    for name, card in cards.items():
        check_card(card, is_node=name in charter.nodes)


def plain(spec: Spec) -> dict[str, Any]:
    """A specification as JSON can hold it."""
    return {n: [list(s.shape), str(s.dtype), s.least] for n, s in spec.items()}


def read_spec(raw: Any) -> Spec:
    """Read what `plain` made; anything else is refused."""
    try:
        return {str(name): _read_tensor(*each) for name, each in raw.items()}
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise MessageError(f"not an announcement: {error!r}") from error


def _read_tensor(shape: Any, dtype: Any, least: Any) -> TensorSpec:
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n < _MOST for n in shape):
        raise ValueError(f"no shape: {shape!r}")
    if least is not None and (type(least) not in (int, float) or abs(least) > _MOST):
        raise ValueError(f"no least value: {least!r}")
    return TensorSpec(tuple(shape), _DTYPES[dtype], least)


def _stand_in(name: Name, card: Card) -> Node:
    """A node with the shapes that a card tells of, and nothing in it."""
    if "shapes" not in card:
        return Node(name)
    net, shapes = nn.Module(), read_spec(card["shapes"])
    if sum(path.count(".") + 1 for path in shapes) > _PARTS:
        raise MessageError(f"a card of a network of more than {_PARTS} modules")
    for path, spec in shapes.items():
        owner = net
        *above, leaf = path.split(".")
        for step in above:
            if step not in dict(owner.named_children()):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_buffer(leaf, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    return Node(name, model=Model(net, {p: tuple(names) for p, names in card["parts"].items()}))


def _check_public(roster: Mapping[Name, Card]) -> None:
    digests = {name: card.get("public") for name, card in roster.items() if card.get("public")}
    if len(set(digests.values())) > 1:
        listed = ", ".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
        raise DataError(
            f"the public inputs differ, or are in another order (digests: {listed}). Give every "
            "party the same tensor."
        )

"""Secure means: the place of a meeting learns the weighted mean of what it is sent, and no message.

Every tick that has meetings becomes two, among the same nodes (`Keyed`):

    first   nodes train and send a public key, made for this once; the place sends all keys to all
    second  nodes send whole numbers, masked pair by pair (`maths/masks.py`); the place adds them

So keys are new in every round, and in every attempt at a round: masks are never used twice. A sum
that lacks somebody whose masks are in it is not used. Where fewer than three meet, nobody tells
anything: who knows one of two knows the other from their mean.

A node's secret key is in its memory from the first tick to the second, and nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from polyfed.core.message import Message, Spec, TensorSpec, about
from polyfed.core.node import Name, Node
from polyfed.core.topology import Seen, Tick, Topology
from polyfed.errors import MessageError
from polyfed.maths.masks import KEY, add, fits, from_fixed, masked, new_secret, public_of, to_fixed

LEAST = 3  # who meet, at least
TOPOLOGIES = ("star", "groups")  # where a node says one thing about a topic at one place
_SECRET, _TABLE, _OF = "guard/secret-key", "guard/keys", "guard/nodes"
_KEY, _KEYS, _SIZE = "guard.key", "guard.keys", "guard.nodes"
_COUNT, _WEIGHT, _COMPANY = "num_examples", "guard.weight", "guard.company"
_DIGEST = 16
T = TypeVar("T")
DTYPES = (torch.float32, torch.float64, torch.int64)  # what can be masked
_DTYPES = {str(d).removeprefix("torch."): d for d in DTYPES}


@dataclass(frozen=True, kw_only=True)
class Keyed(Topology):
    """A topology whose ticks with meetings come twice: once for keys, once for what is masked."""

    name: ClassVar[str] = "keyed"

    inner: Topology

    def __post_init__(self) -> None:
        for what in ("name", "has_links"):
            object.__setattr__(self, what, getattr(self.inner, what))

    @property
    def places(self) -> tuple[Name, ...]:
        """As the topology has them."""
        return self.inner.places

    def joined(
        self, seed: int, names: Iterable[Name], topics: Mapping[str, tuple[Name, ...]]
    ) -> Topology:
        """The topology among these nodes."""
        inner = self.inner.joined(seed, names, topics)
        return replace(self, inner=inner, seed=seed, names=inner.names, topics=inner.topics)

    def round(self, t: int, seen: Seen) -> Iterable[Tick]:
        """Who trains, trains before keys are sent."""
        for tick in self.inner.round(t, seen):
            yield tick
            if tick.meetings:
                yield Tick((), tick.meetings)

    def tick(self, t: int, alive: frozenset[Name]) -> Tick:
        """As the topology has it."""
        return self.inner.tick(t, alive)


# ---- at the node ---------------------------------------------------------------------------------


def joining(node: Node, nodes: int) -> Node:
    """The node, knowing how many there are."""
    return replace(node, memory={**node.memory, _OF: torch.tensor(nodes)})


def is_joined(node: Node) -> bool:
    """Whether this is a node that sends; a hub with data of its own is not."""
    return _OF in node.memory


def has_key(node: Node) -> bool:
    """Whether the node has sent a key, and masks what it sends next."""
    return _SECRET in node.memory


def announce(node: Node, topics: Iterable[str]) -> Message:
    """A new public key, for every topic."""
    secret = new_secret()
    node.memory[_SECRET] = _tensor(secret)
    told = {_KEY: _tensor(public_of(secret)), _SIZE: node.memory[_OF]}
    return Message({_in(topic, what): t for topic in topics for what, t in told.items()})


def announced(topics: Iterable[str]) -> Spec:
    """What `announce` sends."""
    told = {_KEY: TensorSpec((KEY,), torch.uint8), _SIZE: TensorSpec((), torch.int64, least=1)}
    return {_in(topic, what): spec for topic in topics for what, spec in told.items()}


def tables(node: Node, topics: Iterable[str]) -> Spec:
    """The keys of all who meet, as the node hears them; rows of zeros where there are fewer."""
    table = TensorSpec((int(node.memory[_OF]), KEY), torch.uint8)
    return {_in(topic, _KEYS): table for topic in topics}


def keep_keys(node: Node, message: Message) -> None:
    """Remember the keys of all, until the message is masked."""
    node.memory |= {f"{_TABLE}/{name}": t for name, t in message.tensors.items()}


def hidden(spec: Spec, topics: Iterable[str]) -> Spec:
    """What `hide` makes of a message of that specification."""
    made: dict[str, TensorSpec] = {}
    for topic in topics:
        counts, rest = _sorted_out(topic, about(spec, topic))
        made |= {_in(topic, _COMPANY): TensorSpec((_DIGEST,), torch.uint8)}
        made |= {_in(topic, _SIZE): TensorSpec((), torch.int64, least=0)}
        made[_weight_name(topic, counts)] = TensorSpec((), torch.int64)
        made |= {_wire(name, s.dtype): TensorSpec(s.shape, torch.int64) for name, s in rest}
    return made


def hide(node: Node, tensors: Mapping[str, Tensor], topics: Iterable[str]) -> Message:
    """Mask a message, topic by topic, with the keys that were heard; these are forgotten."""
    secret = _bytes(node.memory.pop(_SECRET))
    heard = node.recall(_TABLE)
    node.forget(_TABLE)
    made: dict[str, Tensor] = {}
    for topic in topics:
        keys = _company(heard.get(_in(topic, _KEYS)), public_of(secret))
        made |= _hide(node, topic, about(tensors, topic), secret, keys)
    return Message(made)


def _hide(
    node: Node, topic: str, tensors: Mapping[str, Tensor], secret: bytes, keys: Sequence[bytes]
) -> dict[str, Tensor]:
    counts, rest = _sorted_out(topic, tensors)
    weight = int(tensors[counts[0]]) if counts else 1
    if not all(fits(t, weight, len(keys)) for _, t in rest):
        node.notes["kept_back"] = "numbers too large or not finite"
        weight = 0  # it takes part, for its masks are in the others' numbers, and adds nothing
    parts = [torch.tensor([weight])]
    parts += [to_fixed(t, weight).flatten() if weight else _zeros(t) for _, t in rest]
    flat = torch.cat([part.cpu() for part in parts])
    if keys:
        flat = masked(flat, secret, keys, _digest(keys) + topic.encode())
    else:
        node.notes["kept_back"] = f"fewer than {LEAST} nodes meet"
        flat = torch.zeros_like(flat)
    first, *others = flat.split([len(part) for part in parts])
    device = rest[0][1].device if rest else flat.device
    return {
        _in(topic, _COMPANY): _tensor(_digest(keys)),
        _in(topic, _SIZE): torch.tensor(len(keys)),
        _weight_name(topic, counts): first[0],
        **{
            _wire(name, t.dtype): part.view(t.shape).to(device)
            for (name, t), part in zip(rest, others, strict=True)
        },
    }


def _company(table: Tensor | None, own: bytes) -> list[bytes]:
    """The keys of all who meet, in their order; none, if they are too few to tell them anything."""
    if table is None:
        return []
    keys = sorted({_bytes(row) for row in table if bool(row.any())})
    return keys if len(keys) >= LEAST and own in keys else []


# ---- at the place --------------------------------------------------------------------------------


def are_keys(got: Mapping[Name, Message]) -> bool:
    """Whether this is the first of the two ticks."""
    return any(name.endswith(_KEY) for message in got.values() for name in message.tensors)


def relay(got: Mapping[Name, Message], to: Sequence[Name]) -> dict[Name, Message]:
    """To each node the keys of all who speak about the topics that it speaks about."""
    keys: dict[str, list[Tensor]] = {}
    for name, message in got.items():
        found = {n: t for n, t in message.tensors.items() if n.endswith(_KEY)}
        if not found:
            raise MessageError(f"{name} sent no key, where the others did")
        for key, tensor in found.items():
            keys.setdefault(key.removesuffix(_KEY), []).append(tensor)
    keys = {start: sorted(rows, key=_bytes) for start, rows in keys.items()}
    return {
        name: Message(
            {
                f"{start}{_KEYS}": _filled(rows, int(got[name].tensors[f"{start}{_SIZE}"]))
                for start, rows in keys.items()
                if f"{start}{_KEY}" in got[name].tensors
            }
        )
        for name in to
        if name in got
    }


def revealed(got: Mapping[Name, Message]) -> Message | None:
    """The weighted mean of all messages, as one message; None where nobody tells anything."""
    starts = dict.fromkeys(
        n.removesuffix(_COMPANY) for m in got.values() for n in m.tensors if n.endswith(_COMPANY)
    )
    made: dict[str, Tensor] = {}
    for start in starts:
        told = _told(got, start)
        if told:
            made |= _revealed(start, told)
    return Message(made) if made else None


def _told(got: Mapping[Name, Message], start: str) -> list[Mapping[str, Tensor]]:
    """What is told about a topic by those who do not keep it back."""
    told = [m.tensors for m in got.values() if f"{start}{_COMPANY}" in m.tensors]
    topic = start.removesuffix("/")
    return [about(t, topic) for t in told if int(t[f"{start}{_SIZE}"])]


def _revealed(start: str, told: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    companies = {_bytes(t[f"{start}{_COMPANY}"]) for t in told}
    sizes = {int(t[f"{start}{_SIZE}"]) for t in told}
    if len(companies) > 1 or sizes != {len(told)}:
        raise MessageError(
            f"masks do not cancel: {len(told)} messages, of a company of "
            f"{' or '.join(map(str, sorted(sizes)))}; nobody's are used"
        )
    wires = [n for n in told[0] if n not in (f"{start}{_COMPANY}", f"{start}{_SIZE}")]
    if any(set(t) != set(told[0]) or any(t[n].shape != told[0][n].shape for n in t) for t in told):
        raise MessageError("messages of one sum have other names or shapes")
    total = {wire: add([t[wire] for t in told]) for wire in wires}
    weigher = next(n for n in wires if n in (f"{start}{_WEIGHT}", _wire(f"{start}{_COUNT}")))
    weight = int(total.pop(weigher))
    if weight < 1:
        raise MessageError("nobody's numbers could be added")
    counted = {} if weigher.endswith(_WEIGHT) else {f"{start}{_COUNT}": torch.tensor(weight)}
    means = {}
    for wire, value in total.items():
        name, _, dtype = wire.rpartition("/")
        means[name] = from_fixed(value, weight, _DTYPES[dtype])
    return {**means, **counted}


# ---- names ---------------------------------------------------------------------------------------


def topics_in(names: Iterable[str], *, has_topics: bool) -> list[str]:
    """The topics that a message is about; one without a name, where the method has none."""
    return sorted({name.partition("/")[0] for name in names}) if has_topics else [""]


def _in(topic: str, what: str) -> str:
    return f"{topic}/{what}" if topic else what


def _wire(name: str, dtype: torch.dtype = torch.int64) -> str:
    """A tensor's name on its way: masked numbers have one dtype, so the name says which it was."""
    return f"{name}/{str(dtype).removeprefix('torch.')}"


def _weight_name(topic: str, counts: Sequence[str]) -> str:
    return _wire(counts[0]) if counts else _in(topic, _WEIGHT)


def _sorted_out(topic: str, named: Mapping[str, T]) -> tuple[list[str], list[tuple[str, T]]]:
    """The name of the weight, if there is one, and the others in the order of their names."""
    count = _in(topic, _COUNT)
    rest = [(name, named[name]) for name in sorted(named) if name != count]
    return [n for n in named if n == count], rest


def _digest(keys: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(keys), digest_size=_DIGEST).digest()


def _filled(rows: Sequence[Tensor], size: int) -> Tensor:
    if len(rows) > size:
        raise MessageError(f"{len(rows)} keys, where there are {size} nodes")
    return torch.cat([torch.stack(list(rows)), torch.zeros(size - len(rows), KEY).to(rows[0])])


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.numel(), dtype=torch.int64)


def _tensor(raw: bytes) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())

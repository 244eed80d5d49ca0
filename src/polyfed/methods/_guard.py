r"""A guard around a method: what leaves a node is bounded, made noisy, compressed or masked.

    u = m - r,   m' = r + u min(1, C / |u|) + z C N(0, I)                              (1)

and then m' is compressed (`maths/quantise.py`), with what that loses kept and added to the next
message, or masked (`_secure.py`). Engines and methods do not know.

Symbols: m = all floating numbers of a message as one vector; r = what is known of it without the
node's data: the last that the node was told under the same names, before that what the method says
(`Method.known`), and zero for the rest; C = clip, z = noise.
Whole numbers (counts of examples, counters) pass as they are.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from polyfed.core.guard import Guard
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.core.topology import Topology
from polyfed.errors import ConfigError, MessageError
from polyfed.maths.accountant import check_accountant
from polyfed.maths.masks import check_masks
from polyfed.maths.quantise import halve, quantise, restore
from polyfed.methods import _secure
from polyfed.random import stream

NOISED = "noised"  # the note that counts messages with noise
_HEARD, _LOST, _COUNT, _ROOT = "guard/heard", "guard/lost", "guard/count", "guard/root"
_SCALE = "scale"
_MEAN = "mean"


def guarded(method: Method, topology: Topology) -> tuple[Method, Topology]:
    """The method and the topology as engines run them; raises where the guard cannot do its work.

    Without a guard they are what they were.
    """
    if not isinstance(method, Guarded):
        tools = Guard.parse(method.guard)
        if tools == Guard(delta=tools.delta):
            return method, topology
        method = Guarded.of(method, tools)
    if method.tools.noise:
        check_accountant()
    if not method.tools.secure:
        return method, topology
    check_masks()
    if not method.averages:
        raise ConfigError(
            f"guard secure: only means can be computed under masks, and {method.name} looks at "
            "each message. Use clip and noise, or a method that averages, such as fedavg."
        )
    if topology.name not in _secure.TOPOLOGIES:
        raise ConfigError(
            f"guard secure: masks cancel where all meet at a hub ({', '.join(_secure.TOPOLOGIES)}),"
            f" not on {topology.name}: who knows one of a pair knows the other from their mean."
        )
    return method, _secure.Keyed(inner=topology)


def own_root(node: Node) -> None:
    """Let noise be drawn from randomness that nobody else knows, instead of from the run's seed."""
    node.memory[_ROOT] = torch.tensor(secrets.randbits(63))


@dataclass(frozen=True, kw_only=True)
class Guarded(Method):
    """A method whose messages pass a guard; all else is the method's.

    Attributes:
        inner: the method.
        tools: what is done to messages.
    """

    inner: Method
    tools: Guard

    def __post_init__(self) -> None:
        if self.inner.rounds != self.rounds:
            object.__setattr__(self, "inner", replace(self.inner, rounds=self.rounds))
        for what in ("name", "title", "topologies", "hub_trains", "averages"):
            object.__setattr__(self, what, getattr(self.inner, what))

    @classmethod
    def of(cls, method: Method, tools: Guard) -> Guarded:
        """The method, guarded."""
        common = {field.name: getattr(method, field.name) for field in fields(Method)}
        return cls(inner=method, tools=tools, **common)

    # ---- as the method does --------------------------------------------------------------------

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """As the method does; masks need to know how many nodes there are."""
        made = self.inner.prepare(nodes)
        return [_secure.joining(n, len(made)) for n in made] if self.tools.secure else made

    def check(self, nodes: Sequence[Node]) -> None:
        """As the method does; and masks are among three nodes or more."""
        self.inner.check(nodes)
        if self.tools.secure:
            self._check_masks(nodes)

    def start(self, node: Node) -> Iterable[Phase]:
        """As the method does; before, keep what is known without the node's data."""
        if self.tools.clip:
            known = self.inner.known(node)
            node.remember(_HEARD, {n: t.clone() for n, t in known.items() if t.is_floating_point()})
        yield from self.inner.start(node)

    def local(self, node: Node) -> Iterable[Phase]:
        """As the method does."""
        return self.inner.local(node)

    def topics(self, nodes: Sequence[Node]) -> Mapping[str, tuple[Name, ...]]:
        """As the method does."""
        return self.inner.topics(nodes)

    def finish(self, node: Node) -> Iterable[Phase]:
        """As the method does."""
        return self.inner.finish(node)

    def views(self, node: Node) -> Mapping[Name, Node]:
        """As the method does."""
        return self.inner.views(node)

    # ---- at the node ---------------------------------------------------------------------------

    def sends(self, node: Node) -> Spec:
        """What the method sends, as it travels; a key, where that was sent last."""
        spec = self.inner.sends(node)
        if self.tools.secure:
            topics = self._topics(spec)
            is_key = _secure.has_key(node)
            return _secure.announced(topics) if is_key else _secure.hidden(spec, topics)
        return self._coded_spec(spec)

    def hears(self, node: Node) -> Spec:
        """What the method hears, as it travels; keys, where one was sent."""
        if self.tools.secure and _secure.has_key(node):
            return _secure.tables(node, self._topics(self.inner.sends(node)))
        return self._coded_spec(self.inner.hears(node))

    def send(self, node: Node) -> Message:
        """What the method sends, through all tools; a key first, where masks are wanted."""
        if self.tools.secure and not _secure.has_key(node):
            return _secure.announce(node, self._topics(self.inner.sends(node)))
        told = self.inner.send(node).tensors
        if self.tools.clip:
            told = self._bounded(node, told)
        if self.tools.secure:
            return _secure.hide(node, told, self._topics(told))
        return Message(self._compressed(node, told) if self.tools.compress else told)

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        """What the method does with what it is told; keys are kept for the next message."""
        if self.tools.secure and _secure.has_key(node):
            _secure.keep_keys(node, message)
            return
        told = self._decoded(message)
        if self.tools.clip:
            known = self.inner.sends(node)
            node.memory |= {
                f"{_HEARD}/{n}": t.clone()
                for n, t in told.tensors.items()
                if t.is_floating_point() and known.get(n) == TensorSpec.of(t)
            }
        yield from self.inner.receive(node, told)

    # ---- at the place --------------------------------------------------------------------------

    def gather(self, place: Node, got: Mapping[Name, Message]) -> Iterable[Phase]:
        """As the method does, with what it can read."""
        try:
            read = self._read(got)
        except MessageError:
            return  # `combine` says so
        if read:
            yield from self.inner.gather(place, read)

    def combine(
        self, place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        """As the method does, with what it can read; or pass on keys."""
        if self.tools.secure and _secure.are_keys(got):
            return _secure.relay(got, to)
        read = self._read(got)
        replies = self.inner.combine(place, read, to) if read else {}
        made: dict[int, Message] = {}  # who hears the same hears one message
        for reply in replies.values():
            made.setdefault(id(reply), Message(self._coded(reply.tensors)))
        return {name: made[id(reply)] for name, reply in replies.items()}

    def _read(self, got: Mapping[Name, Message]) -> Mapping[Name, Message]:
        """What the method can make use of: messages as it sends them, or their mean as one."""
        if not self.tools.secure:
            return {name: self._decoded(message) for name, message in got.items()}
        if _secure.are_keys(got):
            return {}
        mean = _secure.revealed(got)
        return {} if mean is None else {_MEAN: mean}

    # ---- clip and noise ------------------------------------------------------------------------

    def _bounded(self, node: Node, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply Eq. (1); where a number is not finite all are NaN, so that nothing is told."""
        known = node.recall(_HEARD)
        floats = {n: t for n, t in told.items() if t.is_floating_point()}
        zero = {n: torch.zeros_like(t) for n, t in floats.items()}
        r = {
            n: known[n] if n in known and known[n].shape == z.shape else z for n, z in zero.items()
        }
        u = {n: t - r[n] for n, t in floats.items()}
        norm = float(sum(x.double().square().sum() for x in u.values())) ** 0.5
        node.notes["update_norm"] = norm
        shrunk = self.tools.clip / norm if norm > self.tools.clip else 1.0
        if not math.isfinite(norm):
            return {n: t * math.nan if n in u else t for n, t in told.items()}
        if not self.tools.noise and shrunk == 1:
            return dict(told)
        if shrunk < 1:
            u = {n: x * shrunk for n, x in u.items()}
        if self.tools.noise:
            u = self._noisy(node, u)
        return {n: r[n] + u[n] if n in u else t for n, t in told.items()}

    def _noisy(self, node: Node, u: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Noise that is new for every message, and the same for one that is made again.

        A round that is played again after a fault may have another message in the same place.
        Where noise is secret, it then has other noise: the difference of the two tells nothing.
        """
        count = int(node.memory.get(_COUNT, 0))
        node.memory[_COUNT] = torch.tensor(count + 1)
        node.notes[NOISED] = node.notes.get(NOISED, 0) + 1
        drawn = node.stream("guard", count)  # whoever knows the run's seed knows this noise
        if _ROOT in node.memory:
            drawn = stream(int(node.memory[_ROOT]), count, _digest(u))
        sigma = self.tools.noise * self.tools.clip
        return {n: x + sigma * torch.randn(x.shape, generator=drawn).to(x) for n, x in u.items()}

    # ---- compression ---------------------------------------------------------------------------

    def _compressed(self, node: Node, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The message with what was lost of the last one, as it travels; what is lost is kept."""
        lost = node.recall(_LOST)
        whole = {n: t + lost[n] if n in lost else t for n, t in told.items()}
        coded = self._coded(whole)
        arrives = self._decoded(Message(coded)).tensors
        for name, tensor in whole.items():
            error = tensor - arrives[name] if self._is_coded(TensorSpec.of(tensor)) else None
            if error is not None and bool(error.isfinite().all()):
                node.memory[f"{_LOST}/{name}"] = error
        return coded

    def _is_coded(self, spec: TensorSpec) -> bool:
        numbers = torch.Size(spec.shape).numel()
        return bool(self.tools.compress) and spec.dtype == torch.float32 and numbers > 1

    def _coded(self, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, tensor in told.items():
            if not self._is_coded(TensorSpec.of(tensor)):
                made[name] = tensor
            elif self.tools.compress == "int8":
                made[name], made[f"{name}/{_SCALE}"] = quantise(tensor)
            else:
                made[name] = halve(tensor)
        return made

    def _coded_spec(self, spec: Spec) -> Spec:
        """What `_coded` makes of a message of that specification."""
        made: dict[str, TensorSpec] = {}
        for name, each in spec.items():
            if not self._is_coded(each):
                made[name] = each
            elif self.tools.compress == "int8":
                made[name] = TensorSpec(each.shape, torch.int8)
                made[f"{name}/{_SCALE}"] = TensorSpec((), least=0)
            else:
                made[name] = TensorSpec(each.shape, torch.float16)
        return made

    def _decoded(self, message: Message) -> Message:
        if not self.tools.compress:
            return message
        told = message.tensors
        made: dict[str, Tensor] = {}
        for name, tensor in told.items():
            if tensor.dtype == torch.int8 and f"{name}/{_SCALE}" in told:
                made[name] = restore(tensor, told[f"{name}/{_SCALE}"])
            elif tensor.dtype == torch.float16:
                made[name] = tensor.float()
            elif told.get(name.removesuffix(f"/{_SCALE}"), tensor).dtype != torch.int8:
                made[name] = tensor
        return Message(made)

    # ---- masks ---------------------------------------------------------------------------------

    def _topics(self, named: Iterable[str]) -> list[str]:
        return _secure.topics_in(named, has_topics=type(self.inner).topics is not Method.topics)

    def _check_masks(self, nodes: Sequence[Node]) -> None:
        speaking = [node for node in nodes if _secure.is_joined(node)]
        named = self.topics(speaking) or {"": tuple(node.name for node in speaking)}
        for topic, names in named.items():
            if len(names) < _secure.LEAST:
                what = f"speak about '{topic}'" if topic else "take part"
                raise ConfigError(
                    f"guard secure: {len(names)} nodes {what} ({', '.join(names)}), and from a "
                    f"mean of two each knows the other's. It needs {_secure.LEAST} or more."
                )
        for node in (n for n in speaking if any(n.name in names for names in named.values())):
            for name, spec in self.inner.sends(node).items():
                if spec.dtype not in _secure.DTYPES:
                    raise ConfigError(
                        f"guard secure: '{name}' of node {node.name} is {spec}, which has no mean."
                    )


def _digest(u: Mapping[str, Tensor]) -> str:
    """What tells one message from another, so that no two have the same noise."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in u.items():
        found.update(name.encode())
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(raw.numpy().tobytes())
    return found.hexdigest()

r"""Partial models as a person types them, and what a node sends by them.

    scheme    784-250-80-10     cells of the global model in every layer, or 80%: that share of the
                                cells of hidden layers, rounded down, and all inputs and outputs;
                                0% is nothing, 100% everything
    groups    fr=0-50-20-0@M0+M1;en=rest@M2+M3              a name, cells, and who implements it;
                                rest is what the global model leaves of hidden layers; * is all
    depends   fr:global;qc:fr+global, or global             each of all it depends on, or all groups

What a node sends about a topic follows from this text and from its own network alone (`Plan`), so
nobody needs to know the others' networks; `checked` sees to it that they fit together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.message import Spec, TensorSpec
from polyfed.core.node import Name, Node
from polyfed.errors import ConfigError, ModelError
from polyfed.maths.chain import read
from polyfed.maths.scheme import GLOBAL, Scheme, Sizes, counts
from polyfed.maths.slices import Slices
from polyfed.methods._layout import Plan, Shapes, State, aligned, state_of

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_GROUP = re.compile(r"([\w.-]+)\s*=\s*([\d\s-]+|rest)@(.+)")
_REST, _ALL = "rest", ("*",)


@dataclass(frozen=True)
class Declared:
    """What a person typed; the module says in which form."""

    scheme: str | None
    groups: str = ""
    depends: str = ""
    cross: bool = False

    def check(self) -> None:
        """Raise what can be known without a network."""
        has_rest = any(cells == _REST for cells, _ in self._groups.values())
        if self._share is None and not has_rest:
            self.among(())
        if (self._share or 0) > 100:
            raise ConfigError(f"scheme '{self.scheme}': a share is at most 100%.")

    def models(self, node: Name) -> tuple[str, ...]:
        """The models that a node implements."""
        own = [name for name, (_, who) in self._groups.items() if node in who or who == _ALL]
        return (*([GLOBAL] if self.scheme else []), *own)

    def shares(self, node: Name, topic: str) -> bool:
        """Whether a node implements all models of a topic."""
        return set(topic.split("+")) <= set(self.models(node))

    def is_shared(self, topic: str) -> bool:
        """Whether two nodes or more implement all models of a topic, as far as is typed."""
        who = [self._groups[group][1] for group in set(topic.split("+")) - {GLOBAL}]
        some = [set(names) for names in who if names != _ALL]
        return not some or len(set.intersection(*some)) > 1

    def among(self, widths: Sizes) -> Scheme:
        """The scheme for networks with so many cells in their layers."""
        cells = self._cells(widths)
        scheme = Scheme.parse(
            cells,
            groups={
                name: _left(cells, widths) if own == _REST else own
                for name, (own, _) in self._groups.items()
            },
            members={name: who for name, (_, who) in self._groups.items()},
            depends=self._above(),
            cross=self.cross,
        )
        members = {name: who for name, who in scheme.members.items() if who != _ALL}
        return Scheme(scheme.sizes, members, scheme.depends, scheme.cross)

    @cached_property
    def _share(self) -> float | None:
        """The share of hidden cells that are global, if that is what was typed."""
        found = _PERCENT.fullmatch((self.scheme or "").strip())
        return None if found is None else float(found[1])

    def _cells(self, widths: Sizes) -> str | None:
        """The global model, written out."""
        if self._share is None:
            return self.scheme
        first, *hidden, last = widths
        inner = [int(width * self._share / 100) for width in hidden]
        return _text([first, *inner, last] if self._share else [0] * len(widths))

    @cached_property
    def _groups(self) -> dict[str, tuple[str, tuple[Name, ...]]]:
        found: dict[str, tuple[str, tuple[Name, ...]]] = {}
        for text in _split(self.groups, ";"):
            match = _GROUP.fullmatch(text)
            if match is None or match[1] in found:
                raise ConfigError(
                    f"group '{text}' is {'named twice' if match else 'not understood'}. Write "
                    "NAME=CELLS@NODE+NODE, with ; between groups: fr=0-50-20-0@M0+M1."
                )
            found[match[1]] = match[2].strip(), tuple(_split(match[3], "+"))
        return found

    def _above(self) -> dict[str, tuple[str, ...]]:
        """What each model depends on."""
        found: dict[str, tuple[str, ...]] = {}
        for text in _split(self.depends, ";"):
            model, colon, above = text.rpartition(":")
            for name in [model.strip()] if colon else self._groups:
                found[name] = (*found.get(name, ()), *_split(above, "+"))
        return found


def _left(cells: str | None, widths: Sizes) -> str:
    """What the global model leaves of the hidden layers."""
    taken = counts(cells, "-", f"model '{GLOBAL}'") if cells else (0,) * len(widths)
    hidden = zip(widths[1:-1], taken[1:-1], strict=False)  # who has other layers is told later
    return _text([0, *(max(0, width - own) for width, own in hidden), 0])


def _split(text: str, sign: str) -> Iterable[str]:
    return filter(None, (part.strip() for part in text.split(sign)))


# ---- one node ------------------------------------------------------------------------------------


def plan_of(declared: Declared, node: Node) -> tuple[Plan, State]:
    """What a node shares, worked out once for each kind of node and device; and its tensors."""
    state = state_of(node.model.net)
    plan = state.plans.get((declared, node.name))
    if plan is None:
        first = next(t for t in state.values() if t.is_floating_point())
        models = declared.models(node.name)
        plan = _plan(declared, models, state.shapes, first.dtype, first.device)
        state.plans[declared, node.name] = plan
    return plan, state


@lru_cache(maxsize=4096)
def _plan(
    declared: Declared,
    models: tuple[str, ...],
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    scheme = declared.among(_widths(shapes))
    own = tuple(
        (scheme.sizes[m], tuple(i for i, n in enumerate(models) if n in scheme.depends.get(m, ())))
        for m in models
    )
    index = {}
    for numbers, where in _index(own, scheme.cross, shapes, device).items():
        topic = "+".join(sorted(models[i] for i in numbers))
        if declared.is_shared(topic):
            index[topic] = where
    return Plan(shapes, index, {t: TensorSpec((len(w),), dtype) for t, w in index.items()})


@lru_cache(maxsize=128)
def _index(
    models: tuple[tuple[Sizes, tuple[int, ...]], ...],
    cross: bool,
    shapes: Shapes,
    device: torch.device,
) -> dict[tuple[int, ...], Int64[Tensor, " _"]]:
    """The places of the topics of a node with these models, as if it shared them with a twin.

    Args:
        models: the cells of each, and the numbers of those it depends on.
        cross: whether pairs of models are topics, too.
        shapes: of the node's tensors.
        device: where to keep the places.
    """
    if not models:
        return {}  # a node of no group, where there is no global model, shares nothing
    net = {name: TensorSpec(shape) for name, shape in shapes}
    sizes = {str(i): cells for i, (cells, _) in enumerate(models)}
    depends = {str(i): frozenset(map(str, above)) for i, (_, above) in enumerate(models)}
    found = Slices(Scheme(sizes, {}, depends, cross), {"node": net, "twin": net}).index("node")
    return {
        tuple(map(int, topic.split("+"))): aligned(where, shapes).to(device)
        for topic, where in found.items()
    }


@lru_cache(maxsize=1024)
def _widths(shapes: Shapes) -> Sizes:
    return read("node", {name: TensorSpec(shape) for name, shape in shapes}).widths


# ---- all nodes -----------------------------------------------------------------------------------


def checked(declared: Declared, nodes: Sequence[Node]) -> Slices:
    """Who shares which parameters; raises, naming the culprit, where they do not fit together."""
    specs = {node.name: node.model.spec() for node in nodes}
    shapes = {name: tuple((n, s.shape) for n, s in spec.items()) for name, spec in specs.items()}
    return _checked(declared, tuple(shapes.items()))


@lru_cache(maxsize=16)
def _checked(declared: Declared, nets: tuple[tuple[Name, Shapes], ...]) -> Slices:
    specs = {name: {n: TensorSpec(shape) for n, shape in shapes} for name, shapes in nets}
    slices = Slices(_common(declared, specs), specs)
    if len({shapes for _, shapes in nets}) > 1:
        for name, shapes in nets:
            _check_order(declared, name, shapes, slices)
    return slices


def _check_order(declared: Declared, name: Name, shapes: Shapes, slices: Slices) -> None:
    """What a node works out by itself is what all work out together."""
    models, cpu = declared.models(name), torch.device("cpu")
    own = _plan(declared, models, shapes, torch.float32, cpu).index
    for topic, where in slices.index(name).items():
        if not torch.equal(aligned(where, shapes), own[topic]):
            raise ModelError(
                f"the tensors of node {name} come in another order than those of other nodes that "
                f"share '{topic}'. Define the layers of their networks in the same order."
            )


def _common(declared: Declared, specs: Mapping[Name, Spec]) -> Scheme:
    """The scheme of all: a model comes to the same cells on all nodes that implement it."""
    chains = {name: read(name, spec) for name, spec in specs.items()}
    first, chain = next(iter(chains.items()))
    found: dict[str, tuple[Name, Sizes]] = {}
    for name, other in chains.items():
        if len(other.widths) != len(chain.widths):
            raise ConfigError(
                f"partial models need networks with the same number of layers, but {first} has "
                f"{chain} and {name} has {other}."
            )
        sizes = declared.among(other.widths).sizes
        for model in declared.models(name):
            one, cells = found.setdefault(model, (name, sizes[model]))
            if cells != sizes[model]:
                fewest = map(min, zip(cells, sizes[model], strict=True))
                raise ConfigError(
                    f"partial model '{model}' must have the same size on all nodes, but it comes "
                    f"to {_text(cells)} on {one} and {_text(sizes[model])} on {name}. Fix: write "
                    f"out cells that all have, such as {_text(fewest)}."
                )
    scheme = declared.among(chain.widths)
    sizes = {**scheme.sizes, **{model: cells for model, (_, cells) in found.items()}}
    return Scheme(sizes, scheme.members, scheme.depends, scheme.cross)


def _text(cells: Iterable[int]) -> str:
    return "-".join(map(str, cells))

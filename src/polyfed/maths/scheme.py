r"""Partial models: who implements them, their cells in every layer, and who depends on whom.

    M(pi) = {mu(c) : c in C(pi)}                                      models of a parameter's cells
    R(pi) = {m in M(pi) : no m' in M(pi) depends on m}                its minimal elements
    |R(pi)| = 1: averaged by all who implement that model;  |R(pi)| = 2: local, or, with `cross`,
    averaged by all who implement both

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, sections II.3 and V.1 and appendix A.
Symbols: pi = a parameter, C(pi) = its cells (two neurons of a weight, one of a bias), mu(c) = the
partial model of a cell. A scheme 784-250-80-10 counts a model's cells in every layer, the input
layer too; what no model takes of a node's network is the node's local slice.
Limits: one global model of the whole network is FedAvg; 0-0-0-0 shares nothing.
Deviations from the paper: none. A local slice depends on all that its node implements, so whatever
it touches stays local.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.errors import ConfigError, UnknownNameError

GLOBAL, LOCAL = "global", "local"

Names = str | Iterable[str]
Sizes = tuple[int, ...]


def reduced(models: Collection[str], depends: Mapping[str, Collection[str]]) -> frozenset[str]:
    """R(pi): the models that no other of them depends on.

    >>> sorted(reduced(["m1", "m2", "m3"], {"m2": ["m1"]}))
    ['m2', 'm3']
    """
    needed = {above for model in models for above in depends.get(model, ())}
    return frozenset(models) - needed


def counts(text: str, sign: str, what: str) -> Sizes:
    """The numbers of `784-250-80-10` (a model) or `784=300=100=10` (a network).

    >>> counts("784=300=10", "=", "the network")
    (784, 300, 10)
    """
    if not re.fullmatch(rf"\d+(\s*{sign}\s*\d+)+", text.strip()):
        raise ConfigError(
            f"{what} must be its number of cells in every layer, such as "
            f"{sign.join(('784', '300', '10'))}, got {text!r}."
        )
    return tuple(map(int, text.split(sign)))


@dataclass(frozen=True)
class Scheme:
    """The declaration of partial models, checked; it knows no network yet.

    Attributes:
        sizes: each model's cells in every layer, in the order of the slices of a network.
        members: the nodes that implement a model; all do, of a model that is not named.
        depends: the models that a model depends on.
        cross: average weights between two models neither of which depends on the other.
    """

    sizes: Mapping[str, Sizes]
    members: Mapping[str, tuple[str, ...]]
    depends: Mapping[str, frozenset[str]]
    cross: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)
        _check_depends(self.depends, self.sizes)

    @classmethod
    def parse(
        cls,
        scheme: str | None,
        *,
        groups: Mapping[str, str] | None = None,
        members: Mapping[str, Names] | None = None,
        depends: Mapping[str, Names] | None = None,
        cross: bool = False,
    ) -> Scheme:
        """Read the paper's notation.

        Args:
            scheme: cells of the global model, which every node implements; None if there is none.
            groups: name of a semi-local model = its cells.
            members: name of a semi-local model = the nodes that implement it.
            depends: name of a model = the models it depends on, all of them.
            cross: Algorithm 2: also average between models that do not depend on each other.

        >>> Scheme.parse("784-250-80-10", groups={"fr": "0-50-20-0"}, members={"fr": "M0, M1"},
        ...              depends={"fr": "global"}).of("M2")
        ('global',)
        """
        groups = groups or {}
        texts = {GLOBAL: scheme, **groups} if scheme else groups
        found = {name: _names(nodes) for name, nodes in (members or {}).items()}
        _check_groups(groups, found)
        return cls(
            {name: counts(str(text), "-", f"model '{name}'") for name, text in texts.items()},
            found,
            {name: frozenset(_names(models)) for name, models in (depends or {}).items()},
            cross,
        )

    @property
    def layers(self) -> int:
        """Number of layers, with the input layer."""
        return len(next(iter(self.sizes.values())))

    def of(self, node: str) -> tuple[str, ...]:
        """The models that a node implements."""
        return tuple(m for m in self.sizes if m not in self.members or node in self.members[m])

    def owners(self) -> tuple[dict[str, frozenset[str]], Int64[Tensor, "models models"]]:
        """Topics, and who owns the weights between the cells of two models.

        Returns:
            Each topic's R(pi): first every model by itself, then with `cross` the pairs `a+b`; and
            a table with the number of the topic that owns the weights from the models of a column
            to the models of a row, -1 for nobody. The last row and column are the local slice.
        """
        names = list(self.sizes)
        topics = {name: frozenset({name}) for name in names}
        table = torch.full((len(names) + 1, len(names) + 1), -1)
        for i, a in enumerate(names):
            for j, b in enumerate(names[: i + 1]):
                minimal = reduced({a, b}, self.depends)
                if len(minimal) > 1 and not self.cross:
                    continue
                topic = "+".join(sorted(minimal))
                topics.setdefault(topic, minimal)
                table[i, j] = table[j, i] = list(topics).index(topic)
        return topics, table


def _names(value: Names) -> tuple[str, ...]:
    """Names of a comma-separated text or of any sequence, each once."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def _check_groups(groups: Mapping[str, str], members: Mapping[str, tuple[str, ...]]) -> None:
    for name in groups:
        if name in (GLOBAL, LOCAL) or not name or set(name) & set("+,"):
            raise ConfigError(
                f"a group cannot be called {name!r}: '{GLOBAL}' and '{LOCAL}' are taken, and '+' "
                "and ',' separate names."
            )
        if not members.get(name):
            raise ConfigError(
                f"group '{name}' has no members. Fix: name the nodes that implement it, "
                f"members={{'{name}': 'M0, M1'}}."
            )
    for name in members:
        if name not in groups:
            raise UnknownNameError("group", name, groups)


def _check_sizes(sizes: Mapping[str, Sizes]) -> None:
    if not sizes:
        raise ConfigError(
            "there is no partial model. Fix: give the global model's scheme, such as "
            "784-250-80-10, or groups. 0-0-0-0 shares nothing."
        )
    first, wanted = next(iter(sizes.items()))
    for name, size in sizes.items():
        if len(size) != len(wanted):
            raise ConfigError(
                f"model '{name}' has {len(size)} layers and '{first}' has {len(wanted)}. Fix: "
                "write 0 for a layer in which a model has no cells."
            )


def _check_depends(depends: Mapping[str, frozenset[str]], sizes: Mapping[str, Sizes]) -> None:
    """A strict partial order: of known models, without cycles, transitively closed."""
    for name in [*depends, *(above for models in depends.values() for above in sorted(models))]:
        if name not in sizes:
            raise UnknownNameError("model", name, sizes)
    try:
        TopologicalSorter(depends).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"dependencies go round in a circle: {circle}. Fix: drop one.") from None
    for low, middles in depends.items():
        for middle in sorted(middles):
            for high in sorted(depends.get(middle, frozenset()) - middles):
                raise ConfigError(
                    f"'{low}' depends on '{middle}', which depends on '{high}', so '{low}' must "
                    f"depend on '{high}' too. Fix: add '{high}' to depends['{low}']."
                )

r"""Partial averaging: the parameters that are one and the same on several nodes, and their mean.

    key(pi) = (tensor, model and rank of the out cell, model and rank of the in cell, position)
    g(pi)   = number of key(pi) if R(pi) has one owner that two or more nodes implement, else -1
    z_pi   <- mean {z_pi' : g(pi') = g(pi)}   where g(pi) >= 0                              (1)

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, Algorithms 1 and 2; R(pi) is in `scheme`.
Symbols: z_pi = the value of parameter pi on its node; a cell is a neuron or a channel; its rank is
its place within its model, never its place in the layer: that is the paper's index offset. The
position is the one in the kernel, or in the channel where a linear layer follows a flatten.
Groups of one R(pi) are a topic. They are numbered one after the other, by tensor, then by the key,
so the nodes that implement a topic send vectors whose mean, number by number, is Eq. (1).
Limits: one model of everything is the mean of all networks; two nodes that share no model keep
every bit.
Deviations from the paper: Algorithm 2 averages weights between models two or three times over.
That changes at most their last bits (from six nodes on), so here it happens once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.errors import ConfigError, UnknownNameError
from polyfed.maths.chain import Chain, Entry, Net, Role, read
from polyfed.maths.scheme import LOCAL, Names, Scheme, Sizes

Order = Sequence[Int64[Tensor, " _"]]


@dataclass(frozen=True)
class Cells:
    """One layer of one node: the number of each cell's model (the last: local), and its rank."""

    model: Int64[Tensor, " cells"]
    rank: Int64[Tensor, " cells"]


class Slices:
    """Who shares which parameters: a scheme laid over the networks of the nodes.

    Args:
        scheme: the partial models.
        nets: node = its network: named tensors or their specs, or a text such as 784=300=100=10,
            a multi-layer perceptron with tensors `1.weight`, `1.bias`, `2.weight`, ...
        order: node = for every layer a permutation of its cells; place i holds cell order[i] of
            the usual arrangement: the models in declared order, then the local slice.
    """

    def __init__(
        self, scheme: Scheme, nets: Mapping[str, Net], *, order: Mapping[str, Order] | None = None
    ) -> None:
        order = order or {}
        self.scheme = scheme
        self.nodes = tuple(nets)
        _check_nodes(scheme, self.nodes, order)
        self._chains = {node: read(node, net) for node, net in nets.items()}
        self._counts = {node: _layers(scheme, node, self._chains[node]) for node in nets}
        self._cells = {node: self._arrange(node, order.get(node)) for node in nets}
        self._topics, self._owner = scheme.owners()
        self._nodes = {topic: self._who(models) for topic, models in self._topics.items()}
        self._first: dict[Role, Tensor] = {}
        self._ranges = self._number()
        self._index = self._indices(order)

    @classmethod
    def parse(
        cls,
        scheme: str | None,
        *,
        nets: Mapping[str, Net],
        groups: Mapping[str, str] | None = None,
        members: Mapping[str, Names] | None = None,
        depends: Mapping[str, Names] | None = None,
        cross: bool = False,
    ) -> Slices:
        """Read the paper's notation; the arguments are those of `Scheme.parse` and of the class.

        >>> nets = dict.fromkeys(["M0", "M1", "M2"], "784=300=100=10")
        >>> slices = Slices.parse("784-250-80-10", nets=nets, groups={"fr": "0-50-20-0"},
        ...                       members={"fr": "M0, M1"}, depends={"fr": "global"})
        >>> slices.topics("M0"), slices.topics("M2"), slices.size("global")
        (('global', 'fr'), ('global',), 217140)
        """
        declared = Scheme.parse(
            scheme, groups=groups, members=members, depends=depends, cross=cross
        )
        return cls(declared, nets)

    # ---- what is shared ------------------------------------------------------------------------

    def topics(self, node: str | None = None) -> tuple[str, ...]:
        """The topics that a node shares with others, or all topics: a model, or a pair `a+b`."""
        if node is None:
            return tuple(self._ranges)
        return tuple(self._index[node])

    def implementers(self, topic: str) -> tuple[str, ...]:
        """The nodes that average a topic: those that implement all models of R(pi)."""
        return self._nodes[topic]

    def size(self, topic: str) -> int:
        """How many numbers a topic has."""
        return len(self._ranges[topic])

    def owner(self, model: str, other: str) -> str | None:
        """The topic that averages weights between two models, or within one; None if none does."""
        names = [*self.scheme.sizes, LOCAL]
        number = int(self._owner[names.index(model), names.index(other)])
        topic = [*self._topics, None][number]
        return topic if topic in self._ranges else None

    def layers(self, node: str) -> tuple[dict[str, int], ...]:
        """For every layer of a node, how many cells each of its models has, and `local` the rest.

        >>> Slices.parse("3-2-0", nets={"A": "3=4=1"}).layers("A")[1]
        {'global': 2, 'local': 2}
        """
        return self._counts[node]

    def cells(self, node: str) -> tuple[Cells, ...]:
        """For every layer of a node, model and rank of each cell."""
        return self._cells[node]

    def gids(self, node: str) -> dict[str, Int64[Tensor, ...]]:
        """g(pi) of every parameter of a node, in the shape of its tensor; -1 is local."""
        return {e.name: self._groups(node, e).reshape(e.shape) for e in self._entries(node)}

    def index(self, node: str) -> dict[str, Int64[Tensor, " size"]]:
        """Where the numbers of each topic are in the node's tensors, laid end to end."""
        return self._index[node]

    # ---- what travels --------------------------------------------------------------------------

    def pack(self, node: str, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A node's message: one vector for every topic, in the same order on every node."""
        flat = self._flat(node, params)
        return {topic: flat[where] for topic, where in self._index[node].items()}

    def unpack(
        self, node: str, params: Mapping[str, Tensor], vectors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The node's tensors with the topics in `vectors` put in; all else is as it was."""
        flat = self._flat(node, params)
        for topic, vector in vectors.items():
            flat[self._index[node][topic]] = vector.to(flat)
        entries = self._entries(node)
        pieces = flat.split([prod(e.shape) for e in entries])
        put = {
            e.name: piece.reshape(e.shape).to(params[e.name].dtype)
            for e, piece in zip(entries, pieces, strict=True)
            if e.shape
        }
        return {**params, **put}

    def _flat(self, node: str, params: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([params[e.name].reshape(-1) for e in self._entries(node)])

    # ---- how groups are numbered ---------------------------------------------------------------

    def _entries(self, node: str) -> tuple[Entry, ...]:
        return self._chains[node].entries

    def _who(self, models: frozenset[str]) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if models <= set(self.scheme.of(node)))

    def _arrange(self, node: str, order: Order | None) -> tuple[Cells, ...]:
        """Model and rank of every cell: slice after slice, or as `order` says."""
        number = {name: i for i, name in enumerate([*self.scheme.sizes, LOCAL])}
        cells = []
        for layer in self._counts[node]:
            sizes = torch.tensor(list(layer.values()))
            model = torch.tensor([number[name] for name in layer]).repeat_interleave(sizes)
            begin = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
            cells.append(Cells(model, torch.arange(len(model)) - begin))
        if order is None:
            return tuple(cells)
        _check_order(node, order, self._chains[node].widths)
        return tuple(Cells(c.model[o], c.rank[o]) for c, o in zip(cells, order, strict=True))

    def _number(self) -> dict[str, range]:
        """Give every topic its range of group numbers, and every block of weights its first."""
        ranges, total = {}, 0
        for number, (topic, nodes) in enumerate(self._nodes.items()):
            if len(nodes) < 2:
                continue
            start = total
            for entry in self._shared(number, topic, nodes):
                first = self._first.setdefault(entry.role, torch.full_like(self._owner, -1))
                for out, into, size in self._blocks(number, entry):
                    first[out, into] = total
                    total += size
            if total > start:
                ranges[topic] = range(start, total)
        return ranges

    def _blocks(self, topic: int, entry: Entry) -> Iterator[tuple[int, int, int]]:
        """The pairs of models whose cells meet in a tensor and belong to a topic, and numbers."""
        sizes = list(self.scheme.sizes.values())
        for out, into in (self._owner == topic).nonzero().tolist():
            if not entry.shape or not (entry.reads or out == into):
                continue
            before = sizes[into][entry.layer - 1] if entry.reads else 1
            size = sizes[out][entry.layer] * before * entry.each
            if size:
                yield out, into, size

    def _shared(self, number: int, topic: str, nodes: Sequence[str]) -> list[Entry]:
        """The tensors that hold numbers of a topic: alike on all who implement it."""
        found = {n: [e for e in self._entries(n) if any(self._blocks(number, e))] for n in nodes}
        wanted = {e.role: e for e in found[nodes[0]]}
        for node in nodes[1:]:
            got = {e.role: e for e in found[node]}
            for role in {**wanted, **got}:
                here, there = wanted.get(role), got.get(role)
                if not (here and there and here.positions == there.positions):
                    raise ConfigError(
                        f"partial model '{topic}' must be the same on all nodes, but in layer "
                        f"{role[0]} {nodes[0]} has {_said(here, role)} and {node} has "
                        f"{_said(there, role)}. Fix: give them equal layers but for their widths, "
                        f"or no cells of '{topic}' there."
                    )
        return found[nodes[0]]

    def _groups(self, node: str, entry: Entry) -> Tensor:
        """g(pi) of one tensor: out cells by in cells by positions, or cells by positions."""
        first = self._first.get(entry.role)
        if first is None or not entry.shape:
            return torch.full(entry.shape, -1)
        out = self._cells[node][entry.layer]
        if entry.reads:
            into = self._cells[node][entry.layer - 1]
            wide = torch.tensor([s[entry.layer - 1] for s in self.scheme.sizes.values()] + [0])
            start = first[out.model[:, None], into.model]
            place = out.rank[:, None] * wide[into.model] + into.rank
        else:
            start, place = first[out.model, out.model], out.rank
        numbers = (start + place * entry.each)[..., None] + torch.arange(entry.each)
        return torch.where(start[..., None] >= 0, numbers, -1)

    def _indices(self, order: Mapping[str, Order]) -> dict[str, dict[str, Tensor]]:
        """Every node's index; nodes with equal networks and slices hold the same tensors."""
        built: dict[object, dict[str, Tensor]] = {}
        keys = {
            n: (self._chains[n], self.scheme.of(n), n if n in order else "") for n in self.nodes
        }
        for node, key in keys.items():
            if key not in built:
                built[key] = self._positions(node)
        return {node: built[key] for node, key in keys.items()}

    def _positions(self, node: str) -> dict[str, Tensor]:
        """For every topic of a node, where its groups are in the tensors laid end to end."""
        group = torch.cat([self._groups(node, e).reshape(-1) for e in self._entries(node)])
        mine = (group >= 0).nonzero().flatten()
        topics = [topic for topic in self._ranges if node in self._nodes[topic]]
        where = mine[group[mine].argsort()].split([self.size(topic) for topic in topics])
        return dict(zip(topics, where, strict=True))


def segment_mean(
    flats: Sequence[Float[Tensor, " _"]],
    gids: Sequence[Int64[Tensor, " _"]],
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Apply Eq. (1) to all nodes in one pass.

    Sums run in the order of the nodes, so equal order means equal bits; on a GPU they do so only
    under `torch.use_deterministic_algorithms`.

    Args:
        flats: each node's parameters, laid end to end.
        gids: the group number of each of them, -1 for local; on the same device.
        weights: of the nodes, positive; the paper's plain mean if there are none.

    >>> segment_mean([torch.tensor([1.0, 5.0]), torch.tensor([3.0])],
    ...              [torch.tensor([0, -1]), torch.tensor([0])])
    [tensor([2., 5.]), tensor([2.])]
    """
    flat, bucket = torch.cat(list(flats)), torch.cat(list(gids)) + 1  # bucket 0: local
    shares = weights if weights is not None else [1.0] * len(flats)
    weight = torch.cat([torch.full_like(x, w) for x, w in zip(flats, shares, strict=True)])
    zeros = flat.new_zeros(int(bucket.max()) + 1)
    mean = zeros.index_add(0, bucket, flat * weight) / zeros.index_add(0, bucket, weight)
    means = torch.where(bucket > 0, mean[bucket], flat)
    return list(means.split([len(x) for x in flats]))


def _layers(scheme: Scheme, node: str, chain: Chain) -> tuple[dict[str, int], ...]:
    """Cells of every model in every layer of a node; what is left is local."""
    if len(chain.widths) != scheme.layers:
        raise ConfigError(
            f"the scheme has {scheme.layers} layers, the network of {node} has "
            f"{len(chain.widths)}: {chain}. Fix: count the input layer too."
        )
    layers = []
    for i, width in enumerate(chain.widths):
        taken = {model: scheme.sizes[model][i] for model in scheme.of(node)}
        if sum(taken.values()) > width:
            listed = ", ".join(f"{model} {n}" for model, n in taken.items() if n)
            raise ConfigError(
                f"layer {i} of node {node} has {width} cells, but its slices need "
                f"{sum(taken.values())}: {listed}. Slices cannot overlap: shrink one of them."
            )
        layers.append({**taken, LOCAL: width - sum(taken.values())})
    return tuple(layers)


def _check_nodes(scheme: Scheme, nodes: Sequence[str], order: Mapping[str, Order]) -> None:
    """Members are known, and implement what their models depend on."""
    for node in (*(n for names in scheme.members.values() for n in names), *order):
        if node not in nodes:
            raise UnknownNameError("node", node, nodes)
    for node in nodes:
        for model in scheme.of(node):
            missing = scheme.depends.get(model, frozenset()) - set(scheme.of(node))
            for above in sorted(missing):
                raise ConfigError(
                    f"node {node} implements '{model}' but not '{above}', on which it depends. "
                    f"Fix: add {node} to members['{above}'], or drop the dependency."
                )


def _check_order(node: str, order: Order, widths: Sizes) -> None:
    for layer, width in enumerate(widths):
        if len(order) != len(widths) or order[layer].sort().values.tolist() != list(range(width)):
            raise ConfigError(
                f"order['{node}'] must be a permutation of the cells of each of {len(widths)} "
                f"layers; layer {layer} has {width} cells, and each must be there once."
            )


def _said(entry: Entry | None, role: Role) -> str:
    if entry is None:
        return f"no {role[1]}"
    return f"'{entry.name}' with {'x'.join(map(str, entry.positions))} numbers a cell"

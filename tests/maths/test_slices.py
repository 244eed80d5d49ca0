"""Partial averaging against its paper's loops, its section III, and numbers counted by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from polyfed.maths.mixing import weighted_mean
from polyfed.maths.scheme import Scheme
from polyfed.maths.slices import Slices, segment_mean
from polyfed.random import stream
from polyfed.testing.slices import literal_average

F64 = torch.float64
States = dict[str, dict[str, Tensor]]

# Figure 6: red depends on green and yellow, which depend on blue; weights between green and yellow
# belong to nobody, or to the pair. Every node has its own widths.
DAG = Scheme.parse(
    "3-3-2-2",
    groups={"green": "1-2-1-0", "yellow": "0-1-2-1", "red": "1-1-1-1"},
    members={"green": "A,B,C,E", "yellow": ["A", "B", "D", "E"], "red": ("A", "B")},
    depends={"green": "global", "yellow": "global", "red": "green, yellow, global"},
)
CROSS = Scheme(DAG.sizes, DAG.members, DAG.depends, cross=True)
WIDTHS = {
    "A": (5, 7, 6, 4),
    "B": (6, 9, 8, 5),
    "C": (4, 6, 3, 3),
    "D": (3, 5, 6, 4),
    "E": (7, 6, 5, 3),
    "F": (3, 4, 2, 2),
}


# ---- helpers -----------------------------------------------------------------------------------


def text(widths: Sequence[int]) -> str:
    return "=".join(map(str, widths))


def filled(shapes: Mapping[str, Sequence[int]], *path: str | int) -> dict[str, Tensor]:
    """Tensors of these shapes with normal numbers; scalars count, as BatchNorm's do."""
    generator = stream(0, *path)
    return {
        name: torch.randn(*shape, generator=generator, dtype=F64) if shape else torch.tensor(7)
        for name, shape in shapes.items()
    }


def dense(widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (before, width) in enumerate(pairwise(widths), 1):
        shapes |= {f"{i}.weight": (width, before), f"{i}.bias": (width,)}
    return shapes


def permutations(widths: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, list[Tensor]]:
    return {
        node: [torch.randperm(w, generator=stream(seed, node, i)) for i, w in enumerate(ws)]
        for node, ws in widths.items()
    }


def written_out(
    scheme: Scheme, widths: Mapping[str, Sequence[int]], order: Mapping[str, Sequence[Tensor]]
) -> tuple[dict[str, list[list[tuple[str, int]]]], dict[str, set[str]]]:
    """The cells of every node, and who depends on whom, with a local model for every node."""
    cells, depends = {}, {m: set(above) for m, above in scheme.depends.items()}
    for node, ws in widths.items():
        mine = [m for m in scheme.sizes if node in scheme.members.get(m, widths)]
        depends[f"local {node}"] = set(mine)
        cells[node] = []
        for i, width in enumerate(ws):
            layer = [(m, rank) for m in mine for rank in range(scheme.sizes[m][i])]
            layer += [(f"local {node}", rank) for rank in range(width - len(layer))]
            cells[node].append([layer[j] for j in order[node][i].tolist()])
    return cells, depends


def average(slices: Slices, states: States, weights: Sequence[float] | None = None) -> States:
    """Eq. (1) in one pass over all nodes."""
    gids = [torch.cat([g.flatten() for g in slices.gids(n).values()]) for n in states]
    flats = [torch.cat([t.double().flatten() for t in state.values()]) for state in states.values()]
    new: States = {}
    for (node, state), flat in zip(states.items(), segment_mean(flats, gids, weights), strict=True):
        pieces = flat.split([t.numel() for t in state.values()])
        new[node] = {
            name: piece.reshape(t.shape).to(t.dtype)
            for (name, t), piece in zip(state.items(), pieces, strict=True)
        }
    return new


def average_by_topic(slices: Slices, states: States) -> States:
    """Every topic's vectors meet: sum in the order of the nodes, divided by their number."""
    packed = {node: slices.pack(node, state) for node, state in states.items()}
    means = {
        topic: sum(packed[n][topic] for n in slices.implementers(topic))
        / len(slices.implementers(topic))
        for topic in slices.topics()
    }
    return {
        node: slices.unpack(node, state, {t: means[t] for t in slices.topics(node)})
        for node, state in states.items()
    }


def equal(a: States, b: States) -> bool:
    assert {n: list(s) for n, s in a.items()} == {n: list(s) for n, s in b.items()}
    return all(torch.equal(a[n][name], b[n][name]) for n in a for name in a[n])


def close(a: States, b: States, tolerance: float) -> bool:
    return all(
        torch.allclose(a[n][name], b[n][name], rtol=0, atol=tolerance) for n in a for name in a[n]
    )


def dag(scheme: Scheme = DAG, seed: int = 0) -> tuple[Slices, States, Any, Any]:
    order = permutations(WIDTHS, seed)
    states = {node: filled(dense(ws), node, seed) for node, ws in WIDTHS.items()}
    slices = Slices(scheme, states, order=order)
    return slices, states, *written_out(scheme, WIDTHS, order)


# ---- the literal algorithms --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_equals_algorithm_1_bit_for_bit(seed: int) -> None:
    """Figure 6's models, every node with its own widths and its own order of cells."""
    slices, states, cells, depends = dag(seed=seed)
    expected = literal_average(states, cells, depends)
    assert not close(expected, states, 0.1)
    assert equal(average(slices, states), expected)
    assert equal(average_by_topic(slices, states), expected)


@pytest.mark.parametrize("seed", range(3))
def test_equals_algorithm_2_bit_for_bit(seed: int) -> None:
    slices, states, cells, depends = dag(CROSS, seed)
    expected = literal_average(states, cells, depends, cross=True)
    assert not equal(expected, literal_average(states, cells, depends))
    assert equal(average(slices, states), expected)
    assert equal(average_by_topic(slices, states), expected)


def test_equals_algorithm_2_up_to_repeated_rounding() -> None:
    """It averages each pair of models twice: with seven nodes (x + ... + x) / 7 may not be x."""
    widths = dict.fromkeys("ABCDEFG", (2, 4, 2))
    order, both = permutations(widths), dict.fromkeys("xy", "1-2-1")
    scheme = Scheme.parse(None, groups=both, members=dict.fromkeys("xy", widths), cross=True)
    states = {n: filled(dense(w), n) for n, w in widths.items()}
    slices, (cells, depends) = (
        Slices(scheme, states, order=order),
        written_out(scheme, widths, order),
    )
    expected = literal_average(states, cells, depends, cross=True)
    assert close(average(slices, states), expected, 1e-15)
    assert not equal(average(slices, states), expected)


def test_topics_of_figure_6() -> None:
    slices, *_ = dag(CROSS)
    assert set(slices.topics()) == {"global", "green", "yellow", "red", "green+yellow"}
    assert slices.implementers("green+yellow") == ("A", "B", "E")
    assert set(slices.topics("C")) == {"global", "green"}
    assert slices.topics("F") == ("global",)
    # green 2, 1, 0 cells from yellow 0, 1, 2; yellow 1, 2, 1 from green 1, 2, 1
    assert slices.size("green+yellow") == (2 * 0 + 1 * 1 + 0 * 2) + (1 * 1 + 2 * 2 + 1 * 1)
    assert "green+yellow" not in dag(DAG)[0].topics()
    assert slices.owner("green", "yellow") == "green+yellow"
    assert slices.owner("red", "global") == slices.owner("global", "red") == "red"
    assert dag(DAG)[0].owner("yellow", "green") is None
    assert slices.owner("local", "global") is None


# ---- any small federation ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    declared: dict[str, Any]
    shapes: dict[str, dict[str, tuple[int, ...]]]
    widths: dict[str, tuple[int, ...]]
    seed: int

    @property
    def scheme(self) -> Scheme:
        return Scheme(**self.declared)


def convolutional(widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Norm, conv 2x3, norm with its counter; flatten of 3 positions, norm; linear layers."""
    first, second, *rest = widths
    shapes: dict[str, tuple[int, ...]] = {"n.weight": (first,), "n.bias": (first,)}
    shapes |= {"c.weight": (second, first, 2, 3), "c.bias": (second,)}
    shapes |= {f"b.{leaf}": (second,) for leaf in ("weight", "bias", "running_mean")}
    shapes |= {"b.num_batches_tracked": (), "f.weight": (3 * second,)}
    for i, (before, width) in enumerate(pairwise([3 * second, *rest])):
        shapes |= {f"l{i}.weight": (width, before), f"l{i}.bias": (width,)}
    return shapes


@st.composite
def cases(draw: Any) -> Case:
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    layers = draw(st.integers(2, 4))
    sizes, members, depends = {}, {}, dict[str, frozenset[str]]()
    for i in range(draw(st.integers(1, 4))):
        name = f"m{i}"
        sizes[name] = tuple(draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers)))
        direct = draw(st.sets(st.sampled_from(list(sizes)))) - {name}
        depends[name] = frozenset(direct.union(*(depends[d] for d in direct)))
        able = [n for n in nodes if all(n in members[d] for d in depends[name])]
        members[name] = tuple(sorted(draw(st.sets(st.sampled_from(able))))) if able else ()
    widths = {}
    for n in nodes:
        mine = [size for name, size in sizes.items() if n in members[name]]
        widths[n] = tuple(
            max(1, sum(size[i] for size in mine) + draw(st.integers(0, 2))) for i in range(layers)
        )
    shapes_of = draw(st.sampled_from([dense, convolutional]))
    return Case(
        {"sizes": sizes, "members": members, "depends": depends, "cross": draw(st.booleans())},
        {n: shapes_of(w) for n, w in widths.items()},
        widths,
        draw(st.integers(0, 9)),
    )


@given(cases())
def test_any_federation_equals_the_literal_algorithm(case: Case) -> None:
    order = permutations(case.widths, case.seed)
    states = {n: filled(shapes, n, case.seed) for n, shapes in case.shapes.items()}
    slices = Slices(case.scheme, states, order=order)
    cells, depends = written_out(case.scheme, case.widths, order)
    expected = literal_average(states, cells, depends, cross=case.scheme.cross)
    assert equal(average(slices, states), expected)
    assert equal(average_by_topic(slices, states), expected)
    assert equal(average(slices, expected), expected)  # once more changes nothing


@given(cases())
def test_topics_are_the_groups(case: Case) -> None:
    """Each group is in one topic, once on each node that implements it, in one order for all."""
    states = {n: filled(shapes, n) for n, shapes in case.shapes.items()}
    slices = Slices(case.scheme, states, order=permutations(case.widths, case.seed))
    seen: dict[str, list[int]] = {}
    for node, state in states.items():
        gid = torch.cat([g.flatten() for g in slices.gids(node).values()])
        index = slices.index(node)
        for topic, where in index.items():
            assert len(where) == slices.size(topic) > 0
            assert seen.setdefault(topic, gid[where].tolist()) == gid[where].tolist()
            assert node in slices.implementers(topic)
        taken = torch.cat([torch.empty(0, dtype=torch.int64), *index.values()])
        assert sorted(taken.tolist()) == (gid >= 0).nonzero().flatten().tolist()
        assert {n: g.shape for n, g in slices.gids(node).items()} == {
            n: t.shape for n, t in state.items()
        }
        back = slices.unpack(node, state, slices.pack(node, state))
        assert equal({node: back}, {node: state})
    numbers = sorted(number for topic in seen.values() for number in topic)
    assert numbers == list(range(len(numbers)))
    for topic in seen:
        assert len(slices.implementers(topic)) > 1


# ---- identities --------------------------------------------------------------------------------


def test_averaging_keeps_sums_makes_nodes_agree_and_leaves_the_rest() -> None:
    slices, states, *_ = dag(CROSS)
    new = average(slices, states)
    packed = {n: slices.pack(n, s) for n, s in states.items()}
    after = {n: slices.pack(n, s) for n, s in new.items()}
    for topic in slices.topics():
        who = slices.implementers(topic)
        assert all(torch.equal(after[n][topic], after[who[0]][topic]) for n in who)
        before = sum(packed[n][topic] for n in who)
        assert torch.allclose(sum(after[n][topic] for n in who), before, rtol=0, atol=1e-14)
    for node in states:
        for name, gid in slices.gids(node).items():
            assert torch.equal(new[node][name][gid < 0], states[node][name][gid < 0])
            assert (new[node][name] != states[node][name])[gid >= 0].all()
    assert close(average(slices, new), new, 1e-15)


def test_one_global_model_is_fedavg() -> None:
    states = {n: filled(convolutional((3, 5, 4, 2)), n) for n in "ABC"}
    slices = Slices.parse("3-5-4-2", nets=states)
    mean = weighted_mean(list(states.values()), [1.0] * 3)
    assert slices.topics() == ("global",)
    assert close(average(slices, states), dict.fromkeys("ABC", mean), 1e-15)
    weights = [3.0, 1.0, 2.0]
    mean = weighted_mean(list(states.values()), weights)
    assert close(average(slices, states, weights), dict.fromkeys("ABC", mean), 1e-15)


@pytest.mark.parametrize("scheme", ["0-0-0", "3-0-0", "0-0-2", "0-4-0"])
def test_cells_without_shared_weights(scheme: str) -> None:
    """Level 0 shares nothing; neither does the input layer alone. Others have their biases."""
    states = {n: filled(dense((3, 4, 2)), n) for n in "AB"}
    slices = Slices.parse(scheme, nets=states)
    shared = {"0-0-0": 0, "3-0-0": 0, "0-0-2": 2, "0-4-0": 4}[scheme]
    assert sum(map(slices.size, slices.topics())) == shared
    assert equal(average(slices, states), states) == (shared == 0)
    if not shared:
        assert slices.pack("A", states["A"]) == {}


@pytest.mark.parametrize("scheme", [None, "", "0-0-0"])
def test_full_averaging_per_class_of_nodes(scheme: str | None) -> None:
    states = {n: filled(dense((3, 4, 2)), n) for n in "ABCD"}
    slices = Slices.parse(
        scheme, nets=states, groups={"x": "3-4-2", "y": "3-4-2"}, members={"x": "A,B", "y": "C,D"}
    )
    new = average(slices, states)
    for pair in ("AB", "CD"):
        mean = weighted_mean([states[n] for n in pair], [1.0, 1.0])
        assert close({n: new[n] for n in pair}, dict.fromkeys(pair, mean), 1e-15)


def test_a_model_of_one_node_is_local() -> None:
    states = {n: filled(dense((3, 4, 2)), n) for n in "AB"}
    slices = Slices.parse("3-1-0", nets=states, groups={"own": "0-2-2"}, members={"own": "B"})
    assert slices.topics("B") == ("global",)
    assert slices.owner("own", "own") is None


def test_weights_are_of_the_nodes_that_implement_the_model() -> None:
    slices, states, *_ = dag(CROSS)
    weights = dict(zip(states, [1.0, 2.5, 3.0, 0.5, 4.0, 7.0], strict=True))
    new = average(slices, states, list(weights.values()))
    for topic in slices.topics():
        who = slices.implementers(topic)
        vectors = [{topic: slices.pack(n, states[n])[topic]} for n in who]
        mean = weighted_mean(vectors, [weights[n] for n in who])[topic]
        assert torch.allclose(slices.pack(who[-1], new[who[-1]])[topic], mean, rtol=0, atol=1e-15)


def test_order_of_cells_on_a_node_changes_nothing() -> None:
    """B's network with its neurons and channels permuted is the same function, and averages so."""
    torch_order = permutations({"B": (2, 4, 3, 2)})["B"]
    torch_order[0], torch_order[3] = torch.arange(2), torch.arange(2)  # what enters and leaves
    nets = {n: small_conv_net(n) for n in "AB"}
    scheme = Scheme.parse("2-3-2-2")
    x = torch.randn(5, 2, 4, 4, generator=stream(0, "x"), dtype=F64)
    plain = {n: {k: t.clone() for k, t in net.state_dict().items()} for n, net in nets.items()}
    moved = {"A": plain["A"], "B": permuted(plain["B"], torch_order)}
    nets["B"].load_state_dict(moved["B"])
    after = nets["B"].eval()(x)
    nets["B"].load_state_dict(plain["B"])
    assert torch.allclose(nets["B"].eval()(x), after, rtol=0, atol=1e-13)
    new = average(Slices(scheme, plain), plain)
    turned = average(Slices(scheme, moved, order={"B": torch_order}), moved)
    assert equal({"A": turned["A"]}, {"A": new["A"]})
    assert equal({"B": turned["B"]}, {"B": permuted(new["B"], torch_order)})
    assert not equal(turned, moved)


def small_conv_net(name: str) -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(12, 2)).double()
    net.load_state_dict(filled({n: tuple(t.shape) for n, t in net.state_dict().items()}, name))
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_var.square_()
    return net


def permuted(state: Mapping[str, Tensor], order: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same network with its cells in another order, written for this one network."""
    new = dict(state)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        new[name] = state[name][order[1]]
    new["3.weight"] = state["3.weight"][order[2]][:, order[1]]
    new["3.bias"] = state["3.bias"][order[2]]
    new["5.weight"] = state["5.weight"].reshape(2, 3, 4)[:, order[2]].reshape(2, 12)
    return new


# ---- section III -------------------------------------------------------------------------------


def loss(state: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Squared error of a multi-layer perceptron with sigmoids."""
    tensors = list(state.values())
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        x = torch.sigmoid(x @ weight.T + bias)
    return (x - y).square().sum() / 2


def sgd(state: Mapping[str, Tensor], x: Tensor, y: Tensor, lr: float) -> dict[str, Tensor]:
    moving = {n: t.detach().requires_grad_() for n, t in state.items()}
    grads = torch.autograd.grad(loss(moving, x, y), list(moving.values()))
    return {n: t.detach() - lr * g for (n, t), g in zip(moving.items(), grads, strict=True)}


@pytest.mark.parametrize("scheme", [DAG, CROSS], ids=["algorithm 1", "algorithm 2"])
def test_section_iii_one_step_is_one_step_on_the_sum_of_losses(scheme: Scheme) -> None:
    """SGD on every node from consensus, then averaging: SGD on M with rate lr / implementers."""
    slices, states, *_ = dag(scheme)
    states, lr = average(slices, states), 0.7
    data = {
        n: (
            torch.randn(6, WIDTHS[n][0], generator=stream(1, n), dtype=F64),
            torch.rand(6, WIDTHS[n][-1], generator=stream(2, n), dtype=F64),
        )
        for n in states
    }
    stepped = average(slices, {n: sgd(s, *data[n], lr) for n, s in states.items()})

    M = {
        t: slices.pack(slices.implementers(t)[0], states[slices.implementers(t)[0]])[t]
        for t in slices.topics()
    }
    M = {t: m.requires_grad_() for t, m in M.items()}
    own = {n: {k: t.clone().requires_grad_() for k, t in s.items()} for n, s in states.items()}
    x = {n: slices.unpack(n, own[n], {t: M[t] for t in slices.topics(n)}) for n in states}
    sum_of_losses = torch.stack([loss(x[n], *data[n]) for n in states]).sum()
    leaves = [*M.values(), *(t for s in own.values() for t in s.values())]
    grads = iter(torch.autograd.grad(sum_of_losses, leaves))
    new = {t: m.detach() - lr / len(slices.implementers(t)) * next(grads) for t, m in M.items()}
    local = {n: {k: t.detach() - lr * next(grads) for k, t in s.items()} for n, s in own.items()}
    together = {
        n: slices.unpack(n, local[n], {t: new[t] for t in slices.topics(n)}) for n in states
    }

    assert close(stepped, together, 1e-14)
    assert not close(stepped, states, 1e-3)
    twice = {n: sgd(sgd(s, *data[n], lr / 2), *data[n], lr / 2) for n, s in states.items()}
    assert not close(average(slices, twice), together, 1e-6)  # exact for a single step only


# ---- tensors -----------------------------------------------------------------------------------


def test_dtypes_are_kept_and_unpack_changes_nothing_in_place() -> None:
    state = {
        "1.weight": torch.ones(2, 3, dtype=torch.bfloat16),
        "1.bias": torch.zeros(2),
        "counter": torch.tensor(2**40),
    }
    slices = Slices.parse("3-1", nets={"A": state, "B": state})
    vector = slices.pack("A", state)["global"]
    assert vector.tolist() == [1, 1, 1, 0]
    new = slices.unpack("A", state, {"global": vector + 1})
    assert new["1.weight"].tolist() == [[2, 2, 2], [1, 1, 1]]
    assert new["1.bias"].tolist() == [1, 0]
    assert new["counter"] is state["counter"]
    assert {n: t.dtype for n, t in new.items()} == {n: t.dtype for n, t in state.items()}
    assert state["1.weight"].eq(1).all()
    assert equal({"A": slices.unpack("A", state, {})}, {"A": state})
    means = segment_mean([torch.ones(1), torch.zeros(1)], [torch.tensor([0])] * 2)
    assert means[0].dtype == torch.float32


def test_nodes_with_equal_networks_hold_one_index() -> None:
    slices = Slices.parse("3-2", nets=dict.fromkeys("AB", "3=2") | {"C": "3=4"})
    assert slices.index("A") is slices.index("B")
    assert slices.index("A") is not slices.index("C")


def test_sixteen_networks_are_numbered_quickly() -> None:
    """Each with its own order, so nothing is shared; about 0.2 s of one core when written."""
    widths = {f"M{i}": (784, 300, 100, 10) for i in range(16)}
    nets, order = {n: text(w) for n, w in widths.items()}, permutations(widths)
    start = time.process_time()
    Slices(Scheme.parse("784-250-80-10"), nets, order=order)
    assert time.process_time() - start < 10

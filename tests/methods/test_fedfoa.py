"""FedFoA: against Algorithm 1 written out, and the invariants of the specification (3.7)."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed import methods
from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.correlation import (
    Begun,
    Understanding,
    pack_triangle,
    triangular,
    unpack_triangle,
)
from polyfed.methods import fedfoa
from polyfed.methods.fedbyol import Averaged, BYOLAlone, FedBYOL, FedEMA, FedU
from polyfed.methods.fedfoa import Correlated, FedFoA
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny
from polyfed.train.augment_views import VectorViews
from polyfed.train.ssl import BYOL

N, K = 4, 10  # numbers in a projection, and in its triangle
SMALL: dict[str, Any] = {"batch": 8, "local_epochs": 1, "projection": N, "predictor_hidden": 6}
SMALL |= {"probe_epochs": 0, "neighbours": 5}
FOA: dict[str, Any] = {**SMALL, "lam": 0.1, "warm_up": 1}
BASES = {None: BYOLAlone, "fedbyol": FedBYOL, "fedu": FedU, "fedema": FedEMA}


def different(seed: int = 0) -> list[Node]:
    """The tiny federation with three trunks that have nothing in common."""
    widths = {"M0": (8, 5), "M1": (11, 7), "M2": (6, 6)}
    made = []
    for node in tiny(seed):
        hidden, width = widths[node.name]
        with ambient(seed, "different", node.name):
            trunk = nn.Sequential(
                nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, width)
            )
            net = nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(width, 3)))
        made.append(replace(node, model=Model.split(net, trunk="trunk", head="head")))
    return made


# A node with one sample has no triangle: that is an error before training, tested below.
@pytest.mark.filterwarnings("ignore::polyfed.methods.fedbyol.CollapseWarning")  # 'stacked'
@pytest.mark.parametrize("check", [name for name in CHECKS if name != "one sample"])
@pytest.mark.parametrize("base", [None, "fedu"])
def test_conformance(check: str, base: Any) -> None:
    """A warm-up of 0, so that the term is there in the second of the two rounds."""
    method = FedFoA(**{**FOA, "warm_up": 0}, base=base, per_sample=True)
    CHECKS[check](method, different if base is None and check != "stacked" else tiny)


# --- the algorithm, written out -------------------------------------------------------------------


def _literal_foa(loss: Tensor, Z: Tensor, R: Tensor, peers: Sequence[Tensor], lam: float) -> Tensor:
    """Lines 15 to 24 of Algorithm 1, with Eq. (6) as it stands."""
    for Rbar in peers:
        if Rbar.trace() > R.trace():
            U, _, Vh = torch.linalg.svd((Rbar @ Z.T).detach(), full_matrices=False)
            Q = Vh.T @ U.T
            loss = loss + lam * torch.linalg.matrix_norm(Z - Q @ Rbar, ord="fro")
    return loss


def _literal_round(
    net: nn.Module, node: Node, method: FedFoA, t: int, peers: Sequence[Tensor]
) -> Tensor:
    """Lines 5 to 13: BYOL, QR of every batch, and the mean of R."""
    x, views = node.data["train"].x, VectorViews(noise=method.noise_views, mask=method.mask)
    online = [net.trunk, net.projector, net.predictor]
    optimiser = torch.optim.SGD(
        [p for module in online for p in module.parameters()],
        lr=method.lr * (1 + math.cos(math.pi * (t - 1) / method.rounds)) / 2,
        momentum=method.momentum,
        weight_decay=method.weight_decay,
    )
    path = ("tick", t, "local", 0)
    order = torch.randperm(len(x), generator=stream(0, "node", node.name, "batches", *path))
    triangles = []
    net.train()
    with ambient(0, "node", node.name, "noise", *path):
        for b in range(len(x) // 8):
            batch = x[order[8 * b : 8 * b + 8]]
            first, second = views(batch), views(batch)
            z = [net.projector(net.trunk(view)) for view in (first, second)]
            with torch.no_grad():
                target = [net.target(view) for view in (first, second)]
            p = [net.predictor(each) for each in z]
            cos = torch.nn.functional.cosine_similarity
            loss = (4 - 2 * cos(p[0], target[1]) - 2 * cos(p[1], target[0])).mean()
            Z = z[0] / z[0].square().sum(1, keepdim=True).sqrt() if method.normalise_rows else z[0]
            Z = Z / math.sqrt(len(Z)) if method.per_sample else Z
            R = torch.linalg.cholesky(Z.T.detach() @ Z.detach()).T  # positive diagonal
            triangles.append(R)
            if t > method.warm_up:
                loss = _literal_foa(loss, Z, R, peers, method.lam)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            followed = [*net.trunk.parameters(), *net.projector.parameters()]
            with torch.no_grad():
                for slow, fast in zip(net.target.parameters(), followed, strict=True):
                    slow.mul_(method.target_momentum).add_((1 - method.target_momentum) * fast)
    return torch.stack(triangles).mean(0)


def even(seed: int = 0) -> list[Node]:
    """Different trunks, in float64, and 24, 16 and 32 samples: whole batches of 8."""
    made = []
    for node in different(seed):
        model = node.model.copy()
        model.net.double()
        train = node.data["train"]
        rows = len(train) // 8 * 8
        data = Data(
            train=(train.x[:rows].double(), train.y[:rows]),
            test=(node.data["test"].x.double(), node.data["test"].y),
        )
        made.append(Node(node.name, data, model, node.classes))
    return made


@pytest.mark.parametrize("reading", [{}, {"normalise_rows": True}, {"per_sample": True}])
def test_equals_the_literal_algorithm(reading: dict[str, bool]) -> None:
    """Four rounds of which two have the term, and somebody is heard, and somebody is not."""
    options = {**FOA, "warm_up": 2, "lam": 0.3}
    method = FedFoA(rounds=4, **reading, **options)
    nodes = method.prepare(even())
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    bank: dict[str, Tensor] = {}
    for t in range(1, 5):
        new = {}
        for node in nodes:
            peers = [R for name, R in bank.items() if name != node.name]
            new[node.name] = _literal_round(nets[node.name], node, method, t, peers)
        bank = new  # all read the last round's
    done = run(method, even(), progress=False)
    for name, net in nets.items():
        for key, wanted in net.state_dict().items():
            got = done.nodes[name].model.state()[key]
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9, msg=f"{name} {key}")
        sent = unpack_triangle(done.nodes[name].memory["correlation"])
        torch.testing.assert_close(sent, bank[name], rtol=0, atol=1e-9)
    heard = [m["heard"] for m in done.metrics if "heard" in m]
    assert len(heard) == 6
    assert min(heard) < 1 < max(heard)


def test_the_last_batch_that_is_short_is_left_out() -> None:
    """18 samples in batches of 8: two of them; R of 2 samples and 4 numbers would not be square."""
    done = run(FedFoA(rounds=1, **FOA), tiny()[1:2], progress=False)
    assert int(done.nodes["M1"].model.state()["trunk.1.num_batches_tracked"]) == 4  # two views


# --- invariants 7, 8, 9 and 11 --------------------------------------------------------------------


def states(done: Run) -> dict[str, Tensor]:
    return {
        f"{name}: {key}": tensor
        for name, node in done.nodes.items()
        for key, tensor in node.model.state().items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("off", [{"lam": 0.0, "warm_up": 0}, {"warm_up": 3}])
def test_without_the_term_it_is_the_base_bit_for_bit(base: Any, off: dict[str, Any]) -> None:
    method = FedFoA(rounds=3, base=base, **{**FOA, **off})
    plain = run(BASES[base](rounds=3, **SMALL), tiny(), progress=False)
    done = run(method, tiny(), progress=False)
    assert_same(states(done), states(plain))
    assert done.accuracy == plain.accuracy


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("fedbyol", {}),
        ("fedu", {}),
        ("fedema", {}),
        ("fedu", {"mu": 0.1, "divergence": "paper"}),
        ("fedema", {"tau": 0.2, "divergence": "drift"}),
    ],
)
def test_the_base_has_its_own_defaults_and_heeds_its_options(
    base: Any, options: dict[str, Any]
) -> None:
    alone = methods.make(base, options)
    assert isinstance(alone, Averaged)
    assert FedFoA(base=base, **options).rule == alone.rule


@pytest.mark.parametrize("base", BASES)
def test_with_the_term_it_is_not(base: Any) -> None:
    """The first round after the warm-up is the first that differs."""
    plain = run(BASES[base](rounds=4, **SMALL), tiny(), progress=False)
    for warm_up, differs in ((3, True), (4, False)):
        done = run(FedFoA(rounds=4, base=base, **{**FOA, "warm_up": warm_up}), tiny())
        ours, theirs = states(done), states(plain)
        assert any(not torch.equal(ours[key], theirs[key]) for key in theirs) is differs
        assert sum("heard" in m for m in done.metrics) == 3 * (4 - warm_up)


def correlated(bank: Tensor, lam: float = 0.5) -> tuple[Correlated, Model, Tensor]:
    node = FedFoA(**FOA).prepare(tiny())[0]
    byol = BYOL(views=lambda x: x, momentum=0.9)
    node.model.net.eval()  # BatchNorm and dropout at rest: every call is alike
    return Correlated(byol, lam, bank), node.model, node.data["train"].x[:8]


def test_peers_of_smaller_trace_change_nothing() -> None:
    """And a bank of zeros, which is an empty one, is never heard."""
    plain, model, x = correlated(torch.zeros(0, N, N), lam=0.0)
    alone = plain(model, x, None)
    R = plain.total
    small = torch.stack([torch.zeros(N, N), 0.99 * R, 0.999 * torch.eye(N) * R.trace() / N])
    objective, _, _ = correlated(small)
    loss = objective(model, x, None)
    assert torch.equal(loss, alone)
    assert float(objective.heard) == 0
    parameters = [p for p in model.net.parameters() if p.requires_grad]
    for got, wanted in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(alone, parameters), strict=True
    ):
        assert torch.equal(got, wanted)
    louder, _, _ = correlated(torch.stack([1.01 * R, 3 * R]))
    extra = (louder(model, x, None) - alone).detach()
    assert float(louder.heard) == 2
    assert float(extra) == pytest.approx(0.5 * (0.01 + 2) * float(R.norm()), rel=1e-4)


def test_the_term_begins_before_the_second_view(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, model, x = correlated(5 * torch.eye(N)[None])
    passed: list[str] = []
    dict(model.net.named_children())["trunk"].register_forward_hook(lambda *_: passed.append("net"))

    class Noted(Begun):
        def __init__(self, *args: Any, **named: Any) -> None:
            passed.append("begun")
            super().__init__(*args, **named)

        def end(self) -> Understanding:
            passed.append("end")
            return super().end()

    monkeypatch.setattr(fedfoa, "Begun", Noted)
    objective(model, x, None)
    assert passed == ["net", "begun", "net", "end"]


def test_the_mean_triangle_is_that_of_the_first_view() -> None:
    objective, model, x = correlated(torch.zeros(0, N, N))
    calls = iter([x, x + 1, 2 * x, x - 1])
    objective = replace(objective, inner=BYOL(views=lambda _: next(calls)))
    objective(model, x, None)
    objective(model, x, None)
    Z = [model.output(view, "projector").detach() for view in (x, 2 * x)]
    wanted = (triangular(Z[0]) + triangular(Z[1])) / 2
    torch.testing.assert_close(objective.total / objective.batches, wanted)
    scaled = replace(objective, per_sample=True, total=0.0, batches=0)
    calls = iter([x, x])
    scaled.inner = BYOL(views=lambda _: x)
    scaled(model, x, None)
    torch.testing.assert_close(scaled.total, triangular(Z[0]) / math.sqrt(8))


def test_with_rows_of_length_one_the_size_of_projections_does_not_matter() -> None:
    """Neither to the triangle nor to the term, which has a bound."""
    bank = math.sqrt(8 / N) * torch.eye(N)[None]  # of independent features: the largest trace
    objective, model, x = correlated(bank)
    alone, _, _ = correlated(bank, lam=0.0)
    found = []
    for scale in (1, 100):
        with torch.no_grad():
            for parameter in model.parameters("projector"):
                parameter.mul_(scale)
        unit = replace(objective, normalise_rows=True)
        term = (unit(model, x, None) - alone(model, x, None)).detach()
        own = triangular(functional.normalize(model.output(x, "projector").detach(), dim=1))
        torch.testing.assert_close(unit.total, own)
        assert float(own.norm()) == pytest.approx(math.sqrt(8))
        assert float(unit.heard) == 1
        found.append(float(term))
    assert 0 < found[0] <= 0.5 * math.sqrt(2 * 8)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def told(name: str, scale: float, wanted: int = 2) -> Message:
    R = triangular(scale * torch.randn(9, N, generator=stream(0, name)))
    return Message({"correlation": pack_triangle(R), "correlation/wanted": torch.tensor(wanted)})


def test_a_node_hears_everybody_but_itself() -> None:
    got = {name: told(name, 1.0) for name in ("A", "B", "C")}
    replies = FedFoA(**FOA).combine(Node("hub"), got, ["A", "B", "C"])
    for name, reply in replies.items():
        others = [got[n].tensors["correlation"] for n in ("A", "B", "C") if n != name]
        assert torch.equal(reply.tensors["correlation"], torch.stack(others))


def test_the_own_triangle_has_no_influence() -> None:
    """A node that tells the hub another triangle of its own trains the same."""

    @dataclass(frozen=True, kw_only=True)
    class Boast(FedFoA):
        def send(self, node: Node) -> Message:
            tensors = dict(super().send(node).tensors)
            if node.name == "M1":
                tensors["correlation"] = 100 * tensors["correlation"]
            return Message(tensors)

    honest = run(FedFoA(rounds=2, **FOA), different(), progress=False)
    boast = run(Boast(rounds=2, **FOA), different(), progress=False)
    for name, same in (("M0", False), ("M1", True), ("M2", False)):
        pairs = zip(
            honest.nodes[name].model.state().values(),
            boast.nodes[name].model.state().values(),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs) is same, name


def test_a_message_is_a_triangle() -> None:
    """n (n + 1) / 2 floats up; as many for each other node down. And how many are wanted."""
    done = run(FedFoA(rounds=1, **FOA), different(), progress=False)
    for crossing in done.ledger.crossings():
        shapes = {t["name"]: (t["shape"], t["dtype"]) for t in crossing.tensors}
        if crossing.to == "hub":
            assert shapes == {
                "correlation": ([K], "float32"),
                "correlation/wanted": ([], "int64"),
            }
            assert crossing.bytes == 4 * N * (N + 1) // 2 + 8
        else:
            assert shapes == {"correlation": ([2, K], "float32")}


def test_with_a_base_the_online_network_travels_too() -> None:
    done = run(FedFoA(rounds=1, base="fedema", **FOA), tiny(), progress=False)
    plain = run(FedEMA(rounds=1, **SMALL), tiny(), progress=False)
    for ours, theirs in zip(done.ledger.crossings(), plain.ledger.crossings(), strict=True):
        names = {t["name"] for t in ours.tensors}
        model = {f"model/{t['name']}" for t in theirs.tensors}
        assert names - model <= {"correlation", "correlation/wanted"}
        assert model <= names


# --- who hears whom -------------------------------------------------------------------------------


def test_a_node_that_was_away_leaves_a_triangle_of_zeros_and_then_its_last() -> None:
    away = {1: ["M2"], 3: ["M2"]}
    method = FedFoA(rounds=3, **FOA)
    seen: list[Tensor] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(FedFoA):
        def receive(self, node: Node, message: Message) -> Any:
            if node.name == "M0":
                seen.append(message.tensors["correlation"])
            return super().receive(node, message)

    done = run(Watched(rounds=3, **FOA), different(), absent=away, progress=False)
    assert [f["fault"] for f in done.faults] == ["absent", "absent"]
    first, second, third = seen
    assert (first[0] != 0).any()  # M1
    assert (first[1] == 0).all()  # M2 has not been heard of: last, as there is no row for it yet
    assert (second[1] != 0).any()
    assert torch.equal(third[1], second[1])  # the bank keeps what M2 told last
    assert not torch.equal(third[0], second[0])
    assert method.rounds == 3


def test_peers_are_drawn_anew_every_round() -> None:
    got = {name: told(name, 1.0, wanted=2) for name in "ABCDEF"}
    place = Node("hub", seed=3)
    heard: dict[str, set[tuple[int, ...]]] = {name: set() for name in got}
    lots: dict[str, list[list[int]]] = {name: [] for name in got}
    names = sorted(got)
    for _ in range(20):
        for name, reply in FedFoA(peers=2, **FOA).combine(place, got, names).items():
            rows = reply.tensors["correlation"]
            assert rows.shape == (2, K)
            which = tuple(
                i
                for i, n in enumerate(names)
                if any(torch.equal(row, got[n].tensors["correlation"]) for row in rows)
            )
            assert len(which) == 2
            assert names.index(name) not in which
            heard[name].add(which)
            lots[name].append([i - (i > names.index(name)) for i in which])  # among the others
    assert all(len(pairs) > 4 for pairs in heard.values())  # of 10
    assert lots["A"] != lots["B"]


def test_fewer_peers_are_a_smaller_reply() -> None:
    done = run(FedFoA(rounds=2, peers=1, **FOA), different(), progress=False)
    down = [c.bytes for c in done.ledger.crossings() if c.source == "hub"]
    assert down == [4 * K] * 6


@pytest.mark.parametrize("base", [None, "fedema"])
def test_a_mesh_does_what_a_star_does(base: Any) -> None:
    method = FedFoA(rounds=3, base=base, **FOA)
    star = run(method, tiny(), progress=False)
    mesh = run(method, tiny(), topology="mesh", progress=False)
    assert_same(states(star), states(mesh))
    assert len(mesh.ledger.crossings()) == 3 * 6
    assert {c.to for c in mesh.ledger.crossings()} == {"M0", "M1", "M2"}


def test_one_node_hears_nobody() -> None:
    alone = run(BYOLAlone(rounds=3, **SMALL), tiny()[:1], progress=False)
    assert_same(states(run(FedFoA(rounds=3, **FOA), tiny()[:1])), states(alone))


def test_what_is_noted_of_a_round_is_the_mean_over_its_batches() -> None:
    method = FedFoA(**FOA)
    node = method.prepare(tiny())[0]
    done = Correlated(method.byol(node), 0.5, torch.zeros(0, N, N))
    method.end(node, replace(done, total=6 * torch.eye(N), heard=6.0, batches=3))
    assert node.notes == {"correlation_trace": 2.0 * N, "heard": 2.0}
    assert torch.equal(unpack_triangle(node.memory["correlation"]), 2 * torch.eye(N))


def test_distances_are_noted() -> None:
    done = run(FedFoA(rounds=2, **FOA), different(), progress=False)
    noted = [m["distances"] for m in done.metrics if "distances" in m]
    assert len(noted) == 2
    assert noted[-1]["nodes"] == ["M0", "M1", "M2"]
    R = [unpack_triangle(done.nodes[n].memory["correlation"]) for n in noted[-1]["nodes"]]
    for i in range(3):
        for j in range(3):
            assert noted[-1]["rows"][i][j] == pytest.approx(float((R[i] - R[j]).norm()), abs=1e-5)
    traces = {m["node"]: m["correlation_trace"] for m in done.metrics if "correlation_trace" in m}
    assert traces == pytest.approx({f"M{i}": float(R[i].trace()) for i in range(3)})


def test_labels_do_not_influence_training() -> None:
    honest, shuffled = different(), different()
    for node in shuffled:
        train = node.data["train"]
        y = train.y[torch.randperm(len(train), generator=stream(1, node.name))]
        node.data = Data(**{**node.data, "train": Split(train.x, y)})
    method = FedFoA(rounds=3, **FOA)
    assert_same(states(run(method, honest)), states(run(method, shuffled)))


# --- what is wrong --------------------------------------------------------------------------------


def test_a_triangle_that_cannot_be_is_left_out_and_noted() -> None:
    """With it goes the network that came with it."""

    @dataclass(frozen=True, kw_only=True)
    class Liar(FedFoA):
        def send(self, node: Node) -> Message:
            tensors = dict(super().send(node).tensors)
            if node.name == "M1":
                tensors["correlation"] = -tensors["correlation"]
            return Message(tensors)

    lied = run(Liar(rounds=1, base="fedbyol", **FOA), tiny(), progress=False)
    noted = [m["refused"] for m in lied.metrics if "refused" in m]
    assert [list(each) for each in noted] == [["M1"]]
    assert "node M1 sent a triangle with -" in noted[0]["M1"]
    honest = run(FedBYOL(rounds=1, **SMALL), tiny(), absent={1: ["M1"]}, progress=False)
    for name, value in honest.nodes["M0"].model.state().items():
        assert torch.equal(lied.nodes["M0"].model.state()[name], value), name
    everybody = {n: Message({"correlation": -torch.ones(K)}) for n in ("A", "B")}
    assert FedFoA(**FOA).combine(Node("hub"), everybody, ["A", "B"]) == {}


def test_a_triangle_of_another_size_is_refused_and_the_round_goes_on() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wider(FedFoA):
        def send(self, node: Node) -> Message:
            tensors = dict(super().send(node).tensors)
            if node.name == "M1":
                tensors["correlation"] = torch.ones((N + 1) * (N + 2) // 2)
            return Message(tensors)

    done = run(Wider(rounds=2, **FOA), tiny(), progress=False)
    assert [(f["tick"], f["node"], f["fault"]) for f in done.faults] == [
        (1, "M1", "message refused"),
        (2, "M1", "message refused"),
    ]
    assert "correlation" in str(done.faults[0])
    others = done.nodes["M0"].memory["bank"]
    assert (others.any(1)).tolist() == [True, False], "M2's, and nothing of M1"


def test_batches_must_fill_a_triangle() -> None:
    message = r"FedFoA.batch=3 gives node M0 batches of 3, fewer than the projection size 4"
    with pytest.raises(ConfigError, match=message):
        run(FedFoA(**{**FOA, "batch": 3}), tiny(), progress=False)
    with pytest.raises(DataError, match="node M1 has 18 training samples, fewer than the proj"):
        run(FedFoA(**{**FOA, "batch": 25, "projection": 19}), tiny(), progress=False)
    run(FedFoA(**{**FOA, "batch": 4, "rounds": 1}), tiny(), progress=False)


def test_batches_must_be_of_one_size_unless_scaled() -> None:
    message = "batches differ: M0 25, M1 18, M2 30. Use per_sample=True"
    with pytest.raises(ConfigError, match=message):
        run(FedFoA(**{**FOA, "batch": 30}), tiny(), progress=False)
    run(FedFoA(**{**FOA, "batch": 30, "rounds": 1, "per_sample": True}), tiny(), progress=False)


def test_nodes_may_not_be_fewer_than_the_peers() -> None:
    with pytest.raises(ConfigError, match=r"FedFoA.peers must be <= 2, the number of other nodes"):
        run(FedFoA(peers=3, **FOA), tiny(), progress=False)


def test_a_base_needs_equal_networks() -> None:
    with pytest.raises(ModelError, match="of node M1 differs from that of M0"):
        run(FedFoA(base="fedbyol", **FOA), different(), progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": "fedavg"}, {"lam": -0.1}, {"warm_up": -1}, {"peers": -1}, {"triangle_noise": -1.0},
        {"mu": -1.0}, {"tau": 2.0}, {"divergence": "l2"},
    ],
)  # fmt: skip
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        methods.make("fedfoa", wrong)


# --- noise ----------------------------------------------------------------------------------------


def test_noise_is_a_share_of_the_triangle_and_keeps_the_diagonal_above_zero() -> None:
    method = FedFoA(**{**SMALL, "projection": 60, "batch": 64}, triangle_noise=0.5)
    node = Node("A", seed=1, memory={"bank": torch.zeros(2, 1830)})
    R = triangular(torch.randn(200, 60, generator=stream(0, "noise")))
    node.memory["correlation"] = pack_triangle(R)
    sent = unpack_triangle(method.send(node).tensors["correlation"])
    above = torch.triu(torch.ones(60, 60), 1).bool()
    rms = float(pack_triangle(R).square().mean().sqrt())
    assert float((sent - R)[above].std()) == pytest.approx(0.5 * rms, rel=0.05)
    assert float((sent - R)[above].mean()) == pytest.approx(0, abs=0.05 * rms)
    assert float(sent.diagonal().min()) >= 0
    again = unpack_triangle(method.send(node).tensors["correlation"])
    assert torch.equal(sent, again)  # one draw a round
    node.memory["round"] = torch.tensor(1)
    assert not torch.equal(sent, unpack_triangle(method.send(node).tensors["correlation"]))
    huge = unpack_triangle(replace(method, triangle_noise=100.0).send(node).tensors["correlation"])
    assert float(huge.diagonal().min()) == 0
    assert torch.equal(unpack_triangle(node.memory["correlation"]), R)  # what stays is exact


def test_a_triangle_reveals_second_moments_exactly() -> None:
    """What the privacy note says: R'R = Z'Z, up to rounding."""
    Z = torch.randn(50, N, generator=stream(0, "Z"), dtype=torch.float64)
    R = unpack_triangle(pack_triangle(triangular(Z)))
    torch.testing.assert_close(R.T @ R, Z.T @ Z, rtol=1e-12, atol=1e-12)

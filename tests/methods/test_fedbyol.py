"""FedBYOL, FedU and FedEMA: against their algorithms written out, and what they promise."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import methods
from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError, UnknownNameError
from polyfed.methods import _self_taught
from polyfed.methods._self_taught import SelfTaught
from polyfed.methods.fedbyol import BYOLAlone, CollapseWarning, FedBYOL, FedEMA, FedU
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny
from polyfed.train import outputs, probe
from polyfed.train.augment_views import ImageViews, VectorViews
from polyfed.train.plane import in_plane
from polyfed.train.probe import few_labels_probe, knn_probe, linear_probe

SMALL: dict[str, Any] = {"batch": 8, "local_epochs": 1, "projection": 4, "predictor_hidden": 6}
SMALL |= {"probe_epochs": 0, "neighbours": 5}
OTHER: dict[str, Any] = {"local_epochs": 2, "lr": 0.05, "target_momentum": 0.9}
OTHER |= {"noise_views": 0.3, "mask": 0.5, "momentum": 0.5, "weight_decay": 1e-2}
FAMILY = (BYOLAlone, FedBYOL, FedU, FedEMA)
ONLINE = ("trunk", "projector", "predictor")


@pytest.mark.filterwarnings("ignore::polyfed.methods.fedbyol.CollapseWarning")  # 'stacked'
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("cls", FAMILY)
def test_conformance(check: str, cls: type[SelfTaught]) -> None:
    CHECKS[check](cls(**SMALL), tiny)


# --- the algorithms, written out ------------------------------------------------------------------


def _literal_byol(net: nn.Module, node: Node, method: SelfTaught, t: int) -> None:
    """Grill et al. 2020 for one round, with the random streams of our engine."""
    x = node.data["train"].x
    views = VectorViews(noise=method.noise_views, mask=method.mask)
    online = [net.trunk, net.projector, net.predictor]
    lr = method.lr * (1 + math.cos(math.pi * (t - 1) / method.rounds)) / 2
    optimiser = torch.optim.SGD(
        [p for module in online for p in module.parameters()],
        lr=lr,
        momentum=method.momentum,
        weight_decay=method.weight_decay,
    )
    path = ("tick", t, "local", 0)
    order = stream(0, "node", node.name, "batches", *path)
    size = int(method.batch)
    net.train()
    with ambient(0, "node", node.name, "noise", *path):
        for _ in range(method.local_epochs):
            shuffled = torch.randperm(len(x), generator=order)
            whole = len(x) // size  # a single sample that is left joins the last batch
            for b in range(whole):
                end = len(x) if b == whole - 1 and len(x) % size == 1 else (b + 1) * size
                batch = x[shuffled[b * size : end]]
                first, second = views(batch), views(batch)
                z = [net.projector(net.trunk(view)) for view in (first, second)]
                with torch.no_grad():
                    target = [net.target(view) for view in (first, second)]
                p = [net.predictor(each) for each in z]
                loss = torch.zeros(())
                for i in range(len(batch)):
                    for a in (0, 1):
                        q, other = p[a][i], target[1 - a][i]
                        loss = loss + 2 - 2 * (q @ other) / (q.norm() * other.norm())
                optimiser.zero_grad()
                (loss / len(batch)).backward()
                optimiser.step()
                followed = [*net.trunk.parameters(), *net.projector.parameters()]
                with torch.no_grad():
                    for slow, fast in zip(net.target.parameters(), followed, strict=True):
                        slow.mul_(method.target_momentum).add_((1 - method.target_momentum) * fast)


def _distance(one: nn.Module, other: nn.Module) -> float:
    """Of the parameters of trunk and projector."""
    total = 0.0
    for part in ("trunk", "projector"):
        pairs = zip(getattr(one, part).parameters(), getattr(other, part).parameters(), strict=True)
        total += sum(float((a - b).detach().square().sum()) for a, b in pairs)
    return math.sqrt(total)


def _drift(before: nn.Module, after: nn.Module) -> float:
    pairs = zip(before.trunk.parameters(), after.trunk.parameters(), strict=True)
    moved = [float((a - b).detach().norm()) for a, b in pairs if a.dim() > 1]
    return sum(moved) / len(moved)


def _literal_mean(nets: dict[str, nn.Module], n: dict[str, int]) -> dict[str, Tensor]:
    mean = {}
    for key, value in next(iter(nets.values())).state_dict().items():
        total = sum(n[k] / sum(n.values()) * nets[k].state_dict()[key].double() for k in nets)
        mean[key] = total.to(value.dtype) if value.is_floating_point() else total.round().long()
    return {key: value for key, value in mean.items() if not key.startswith("target")}


def _literal(method: SelfTaught) -> tuple[dict[str, nn.Module], list[str]]:
    """All rounds; and what was decided for each node and round."""
    nodes = method.prepare(tiny())
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    n = {node.name: len(node.data["train"]) for node in nodes}
    lam: dict[str, float] = {}
    decided: list[str] = []
    for t in range(1, method.rounds + 1):
        before = copy.deepcopy(nets)
        for node in nodes:
            _literal_byol(nets[node.name], node, method, t)
        mean = _literal_mean(nets, n)
        for name, net in nets.items():
            globe = copy.deepcopy(net)
            globe.load_state_dict(mean, strict=False)
            paper, drift = _distance(globe, net), _drift(before[name], net)
            own = copy.deepcopy(net.state_dict())
            if isinstance(method, FedBYOL):
                net.load_state_dict(mean, strict=False)
            if isinstance(method, FedU):
                d = drift if method.divergence == "drift" else paper
                keeps = "" if d < method.mu else "predictor"
                taken = {k: v for k, v in mean.items() if not keeps or not k.startswith(keeps)}
                net.load_state_dict(taken, strict=False)
                decided.append("own" if keeps else "mean")
            if isinstance(method, FedEMA):
                d = drift if method.divergence == "drift" else paper
                lam.setdefault(name, method.tau / d)
                mu = min(lam[name] * d, 1.0)
                decided.append(f"{mu:.4f}")
                for key, value in net.state_dict().items():
                    if key in mean:
                        mixed = mu * own[key].double() + (1 - mu) * mean[key].double()
                        value.copy_(mixed if value.is_floating_point() else mixed.round())
    return nets, decided


@pytest.mark.parametrize(
    "method",
    [
        BYOLAlone(rounds=3, **SMALL),
        BYOLAlone(rounds=3, **(SMALL | OTHER)),
        FedBYOL(rounds=3, **SMALL),
        FedU(rounds=3, mu=0.12, **SMALL),
        FedU(rounds=3, mu=0.2, divergence="paper", **SMALL),
        FedEMA(rounds=3, **SMALL),
        FedEMA(rounds=3, divergence="drift", **SMALL),
    ],
    ids=lambda m: f"{m.name}-{getattr(m, 'divergence', '')}",
)
def test_equals_the_literal_algorithm(method: SelfTaught) -> None:
    """25, 18 and 33 samples in batches of 8: nodes of different weight, a last batch of 9."""
    nets, decided = _literal(method)
    done = run(method, tiny(), progress=False)
    for name, net in nets.items():
        got, wanted = done.nodes[name].model.state(), net.state_dict()
        assert list(got) == list(wanted)
        for key in wanted:
            torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=2e-5, msg=key)
    noted = [m["predictor"] for m in done.metrics if "predictor" in m]
    noted += [f"{m['mu']:.4f}" for m in done.metrics if "mu" in m]
    assert noted == decided
    if isinstance(method, FedU):
        assert set(decided) == {"own", "mean"}  # the threshold is between them


# --- what they promise ----------------------------------------------------------------------------


def states(done: Run, *parts: str) -> dict[str, Tensor]:
    """Parameters and buffers of all nodes."""
    return {
        f"{name}: {key}": tensor
        for name, node in done.nodes.items()
        for key, tensor in node.model.state(*parts).items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize("cls", FAMILY)
def test_labels_do_not_influence_training(cls: type[SelfTaught]) -> None:
    """Other labels, or none: the same weights, bit for bit."""
    method = cls(rounds=2, **SMALL)
    honest = run(method, tiny(), progress=False)
    shuffled, bare = tiny(), tiny()
    for node in shuffled:
        train = node.data["train"]
        y = train.y[torch.randperm(len(train), generator=stream(1, node.name))]
        assert not torch.equal(y, train.y)
        node.data = Data(**{**node.data, "train": Split(train.x, y)})
    for node in bare:
        node.data = Data(train=node.data["train"].x, test=node.data["test"], probe=(
            node.data["train"].x[:3], node.data["train"].y[:3]))  # fmt: skip
    assert_same(states(honest), states(run(method, shuffled, progress=False)))
    assert_same(states(honest), states(run(method, bare, progress=False)))
    assert honest.accuracy != run(method, shuffled, progress=False).accuracy  # it does look there


@pytest.mark.parametrize("method", [FedU(mu=1e6, **SMALL), FedEMA(tau=0, **SMALL)])
def test_limits_are_fedbyol(method: SelfTaught) -> None:
    method = replace(method, rounds=2)
    plain = run(FedBYOL(rounds=2, **SMALL), tiny(), progress=False)
    assert_same(states(run(method, tiny(), progress=False)), states(plain))


def test_with_a_threshold_of_zero_every_node_keeps_its_predictor() -> None:
    """Even if it has not moved at all: Eq. (3) takes the mean below mu only."""
    node = FedU(**SMALL).prepare(tiny())[0]
    own = node.model.state(*ONLINE)
    mean = {n: t + 1 if n.startswith("predictor") else t for n, t in own.items()}
    FedU(mu=0, divergence="paper", **SMALL).rule.receive(node, mean)
    assert node.notes == {"divergence": 0, "predictor": "own"}
    assert all(torch.equal(t, own[n]) for n, t in node.model.state(*ONLINE).items())


def test_a_node_that_is_very_far_keeps_all_of_its_own_and_not_more() -> None:
    """Eq. (5): mu is tau in the first round, and 1 where the mean is 1 / tau times as far."""
    method = FedEMA(tau=0.5, **SMALL)
    node = method.prepare(tiny())[0]

    def heard(apart: float) -> tuple[float, dict[str, Tensor]]:
        own = node.model.state(*ONLINE)
        floats = {n for n, t in own.items() if t.is_floating_point()}
        method.rule.receive(node, {n: t + apart * (n in floats) for n, t in own.items()})
        after = node.model.state(*ONLINE)
        return node.notes["mu"], {n: after[n] - own[n] for n in floats}

    for apart, mu in ((1.0, 0.5), (1.5, 0.75), (4.0, 1.0)):
        noted, moved = heard(apart)
        assert noted == pytest.approx(mu, rel=1e-5)
        for step in moved.values():
            torch.testing.assert_close(step, torch.full_like(step, (1 - mu) * apart))


@pytest.mark.parametrize("method", [FedBYOL(**SMALL), FedU(**SMALL), FedEMA(**SMALL)])
def test_one_node_is_byol(method: SelfTaught) -> None:
    """The mean of one is itself, up to the rounding of a blend."""
    alone = run(BYOLAlone(rounds=2, **SMALL), tiny()[:1], progress=False)
    done = run(replace(method, rounds=2), tiny()[:1], progress=False)
    for key, tensor in states(alone).items():
        torch.testing.assert_close(states(done)[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cls", FAMILY[1:])
def test_what_travels_is_the_online_network(cls: type[SelfTaught]) -> None:
    method = cls(rounds=1, **SMALL)
    done = run(method, tiny(), progress=False)
    names = set(method.prepare(tiny())[0].model.names(*ONLINE))
    for crossing in done.ledger.crossings():
        up = crossing.to == "hub"
        assert {t["name"] for t in crossing.tensors} == names | ({"num_examples"} if up else set())
    alone = run(BYOLAlone(rounds=1, **SMALL), tiny(), progress=False)
    assert_same(states(alone, "target"), states(done, "target"))  # it stays
    trunks = {float(n.model.state()["trunk.0.weight"].sum()) for n in done.nodes.values()}
    assert len(trunks) == (3 if cls is FedEMA else 1)


@pytest.mark.parametrize("cls", FAMILY[1:])
def test_a_mesh_does_what_a_star_does(cls: type[SelfTaught]) -> None:
    method = cls(rounds=2, **SMALL)
    star = run(method, tiny(), progress=False)
    mesh = run(method, tiny(), topology="mesh", progress=False)
    assert_same(states(star), states(mesh))
    assert {c.to for c in mesh.ledger.crossings()} == {"M0", "M1", "M2"}


@pytest.mark.parametrize("method", [FedU(mu=0, **SMALL), FedEMA(**SMALL)])
@pytest.mark.parametrize("divergence", ["paper", "drift"])
def test_a_node_that_diverged_takes_the_mean(method: SelfTaught, divergence: str) -> None:
    method = replace(method, rounds=1, divergence=divergence)
    nodes = tiny()
    nodes[0].model.load({"trunk.0.weight": torch.full((8, 6), torch.nan)})
    done = run(method, nodes, progress=False)
    mean = run(FedBYOL(rounds=1, **SMALL), nodes, progress=False)
    for key, tensor in done.nodes["M0"].model.state(*ONLINE).items():
        assert torch.equal(tensor, mean.nodes["M1"].model.state()[key]), key


def test_the_learning_rate_falls_as_a_cosine() -> None:
    def rates(method: SelfTaught) -> list[float]:
        node = method.prepare(tiny())[0]
        return [next(iter(method.local(node))).optimiser.lr for _ in range(4)]

    wanted = [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert rates(FedBYOL(rounds=4, lr=0.1, **SMALL)) == pytest.approx(wanted)
    assert wanted[2] == pytest.approx(0.05)
    assert rates(FedBYOL(rounds=4, lr=0.1, cosine=False, **SMALL)) == [0.1] * 4


# --- evaluation -----------------------------------------------------------------------------------


def test_rounds_are_judged_by_neighbours_and_the_end_by_probes() -> None:
    settings = {**SMALL, "probe_epochs": 7}
    done = run(FedBYOL(rounds=1, **settings), tiny(), seed=3, progress=False)
    for name, node in done.nodes.items():
        train, test = (
            Split(outputs(node.model, node.data[n].x, "trunk"), node.data[n].y)
            for n in ("train", "test")
        )
        assert done.accuracy[name] == knn_probe(train, test, k=5)
        noted = next(m for m in done.metrics if m.get("node") == name and "linear_probe" in m)
        assert noted["tick"] == "final"
        probe._found.clear()
        assert noted["linear_probe"] == linear_probe(train, test, seed=3, epochs=7)
        assert noted["linear_probe_1%"] == few_labels_probe(train, test, 0.01, seed=3)
        assert noted["linear_probe_10%"] == few_labels_probe(train, test, 0.1, seed=3)
    bare = run(FedBYOL(rounds=1, **SMALL), tiny(), progress=False)
    assert not any("linear_probe" in m for m in bare.metrics)


def test_probes_with_few_labels_have_the_share_that_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundredth and a tenth of a tiny node's labels are the same, one a class."""
    monkeypatch.setattr(_self_taught, "few_labels_probe", lambda train, test, share, seed: share)
    method = BYOLAlone(**(SMALL | {"probe_epochs": 1}))
    node = method.prepare(tiny())[0]
    assert list(method.finish(node)) == []
    assert (node.notes["linear_probe_1%"], node.notes["linear_probe_10%"]) == (0.01, 0.1)


def test_rounds_may_be_judged_by_a_linear_probe() -> None:
    method = FedBYOL(rounds=1, judge="linear", **{**SMALL, "probe_epochs": 7})
    done = run(method, tiny(), seed=3, progress=False)
    assert done.accuracy == {
        m["node"]: m["linear_probe"] for m in done.metrics if "linear_probe" in m
    }
    with pytest.raises(ConfigError, match=r"FedBYOL\.probe_epochs must be >= 1, got 0"):
        FedBYOL(judge="linear", probe_epochs=0)


def test_features_of_test_samples_are_laid_out_in_the_plane() -> None:
    done = run(FedBYOL(rounds=1, map_samples=5, **SMALL), tiny(), seed=3, progress=False)
    noted = {m["node"]: m["map"] for m in done.metrics if "map" in m}
    for name, node in done.nodes.items():
        features = outputs(node.model, node.data["test"].x[:5], "trunk")
        wanted = in_plane(features, seed=3)
        assert torch.allclose(torch.tensor(noted[name]["points"]), wanted, atol=1e-3)
        assert noted[name]["labels"] == node.data["test"].y[:5].tolist()


def test_a_network_that_diverged_has_no_map() -> None:
    method = BYOLAlone(map_samples=5, **SMALL)
    node = method.prepare(tiny())[0]
    node.model.load({name: t * math.nan for name, t in node.model.state("trunk").items()})
    assert list(method.finish(node)) == []
    assert node.notes["map"] == {"points": [], "labels": []}


def test_labelled_samples_of_their_own_take_the_votes() -> None:
    nodes = tiny()
    for node in nodes:
        x, y = node.data["train"].x, node.data["train"].y
        node.data = Data(train=(x, y), test=node.data["test"], probe=(x[y == 2], y[y == 2]))
    done = run(BYOLAlone(rounds=0, **SMALL), nodes, progress=False)
    for name, node in done.nodes.items():
        assert done.accuracy[name] == float((node.data["test"].y == 2).double().mean())


def test_no_test_split_needs_no_labels() -> None:
    nodes = tiny()
    for node in nodes:
        node.data = Data(train=node.data["train"].x)
    done = run(FedBYOL(rounds=1, **{**SMALL, "probe_epochs": 2}), nodes, progress=False)
    assert done.accuracy == {}
    assert done.faults == []


def test_a_test_split_without_labels_to_judge_by_is_an_error() -> None:
    nodes = tiny()
    nodes[1].data = Data(train=nodes[1].data["train"].x, test=nodes[1].data["test"])
    with pytest.raises(DataError, match="node M1 has a split 'test', but no labels to evaluate"):
        run(FedBYOL(**SMALL), nodes, progress=False)


# --- networks and data ----------------------------------------------------------------------------


def wrapped(net: nn.Module, x: Tensor, **parts: Any) -> Node:
    return Node("N", Data(train=x), Model.split(net, **parts))


def test_heads_begin_alike_where_trunks_are_as_wide() -> None:
    nodes = [replace(node, seed=5) for node in tiny()]
    made = FedBYOL(**SMALL).prepare(nodes)
    for other in made[1:]:
        for key, tensor in made[0].model.state().items():
            assert torch.equal(tensor, other.model.state()[key]), key
    for key, tensor in nodes[0].model.state("trunk").items():
        assert torch.equal(tensor, made[0].model.state()[key])
        assert torch.equal(tensor, made[0].model.state()[f"target.{key}"])
    other_seed = FedBYOL(**SMALL).prepare([replace(tiny()[0], seed=6)])[0].model.state()
    assert not torch.equal(
        other_seed["projector.weight"], made[0].model.state()["projector.weight"]
    )


def test_heads_have_the_sizes_asked_for() -> None:
    method = FedBYOL(projection=4, projector_hidden=3, predictor_hidden=7)
    shapes = {n: list(t.shape) for n, t in method.prepare(tiny())[0].model.state().items()}
    wide = [
        s for n, s in shapes.items() if len(s) == 2 and n.startswith(("projector", "predictor"))
    ]
    assert wide == [[3, 5], [4, 3], [7, 4], [4, 7]]


def test_the_whole_network_may_be_the_trunk() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    node = wrapped(net, torch.randn(9, 6, generator=stream(0, "x"), dtype=torch.float64), trunk=...)
    model = FedBYOL(**SMALL).prepare([node])[0].model
    assert [*model.parts] == ["trunk", "projector", "predictor", "target"]
    assert {t.dtype for t in model.state().values() if t.is_floating_point()} == {torch.float64}


class Between(nn.Module):
    """Flattens between trunk and head, where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(1))


@pytest.mark.parametrize(
    ("net", "parts", "message"),
    [
        (nn.Sequential(nn.Linear(6, 3)), {"body": ...}, "unknown part of node N 'trunk'"),
        (
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
            {"trunk": ("0", "1"), "head": "2"},
            r"the trunk of node N is 2 modules \(0, 1\)",
        ),
        (
            nn.Sequential(OrderedDict(trunk=nn.Flatten(), head=nn.Linear(6, 3))),
            {"trunk": "trunk", "head": "head"},
            "the trunk of node N has no weights",
        ),
    ],
)
def test_trunks_that_cannot_be_taken_are_errors(
    net: nn.Module, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises((ModelError, UnknownNameError), match=message):
        FedBYOL(**SMALL).prepare([wrapped(net, torch.zeros(4, 6), **parts)])


def test_a_step_between_trunk_and_head_is_an_error() -> None:
    node = wrapped(Between(), torch.zeros(4, 1, 4, 4), trunk="conv", head="head")
    with pytest.raises(ModelError, match=r"puts out \[2, 2, 2\] per sample, but \[8\] enters"):
        FedBYOL(**SMALL).prepare([node])


def images(low: float, high: float) -> Node:
    net = nn.Sequential(
        OrderedDict(
            trunk=nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()),
            head=nn.Linear(16, 2),
        )
    )
    x = low + (high - low) * torch.rand(12, 1, 4, 4, generator=stream(0, "images"))
    return wrapped(net, x, trunk="trunk", head="head")


def test_images_have_views_of_images_and_values_from_minus_one_to_one() -> None:
    method = FedBYOL(crop=0.5, flip=0.25, jitter=0.125, noise_views=0.3, mask=0.4, **SMALL)
    assert method.byol(images(-1, 1)).views == ImageViews(area=(0.5, 1), flip=0.25, jitter=0.125)
    assert method.byol(tiny()[0]).views == VectorViews(noise=0.3, mask=0.4)
    run(replace(method, rounds=1), [images(-1, 1)], progress=False)
    for low, high in ((-1, 1.5), (-2, 1)):
        with pytest.raises(DataError, match=r"expected -1 \(black\) to 1 \(white\)"):
            run(method, [images(low, high)], progress=False)


def without_batchnorm() -> list[Node]:
    nodes = tiny()
    for node in nodes[1:]:
        node.model.net.trunk[1] = nn.Identity()
        node.model = Model(node.model.net, node.model.parts)
    return nodes


def test_networks_without_batchnorm_are_warned_about() -> None:
    with pytest.warns(CollapseWarning, match="byol: M1, M2 have no BatchNorm in trunk or proj"):
        run(BYOLAlone(rounds=0, **SMALL), without_batchnorm(), progress=False)
    run(BYOLAlone(rounds=0, projector_hidden=4, **SMALL), without_batchnorm(), progress=False)


def test_a_collapse_is_noted() -> None:
    """A projector that puts out the same for everything."""
    nodes = tiny()[:1]
    method = BYOLAlone(rounds=1, lr=1e-12, **SMALL)
    honest = run(method, nodes, progress=False)
    assert [m["collapsed"] for m in honest.metrics if "collapsed" in m] == [False]
    nodes[0].model.load({"trunk.4.weight": torch.zeros(5, 8)})
    collapsed = run(method, nodes, progress=False)
    noted = next(m for m in collapsed.metrics if "collapsed" in m)
    assert noted["collapsed"] is True
    assert noted["feature_std"] == pytest.approx(0, abs=1e-6)


def test_different_trunks_are_an_error() -> None:
    nodes = tiny()
    net = nn.Sequential(OrderedDict(trunk=nn.Linear(6, 7), head=nn.Linear(7, 3)))
    nodes[2].model = Model.split(net, trunk="trunk", head="head")
    message = "part 'trunk, projector, predictor' of node M2 differs"
    with (
        pytest.warns(CollapseWarning, match="M2 have no BatchNorm"),
        pytest.raises(ModelError, match=message),
    ):
        run(FedBYOL(**SMALL), nodes, progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_epochs": 0}, {"projection": 0}, {"predictor_hidden": 0}, {"neighbours": 0},
        {"projector_hidden": -1}, {"probe_epochs": -1}, {"noise_views": -0.1}, {"crop": 0.0},
        {"map_samples": -1}, {"crop": 1.1}, {"flip": 2.0}, {"jitter": -1.0}, {"mask": 1.5},
        {"target_momentum": 1.1},
    ],
)  # fmt: skip
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FedBYOL(**wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("byol", {"judge": "forest"}),
        ("fedu", {"mu": -1.0}),
        ("fedu", {"divergence": "l2"}),
        ("fedema", {"tau": 1.1}),
        ("fedema", {"divergence": "l2"}),
    ],
)
def test_wrong_options_of_the_rules_are_errors(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        methods.make(name, wrong)

"""FedUL and its Methods 1 and 2 against the printed algorithm, and against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import cross_entropy
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.surrogate import surrogate_losses
from polyfed.methods.fedul import FedUL, FedULM1, FedULM2, FedULMgda, IdentifiabilityWarning
from polyfed.methods.fedul_controls import HubOnly
from polyfed.testing import CHECKS
from polyfed.testing.sets import tiny_sets
from polyfed.train import accuracy, fit
from polyfed.train.augment import Rotated
from polyfed.train.evaluate import mean_loss
from polyfed.train.surrogate import SETS, L1Penalty, SurrogateLoss, attach_sets, set_proportions

SMALL: dict[str, Any] = {"batch": 8, "lr": 1e-2}
FAMILY = [
    FedUL(**SMALL, alpha_g=0.5),
    FedULM1(**SMALL),
    FedULM2(**SMALL, h="auto", hub_start="persistent"),
    FedULMgda(**SMALL),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_conformance(check: str, method: Method) -> None:
    CHECKS[check](method, tiny_sets)


def done(method: Method, nodes: Sequence[Node] | None = None, **settings: Any) -> Run:
    return run(method, tiny_sets() if nodes is None else nodes, progress=False, **settings)


def noted(ended: Run, name: str) -> list[Any]:
    return [m[name] for m in ended.metrics if name in m]


def assert_same(one: Node, other: Node) -> None:
    """The same network, bit for bit."""
    wanted = other.model.state()
    for name, tensor in one.model.state().items():
        assert torch.equal(tensor, wanted[name]), name


def swap(nodes: Sequence[Node], name: str, **changes: Any) -> list[Node]:
    return [replace(n, **changes) if n.name == name else n for n in nodes]


# ---- the printed algorithm -----------------------------------------------------------------------

Nets = dict[str, nn.Module]


def mix(parts: Sequence[tuple[float, nn.Module]], into: nn.Module) -> None:
    """A weighted sum of networks, tensor by tensor; counters are rounded."""
    for name, value in into.state_dict().items():
        total = sum(w * net.state_dict()[name].double() for w, net in parts)
        exact = torch.as_tensor(total)
        value.copy_(exact if value.is_floating_point() else exact.round())


def direct_loss(net: nn.Module, x: Tensor, m: Tensor, node: Node, method: Any) -> Tensor:
    """Theorem 1 as printed, in probabilities, and the L1 penalty."""
    Pi = set_proportions(node.model)
    sizes = torch.bincount(node.memory[SETS]).float()
    pi = torch.full((3,), 1 / 3)
    q = (
        functional.softmax(net(x), 1)
        @ (torch.diag(sizes / sizes.sum()) @ Pi @ torch.diag(1 / pi)).T
    )
    q = q / q.sum(1, keepdim=True)
    if method.loss == "reference":
        q = functional.softmax(q, 1)
    penalty = sum(p.abs().sum() for p in net.parameters())
    return -q[torch.arange(len(m)), m].log().mean() + method.l1 * penalty


def literal(nodes: Sequence[Node], method: Any, literal_train: Callable[..., None]) -> Nets:
    """Algorithm 1 of Alzahrani 2024 with the aggregation and the broadcast that it lacks.

    Returns the broadcast of every round and, as `best`, the one to keep.
    """
    hub, clients = nodes[0], nodes[1:]
    settings: dict[str, Any] = {"batch": method.batch, "lr": method.lr}
    f, own = copy.deepcopy(hub.model.net), copy.deepcopy(hub.model.net)
    rounds: Nets = {}
    best = -1.0
    for t in range(1, method.rounds + 1):
        trained = []
        for node in clients:  # procedure B
            f_c = copy.deepcopy(f)
            literal_train(
                f_c, [f_c], node.data["train"].x, node.memory[SETS], name=node.name,
                path=("tick", t, "local", 0), epochs=method.local_epochs,
                loss=lambda net, x, m, node=node: direct_loss(net, x, m, node, method),
                **settings,
            )  # fmt: skip
            trained.append(f_c)
        last, fbar = copy.deepcopy(f), copy.deepcopy(f)
        mix([(1 - method.alpha_g, last), *((method.alpha_g / 3, net) for net in trained)], fbar)
        f = procedure_c(method, t, hub, last, fbar, own, literal_train, settings)
        rounds[str(t)] = copy.deepcopy(f)
        held_out = hub.data["val_rb"]
        f.eval()
        now = float((f(held_out.x).argmax(1) == held_out.y).double().mean())
        if now >= best:
            best, rounds["best"] = now, copy.deepcopy(f)
    return rounds


def procedure_c(
    method: Any, t: int, hub: Node, last: nn.Module, fbar: nn.Module, own: nn.Module,
    literal_train: Callable[..., None], settings: dict[str, Any],
) -> nn.Module:  # fmt: skip
    """The server's part; `own` is where a persistent f' stands, and moves."""
    if isinstance(method, FedUL):
        return fbar
    start = getattr(method, "hub_start", "broadcast")
    trained = {"broadcast": copy.deepcopy(last), "aggregate": copy.deepcopy(fbar)}.get(start, own)
    if isinstance(method, FedULM1):
        trained = fbar
    x, y = hub.data["train"].x, hub.data["train"].y
    settings = settings | {"path": ("tick", t, "gather", 0), "epochs": method.hub_epochs}
    literal_train(trained, [trained], x, y, name="hub", **settings)
    if isinstance(method, FedULM1):
        return trained
    h = getattr(method, "h", 0.5)
    if isinstance(method, FedULMgda):
        flat = [torch.cat([p.flatten() for p in n.parameters()]) for n in (last, fbar, trained)]
        g1, g2 = flat[0] - flat[1], flat[0] - flat[2]
        shares = torch.linspace(0, 1, 10_001)[:, None]
        lengths = (shares * g1 + (1 - shares) * g2).norm(dim=1)
        h = 1 - float(shares[lengths.argmin()])
    mixed = copy.deepcopy(fbar)
    mix([(1 - h, fbar), (h, trained)], mixed)
    return mixed


CASES = [
    FedUL(),
    FedUL(loss="reference"),
    FedUL(alpha_g=0.3, l1=1e-3, local_epochs=2),
    FedULM1(),
    FedULM1(alpha_g=0.3, hub_epochs=2),
    FedULM2(h=0.3),
    FedULM2(h=0.3, hub_start="aggregate"),
    FedULM2(h=0.3, hub_start="persistent", hub_epochs=2),
    FedULMgda(),
]


@pytest.mark.parametrize("method", CASES, ids=lambda m: repr(m).partition("rounds")[0] + m.name)
def test_equals_the_printed_algorithm(
    method: Any, literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Two rounds: parameters, BatchNorm statistics and counters, at the hub and at every node."""
    method = replace(method, rounds=2, batch=11, lr=3e-3)
    nets = literal(tiny_sets(), method, literal_train)
    ended = done(method)
    atol = 1e-4 if isinstance(method, FedULMgda) else 2e-5  # the literal a has four digits
    assert_close(ended.places["hub"], nets["2"], atol)
    for node in ended.nodes.values():
        assert_close(node, nets["best"], atol)


def test_the_mean_is_uniform() -> None:
    """25, 18 and 33 samples weigh the same."""
    ended = done(FedUL(rounds=1, local_epochs=0), swap(tiny_sets(), "west", model=shifted(3.0)))
    was = tiny_sets()[1].model.state()["head.bias"]
    got = ended.places["hub"].model.state()["head.bias"]
    torch.testing.assert_close(got, was + 1.0)


def shifted(by: float) -> Model:
    """West's network with its last bias moved."""
    model = tiny_sets()[3].model
    model.load({"head.bias": model.state()["head.bias"] + by})
    return model


# ---- SPEC 4.7, 7 and 8: what is what -------------------------------------------------------------


def test_h_of_0_is_plain_fedul() -> None:
    plain = done(FedUL(rounds=2, **SMALL))
    for start in ("broadcast", "aggregate", "persistent"):
        blended = done(FedULM2(rounds=2, h=0, hub_start=start, **SMALL))
        for name in ("hub", "east", "north", "west"):
            assert_same((blended.nodes | blended.places)[name], (plain.nodes | plain.places)[name])


def test_h_of_1_is_the_model_of_the_hub() -> None:
    """Which is then what it is when nobody else trains."""
    alone = done(HubOnly(rounds=2, **SMALL))
    for start in ("broadcast", "persistent"):
        blended = done(FedULM2(rounds=2, h=1, hub_start=start, **SMALL))
        assert_same(blended.places["hub"], alone.places["hub"])
        assert_same(blended.nodes["west"], alone.nodes["west"])


def test_h_of_1_from_the_aggregate_is_method_1() -> None:
    first = done(FedULM1(rounds=2, **SMALL))
    second = done(FedULM2(rounds=2, h=1, hub_start="aggregate", **SMALL))
    assert_same(second.places["hub"], first.places["hub"])


def test_method_1_without_steps_is_plain_fedul() -> None:
    plain, idle = done(FedUL(rounds=2, **SMALL)), done(FedULM1(rounds=2, hub_epochs=0, **SMALL))
    assert_same(idle.places["hub"], plain.places["hub"])
    assert_same(idle.nodes["north"], plain.nodes["north"])


def test_one_node_is_centralised_training() -> None:
    hub, node = tiny_sets()[:2]
    method = FedUL(rounds=3, **SMALL)
    ended = done(method, [hub, node])
    for t in (1, 2, 3):
        (phase,) = method.local(node)
        fit(node, phase, "tick", t, "local", 0)
    assert_same(ended.places["hub"], node)


def test_the_multi_gradient_step_is_method_2_with_its_h() -> None:
    mgda = done(FedULMgda(rounds=1, **SMALL))
    (h,) = noted(mgda, "h")
    assert 0 < h < 1
    blended = done(FedULM2(rounds=1, h=h, **SMALL))
    assert_same(mgda.places["hub"], blended.places["hub"])


PAIR = (FedUL(rounds=1, **SMALL), HubOnly(rounds=1, **SMALL))


def test_the_cosine_is_that_of_what_nodes_and_hub_did() -> None:
    start = tiny_sets()[0]
    ends = [done(m).places["hub"] for m in PAIR]
    names = [n for n, _ in start.model.net.named_parameters()]
    was = start.model.state()
    g = [torch.cat([(was[n] - e.model.state()[n]).flatten() for n in names]) for e in ends]
    wanted = float(g[0] @ g[1] / g[0].norm() / g[1].norm())
    assert noted(done(FedULMgda(rounds=1, **SMALL)), "cosine") == [pytest.approx(wanted, abs=1e-5)]


# ---- h="auto" ------------------------------------------------------------------------------------


def test_auto_finds_the_lowest_validation_loss() -> None:
    """No h of a fine grid between the aggregate and the hub's own model does better."""
    mean, own = (done(m).places["hub"].model.state() for m in PAIR)
    ended = done(FedULM2(rounds=1, h="auto", **SMALL))
    (h,) = noted(ended, "h")
    hub = ended.places["hub"]
    found = mean_loss(hub.model, hub.data["val_rb"], cross_entropy)
    assert noted(ended, "val_rb_loss") == [pytest.approx(found, abs=1e-6)]
    losses = []
    for i in range(101):
        share = i / 100
        blended = {
            n: (t * (1 - share) + own[n] * share).to(t.dtype) if t.is_floating_point() else t
            for n, t in mean.items()
        }
        hub.model.load(blended)
        losses.append(mean_loss(hub.model, hub.data["val_rb"], cross_entropy))
    assert losses[50] > min(losses)  # the default would have been another
    assert h == pytest.approx(losses.index(min(losses)) / 100, abs=0.03)
    assert found <= min(losses) + 1e-3


# ---- the best is kept ----------------------------------------------------------------------------


def test_nodes_end_with_the_round_that_validates_best_of_equal_ones_the_later() -> None:
    ended = done(FedULM1(rounds=6, batch=8, lr=3e-2))
    found = noted(ended, "val_rb_accuracy")
    best = max(range(6), key=lambda i: (found[i], i)) + 1
    assert best < 6
    shorter = done(FedULM1(rounds=best, batch=8, lr=3e-2)).places["hub"]
    assert accuracy(shorter.model, shorter.data["val_rb"]) == found[best - 1]
    final = {m["node"]: m["surrogate_loss"] for m in ended.metrics if "surrogate_loss" in m}
    for node in ended.nodes.values():
        assert_same(node, shorter)
        sets = Split(node.data["train"].x, node.memory[SETS])
        assert final[node.name] == mean_loss(node.model, sets, SurrogateLoss())


def test_without_validation_nodes_end_with_the_last_round() -> None:
    hub = tiny_sets()[0]
    nodes = swap(tiny_sets(), "hub", data=Data(train=hub.data["train"]))
    ended = done(FedULM1(rounds=6, batch=8, lr=3e-2), nodes)
    assert noted(ended, "val_rb_accuracy") == []
    assert_same(ended.nodes["east"], ended.places["hub"])


def test_plain_fedul_does_without_a_hub() -> None:
    hub, *others = tiny_sets()
    bare = [replace(hub, data=Data()), *others]
    ended = done(FedUL(rounds=2, **SMALL), others)
    assert_same(ended.nodes["west"], done(FedUL(rounds=2, **SMALL), bare).nodes["west"])


# ---- what travels, what is noted -----------------------------------------------------------------


def test_what_travels_is_the_network_and_whether_it_is_the_best() -> None:
    ended = done(FedULM1(rounds=1, **SMALL))
    names = set(tiny_sets()[0].model.names())
    up = [c for c in ended.ledger.crossings() if c.to == "hub"]
    down = [c for c in ended.ledger.crossings() if c.source == "hub"]
    assert [{t["name"] for t in c.tensors} for c in up] == [names] * 3
    assert [{t["name"] for t in c.tensors} for c in down] == [names | {"is_best"}] * 3
    assert down[0].bytes == up[0].bytes + 1


def test_notes() -> None:
    ended = done(FedULM1(rounds=2, **SMALL))
    start = {m["node"]: m for m in ended.metrics if m["tick"] == 0 and "set_rank" in m}
    assert sorted(start) == ["east", "north", "west"]
    for node in tiny_sets()[1:]:
        values = torch.linalg.svdvals(set_proportions(node.model))
        assert start[node.name]["set_rank"] == 3
        assert start[node.name]["set_sigma"] == pytest.approx(float(values[-1]), abs=1e-5)
    assert len(noted(ended, "supervised_loss")) == 2
    assert len(noted(ended, "local_loss")) == 6
    final = {m["node"]: m for m in ended.metrics if "surrogate_loss" in m}
    assert {m["tick"] for m in final.values()} == {"final"}
    for node in ended.nodes.values():
        T = node.model.net.get_buffer("set_transition")
        node.model.net.eval()
        with torch.no_grad():
            losses = surrogate_losses(node.model(node.data["train"].x), node.memory[SETS], T)
        assert final[node.name]["surrogate_loss"] == pytest.approx(float(losses.mean()), abs=1e-5)


def test_the_objectives_are_those_asked_for() -> None:
    node = tiny_sets()[1]
    turned = FedULM1(rotate=20, fill=-1, l1=1e-4, loss="reference", hub_epochs=3, local_epochs=2)
    (phase,) = turned.local(node)
    loss = L1Penalty(SurrogateLoss("reference"), 1e-4)
    assert (phase.objective, phase.target, phase.epochs) == (Rotated(loss, 20, -1), SETS, 2)
    hub = turned.supervised(turned.hub_epochs)
    assert (hub.objective, hub.target, hub.epochs) == (Rotated(cross_entropy, 20, -1), None, 3)
    plain = FedULM1(l1=0)
    assert next(iter(plain.local(node))).objective == SurrogateLoss("proper")
    assert plain.supervised(1).objective == cross_entropy


def test_images_are_turned() -> None:
    def images(rotate: float) -> Node:
        made = []
        for node in tiny_sets():
            data = {
                n: (s.x.view(-1, 1, 2, 3), s.y) for n, s in node.data.items() if s.y is not None
            }
            if node.name != "hub":
                data["train"] = node.data["train"].x.view(-1, 1, 2, 3)
            net = node.model.net
            net.trunk.insert(0, nn.Flatten())
            model = Model.split(net, trunk="trunk", head="head")
            made.append(replace(node, data=Data(**data), model=model))
        return done(FedULM1(rounds=1, rotate=rotate, **SMALL), made).places["hub"]

    straight, turned = images(0), images(90)
    assert not torch.equal(*(n.model.state()["head.bias"] for n in (straight, turned)))


# ---- what cannot be ------------------------------------------------------------------------------


def poor_sets(nodes: list[Node]) -> list[Node]:
    """West's sets are all alike: they tell nothing."""
    west = nodes[-1]
    attach_sets(west, west.memory[SETS], torch.full((4, 3), 1 / 3))
    return nodes


def test_sets_that_tell_nothing_are_a_warning_with_numbers_and_advice() -> None:
    said = r"fedul: alone, the sets of west \(rank 1\) do not .* fedul-m1 or fedul-m2\."
    with pytest.warns(IdentifiabilityWarning, match=said):
        done(FedUL(rounds=0), poor_sets(tiny_sets()))


def test_fewer_sets_than_classes_are_a_warning() -> None:
    nodes = tiny_sets()
    for node in nodes[1:]:
        attach_sets(node, node.memory[SETS] % 2, [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    said = r"east \(rank 2\), north \(rank 2\), west \(rank 2\) do not tell 3 .* \(at least 3"
    with pytest.warns(IdentifiabilityWarning, match=said):
        done(FedUL(rounds=0), nodes)


def test_with_labels_at_the_hub_there_is_nothing_to_warn_of() -> None:
    ended = done(FedULM1(rounds=1, **SMALL), poor_sets(tiny_sets()))  # warnings are errors here
    assert noted(ended, "set_rank") == [3, 3, 1]


def other_classes(nodes: list[Node]) -> list[Node]:
    return swap(nodes, "north", classes=("a", "c", "b"))


def other_net(nodes: list[Node], name: str) -> list[Node]:
    net = copy.deepcopy(nodes[0].model.net)
    net.head = nn.Linear(5, 3, bias=False)
    model = Model.split(net, trunk="trunk", head="head")
    changed = swap(nodes, name, model=model)
    for old, new in zip(nodes, changed, strict=True):
        if new.name == name != "hub":
            attach_sets(new, old.memory[SETS], set_proportions(old.model))
    return changed


def wide_sets(nodes: list[Node]) -> list[Node]:
    east = nodes[1]
    east.classes = ()
    attach_sets(east, east.memory[SETS], torch.full((4, 5), 0.2))
    return [*swap(nodes, "hub", classes=())[:1], east]


def hub_with(nodes: list[Node], **changes: Any) -> list[Node]:
    return swap(nodes, "hub", **changes)


TRAIN, VAL = (tiny_sets()[0].data[name] for name in ("train", "val_rb"))
BAD: list[tuple[Method, Callable[[list[Node]], list[Node]], type[Exception], str]] = [
    (
        FedULM1(),
        lambda n: n[1:],
        ConfigError,
        "no node is called 'hub'. Use a task with unlabelled sets",
    ),
    (
        FedULM2(),
        lambda n: hub_with(n, data=Data(train=TRAIN.x)),
        DataError,
        "fedul-m2 trains on labels at the hub, but its split 'train' has none",
    ),
    (FedULMgda(), lambda n: hub_with(n, data=Data(val_rb=VAL)), DataError, "'train' is missing"),
    (
        FedULM1(),
        lambda n: hub_with(n, data=Data(train=TRAIN), model=Model.none()),
        ModelError,
        "node hub: its model is missing",
    ),
    (FedUL(), lambda n: hub_with(n, data=Data(val_rb=VAL.x)), DataError, "'val_rb' has no labels"),
    (
        FedUL(),
        lambda n: hub_with(n, data=Data(val_rb=VAL), model=Model.none()),
        ModelError,
        "has a split 'val_rb', but no network",
    ),
    (FedUL(), lambda n: other_net(n, "west"), ModelError, "node west differs from that of east"),
    (FedUL(), lambda n: other_net(n, "hub"), ModelError, "node hub differs from that of east"),
    (FedUL(), other_classes, ConfigError, r"of east mean {a, b, c} and those of north mean {a, c"),
    (FedUL(), lambda n: swap(n, "west", memory={}), ConfigError, "node west knows no sets"),
    (
        FedUL(),
        lambda n: swap(n, "east", data=Data(train=n[1].data["train"].x[:7])),
        DataError,
        "node east knows the sets of 25 samples, but its split 'train' has 7",
    ),
    (FedUL(), wide_sets, DataError, "proportions of 5 classes, but its network has 3 outputs"),
    (FedUL(rotate=20), lambda n: n, ConfigError, r"rotate=20 .* node east has shape \[6\]"),
    (FedUL(alpha_g=0.5), lambda n: n[1:], ConfigError, "alpha_g=0.5 goes on from the network"),
    (
        FedULM2(h="auto"),
        lambda n: hub_with(n, data=Data(train=TRAIN)),
        DataError,
        "h='auto' looks for h on the hub's split 'val_rb'",
    ),
    (
        FedUL(),
        lambda n: hub_with(n, data=Data(train=(TRAIN.x, TRAIN.y + 7))),
        DataError,
        "node hub, split 'train': labels run from 7 to 9",
    ),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_federations_are_errors_before_training(case: int) -> None:
    method, spoil, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        done(method, spoil(tiny_sets()))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (FedUL, {"alpha_g": 0.0}, "FedUL.alpha_g must be > 0"),
        (FedUL, {"alpha_g": 1.5}, "FedUL.alpha_g must be between 0 and 1"),
        (FedUL, {"loss": "other"}, "FedUL.loss must be one of 'proper', 'reference'"),
        (FedUL, {"l1": -1.0}, "FedUL.l1 must be >= 0"),
        (FedUL, {"rotate": 200.0}, "FedUL.rotate must be between 0 and 180"),
        (FedUL, {"local_epochs": -1}, "FedUL.local_epochs must be >= 0"),
        (FedULM1, {"hub_epochs": -1}, "FedULM1.hub_epochs must be >= 0"),
        (FedULM2, {"h": 1.5}, "FedULM2.h must be between 0 and 1"),
        (FedULM2, {"hub_start": "there"}, "FedULM2.hub_start must be one of"),
    ],
)
def test_options_that_cannot_be(make: type[Method], options: dict[str, Any], text: str) -> None:
    method = make()
    for name, value in options.items():  # past the type checker of the tests
        object.__setattr__(method, name, value)
    with pytest.raises(ConfigError, match=text):
        method.__post_init__()

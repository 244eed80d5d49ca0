"""FedLinked at the level of the method; the hub's arithmetic is tested in maths/test_procrustes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import EarlyStop, MatchOutput
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.maths.procrustes import link, random_rotation
from polyfed.methods.fedlinked import FedLinked
from polyfed.random import stream
from polyfed.testing import CHECKS, tiny
from polyfed.train import fit

_SMALL: dict[str, Any] = {
    "rounds": 2,
    "batch": 0.4,
    "lr": 5e-3,
    "init_epochs": 2,
    "distil_epochs": 3,
    "finetune_epochs": 2,
    "local_epochs": 3,
    "patience": 1,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"transform": False},
        {"secret_rotation": True, "strength": True, "normalise": "all", "normalise_rows": True},
    ],
    ids=["paper", "ablation", "all options"],
)
def test_conformance(check: str, variant: dict[str, Any]) -> None:
    epochs = {"init_epochs": 1, "distil_epochs": 1, "finetune_epochs": 1, "local_epochs": 1}
    CHECKS[check](FedLinked(**(_SMALL | epochs | variant)), tiny)


# --- the literal Algorithm 3 --------------------------------------------------------------------


def _literal_regularisers(z: dict[str, Tensor], transform: bool) -> dict[str, Tensor]:
    """Lines 7 to 15, one public example at a time."""
    f = {}
    for j, z_j in z.items():
        above, below = torch.zeros_like(z_j), 0.0
        for k, z_k in z.items():
            if k == j:
                continue
            B = torch.eye(z_j.shape[1], dtype=z_j.dtype)
            if transform:
                R = torch.zeros_like(B)
                for a_k, a_j in zip(z_k, z_j, strict=True):
                    R += torch.outer(a_k, a_j)
                U, _, Vh = torch.linalg.svd(R)
                B = Vh.T @ U.T
            rotated = torch.stack([B @ a_k for a_k in z_k])
            g = sum(float(a_j @ b) for a_j, b in zip(z_j, rotated, strict=True))
            above, below = above + g * rotated, below + abs(g)
        f[j] = above / below
    return f


def _literal_algorithm_3(
    nodes: list[Node], method: FedLinked, literal_train: Callable[..., None]
) -> dict[str, nn.Module]:
    """The whole run: pre-training, rounds of exchange, distillation, fine-tuning, training."""
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    data = {node.name: node.data for node in nodes}
    best: dict[str, float] = {}
    snapshot: dict[str, Any] = {}

    def batch(n: int) -> int:
        return max(1, round(method.batch * n))

    def private(name: str, moving: list[nn.Module], epochs: int, *path: Any, stop: bool) -> None:
        train, held = data[name]["train"], data[name]["val_es"]
        literal_train(
            nets[name],
            moving,
            train.x,
            train.y,
            name=name,
            path=path,
            epochs=epochs,
            batch=batch(len(train)),
            lr=method.lr,
            stop=(held.x, held.y, method.patience) if stop and method.patience else None,
        )

    def distil(name: str, f: Tensor, t: int) -> None:
        x0 = data[name]["public"].x
        literal_train(
            nets[name],
            [nets[name].trunk],
            x0,
            f,
            name=name,
            path=("tick", t, "receive", 0),
            epochs=method.distil_epochs,
            batch=batch(len(x0)),
            lr=method.lr,
            loss=lambda net, x, y: functional.mse_loss(net.trunk(x), y),
        )

    for name, net in nets.items():
        private(name, [net], method.init_epochs, "tick", 0, "start", 0, stop=True)
    for t in range(1, method.rounds + 1):
        with torch.no_grad():
            z = {n: net.eval().trunk(data[n]["public"].x).double() for n, net in nets.items()}
        f = _literal_regularisers(z, method.transform)
        for name, net in nets.items():
            path = ("tick", t, "receive")
            distil(name, f[name].float(), t)
            private(name, [net.head], method.finetune_epochs, *path, 1, stop=False)
            private(name, [net], method.local_epochs, *path, 2, stop=True)
            held = data[name]["val_rb"]
            right = (net.eval()(held.x).argmax(1) == held.y).double().mean().item()
            if name not in best or right >= best[name]:
                best[name], snapshot[name] = right, copy.deepcopy(net.state_dict())
    for name, net in nets.items():
        net.load_state_dict(snapshot[name])
    return nets


@pytest.mark.parametrize("transform", [True, False])
def test_equals_the_literal_algorithm_3(
    transform: bool, literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """With BatchNorm, dropout, early stopping and rollback; transform=False is the ablation."""
    method = FedLinked(**_SMALL, transform=transform)
    nets = _literal_algorithm_3(tiny(), method, literal_train)
    done = run(method, tiny(), progress=False)
    for name, node in done.nodes.items():
        assert_close(node, nets[name], 1e-4)


def test_the_ablation_is_another_algorithm() -> None:
    one = run(FedLinked(**_SMALL), tiny(), progress=False)
    other = run(FedLinked(**_SMALL, transform=False), tiny(), progress=False)
    assert _gap(one, other) > 1e-3


# --- identities ---------------------------------------------------------------------------------


def _gap(one: Run, other: Run) -> float:
    """The largest difference between the models of two runs."""
    return max(
        float((tensor.double() - other.nodes[name].model.state()[key].double()).abs().max())
        for name, node in one.nodes.items()
        for key, tensor in node.model.state().items()
    )


def _exchange(method: FedLinked, nodes: list[Node]) -> dict[str, Message]:
    got = {node.name: method.send(node) for node in nodes}
    return dict(method.combine(Node("hub"), got, list(got)))


def test_identical_nodes_are_not_pulled(plain_nodes: Callable[..., list[Node]]) -> None:
    """SPEC 1.8, oracle 7: F_j = Z_j, the distillation loss is 0 and the trunk stays."""
    nodes = plain_nodes(common=True)
    method = FedLinked(
        rounds=1,
        batch=8,
        optimiser="sgd",
        lr=0.1,
        init_epochs=0,
        distil_epochs=3,
        finetune_epochs=0,
        local_epochs=0,
    )
    for node in nodes:
        z = method.send(node).tensors["representations"]
        f = _exchange(method, nodes)[node.name].tensors["regulariser"]
        torch.testing.assert_close(f, z, rtol=0, atol=1e-5)
    done = run(method, nodes, progress=False)
    losses = [m["distil_loss"] for m in done.metrics if "distil_loss" in m]
    assert len(losses) == 3
    assert max(losses) < 1e-10
    for node in nodes:
        for name, tensor in done.nodes[node.name].model.state().items():
            torch.testing.assert_close(tensor, node.model.state()[name], rtol=0, atol=1e-5)


def test_different_nodes_are_pulled(plain_nodes: Callable[..., list[Node]]) -> None:
    """Otherwise the test above shows nothing."""
    method = FedLinked(rounds=1, init_epochs=0, distil_epochs=1, finetune_epochs=0, local_epochs=0)
    done = run(method, plain_nodes(), progress=False)
    assert min(m["distil_loss"] for m in done.metrics if "distil_loss" in m) > 1e-4


def test_a_rotated_trunk_changes_only_its_own_regulariser(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """SPEC 1.8, oracle 9: rotate the last layer of M1; F_1 turns with it, F_0 and F_2 stay."""
    nodes, method = plain_nodes(), FedLinked()
    before = _exchange(method, nodes)
    Q = random_rotation(5, stream(0, "Q"))
    state = nodes[1].model.state()
    nodes[1].model.load(
        {"trunk.2.weight": Q @ state["trunk.2.weight"], "trunk.2.bias": Q @ state["trunk.2.bias"]}
    )
    after = _exchange(method, nodes)
    for name in ("M0", "M1", "M2"):
        f, g = before[name].tensors["regulariser"], after[name].tensors["regulariser"]
        torch.testing.assert_close(g, f @ Q.T if name == "M1" else f, rtol=0, atol=1e-5)
    assert not torch.allclose(
        after["M1"].tensors["regulariser"], before["M1"].tensors["regulariser"], atol=1e-2
    )


@pytest.mark.parametrize("seed", range(2))
def test_rollback_ends_with_the_last_of_the_best_rounds(seed: int) -> None:
    """SPEC 1.8, oracle 10: n rounds without rollback are the first n rounds of a longer run."""
    noisy = _SMALL | {"lr": 0.1, "local_epochs": 1, "init_epochs": 0, "patience": 0}

    def result(rounds: int, rollback: bool) -> Run:
        method = FedLinked(**(noisy | {"rounds": rounds, "rollback": rollback}))
        return run(method, tiny(), seed=seed, progress=False)

    done = result(4, True)
    prefixes = {n: result(n, False) for n in range(1, 5)}
    for name, node in done.nodes.items():
        scores = [
            m["val_rb_accuracy"]
            for m in done.metrics
            if m.get("node") == name and "val_rb_accuracy" in m
        ]
        last_best = max(range(4), key=lambda i: (scores[i], i)) + 1
        wanted = prefixes[last_best].nodes[name].model.state()
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, wanted[key]), (name, scores, key)


def test_without_rollback_it_is_as_if_rounds_could_not_be_judged(
    without: Callable[..., Node],
) -> None:
    noisy = _SMALL | {"rounds": 4, "lr": 0.1, "local_epochs": 1, "init_epochs": 0, "patience": 0}
    method = FedLinked(**noisy, rollback=False)
    unjudged = run(method, [without(node, "val_rb") for node in tiny()], progress=False)
    assert _gap(run(method, tiny(), progress=False), unjudged) == 0
    assert _gap(run(replace(method, rollback=True), tiny(), progress=False), unjudged) > 1e-3


def test_each_phase_moves_its_part_and_not_a_bit_more() -> None:
    """SPEC 1.8, oracle 11: distillation leaves the head, fine-tuning the trunk, buffers too."""
    method = FedLinked(**_SMALL)
    nodes = tiny()
    node = nodes[0]
    moved: dict[str, set[str]] = {}
    reply = Message({"regulariser": torch.randn(20, 5, generator=stream(0, "F"))})
    for index, phase in enumerate(method.receive(node, reply)):
        before = node.model.state()
        fit(node, phase, "here", index)
        after = node.model.state()
        moved[phase.label] = {n for n in after if not torch.equal(after[n], before[n])}
    trunk, head = set(node.model.names("trunk")), set(node.model.names("head"))
    assert list(moved) == ["distil", "finetune", "local"]
    assert moved["distil"] == trunk
    assert moved["finetune"] == head
    assert moved["local"] == trunk | head
    assert "trunk.1.running_mean" in trunk
    assert "regulariser" not in node.memory


def test_what_is_sent_is_the_trunk_output_in_eval_mode() -> None:
    node = tiny()[0]
    node.model.net.train()
    z = FedLinked().send(node).tensors["representations"]
    with torch.no_grad():
        wanted = node.model.net.eval().trunk(node.data["public"].x)
    assert torch.equal(z, wanted)


def test_only_representations_travel() -> None:
    done = run(FedLinked(**_SMALL), tiny(), progress=False)
    crossings = done.ledger.crossings()
    assert len(crossings) == 12
    for c in crossings:
        name = "regulariser" if c.source == "hub" else "representations"
        assert [(t["name"], t["shape"]) for t in c.tensors] == [(name, [20, 5])]
        assert c.bytes == 4 * 20 * 5  # SPEC 1.5: 4 N r up, 4 N r down


# --- eta and strength ---------------------------------------------------------------------------


def test_eta_does_nothing_without_strength() -> None:
    """SPEC, finding 2: eta cancels in F."""
    one = run(FedLinked(**_SMALL, eta=1.0), tiny(), progress=False)
    assert _gap(one, run(FedLinked(**_SMALL, eta=4.0), tiny(), progress=False)) == 0.0
    assert _gap(one, run(FedLinked(**_SMALL, eta=2.97), tiny(), progress=False)) < 1e-4


def test_normalise_does_nothing_without_strength() -> None:
    """SPEC 1.4 b: F is invariant to any factor per receiver."""
    one = run(FedLinked(**_SMALL), tiny(), progress=False)
    assert _gap(one, run(FedLinked(**_SMALL, normalise="all"), tiny(), progress=False)) < 1e-4


def test_strength_weighs_the_distillation_loss_by_the_utilities(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    """The loss of the only step of one full batch is sum_k A[j, k] times the unweighted one."""
    method = FedLinked(
        rounds=1,
        batch=1000,
        eta=2.97,
        init_epochs=0,
        distil_epochs=1,
        finetune_epochs=0,
        local_epochs=0,
    )
    nodes = plain_nodes()
    plain = run(method, nodes, progress=False)
    weighed = run(replace(method, strength=True), nodes, progress=False)
    z = [method.send(node).tensors["representations"] for node in nodes]
    A = link(z, eta=2.97).utilities
    for j, node in enumerate(nodes):
        loss = {
            kind: next(
                m["distil_loss"]
                for m in done.metrics
                if m.get("node") == node.name and "distil_loss" in m
            )
            for kind, done in (("plain", plain), ("weighed", weighed))
        }
        assert loss["weighed"] / loss["plain"] == pytest.approx(float(A[j].sum()), rel=1e-4)
    assert len({round(float(a), 4) for a in A.sum(1)}) == 3


def test_with_strength_eta_is_a_step_size() -> None:
    """Under plain descent, twice eta is twice the learning rate of distillation."""
    options = _SMALL | {"optimiser": "sgd", "rounds": 1, "local_epochs": 0, "finetune_epochs": 0}
    options |= {"init_epochs": 0, "strength": True}
    weak = run(FedLinked(**(options | {"eta": 2.0, "lr": 0.1})), tiny(), progress=False)
    strong = run(FedLinked(**(options | {"eta": 4.0, "lr": 0.1})), tiny(), progress=False)
    faster = run(FedLinked(**(options | {"eta": 2.0, "lr": 0.2})), tiny(), progress=False)
    assert _gap(weak, strong) > 1e-3
    assert _gap(strong, faster) < 1e-5


def test_the_phase_carries_the_weight() -> None:
    f = torch.zeros(20, 5)
    method = FedLinked(strength=True)
    message = Message({"regulariser": f, "strength": torch.tensor(2.5)})
    phase = next(iter(method.receive(tiny()[0], message)))
    assert phase.objective == MatchOutput("trunk", 2.5)
    assert (phase.label, phase.parts, phase.split) == ("distil", ("trunk",), "public")


@pytest.mark.parametrize(
    "option",
    [{"eta": 1.5}, {"normalise": "all"}, {"normalise_rows": True}, {"transform": False}],
    ids=lambda option: next(iter(option)),
)
def test_the_hub_links_as_the_options_say(
    option: dict[str, Any], plain_nodes: Callable[..., list[Node]]
) -> None:
    method, plain, hub = FedLinked(**option), FedLinked(), Node("hub")
    got = {node.name: method.send(node) for node in plain_nodes()}
    replies = method.combine(hub, got, list(got))
    z = [message.tensors["representations"] for message in got.values()]
    wanted, usual = link(z, **({"eta": plain.eta} | option)), link(z, eta=plain.eta)
    assert hub.notes["utilities"]["rows"] == wanted.utilities.tolist()
    assert not torch.allclose(wanted.utilities, usual.utilities)
    for j, name in enumerate(got):
        assert torch.equal(replies[name].tensors["regulariser"], wanted.regularisers[j])


def test_init_and_local_epochs_are_the_ones_that_stop_early() -> None:
    method, node = FedLinked(**(_SMALL | {"patience": 3})), tiny()[0]
    (init,) = method.start(node)
    reply = Message({"regulariser": torch.zeros(20, 5)})
    stops = {phase.label: phase.stop for phase in (init, *method.receive(node, reply))}
    early = EarlyStop(patience=3)
    assert stops == {"init": early, "distil": None, "finetune": None, "local": early}


def test_utilities_are_in_the_metrics() -> None:
    done = run(FedLinked(**_SMALL, eta=2.97), tiny(), progress=False)
    notes = [m["utilities"] for m in done.metrics if m.get("node") == "hub"]
    assert len(notes) == 2
    for note in notes:
        assert note["nodes"] == ["M0", "M1", "M2"]
        rows = torch.tensor(note["rows"])
        torch.testing.assert_close(rows.norm(dim=1), torch.full((3,), 2.97))
        assert rows.diagonal().tolist() == [0, 0, 0]


# --- secret rotation ----------------------------------------------------------------------------


def test_a_secret_rotation_hides_the_basis_and_changes_nothing_else() -> None:
    """SPEC 1.5: the trained model is the same; what is sent has another basis, the same Gram."""
    open_, secret = FedLinked(**_SMALL), FedLinked(**_SMALL, secret_rotation=True)
    assert _gap(run(open_, tiny(), progress=False), run(secret, tiny(), progress=False)) < 1e-4
    for node in tiny():
        z = open_.send(node).tensors["representations"]
        hidden = secret.send(node).tensors["representations"]
        assert (hidden - z).abs().max() > 0.1
        torch.testing.assert_close(hidden @ hidden.T, z @ z.T, rtol=0, atol=1e-5)


def test_every_node_has_a_secret_of_its_own_for_the_whole_run() -> None:
    """Equal nodes send different numbers; the same node the same ones again."""
    method = FedLinked(secret_rotation=True)
    sent = [method.send(node).tensors["representations"] for node in tiny()]
    assert not torch.allclose(sent[0], sent[1], atol=1e-2)
    assert torch.equal(sent[0], method.send(tiny()[0]).tensors["representations"])
    other_run = replace(tiny()[0], seed=1)
    assert not torch.allclose(sent[0], method.send(other_run).tensors["representations"], atol=1e-2)


def test_a_secret_rotation_needs_the_transformation() -> None:
    with pytest.raises(ConfigError, match="secret_rotation needs transform=True"):
        FedLinked(secret_rotation=True, transform=False)


# --- different nodes, and wrong ones ------------------------------------------------------------


def test_different_networks_and_classes_work(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [tiny()[0], plain_nodes()[1], plain_nodes(classes=7)[2]]
    done = run(FedLinked(**_SMALL), nodes, progress=False)
    assert not done.faults
    for node in done.nodes.values():
        assert all(bool(torch.isfinite(t).all()) for t in node.model.state().values())


def test_networks_in_float64_link_with_others() -> None:
    """Representations travel in float32, whatever networks compute in."""

    def doubled(node: Node) -> Node:
        splits: dict[str, Any] = {
            name: split.x.double() if split.y is None else (split.x.double(), split.y)
            for name, split in node.data.items()
        }
        model = node.model.copy()
        model.net.double()
        return replace(node, data=Data(**splits), model=model)

    method, plain = FedLinked(**_SMALL), tiny()
    one, other = run(method, plain), run(method, [doubled(node) for node in plain])
    assert not other.faults
    for name, node in one.nodes.items():
        for key, value in other.nodes[name].model.state().items():
            torch.testing.assert_close(
                value.to(node.model.state()[key]), node.model.state()[key], rtol=0, atol=0.01
            )


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("training began")

    monkeypatch.setattr("polyfed.train.together.fit", refuse)


def _with_public(node: Node, x: Tensor | None) -> Node:
    splits = {n: s for n, s in node.data.items() if n != "public"}
    return replace(node, data=Data(**splits, public=x))


@pytest.mark.usefixtures("no_training")
def test_different_representation_sizes_are_an_error(
    plain_nodes: Callable[..., list[Node]],
) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=7)[2]]
    with pytest.raises(ModelError, match="representation sizes differ: M0 5, M1 5, M2 7"):
        run(FedLinked(), nodes, progress=False)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[:-1], "node M1 holds 19 public inputs, M0 holds 20"),
        (lambda x: x.flip(0), "public inputs of node M1 differ from those of M0"),
        (lambda x: x + 1e-6, "public inputs of node M1 differ from those of M0"),
        (lambda x: None, "node M1 has no split 'public'"),
    ],
    ids=["fewer", "another order", "other values", "none"],
)
def test_another_public_set_is_an_error(change: Callable[[Tensor], Any], says: str) -> None:
    nodes = tiny()
    nodes[1] = _with_public(nodes[1], change(nodes[1].data["public"].x))
    with pytest.raises(DataError, match=says):
        run(FedLinked(), nodes, progress=False)


def test_an_equal_copy_of_the_public_set_is_fine() -> None:
    nodes = tiny()
    nodes[1] = _with_public(nodes[1], nodes[1].data["public"].x.clone())
    one, other = run(FedLinked(**_SMALL), nodes, progress=False), tiny()
    assert _gap(one, run(FedLinked(**_SMALL), other, progress=False)) == 0.0


@pytest.mark.usefixtures("no_training")
def test_a_trunk_that_puts_out_maps_is_an_error() -> None:
    def node(name: str) -> Node:
        net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        x = torch.randn(4, 1, 6, generator=stream(0, name))
        data = Data(train=Split(x, torch.arange(4) % 2), public=torch.zeros(3, 1, 6))
        return Node(name, data, Model.split(net, trunk="0", head=("1", "2")))

    with pytest.raises(ModelError, match=r"part 'trunk' puts out \[2, 4\] per sample"):
        run(FedLinked(), [node("A"), node("B")], progress=False)


def test_a_message_of_nan_is_refused_and_the_others_link() -> None:
    """M2's trunk is NaN: M0 and M1 do what they do without it; M2 hears nothing."""
    nodes = tiny()
    nodes[2].model.load({"trunk.4.bias": torch.full((5,), torch.nan)})
    done = run(FedLinked(**(_SMALL | {"rounds": 1})), nodes, progress=False)
    refused = [f for f in done.faults if f["fault"] == "message refused"]
    assert [(f["node"], f["to"]) for f in refused] == [("M2", "hub")]
    assert [c.to for c in done.ledger.crossings() if c.source == "hub"] == ["M0", "M1"]
    pair = run(FedLinked(**(_SMALL | {"rounds": 1})), tiny()[:2], progress=False)
    assert _gap(pair, done) == 0.0


def test_an_absent_node_stands_still_and_the_others_link() -> None:
    options = _SMALL | {"rounds": 1, "init_epochs": 0}
    done = run(FedLinked(**options), tiny(), absent={1: ["M2"]}, progress=False)
    assert [(f["tick"], f["node"], f["fault"]) for f in done.faults] == [(1, "M2", "absent")]
    assert _gap(run(FedLinked(**options), tiny()[:2], progress=False), done) == 0.0
    for name, tensor in tiny()[2].model.state().items():
        assert torch.equal(tensor, done.nodes["M2"].model.state()[name]), name


def test_a_node_alone_is_distilled_towards_itself(plain_nodes: Callable[..., list[Node]]) -> None:
    options = _SMALL | {"rounds": 1, "init_epochs": 0, "batch": 1000, "distil_epochs": 1}
    done = run(FedLinked(**options), plain_nodes()[:1], progress=False)
    assert [m["distil_loss"] for m in done.metrics if "distil_loss" in m] == [
        pytest.approx(0, abs=1e-10)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"eta": 0.0},
        {"init_epochs": -1},
        {"distil_epochs": -1},
        {"finetune_epochs": -1},
        {"local_epochs": -1},
        {"patience": -1},
        {"batch": 0.0},
        {"lr": -1.0},
    ],
)
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FedLinked(**wrong)

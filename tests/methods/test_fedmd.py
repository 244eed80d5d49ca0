"""FedMD, with labels and without: against its algorithm written out, and what it promises."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError, ModelError
from polyfed.methods._consensus import AbsoluteError
from polyfed.methods.fedbyol import BYOLAlone
from polyfed.methods.fedmd import FedMD, FedMDSSL
from polyfed.methods.local import Local
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny

MD: dict[str, Any] = {"batch": 11, "alignment": 12, "public_batch": 5, "init_epochs": 2}
MD |= {"revisit_epochs": 1, "digest_epochs": 2, "patience": 0, "lr": 1e-3}
SSL: dict[str, Any] = {"batch": 8, "local_epochs": 1, "projection": 4, "predictor_hidden": 6}
SSL |= {"probe_epochs": 0, "alignment": 12, "public_batch": 5}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("alignment", [0, 12])
def test_conformance(check: str, alignment: int) -> None:
    CHECKS[check](FedMD(**{**MD, "batch": 8, "alignment": alignment}), tiny)


@pytest.mark.filterwarnings("ignore::polyfed.methods.fedbyol.CollapseWarning")  # 'stacked'
@pytest.mark.parametrize("check", CHECKS)
def test_conformance_without_labels(check: str) -> None:
    CHECKS[check](FedMDSSL(**SSL), tiny)


def different(seed: int = 0) -> list[Node]:
    """The tiny federation, but M2 has another network."""
    nodes = tiny(seed)
    with ambient(seed, "different"):
        trunk = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh())
        net = nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(9, 3)))
    nodes[2].model = Model.split(net, trunk="trunk", head="head")
    return nodes


def _absolute(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over samples and outputs of |net(x) - y|, one by one."""
    out = net(x)
    terms = [(out[i, j] - y[i, j]).abs() for i in range(len(x)) for j in range(out.shape[1])]
    return torch.stack(terms).sum() / len(terms)


def test_equals_the_literal_algorithm(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Li and Wang 2019, Algorithm 1: three different networks, 12 of 20 public inputs a round."""
    method, nodes = FedMD(rounds=3, **MD), different()
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    public = nodes[0].data["public"].x

    def train(node: Node, path: tuple[Any, ...], epochs: int) -> None:
        net, split = nets[node.name], node.data["train"]
        settings: Any = {"name": node.name, "epochs": epochs, "batch": 11, "lr": method.lr}
        literal_train(net, [net], split.x, split.y, path=path, **settings)

    for node in nodes:
        train(node, ("tick", 0, "start", 0), method.init_epochs)
    for t in range(1, 4):
        drawn = torch.randperm(20, generator=stream(0, "aligned", t))[:12]
        X = public[drawn]
        scores = []
        for net in nets.values():
            net.eval()
            with torch.no_grad():
                scores.append(net(X))
        consensus = (scores[0] + scores[1] + scores[2]) / 3
        for node in nodes:
            net, path = nets[node.name], ("tick", t, "receive", 0)
            settings: Any = {"name": node.name, "path": path, "epochs": 2, "batch": 5}
            literal_train(net, [net], X, consensus, lr=method.lr, loss=_absolute, **settings)
            train(node, ("tick", t, "receive", 1), method.revisit_epochs)
    done = run(method, nodes, progress=False)
    for name, net in nets.items():
        assert_close(done.nodes[name], net, 2e-5)


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


def test_without_digestion_it_is_local_training() -> None:
    settings = {**MD, "digest_epochs": 0, "revisit_epochs": 0}
    done = run(FedMD(rounds=2, **settings), tiny(), progress=False)
    local = run(
        Local(
            rounds=1, batch=11, lr=1e-3, init_epochs=2, local_epochs=0, rollback=False, patience=0
        ),
        tiny(),
        progress=False,
    )
    assert_same(states(done), states(local))


@pytest.mark.parametrize("n", [0, 20, 99])
def test_all_public_inputs_are_used_if_no_fewer_are_asked_for(n: int) -> None:
    done = run(FedMD(rounds=1, **{**MD, "alignment": n}), tiny(), progress=False)
    shapes = {t["name"]: t["shape"] for t in done.ledger.crossings()[0].tensors}
    assert shapes == {"scores": [20, 3], "aligned_round": []}


def test_other_inputs_are_drawn_every_round() -> None:
    seen: list[Tensor] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(FedMD):
        def tell(self, node: Node, x: Tensor) -> Tensor:
            if len(x) > 1:
                seen.append(x)
            return super().tell(node, x)

    run(Watched(rounds=2, **MD), tiny(), progress=False)
    assert len(seen) == 6
    for x in seen[:3]:
        assert torch.equal(x, seen[0])  # the same for everybody
    assert not torch.equal(seen[3], seen[0])
    assert len(seen[0].unique(dim=0)) == 12


def test_who_was_away_is_not_averaged_with_other_inputs() -> None:
    """In round 2, M0 tells of the inputs of round 1: the others agree without it, and it hears."""
    consensus: dict[tuple[int, str], Tensor] = {}
    told: dict[tuple[int, str], Tensor] = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(FedMD):
        def send(self, node: Node) -> Message:
            message = super().send(node)
            told[int(message.tensors["aligned_round"]), node.name] = message.tensors["scores"]
            return message

        def receive(self, node: Node, message: Message) -> Any:
            t = int(message.tensors["aligned_round"])
            consensus[t, node.name] = message.tensors["consensus"]
            return super().receive(node, message)

    done = run(Watched(rounds=3, **MD), tiny(), absent={1: ["M0"]}, progress=False)
    assert [f["fault"] for f in done.faults] == ["absent"]
    assert set(consensus) == {
        (1, "M1"),
        (1, "M2"),
        *((t, f"M{i}") for t in (2, 3) for i in range(3)),
    }
    pair = (told[2, "M1"] + told[2, "M2"]) / 2
    torch.testing.assert_close(consensus[2, "M0"], pair)
    every = (told[3, "M0"] + told[3, "M1"] + told[3, "M2"]) / 3
    torch.testing.assert_close(consensus[3, "M0"], every)


def test_data_are_as_they_were() -> None:
    done = run(FedMD(rounds=1, **MD), tiny(), progress=False)
    assert [*done.nodes["M0"].data] == [*tiny()[0].data]
    assert done.nodes["M0"].data.may_miss_classes is False


# --- without labels -------------------------------------------------------------------------------


def test_projections_are_digested_and_the_predictor_stays() -> None:
    """One round: BYOL as alone, then one step of SGD towards the mean projection, by hand."""
    method = FedMDSSL(rounds=1, digest_epochs=1, **{**SSL, "public_batch": 12})
    own = {k: v for k, v in SSL.items() if k not in ("alignment", "public_batch")}
    alone = run(BYOLAlone(rounds=1, **own), tiny(), progress=False)
    X = tiny()[0].data["public"].x
    drawn = X[torch.randperm(20, generator=stream(0, "aligned", 1))[:12]]
    nets = {name: node.model.net for name, node in alone.nodes.items()}
    with torch.no_grad():
        Z = [net.eval().projector(net.trunk(drawn)) for net in nets.values()]
    done = run(method, tiny(), progress=False)
    path = ("tick", 1, "receive", 0)
    for name, net in nets.items():
        order = torch.randperm(12, generator=stream(0, "node", name, "batches", *path))
        got, before = done.nodes[name].model.state(), copy.deepcopy(net.state_dict())
        net.trunk.train()
        with ambient(0, "node", name, "noise", *path):
            z = net.projector(net.trunk(drawn[order]))
        (z - (sum(Z) / 3)[order]).abs().mean().backward()
        moved = dict(net.named_parameters())
        for key in before:
            if key.startswith(("predictor", "target")):
                assert torch.equal(got[key], before[key]), key
            elif key in moved:
                gradient = moved[key].grad + method.weight_decay * before[key]
                wanted = before[key] - method.lr * gradient
                torch.testing.assert_close(got[key], wanted, rtol=0, atol=1e-6, msg=key)
    assert {t["name"] for c in done.ledger.crossings() for t in c.tensors} == {
        "scores",
        "consensus",
        "aligned_round",
    }
    told = [c for c in done.ledger.crossings() if c.to == "hub"]
    assert [c.tensors[0]["shape"] for c in told] == [[12, 4]] * 3


def test_labels_do_not_influence_self_supervised_training() -> None:
    honest, shuffled = tiny(), tiny()
    for node in shuffled:
        train = node.data["train"]
        y = train.y[torch.randperm(len(train), generator=stream(1, node.name))]
        node.data = Data(**{**node.data, "train": Split(train.x, y)})
    method = FedMDSSL(rounds=2, **SSL)
    assert_same(states(run(method, honest)), states(run(method, shuffled)))


# --- what is wrong --------------------------------------------------------------------------------


def test_the_objective_is_the_mean_absolute_difference() -> None:
    net = nn.Sequential(OrderedDict(trunk=nn.Linear(2, 2), head=nn.Linear(2, 1)))
    model = Model.split(net, trunk="trunk", head="head")
    model.load({"trunk.weight": torch.eye(2), "trunk.bias": torch.zeros(2)})
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert AbsoluteError("trunk").losses(model, x, y).tolist() == [1.5]
    with pytest.raises(ConfigError, match="AbsoluteError needs targets"):
        AbsoluteError()(model, x, None)


@pytest.mark.parametrize("cls", [FedMD, FedMDSSL])
def test_a_missing_public_set_is_an_error(cls: Any, without: Callable[..., Node]) -> None:
    settings = MD if cls is FedMD else SSL
    nodes = tiny()
    nodes[1] = without(nodes[1], "public")
    with pytest.raises(DataError, match=f"node M1 has no split 'public'. {cls.name} compares"):
        run(cls(**settings), nodes, progress=False)


def test_another_order_of_public_inputs_is_an_error() -> None:
    nodes = tiny()
    turned = nodes[2].data["public"].x.flip(0)
    nodes[2].data = Data(**{**nodes[2].data, "public": Split(turned)})
    with pytest.raises(DataError, match="public inputs of node M2 differ from those of M0"):
        run(FedMD(**MD), nodes, progress=False)


def test_other_classes_are_an_error() -> None:
    nodes = tiny()
    nodes[1].classes = ("a", "b", "d")
    with pytest.raises(ConfigError, match=r"M0 mean \{a, b, c\} and those of M1 mean \{a, b, d\}"):
        run(FedMD(**MD), nodes, progress=False)


def test_other_numbers_of_outputs_are_an_error() -> None:
    nodes = tiny()
    net = nn.Sequential(OrderedDict(trunk=nn.Linear(6, 5), head=nn.Linear(5, 4)))
    nodes[0] = replace(nodes[0], model=Model.split(net, trunk="trunk", head="head"))
    with pytest.raises(ModelError, match="its sizes differ: M0 4, M1 3, M2 3"):
        run(FedMD(**MD), nodes, progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alignment": -1}, {"public_batch": 0}, {"digest_epochs": -1}, {"init_epochs": -1},
        {"revisit_epochs": -1}, {"patience": -1},
    ],
)  # fmt: skip
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FedMD(**wrong)

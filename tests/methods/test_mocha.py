from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import cross_entropy
from polyfed.engines.run import run
from polyfed.errors import ConfigError, ModelError
from polyfed.maths.relation import relation
from polyfed.methods.mocha import MOCHA, Related
from polyfed.testing import CHECKS, tiny
from polyfed.train import mean_loss


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](MOCHA(batch=8, lr=1e-2, local_epochs=1), tiny)


def _column(net: nn.Module) -> Tensor:
    return torch.cat([net.head.bias.flatten(), net.head.weight.flatten()])


def _literal_bound(W: Tensor, old: Tensor, omega: Tensor, method: MOCHA) -> Tensor:
    """The regulariser of F at W, bounded from the state `old` by Gershgorin's circles."""
    D = W - old
    trace = (old @ omega @ old.T).trace() + 2 * (D @ omega @ old.T).trace()
    for t in range(W.shape[1]):
        trace = trace + omega[t].abs().sum() * D[:, t].square().sum()
    return method.lam1 * trace + method.lam2 * W.square().sum()


def _literal_loss(
    net: nn.Module, x: Tensor, y: Tensor, *, t: int, old: Tensor, omega: Tensor, method: MOCHA
) -> Tensor:
    columns = [old[:, s] if s != t else _column(net) for s in range(old.shape[1])]
    penalty = _literal_bound(torch.stack(columns, 1), old, omega, method)
    return functional.cross_entropy(net(x), y) + penalty


def _literal_mocha(
    nodes: list[Node], method: MOCHA, literal_train: Callable[..., None]
) -> dict[str, nn.Module]:
    """Smith et al. 2017, Algorithm 1: Omega from W, then every column, each from the same W."""
    nets = [copy.deepcopy(node.model.net) for node in nodes]
    for net in nets:
        nn.init.zeros_(net.head.weight)
        nn.init.zeros_(net.head.bias)
    for h in range(1, method.rounds + 1):
        old = torch.stack([_column(net) for net in nets], 1).detach()
        gram = torch.linalg.eigh(old.double().T @ old.double() + method.ridge * torch.eye(3))
        root = gram.eigenvectors @ gram.eigenvalues.sqrt().diag() @ gram.eigenvectors.T
        omega = torch.linalg.inv(root / root.trace()).float()
        for t, (node, net) in enumerate(zip(nodes, nets, strict=True)):
            literal_train(
                net,
                [net.head],
                node.data["train"].x,
                node.data["train"].y,
                name=node.name,
                path=("tick", h, "receive", 0),
                epochs=method.local_epochs,
                batch=int(method.batch),
                lr=method.lr,
                loss=partial(_literal_loss, t=t, old=old, omega=omega, method=method),
            )
    return {node.name: net for node, net in zip(nodes, nets, strict=True)}


def test_equals_the_literal_algorithm(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    method = MOCHA(rounds=4, batch=11, lr=1e-2, local_epochs=3, lam1=0.02, lam2=0.03, ridge=1e-2)
    nets = _literal_mocha(tiny(), method, literal_train)
    done = run(method, tiny(), progress=False)
    for name, node in done.nodes.items():
        assert_close(node, nets[name], 2e-5)
        assert torch.count_nonzero(node.model.state()["head.weight"])


def _objective(nodes: dict[str, Node], method: MOCHA) -> float:
    """F of Eq. (1) with the best Omega, which has (maths/relation.py) ridge * tr(Omega) beside."""
    columns = [_column(node.model.net).detach().double() for node in nodes.values()]
    W = torch.stack(columns, 1)
    omega = torch.linalg.inv(relation(W, method.ridge))
    loss = sum(mean_loss(n.model, n.data["train"], cross_entropy) for n in nodes.values())
    regular = (W @ omega @ W.T).trace() + method.ridge * omega.trace()
    return loss + float(method.lam1 * regular + method.lam2 * W.square().sum())


def _linear_nodes() -> list[Node]:
    """Raw inputs as features; M1 sees the opposite labels of M0, M2 is like M0."""
    nodes, data = [], tiny()[0].data
    for node, flip in zip(tiny(), (False, True, False), strict=True):
        splits = {n: (s.x, 2 - s.y if flip else s.y) for n, s in data.items() if s.y is not None}
        net = nn.Sequential(OrderedDict(trunk=nn.Flatten(), head=nn.Linear(6, 3)))
        for p in net.parameters():
            nn.init.zeros_(p)
        model = Model.split(net, trunk="trunk", head="head")
        nodes.append(Node(node.name, type(data)(**splits), model, node.classes))
    return nodes


def test_the_joint_objective_falls_in_every_round() -> None:
    """Although all nodes move at once: each lowers a bound of it."""
    settings: dict[str, Any] = {"batch": 1000, "optimiser": "sgd", "lr": 2e-3, "local_epochs": 20}
    values = []
    for rounds in range(1, 8):
        method = MOCHA(rounds=rounds, lam1=0.1, lam2=0.01, ridge=1e-2, **settings)
        values.append(_objective(run(method, _linear_nodes(), progress=False).nodes, method))
    falls = [a - b for a, b in pairwise(values)]
    assert min(falls) > 0
    assert values[0] - values[-1] > 0.05


def test_the_relation_is_found_and_noted() -> None:
    """The same data: M2 learns what M0 does; M1, whose labels are turned round, something else."""
    method = MOCHA(rounds=10, batch=1000, lr=1e-2, local_epochs=20)
    done = run(method, _linear_nodes(), progress=False)
    noted = [m["relation"] for m in done.metrics if m.get("node") == "hub"]
    assert len(noted) == 10
    assert noted[0]["nodes"] == ["M0", "M1", "M2"]
    torch.testing.assert_close(torch.tensor(noted[0]["rows"]), torch.eye(3) / 3)
    last = torch.tensor(noted[-1]["rows"])
    related = last / last.diag().outer(last.diag()).sqrt()
    assert related[0, 2] > 0.95
    assert related[0, 1] < 0.5


def test_one_node_is_ridge_regression() -> None:
    """Omega = 1, and the bound is exact: gradient descent on cross-entropy + (l1 + l2) |w|^2."""
    node = _linear_nodes()[0]
    settings: dict[str, Any] = {"batch": 1000, "optimiser": "sgd", "lr": 0.1, "local_epochs": 5}
    method = MOCHA(rounds=2, lam1=0.2, lam2=0.1, **settings)
    done = run(method, [node], progress=False)
    net = copy.deepcopy(node.model.net)
    for _ in range(10):
        x, y = node.data["train"].x, node.data["train"].y
        loss = functional.cross_entropy(net(x), y)
        loss = loss + 0.3 * sum(p.square().sum() for p in net.parameters())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            p.data -= 0.1 * gradient
    for name, value in net.state_dict().items():
        torch.testing.assert_close(done.nodes["M0"].model.state()[name], value, rtol=0, atol=1e-6)


def _said(*values: float) -> Message:
    return Message({"b": torch.tensor(values[:1]), "w": torch.tensor([values[1:]])})


def test_the_hub_tells_the_pull_of_all_tasks_and_the_bend() -> None:
    """Two tasks with w . w' = 0 and lengths 5 and 13: Sigma = diag(5, 13) / 18."""
    got = {"A": _said(3.0, 4.0, 0.0), "B": _said(0.0, 0.0, 13.0)}
    replies = MOCHA(ridge=1e-12).combine(Node("hub"), got, ["A", "B"])
    for name, omega in (("A", 18 / 5), ("B", 18 / 13)):
        told, own = replies[name].tensors, got[name].tensors
        assert told["bend"].item() == pytest.approx(omega, rel=1e-5)
        for key, w in own.items():
            torch.testing.assert_close(told[key], omega * w)


def test_related_tasks_pull_on_each_other() -> None:
    """p_A = Omega_AA w_A + Omega_AB w_B and r_A = |Omega_AA| + |Omega_AB|, with a ridge of 1/2."""
    got = {"A": _said(1.0, 2.0, 0.0), "B": _said(2.0, 1.0, 1.0)}
    W = torch.stack([torch.cat([m.tensors["b"], m.tensors["w"][0]]) for m in got.values()], 1)
    omega = torch.linalg.inv(relation(W, 0.5)).float()
    assert omega[0, 1] < 0
    told = MOCHA(ridge=0.5).combine(Node("hub"), got, ["A"])["A"].tensors
    wanted = omega[0, 0] * W[:, 0] + omega[0, 1] * W[:, 1]
    torch.testing.assert_close(torch.cat([told["b"], told["w"][0]]), wanted)
    torch.testing.assert_close(told["bend"], omega[0, 0] - omega[0, 1])


def test_a_node_that_is_away_counts_with_what_it_last_sent() -> None:
    """The paper: a node that drops out makes no update, and its column stays."""
    method, hub = MOCHA(), Node("hub")
    both = {"A": _said(1.0, 2.0, 0.0), "B": _said(2.0, 1.0, 1.0)}
    method.combine(hub, both, ["A", "B"])
    later = {"A": _said(1.5, 2.0, 0.0)}
    told = method.combine(hub, later, ["A"])
    wanted = method.combine(Node("hub"), both | later, ["A"])
    assert told.keys() == {"A"}
    for name, tensor in told["A"].tensors.items():
        assert torch.equal(tensor, wanted["A"].tensors[name])


def test_heads_travel_and_trunks_stay_bit_for_bit() -> None:
    done = run(MOCHA(rounds=2, batch=8), tiny(), progress=False)
    head = {"head.weight", "head.bias"}
    up = {t["name"] for c in done.ledger.crossings() if c.to == "hub" for t in c.tensors}
    down = {t["name"] for c in done.ledger.crossings() if c.source == "hub" for t in c.tensors}
    assert (up, down) == (head, head | {"bend"})
    for node, given in zip(done.nodes.values(), tiny(), strict=True):
        for name, tensor in node.model.state("trunk").items():
            assert torch.equal(tensor, given.model.state()[name]), name


def test_the_mean_of_the_losses_is_the_objective() -> None:
    node = tiny()[0]
    x, y = node.data["train"].x, node.data["train"].y
    pull = {"head.bias": torch.ones(3)}
    start = {"head.bias": torch.zeros(3)}
    b = node.model.state()["head.bias"]
    node.model.net.eval()
    got = Related(pull, torch.tensor(2.0), start, 0.1, 0.01)(node.model, x, y)
    wanted = functional.cross_entropy(node.model(x), y)
    wanted = wanted + 0.1 * (2 * b.sum() + 2 * b.square().sum()) + 0.01 * b.square().sum()
    torch.testing.assert_close(got, wanted)


def test_other_features_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    with pytest.raises(ModelError, match=r"'trunk\.0\.weight' of node M1 has other values than"):
        run(MOCHA(), plain_nodes(), progress=False)
    run(MOCHA(rounds=1), plain_nodes(common=True), progress=False)


def test_other_heads_are_an_error(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes(common=True)[:2], plain_nodes(common=True, classes=4)[2]]
    with pytest.raises(ModelError, match="part 'head' of node M2 differs"):
        run(MOCHA(), nodes, progress=False)


def test_a_deep_head_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    nodes = [replace(n, model=Model.split(net, trunk="0", head=...)) for n in tiny()]
    with pytest.raises(ModelError, match="must be one linear layer on the 5 outputs of the trunk"):
        run(MOCHA(), nodes, progress=False)


@pytest.mark.parametrize(
    "wrong", [{"lam1": 0.0}, {"lam2": -1.0}, {"ridge": 0.0}, {"local_epochs": -1}]
)
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"MOCHA.{next(iter(wrong))} must be"):
        MOCHA(**wrong)

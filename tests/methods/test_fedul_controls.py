"""The controls of FedUL against bare loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, DataError
from polyfed.methods.fedul import IdentifiabilityWarning
from polyfed.methods.fedul_controls import FedLLP, FedPL, GuessedLabels, HubOnly
from polyfed.testing import CHECKS
from polyfed.testing.sets import tiny_sets
from polyfed.train import outputs
from polyfed.train.surrogate import SETS, attach_sets, set_proportions

SMALL: dict[str, Any] = {"batch": 8, "lr": 1e-2}
CONTROLS = [FedLLP(**SMALL), FedPL(**SMALL, warm=1), HubOnly(**SMALL)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", CONTROLS, ids=lambda m: m.name)
def test_conformance(check: str, method: Method) -> None:
    CHECKS[check](method, tiny_sets)


def done(method: Method, nodes: Sequence[Node] | None = None) -> Run:
    return run(method, tiny_sets() if nodes is None else nodes, progress=False)


# ---- proportions ---------------------------------------------------------------------------------


def proportion_loss(net: nn.Module, x: Tensor, m: Tensor, node: Node, l1: float) -> Tensor:
    """sum over sets of (n_m / n) sum_k Pi_mk log(Pi_mk / mean eta_k), one set at a time."""
    eta, Pi = functional.softmax(net(x), 1), set_proportions(node.model)
    total = l1 * sum(p.abs().sum() for p in net.parameters())
    for i in m.unique().tolist():
        mean = eta[m == i].mean(0)
        held = Pi[i] > 0
        kl = (Pi[i][held] * (Pi[i][held] / mean[held]).log()).sum()
        total = total + kl * (m == i).sum() / len(m)
    return torch.as_tensor(total)


def test_fedllp_is_the_mean_of_bare_loops(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    method = FedLLP(rounds=1, batch=11, lr=3e-3, local_epochs=2, l1=1e-4)
    hub, *nodes = tiny_sets()
    mean = copy.deepcopy(hub.model.net)
    trained = []
    for node in nodes:
        net = copy.deepcopy(node.model.net)
        literal_train(
            net, [net], node.data["train"].x, node.memory[SETS], name=node.name,
            path=("tick", 1, "local", 0), epochs=2, batch=11, lr=3e-3,
            loss=lambda net, x, m, node=node: proportion_loss(net, x, m, node, 1e-4),
        )  # fmt: skip
        trained.append(net.state_dict())
    for name, value in mean.state_dict().items():
        exact = sum(state[name].double() for state in trained) / 3
        value.copy_(exact if value.is_floating_point() else exact.round())
    ended = done(method)
    assert_close(ended.places["hub"], mean, 2e-5)
    assert_close(ended.nodes["west"], mean, 2e-5)


def test_fedllp_warns_of_sets_that_tell_nothing() -> None:
    nodes = tiny_sets()
    attach_sets(nodes[2], nodes[2].memory[SETS], torch.full((4, 3), 1 / 3))
    with pytest.warns(IdentifiabilityWarning, match=r"fedllp: alone, the sets of north \(rank 1\)"):
        done(FedLLP(rounds=0), nodes)


# ---- guesses -------------------------------------------------------------------------------------


def test_at_first_a_sample_is_taken_for_the_most_frequent_class_of_its_set() -> None:
    """Pi of east is ((7, 0, 1), (2, 6, 0), (0, 2, 5), (0, 0, 2)), divided by its sums."""
    node = tiny_sets()[1]
    method = FedPL(warm=2)
    phases = list(method.local(node))
    assert [phase.target for phase in phases] == ["pseudo_labels"]
    most = [0, 1, 2, 2]
    assert node.memory["pseudo_labels"].tolist() == [most[m] for m in node.memory[SETS].tolist()]
    assert node.notes["guessed"] == 1.0
    before = node.memory["pseudo_labels"]
    list(method.local(node))
    assert torch.equal(node.memory["pseudo_labels"], before)
    list(method.local(node))  # round 3: the network's own guesses
    assert not torch.equal(node.memory["pseudo_labels"], before)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.6, 1.0])
def test_later_it_is_the_network_that_guesses_where_it_is_sure(threshold: float) -> None:
    node = tiny_sets()[1]
    node.model.load({"head.weight": 6 * node.model.state()["head.weight"]})
    list(FedPL(warm=0, threshold=threshold).local(node))
    guess, sure = node.memory["pseudo_labels"].tolist(), 0
    scores = outputs(node.model, node.data["train"].x).tolist()
    for logits, label in zip(scores, guess, strict=True):
        odds = [math.exp(v) for v in logits]
        if max(odds) / sum(odds) >= threshold:
            sure += 1
            assert label == odds.index(max(odds))
        else:
            assert label == -1
    assert node.notes["guessed"] == pytest.approx(sure / 25)
    assert (threshold in (0.5, 0.6)) == (0 < sure < 25)


def test_samples_without_a_guess_count_as_nothing() -> None:
    node = tiny_sets()[1]
    node.model.net.eval()
    x, y = node.data["train"].x[:4], torch.tensor([2, -1, 0, -1])
    with torch.no_grad():
        log_eta = node.model(x).log_softmax(1)
        losses = GuessedLabels().losses(node.model, x, y)
    wanted = [-float(log_eta[0, 2]), 0.0, -float(log_eta[2, 0]), 0.0]
    assert losses.tolist() == pytest.approx(wanted, abs=1e-6)


def test_guesses_are_what_is_trained_on(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    hub, node = tiny_sets()[:2]
    labels = set_proportions(node.model).argmax(1)[node.memory[SETS]]
    net = copy.deepcopy(node.model.net)
    x = node.data["train"].x
    common: dict[str, Any] = {"batch": 11, "lr": 3e-3}
    path = ("tick", 1, "local", 0)
    literal_train(net, [net], x, labels, name="east", path=path, epochs=1, **common)
    ended = done(FedPL(rounds=1, l1=0, **common), [replace(hub, data=Data()), node])
    assert_close(ended.nodes["east"], net, 1e-6)


# ---- the hub alone -------------------------------------------------------------------------------


def test_the_hub_alone_is_a_bare_loop_that_everybody_hears(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    hub, *nodes = tiny_sets()
    hub = replace(hub, data=Data(train=hub.data["train"]))
    net = copy.deepcopy(hub.model.net)
    for t in (1, 2):
        literal_train(
            net, [net], hub.data["train"].x, hub.data["train"].y, name="hub",
            path=("tick", t, "gather", 0), epochs=3, batch=11, lr=3e-3,
        )  # fmt: skip
    ended = done(HubOnly(rounds=2, hub_epochs=3, batch=11, lr=3e-3), [hub, *nodes])
    assert_close(ended.places["hub"], net, 1e-5)
    for node in ended.nodes.values():
        assert_close(node, net, 1e-5)
    assert ended.ledger.bytes_sent("east") == 0


def test_the_hub_alone_needs_no_sets_but_labels() -> None:
    hub, *nodes = tiny_sets()
    plain = [replace(node, memory={}) for node in nodes]
    assert done(HubOnly(rounds=1, **SMALL), [hub, *plain]).accuracy.keys() == {
        n.name for n in nodes
    }
    with pytest.raises(DataError, match="hub-only trains on labels at the hub"):
        done(HubOnly(), [replace(hub, data=Data(train=hub.data["train"].x)), *nodes])


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (FedPL, {"warm": -1}, "FedPL.warm must be >= 0"),
        (FedPL, {"threshold": 1.5}, "FedPL.threshold must be between 0 and 1"),
        (HubOnly, {"hub_epochs": -1}, "HubOnly.hub_epochs must be >= 0"),
        (FedLLP, {"l1": -0.1}, "FedLLP.l1 must be >= 0"),
    ],
)
def test_options_that_cannot_be(make: type[Method], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**options)

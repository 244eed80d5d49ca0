from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods import fedala
from polyfed.methods.fedala import FedALA
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from polyfed.random import stream
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](FedALA(batch=8, lr=1e-2), tiny)


def _literal_ala(
    node: Node,
    own: nn.Module,
    mean: nn.Module,
    W: dict[str, Tensor] | None,
    t: int,
    method: FedALA,
) -> tuple[nn.Module, dict[str, Tensor], int]:
    """Zhang et al. 2023, Algorithm 1, lines 6 to 16; only the random streams have our names."""
    x, y = node.data["train"].x, node.data["train"].y
    size = int(method.share * len(x))
    start = stream(0, "node", node.name, "fedala", t - 1)
    first = int(torch.randint(len(x) - size + 1, (), generator=start))
    x, y = x[first : first + size], y[first : first + size]
    temporary = copy.deepcopy(mean).eval()
    local, received = dict(own.head.named_parameters()), dict(mean.head.named_parameters())
    first_time, losses = W is None, []
    W = {name: torch.ones_like(p) for name, p in local.items()} if W is None else W
    while True:
        for name, p in temporary.head.named_parameters():
            p.data = local[name].data + (received[name].data - local[name].data) * W[name]
        if losses and not first_time:
            break
        if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
            break
        generator = stream(0, "node", node.name, "batches", "tick", t, "receive", len(losses))
        for rows in torch.randperm(size, generator=generator).split(int(method.batch)):
            loss = functional.cross_entropy(temporary(x[rows]), y[rows])
            temporary.zero_grad()
            loss.backward()
            for name, p in temporary.head.named_parameters():
                difference = received[name].data - local[name].data
                W[name] = torch.clamp(W[name] - method.eta * (p.grad * difference), 0, 1)
                p.data = local[name].data + difference * W[name]
        last = min(int(method.batch), size)
        losses.append(functional.cross_entropy(temporary(x[-last:]), y[-last:]).item())
    return temporary, W, len(losses)


def _literal_fedala(
    nodes: list[Node], method: FedALA, literal_train: Callable[..., None]
) -> tuple[dict[str, nn.Module], dict[str, dict[str, Tensor]], list[int]]:
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    weights: dict[str, dict[str, Tensor]] = {}
    epochs = []
    n = {node.name: len(node.data["train"]) for node in nodes}
    for t in range(1, method.rounds + 1):
        for node in nodes:
            split = node.data["train"]
            literal_train(
                nets[node.name],
                [nets[node.name]],
                split.x,
                split.y,
                name=node.name,
                path=("tick", t, "local", 0),
                epochs=method.local_epochs,
                batch=int(method.batch),
                lr=method.lr,
            )
        mean = copy.deepcopy(nets["M0"])
        for key, value in mean.state_dict().items():
            total = sum(n[k] / sum(n.values()) * nets[k].state_dict()[key].double() for k in nets)
            value.copy_(total if value.is_floating_point() else total.round())
        for node in nodes:
            k = node.name
            nets[k], weights[k], ran = _literal_ala(node, nets[k], mean, weights.get(k), t, method)
            epochs.append(ran)
    return nets, weights, epochs


def _mixing(done: Run) -> list[int]:
    return [m["mix_epochs"] for m in done.metrics if "mix_epochs" in m]


def test_equals_the_literal_algorithm(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Three rounds, with steps so large that weights end at 0, at 1 and between."""
    method = FedALA(rounds=3, batch=11, lr=2e-3, local_epochs=3, eta=50.0)
    nets, weights, epochs = _literal_fedala(tiny(), method, literal_train)
    done = run(method, tiny(), progress=False)
    assert _mixing(done) == epochs
    assert epochs[3:] == [1] * 6
    for name, node in done.nodes.items():
        assert_close(node, nets[name], 5e-5)
        for key, W in node.recall("mix").items():
            wanted = weights[name][key.removeprefix("head.")]
            torch.testing.assert_close(W, wanted, rtol=0, atol=5e-3)
    flat = torch.cat(
        [W.flatten() for node in done.nodes.values() for W in node.recall("mix").values()]
    )
    assert (flat == 0).any()
    assert (flat == 1).any()
    assert ((flat > 0.05) & (flat < 0.95)).any()


def test_the_first_time_takes_eleven_epochs_or_more_and_later_ones_one() -> None:
    """Ten losses must be close, and an eleventh must have come before: reference code."""
    done = run(FedALA(rounds=3, batch=1000, lr=1e-3), tiny(), progress=False)
    assert _mixing(done) == [11] * 3 + [1] * 6


def test_the_first_search_ends_after_a_hundred_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedala, "_SPREAD", 0.0)
    done = run(FedALA(rounds=2, batch=20, lr=1e-3), tiny(), progress=False)
    assert _mixing(done) == [100] * 3 + [1] * 3


def test_the_search_goes_on_until_the_losses_rest() -> None:
    """Population standard deviation of the last ten, as numpy's."""
    restless = [0.0, 0.2] * 6  # standard deviation 0.1
    assert not fedala._rests(restless)
    assert fedala._rests([*restless, 0.1, 0.1])
    assert fedala._rests([0.0, 0.196] * 6)  # 0.098; a sample's would be 0.103
    assert not fedala._rests([0.5] * 10)
    assert fedala._rests([9.0] + [0.5] * 10)
    assert not fedala._rests([0.5, torch.nan] * 8)


def test_with_hardly_any_step_it_is_fedavg() -> None:
    settings: dict[str, Any] = {"rounds": 2, "batch": 8, "lr": 1e-3}
    one = run(FedALA(**settings, eta=1e-30), tiny(), progress=False)
    other = run(FedAvg(**settings), tiny(), progress=False)
    for name, node in one.nodes.items():
        wanted = other.nodes[name].model.state()
        for key, tensor in node.model.state().items():
            torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=2e-6)


def test_one_node_is_local_training_and_never_mixes() -> None:
    """What it hears is what it has: g = l."""
    alone = tiny()[:1]
    done = run(FedALA(rounds=2, batch=8), alone, progress=False)
    method = Local(rounds=2, batch=8, local_epochs=1, patience=0, rollback=False)
    wanted = run(method, alone, progress=False).nodes["M0"].model.state()
    for name, tensor in done.nodes["M0"].model.state().items():
        assert torch.equal(tensor, wanted[name]), name
    assert _mixing(done) == []
    assert done.nodes["M0"].memory == {}


def test_after_a_round_trunks_are_equal_and_heads_are_personal() -> None:
    done = run(FedALA(rounds=1, batch=8, lr=1e-2, eta=50.0), tiny(), progress=False)
    one, other, _ = (node.model.state() for node in done.nodes.values())
    equal = {name for name in one if torch.equal(one[name], other[name])}
    assert equal == set(tiny()[0].model.names("trunk"))


def test_the_sample_is_a_random_contiguous_share() -> None:
    node, method = tiny()[0], FedALA(share=0.8)
    x = node.data["train"].x
    starts = set()
    for times in range(60):
        sample = method._sample(node, times)
        assert len(sample) == 20  # of 25
        (first,) = (i for i in range(6) if torch.equal(sample.x, x[i : i + 20]))
        assert torch.equal(sample.y, node.data["train"].y[first : first + 20])
        starts.add(first)
    assert starts == {0, 1, 2, 3, 4, 5}
    assert len(FedALA(share=1.0)._sample(node, 0)) == 25


def test_afterwards_the_node_has_its_own_splits_again() -> None:
    done = run(FedALA(rounds=1, batch=8), tiny(), progress=False)
    assert set(done.nodes["M0"].data) == set(tiny()[0].data)


def test_everything_travels() -> None:
    done = run(FedALA(rounds=1), tiny(), progress=False)
    names = set(tiny()[0].model.names())
    sent = [{t["name"] for t in c.tensors} for c in done.ledger.crossings()]
    assert sent == [names | {"num_examples"}] * 3 + [names] * 3


def test_a_frozen_parameter_of_the_head_is_not_mixed() -> None:
    nodes = tiny()
    for node in nodes:
        node.model.net.head.bias.requires_grad_(False)
    done = run(FedALA(rounds=1, batch=8), nodes, progress=False)
    assert set(done.nodes["M0"].recall("mix")) == {"head.weight"}


def test_a_network_without_a_head_is_an_error() -> None:
    nodes = [replace(n, model=Model.split(n.model.net, trunk=...)) for n in tiny()]
    with pytest.raises(ModelError, match="node M0 is all 'trunk'"):
        run(FedALA(), nodes, progress=False)


def test_different_classes_are_an_error() -> None:
    nodes = tiny()
    nodes[1].classes = ("a", "b", "d")
    with pytest.raises(ConfigError, match="fedala averages whole networks"):
        run(FedALA(), nodes, progress=False)


@pytest.mark.parametrize(
    "wrong", [{"eta": 0.0}, {"share": 0.0}, {"share": 1.1}, {"local_epochs": -1}]
)
def test_wrong_options_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"FedALA.{next(iter(wrong))} must be"):
        FedALA(**wrong)


def test_the_learning_rate_may_fall_in_steps() -> None:
    node = tiny()[0]

    def rates(**options: float) -> list[float]:
        node.memory.clear()
        method = replace(FedALA(lr=0.8), **options)  # type: ignore[arg-type]
        return [phase.optimiser.lr for _ in range(5) for phase in method.local(node)]

    assert rates() == [0.8] * 5
    assert rates(decay_every=2) == [0.8, 0.8, 0.4, 0.4, 0.2]
    assert rates(decay_every=3, decay=0.25) == [0.8, 0.8, 0.8, 0.2, 0.2]

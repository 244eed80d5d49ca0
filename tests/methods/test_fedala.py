from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Boxed, Optimiser, Phase, cross_entropy
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, ModelError
from polyfed.methods import fedala
from polyfed.methods.fedala import FedALA
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.local import Local
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny
from polyfed.testing.federations import stackable
from polyfed.train import outputs, together
from polyfed.train.cohort import fit_cohort
from polyfed.train.loop import Fitted, fit
from polyfed.train.track import Job


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


def _with_head(*kinds: Callable[[], nn.Module], frozen: str = "") -> list[Node]:
    """The tiny nodes with another head."""
    nodes = tiny()
    for node in nodes:
        trunk = node.model.net.trunk
        with ambient(3):
            head = nn.Sequential(*(make() for make in kinds))
        net = nn.Sequential(OrderedDict(trunk=trunk, head=head))
        if frozen:
            net.get_parameter(frozen).requires_grad_(False)
        node.model = Model.split(net, trunk="trunk", head="head")
    return nodes


class Scaled(nn.Module):
    """A head that is no linear layer, and no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x * self.scale) @ self.table
        return out


def _heads() -> dict[str, Callable[[], list[Node]]]:
    two = partial(nn.Linear, 5, 6), nn.ReLU, partial(nn.Dropout, 0.3), partial(nn.Linear, 6, 3)
    return {
        "one layer": tiny,
        "two layers and dropout": lambda: _with_head(*two),
        "a frozen bias": lambda: _with_head(*two, frozen="head.0.bias"),
        "no linear layer": lambda: _with_head(partial(nn.LayerNorm, 5), Scaled),
    }


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every way to mix that is chosen: whether it is by a network of W."""
    chosen, way = list[bool](), FedALA._way

    def spy(*args: Any) -> Any:
        found = way(*args)
        chosen.append(isinstance(found[0].net, fedala.MixedHead))
        return found

    monkeypatch.setattr(FedALA, "_way", spy)
    return chosen


@pytest.mark.parametrize("head", _heads())
def test_by_a_network_of_weights_or_by_a_rule_is_the_same(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is noted on the way, and what is kept; sgd, as Adam makes much of rounding."""
    method = FedALA(rounds=3, batch=8, lr=5e-2, eta=20.0, optimiser="sgd")
    chosen, make = _spied(monkeypatch), _heads()[head]
    one = run(method, make(), progress=False)
    assert chosen == [True] * 9
    monkeypatch.setattr(fedala, "cut", lambda model, parts: None)
    other = run(method, make(), progress=False)
    assert chosen == [True] * 9 + [False] * 9
    for a, b in zip(one.nodes.values(), other.nodes.values(), strict=True):
        for mine, its in ((a.model.state(), b.model.state()), (a.memory, b.memory)):
            assert mine.keys() == its.keys()
            for name, t in mine.items():
                torch.testing.assert_close(t, its[name], rtol=1e-4, atol=1e-5, msg=name)
    assert _mixing(one) == _mixing(other)
    for name in ("mixing_weight", "mix_loss"):
        pair = [[m[name] for m in done.metrics if name in m] for done in (one, other)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4)
        assert len(pair[0]) == 9
    weights = torch.cat([w.flatten() for n in one.nodes.values() for w in n.recall("mix").values()])
    assert float(weights.min()) < 0.9


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x)) * 2
        return out


@pytest.mark.parametrize("why", ["buffers", "no Sequential", "too large"])
def test_what_is_mixed_by_a_rule(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normed = partial(nn.BatchNorm1d, 5), partial(nn.Linear, 5, 3)
    nodes = _with_head(*normed) if why == "buffers" else tiny()
    if why == "no Sequential":
        for node in nodes:
            node.model = Model.split(Called(), trunk="trunk", head="head")
    if why == "too large":
        monkeypatch.setattr(fedala, "_BYTES", 26 * 5 * 4 - 1)
    chosen = _spied(monkeypatch)
    run(FedALA(rounds=1, batch=8), nodes, progress=False)
    assert chosen == ([True, True, False] if why == "too large" else [False] * 3)


def test_the_trunk_computes_in_the_precision_of_the_run() -> None:
    node, method = tiny()[0], FedALA(batch=8)
    sample = method._sample(node, 0)
    here = node.model.state("head")
    rule = fedala.Mixing(here, here, {n: torch.ones_like(t) for n, t in here.items()}, 1.0)
    seen = []
    for precision in ("float32", "bfloat16"):
        node.model.precision = precision  # type: ignore[assignment]
        mixed, features, _ = method._way(node.model, sample, rule, ("head",))
        assert mixed.precision == precision
        assert torch.equal(features.x, outputs(node.model, sample.x, "trunk"))
        assert features.y is sample.y
        seen.append(features.x)
    assert not torch.equal(*seen)


def test_what_is_not_mixed_is_that_of_the_head() -> None:
    """A frozen bias, which may be another in every round."""
    head, (here, step, weight) = nn.Linear(5, 3), torch.rand(3, 3, 5)
    mixed = fedala.MixedHead(copy.deepcopy(head), ["weight"])
    nn.init.ones_(head.bias)
    rule = fedala.Mixing({"weight": here}, {"weight": step}, {"weight": weight}, 1.0)
    mixed.begin(rule, head)
    x = torch.rand(4, 5)
    torch.testing.assert_close(mixed(x), x @ (here + step * weight).T + 1)
    assert [name for name, p in mixed.named_parameters() if p.requires_grad] == ["weight0"]


def test_the_trunk_runs_once_however_long_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    node, method, count = tiny()[0], FedALA(batch=8), [0]

    def note(*_: Any) -> None:
        count[0] += 1

    node.model.net.trunk.register_forward_hook(note)
    state = node.model.state()
    message = fedala.Message({n: t + 0.1 * t.is_floating_point() for n, t in state.items()})
    own = node.model, node.data
    for index, phase in enumerate(method.receive(node, message)):
        fit(node, phase, index)
    assert node.notes["mix_epochs"] >= 11
    assert count == [1]
    assert (node.model, node.data) == own


def test_the_weights_of_all_nodes_are_learnt_as_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they are learnt; so the stack is that of the round before."""
    stacks: list[tuple[int, ...]] = []

    def spy(jobs: Sequence[Job], **options: Any) -> list[Fitted]:
        if jobs[0].phase.label == "mix":
            stacks.append(tuple(id(job.node.model.net) for job in jobs))
        return fit_cohort(jobs, **options)

    monkeypatch.setattr(together, "fit_cohort", spy)
    nodes = [stackable(node) for node in tiny()]
    done = run(FedALA(rounds=3, batch=8), nodes, progress=False, stack="always")
    assert len(stacks) == max(_mixing(done)[:3]) + 2
    assert len(set(stacks)) == 1
    assert len(stacks[0]) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_equals_one_by_one() -> None:
    method = FedALA(rounds=3, batch=8, lr=5e-2, eta=20.0, optimiser="sgd")
    alone, stacked = (
        run(method, [stackable(n) for n in tiny()], progress=False, device="cuda", stack=stack)
        for stack in ("never", "auto")
    )
    assert _mixing(alone) == _mixing(stacked)
    for name, node in alone.nodes.items():
        for key, t in node.recall("mix").items():
            torch.testing.assert_close(
                stacked.nodes[name].recall("mix")[key], t, rtol=1e-3, atol=1e-3
            )


def test_mixed_heads_are_kept_as_long_as_their_networks() -> None:
    net, names = tiny()[0].model.net, ["weight", "bias"]
    found = fedala._mixed_head(net, net.head, names)
    assert fedala._mixed_head(net, net.head, names) is found
    assert fedala._mixed_head(net, net.head, names[:1]).names == ("weight",)
    found = fedala._mixed_head(net, net.head, names)
    other = fedala._mixed_head(net, nn.Linear(4, 3), names)
    assert other is not found
    assert other.weight0.shape == (3, 4)
    assert fedala._mixed_head(net, nn.Linear(4, 3).double(), names) is not other
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_boxed_steps_stay_inside() -> None:
    w = nn.Parameter(torch.tensor([0.1, 0.5, 0.9, 1.0]))
    w.grad = torch.tensor([0.4, 0.1, -0.3, 1.0])
    Boxed(lr=0.5).build([w]).step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.0, 0.45, 1.0, 0.5]))
    assert w.requires_grad


def test_boxed_steps_in_a_stack() -> None:
    phase = Phase(label="p", objective=cross_entropy, epochs=3, batch=4, optimiser=Boxed(lr=2.0))

    def linear() -> list[Node]:
        return [replace(n, model=Model.split(nn.Linear(6, 3), all=...)) for n in tiny()]

    with ambient(0):
        alone = linear()
    with ambient(0):
        stacked = linear()
    for node in alone:
        fit(node, phase, "path")
    fit_cohort([Job(node, phase, ("path",)) for node in stacked])
    for one, other in zip(alone, stacked, strict=True):
        flat = torch.cat([t.flatten() for t in one.model.state().values()])
        assert (flat == 0).any()
        assert (flat == 1).any()
        assert ((flat >= 0) & (flat <= 1)).all()
        for name, t in one.model.state().items():
            torch.testing.assert_close(other.model.state()[name], t, rtol=1e-4, atol=1e-5)


def test_boxed_is_no_option_of_methods() -> None:
    for wrong in (lambda: FedAvg(optimiser="boxed-sgd"), lambda: Optimiser(name="boxed-sgd")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"Optimiser\.name must be one of 'sgd', 'adam'"):
            wrong()
    with pytest.raises(ConfigError, match=r"Boxed\.name must be one of 'boxed-sgd'"):
        Boxed(name="adam")
    with pytest.raises(ConfigError, match="momentum"):
        Boxed(momentum=0.5)


def test_the_first_time_takes_eleven_epochs_or_more_and_later_ones_one() -> None:
    """Ten losses must be close, and an eleventh must have come before: reference code."""
    done = run(FedALA(rounds=3, batch=1000, lr=1e-3), tiny(), progress=False)
    assert _mixing(done) == [11] * 3 + [1] * 6


def test_the_first_search_ends_after_a_hundred_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedala, "_SPREAD", 0.0)
    done = run(FedALA(rounds=2, batch=20, lr=1e-3), tiny(), progress=False)
    assert _mixing(done) == [100] * 3 + [1] * 3


def test_the_last_rows_of_the_share_say_whether_the_search_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = []

    def mean_loss(model: Model, split: Split, objective: Any) -> float:
        looked_at.append(split)
        return 0.0

    monkeypatch.setattr(fedala, "mean_loss", mean_loss)
    monkeypatch.setattr(fedala, "cut", lambda model, parts: None)  # by rule: inputs, not features
    method, nodes = FedALA(rounds=1, batch=8), tiny()
    done = run(method, nodes, progress=False)
    assert _mixing(done) == [11] * 3
    last = [method._sample(node, 0).x[-8:] for node in nodes]
    found = [[torch.equal(split.x, rows) for rows in last].index(True) for split in looked_at]
    assert sorted(found) == [0] * 11 + [1] * 11 + [2] * 11


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

"""LI: Algorithm 1 written out, the invariants of SPEC 5.6 (1 to 10), faults, and what cannot be."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.data import Data, Split
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.engines.run import Run, run
from polyfed.errors import ConfigError, ModelError, UnknownNameError
from polyfed.maths.mixing import weighted_mean
from polyfed.methods.cwt import CWT
from polyfed.methods.li import LI
from polyfed.random import ambient, stream
from polyfed.testing import CHECKS, tiny
from polyfed.train import fit

SMALL = LI(rounds=3, batch=9, lr=1e-2)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](LI(batch=8, lr=1e-2, full_epochs=1, finetune_epochs=1), tiny)


@pytest.mark.parametrize("check", ["resume", "declared", "absent", "seeds"])
def test_conformance_of_small_steps(check: str) -> None:
    CHECKS[check](LI(batch=9, lr=1e-2, visit_steps=1, weighting="uniform"), tiny)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def assert_same_runs(one: Run, other: Run, names: Iterable[str] = ("M0", "M1", "M2")) -> None:
    for name in names:
        assert same(one.nodes[name].model.state(), other.nodes[name].model.state()), name
        assert one.accuracy[name] == other.accuracy[name]


@dataclass(frozen=True, kw_only=True)
class Watched(LI):
    """LI that writes down the network at the beginning of every visit, and all that arrives."""

    visits: list[tuple[str, dict[str, Tensor]]] = field(default_factory=list, hash=False)
    heard: list[tuple[str, dict[str, Tensor]]] = field(default_factory=list, hash=False)
    spoilt: tuple[int, ...] = ()  # which messages, counted from 0, are sent with NaN
    sent: list[str] = field(default_factory=list, hash=False)

    def local(self, node: Node) -> Iterable[Phase]:
        self.visits.append((node.name, node.model.state()))
        yield from super().local(node)

    def send(self, node: Node) -> Message:
        self.sent.append(node.name)
        message = super().send(node)
        if len(self.sent) - 1 in self.spoilt:
            bad = {n: t * torch.nan for n, t in message.tensors.items() if t.is_floating_point()}
            return Message({**message.tensors, **bad})
        return message

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        self.heard.append((node.name, dict(message.tensors)))
        return super().receive(node, message)


# ---- Algorithm 1, written out --------------------------------------------------------------------


def _literal_li(nodes: Sequence[Node], method: LI) -> dict[str, nn.Module]:
    """Algorithm 1 with bare PyTorch: three AdamW a node for good, each with its StepLR."""
    nets = {node.name: copy.deepcopy(node.model.net) for node in nodes}
    optimisers: dict[str, list[tuple[Any, Any]]] = {}
    for name, net in nets.items():
        optimisers[name] = []
        for module, lr in (
            (net.head, method.lr / 5),
            (net.trunk, 4 * method.lr / 5),
            (net, method.lr),
        ):
            adamw = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=method.weight_decay)
            decay = torch.optim.lr_scheduler.StepLR(adamw, method.decay_every, method.decay)
            optimisers[name].append((adamw, decay))
    backbone = copy.deepcopy(nets[nodes[0].name].trunk.state_dict())
    for t in range(1, method.rounds + 1):
        for node in nodes:
            net, split = nets[node.name], node.data["train"]
            assert split.y is not None
            net.trunk.load_state_dict(backbone)
            phases = (
                ([net.head], method.head_epochs),
                ([net.trunk], method.trunk_epochs),
                ([net.trunk, net.head], method.full_epochs),
            )
            index = 0
            for (moving, epochs), (adamw, decay) in zip(phases, optimisers[node.name], strict=True):
                if epochs == 0:
                    continue
                path = ("tick", t, "local", index)
                index += 1
                order = stream(0, "node", node.name, "batches", *path)
                net.eval().requires_grad_(False)
                for module in moving:
                    module.train().requires_grad_(True)
                with ambient(0, "node", node.name, "noise", *path):
                    for _ in range(epochs):
                        shuffled = torch.randperm(len(split), generator=order)
                        for rows in shuffled.split(int(method.batch)):
                            adamw.zero_grad()
                            functional.cross_entropy(net(split.x[rows]), split.y[rows]).backward()
                            adamw.step()
                decay.step()
            backbone = copy.deepcopy(net.trunk.state_dict())
    return nets


@pytest.mark.parametrize("full_epochs", [0, 1])
def test_equals_algorithm_1(full_epochs: int, assert_close: Callable[..., None]) -> None:
    """Dropout, BatchNorm, kept optimisers with stale moments, and a decay every two visits."""
    method = replace(SMALL, rounds=5, head_epochs=2, full_epochs=full_epochs, decay_every=2)
    nets = _literal_li(tiny(), method)
    done = run(method, tiny(), progress=False)
    for name, node in done.nodes.items():
        assert_close(node, nets[name], 2e-5)


def test_one_node_is_alternating_training(assert_close: Callable[..., None]) -> None:
    """Invariant 1: on a ring whose other nodes are dead."""
    method = replace(SMALL, decay_every=2)
    done = run(method, tiny(), fail="kill M1 @1; kill M2 @1", progress=False)
    assert_close(done.nodes["M0"], _literal_li(tiny()[:1], method)["M0"], 2e-5)
    assert len(done.ledger) == 0
    for node in tiny()[1:]:
        assert same(done.nodes[node.name].model.state(), node.model.state())


# ---- phases --------------------------------------------------------------------------------------


def test_each_phase_moves_its_part_and_not_a_bit_of_the_other() -> None:
    """Invariant 2: parameters and BatchNorm statistics."""
    node = tiny()[0]
    head, trunk = replace(SMALL, lr=0.1).local(node)
    assert (head.parts, trunk.parts) == (("head",), ("trunk",))
    before = node.model.state()
    fit(node, head, "here")
    after = node.model.state()
    assert all(torch.equal(after[n], before[n]) == n.startswith("trunk.") for n in before)
    fit(node, trunk, "here")
    last = node.model.state()
    assert all(torch.equal(last[n], after[n]) == n.startswith("head.") for n in before)


def test_in_the_authors_way_statistics_of_the_frozen_trunk_drift() -> None:
    """SPEC 5.3b; parameters stay all the same."""
    node = tiny()[0]
    before = node.model.state("trunk")
    fit(node, next(iter(replace(SMALL, reference=True).local(node))), "here")
    moved = {n for n, t in node.model.state("trunk").items() if not torch.equal(t, before[n])}
    assert moved == {n for n in before if "running" in n or "num_batches" in n}
    node.model.net.eval()  # a mode is the owner's, and is put back
    fit(node, next(iter(replace(SMALL, reference=True).local(node))), "there")
    assert not any(module.training for module in node.model.net.modules())


def test_in_the_authors_way_dropout_acts_in_the_frozen_trunk() -> None:
    ours, theirs = (tiny()[0] for _ in range(2))
    for node, method in ((ours, SMALL), (theirs, replace(SMALL, reference=True))):
        node.model.net.trunk[1] = nn.Identity()  # without BatchNorm, dropout is all that differs
        node.model = Model.split(node.model.net, trunk="trunk", head="head")
        fit(node, next(iter(method.local(node))), "here")
    assert same(ours.model.state("trunk"), theirs.model.state("trunk"))
    assert not same(ours.model.state("head"), theirs.model.state("head"))


def test_in_the_authors_way_a_batch_of_one_passes() -> None:
    method = replace(SMALL, rounds=1, batch=8, reference=True)  # M0 has 25 = 3 * 8 + 1 samples
    assert len(run(method, tiny(), progress=False).accuracy) == 3


def rates(method: LI, visits: int) -> list[tuple[float, ...]]:
    node = tiny()[0]
    return [tuple(p.optimiser.lr for p in method.local(node)) for _ in range(visits)]


def test_learning_rates_of_the_paper_decay_with_visits() -> None:
    """SPEC 5.1: 1e-4, 4e-4, 5e-4; halved after ten visits."""
    found = rates(LI(full_epochs=1), 21)
    for visit, factor in ((0, 1.0), (9, 1.0), (10, 0.5), (19, 0.5), (20, 0.25)):
        assert found[visit] == pytest.approx((1e-4 * factor, 4e-4 * factor, 5e-4 * factor))
    assert all(rate == pytest.approx((1e-4, 4e-4)) for rate in rates(LI(decay_every=0), 30))
    other = LI(lr=1.0, head_rate=0.5, trunk_rate=0.1, full_epochs=1, decay=0.1, decay_every=1)
    assert rates(other, 2) == [pytest.approx((f * 0.5, f * 0.1, f)) for f in (1.0, 0.1)]
    defaults = LI()
    assert (defaults.optimiser, defaults.weight_decay, defaults.batch) == ("adamw", 0.1, 10)


def test_phases_that_have_no_epochs_are_left_out_and_optimisers_are_kept_apart() -> None:
    node = tiny()[0]
    labels = [(p.label, p.keep, p.epochs) for p in replace(SMALL, full_epochs=2).local(node)]
    assert labels == [("head", "head", 1), ("trunk", "trunk", 1), ("full", "full", 2)]
    assert [p.label for p in replace(SMALL, head_epochs=0).local(node)] == ["trunk"]
    small = list(replace(SMALL, visit_steps=3).local(node))
    assert [(p.steps, p.epochs, p.walk) for p in small] == [(3, None, True)] * 2


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_only_the_trunk_travels(weighting: Any) -> None:
    """Invariant 3, and SPEC 5.4: |trunk| bytes a visit over one link, C visits a round."""
    done = run(replace(SMALL, weighting=weighting), tiny(), progress=False)
    trunk = tiny()[0].model.state("trunk")
    count = {"num_examples": torch.tensor(0)} if weighting == "examples" else {}
    size = sum(t.numel() * t.element_size() for t in {**trunk, **count}.values())
    ways = [("M0", "M1"), ("M1", "M2"), ("M2", "M0")]
    crossings = done.ledger.crossings()
    assert [(c.source, c.to) for c in crossings] == (ways * 3)[:-1]
    assert [c.tick for c in crossings] == [1, 1, 2, 2, 2, 3, 3, 3]
    for crossing in crossings:
        assert {t["name"] for t in crossing.tensors} == {*trunk, *count}
        assert (crossing.bytes, crossing.hops) == (size, 1)


def test_after_a_round_every_node_has_what_it_had_after_its_own_visit() -> None:
    """SPEC 5.3a; and visits are in order, one each and round (invariant 4)."""
    method = Watched(rounds=3, batch=9, lr=1e-2)
    done = run(method, tiny(), topology="ring:order=M2+M0+M1", progress=False)
    assert [name for name, _ in method.visits] == ["M2", "M0", "M1"] * 3
    trunks = {name: node.model.state("trunk") for name, node in done.nodes.items()}
    assert not same(trunks["M0"], trunks["M1"])
    assert not same(trunks["M0"], trunks["M2"])
    for k, (name, state) in enumerate(method.visits[1:]):  # what arrived is what is trained on
        assert method.heard[k][0] == name
        assert all(torch.equal(state[n], t) for n, t in method.heard[k][1].items())
    own = [n for n, _ in method.visits].index("M0")
    shorter = run(replace(SMALL, rounds=1), tiny(), topology="ring:order=M2+M0+M1", progress=False)
    passed_on = method.visits[own + 1][1]
    for n, tensor in shorter.nodes["M0"].model.state("trunk").items():
        assert torch.equal(passed_on[n], tensor)


def test_all_shared_without_head_phase_is_cwt() -> None:
    """Invariant 5."""
    common: dict[str, Any] = {"rounds": 3, "batch": 9, "lr": 0.05, "optimiser": "sgd"}
    li = LI(
        **common, weight_decay=0.0, share="trunk+head", head_epochs=0, trunk_epochs=2,
        trunk_rate=1.0, decay_every=0,
    )  # fmt: skip
    assert_same_runs(
        run(li, tiny(), progress=False), run(CWT(**common, local_epochs=2), tiny(), progress=False)
    )


def test_a_batch_a_visit_is_sgd_on_the_batches_in_turn(
    plain_nodes: Callable[..., list[Node]], assert_close: Callable[..., None]
) -> None:
    """Invariant 6, the paper's Solution 1: 8 rounds are over one and two epochs of the nodes."""
    nodes = plain_nodes(common=True)
    method = LI(
        rounds=8, batch=9, lr=0.1, optimiser="sgd", weight_decay=0.0, share="trunk+head",
        head_epochs=0, trunk_rate=1.0, decay_every=0, visit_steps=1,
    )  # fmt: skip
    net = copy.deepcopy(nodes[0].model.net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def batches(node: Node) -> Iterable[Tensor]:
        epoch = 0
        while True:
            shuffle = stream(0, "node", node.name, "batches", "walk", "train", epoch)
            yield from torch.randperm(len(node.data["train"]), generator=shuffle).split(9)
            epoch += 1

    rows = {node.name: iter(batches(node)) for node in nodes}
    for _ in range(8):
        for node in nodes:
            x, y = node.data["train"].x, node.data["train"].y
            assert y is not None
            batch = next(rows[node.name])
            sgd.zero_grad()
            functional.cross_entropy(net(x[batch]), y[batch]).backward()
            sgd.step()
    done = run(method, nodes, progress=False)
    assert_close(done.nodes["M2"], net, 1e-5)


def test_the_trunk_may_be_in_the_middle() -> None:
    nodes = tiny()
    for node in nodes:
        with ambient(0, "middle", node.name):
            layers = OrderedDict(
                stem=nn.Linear(6, 8), act=nn.ReLU(), body=nn.Linear(8, 8), head=nn.Linear(8, 3)
            )
        node.model = Model.split(
            nn.Sequential(layers), stem="stem", body=("act", "body"), head="head"
        )
    done = run(replace(SMALL, share="body"), nodes, progress=False)
    names = {t["name"] for c in done.ledger.crossings() for t in c.tensors}
    assert names == {"body.weight", "body.bias", "num_examples"}
    for node in nodes:
        after, before = done.nodes[node.name].model.state(), node.model.state()
        assert not any(torch.equal(after[n], before[n]) for n in before)
    two = run(replace(SMALL, share="stem+body"), nodes, progress=False)
    names = {t["name"] for c in two.ledger.crossings() for t in c.tensors}
    assert names == {"stem.weight", "stem.bias", "body.weight", "body.bias", "num_examples"}


# ---- the last round ------------------------------------------------------------------------------


def test_the_last_round_may_fit_heads_to_the_last_trunk() -> None:
    """SPEC 5.3a, the other evaluation: no trunk moves any more, and all nodes end with one."""
    method = Watched(rounds=3, batch=9, lr=1e-2, finetune_epochs=2)
    done = run(method, tiny(), progress=False)
    two = run(replace(SMALL, rounds=2), tiny(), progress=False)
    final = two.nodes["M2"].model.state("trunk")
    for name, node in done.nodes.items():
        assert same(node.model.state("trunk"), final)
        assert not same(node.model.state("head"), two.nodes[name].model.state("head"))
    noted = [m for m in done.metrics if m.get("node") == "M1" and m["tick"] == 3]
    assert noted[0]["finetune_epochs"] == 2
    assert "trunk_loss" not in noted[0]
    assert len(done.ledger) == 8
    assert done.ledger.crossings()[0].tensors[-1] == {
        "name": "loop", "shape": [], "dtype": "int64", "bytes": 8,
    }  # fmt: skip


def test_fitting_takes_its_own_rate_and_no_kept_optimiser() -> None:
    node = tiny()[0]
    (phase,) = LI(rounds=1, finetune_epochs=6).local(node)
    assert (phase.label, phase.parts, phase.epochs) == ("finetune", ("head",), 6)
    assert phase.optimiser.lr == pytest.approx(2e-5)
    assert phase.keep is None
    (other,) = LI(rounds=1, lr=1.0, finetune_epochs=1, finetune_rate=0.5).local(tiny()[0])
    assert other.optimiser.lr == 0.5


def test_who_missed_rounds_still_knows_the_last() -> None:
    method = Watched(rounds=5, batch=9, lr=1e-2, finetune_epochs=1)
    done = run(method, tiny(), fail="kill M1 @2; kill M2 @3; heal @4", progress=False)
    first, *others = (node.model.state("trunk") for node in done.nodes.values())
    assert all(same(first, other) for other in others)
    last = [m["node"] for m in done.metrics if m["tick"] == 5 and "finetune_loss" in m]
    assert last == ["M0", "M1", "M2"]


# ---- rings that survive --------------------------------------------------------------------------


def test_one_cut_link_changes_the_way_and_not_a_bit() -> None:
    """Invariant 7."""
    whole = run(SMALL, tiny(), topology="dual-ring", progress=False)
    cut = run(SMALL, tiny(), topology="dual-ring", fail="cut M0-M1 @2", progress=False)
    assert_same_runs(whole, cut)
    assert_same_runs(whole, run(SMALL, tiny(), progress=False))
    assert cut.ledger.bytes_sent() == whole.ledger.bytes_sent()
    assert [c.hops for c in whole.ledger.crossings()] == [1] * 8
    assert [c.hops for c in cut.ledger.crossings()] == [1, 1, 1, 2, 1, 1, 2, 1]


def test_a_dead_node_leaves_li_on_the_others() -> None:
    """Invariant 8."""
    dead = run(SMALL, tiny(), fail="kill M1 @1", progress=False)
    others = run(SMALL, [n for n in tiny() if n.name != "M1"], progress=False)
    assert_same_runs(dead, others, ("M0", "M2"))
    assert dead.faults == [{"tick": 1, "node": "M1", "fault": "killed"}]
    assert same(dead.nodes["M1"].model.state(), tiny()[1].model.state())


def test_who_comes_back_has_its_own_head_and_takes_the_trunk() -> None:
    method = Watched(rounds=4, batch=9, lr=1e-2)
    done = run(method, tiny(), fail="kill M1 @2; heal @4", progress=False)
    order = [name for name, _ in method.visits]
    assert order == ["M0", "M1", "M2", "M0", "M2", "M0", "M2", "M0", "M1", "M2"]
    first = run(replace(SMALL, rounds=1), tiny(), progress=False).nodes["M1"].model.state("head")
    back = method.visits[8][1]
    assert all(torch.equal(back[n], t) for n, t in first.items())
    m0 = done.nodes["M0"].model.state("trunk")  # visited just before, and not again
    assert all(torch.equal(back[n], t) for n, t in m0.items())


def four(plain_nodes: Callable[..., list[Node]]) -> list[Node]:
    nodes = plain_nodes()
    extra = nodes[0]
    train = Split(extra.data["train"].x[:11] + 1, extra.data["train"].y[:11])  # type: ignore[index]
    data = Data(may_miss_classes=True, **(dict(extra.data) | {"train": train}))
    return [*nodes, Node("M3", data, extra.model.copy(), extra.classes)]


def test_two_rings_meet_in_the_mean_of_their_trunks(plain_nodes: Callable[..., list[Node]]) -> None:
    """Invariant 9: two cuts make M0, M1 and M2, M3; M1 with 18 and M3 with 11 examples end."""
    cuts = "cut M1-M2 @1; cut M3-M0 @1"
    apart = run(replace(SMALL, rounds=2), four(plain_nodes), topology="dual-ring", fail=cuts)
    for pair in (("M0", "M1"), ("M2", "M3")):  # each part is LI on its own nodes
        nodes = [n for n in four(plain_nodes) if n.name in pair]
        assert_same_runs(apart, run(replace(SMALL, rounds=2), nodes, progress=False), pair)
    method = Watched(rounds=3, batch=9, lr=1e-2)
    run(method, four(plain_nodes), topology="dual-ring", fail=f"{cuts}; heal @3", progress=False)
    m1, m3 = (apart.nodes[n].model.state("trunk") for n in ("M1", "M3"))
    wanted = {n: (18 * t + 11 * m3[n]) / 29 for n, t in m1.items()}
    name, got = method.heard[6]  # two messages a part in round 1 and 2, minus the first
    assert name == "M0"
    for key, tensor in wanted.items():
        torch.testing.assert_close(got[key], tensor)


def test_a_pipeline_with_one_trunk_is_a_ring() -> None:
    """Invariant 10."""
    one = run(SMALL, tiny(), topology="pipeline:tokens=1,merge=replace", progress=False)
    assert_same_runs(one, run(SMALL, tiny(), progress=False))


def test_a_pipeline_that_replaces_moves_trunks_on(plain_nodes: Callable[..., list[Node]]) -> None:
    """Every trunk trained once at every node, written out; as much sent as by a ring."""
    nodes = plain_nodes()
    method = replace(SMALL, optimiser="sgd", weight_decay=0.0)
    done = run(method, nodes, topology="pipeline:merge=replace", progress=False)
    models = {node.name: node.model.copy() for node in nodes}
    for t in range(1, 4):
        if t > 1:
            old = {name: model.state("trunk") for name, model in models.items()}
            for name, source in (("M1", "M0"), ("M2", "M1"), ("M0", "M2")):
                models[name].load(old[source])
        for node in nodes:
            own = Node(node.name, node.data, models[node.name])
            for i, phase in enumerate(method.local(own)):
                fit(own, phase, "tick", t, "local", i)
    for name, node in done.nodes.items():
        for n, tensor in node.model.state().items():
            torch.testing.assert_close(tensor, models[name].state()[n], atol=1e-5, rtol=0)
    assert len(done.ledger) == 6


def test_a_pipeline_that_averages_takes_the_mean_with_its_own() -> None:
    method = Watched(rounds=2, batch=9, lr=1e-2)
    run(method, tiny(), topology="pipeline", progress=False)
    one = run(replace(SMALL, rounds=1), tiny(), topology="pipeline", progress=False)
    trunks = {name: node.model.state("trunk") for name, node in one.nodes.items()}
    count = {node.name: float(len(node.data["train"])) for node in tiny()}
    heard = dict(method.heard)
    for name, source in (("M1", "M0"), ("M2", "M1"), ("M0", "M2")):
        pair = sorted((name, source))
        wanted = weighted_mean([trunks[n] for n in pair], [count[n] for n in pair])
        assert same(heard[name], wanted)


def test_a_trunk_with_nan_is_refused_and_the_last_good_one_goes_on() -> None:
    """M1's message of round 2, the fifth of all, is bad: M2 goes on with its trunk of round 1."""
    method = Watched(rounds=3, batch=9, lr=1e-2, spoilt=(4,))
    done = run(method, tiny(), progress=False)
    assert method.sent[4] == "M1"
    assert [(f["tick"], f["node"], f["to"], f["fault"]) for f in done.faults] == [
        (2, "M1", "M2", "message refused")
    ]
    name, begun = method.visits[5]
    one = run(replace(SMALL, rounds=1), tiny(), progress=False).nodes["M2"].model.state()
    assert name == "M2"
    assert same(begun, one)
    assert all(
        torch.isfinite(t).all() for n in done.nodes.values() for t in n.model.state().values()
    )


def test_a_node_that_diverges_does_not_stop_the_others() -> None:
    nodes = tiny()
    nodes[1].model.load({"head.weight": torch.full((3, 5), torch.inf)})
    done = run(SMALL, nodes, progress=False)
    refused = {(f["node"], f["to"]) for f in done.faults if f["fault"] == "message refused"}
    assert refused == {("M1", "M2")}
    for name in ("M0", "M2"):
        assert all(torch.isfinite(t).all() for t in done.nodes[name].model.state().values())


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["kill M0", "kill 1", "kill M3", "cut 0-1", "cut 1-2", "cut 3-0", "heal",
                         "heal M1", "heal 0-1"]),
        st.integers(1, 5),
    ),
    max_size=7,
)  # fmt: skip


@settings(max_examples=8)
@given(FAULTS, st.sampled_from(["ring", "dual-ring", "pipeline"]))
def test_any_faults(found: list[tuple[str, int]], topology: str) -> None:
    """No crash; every byte in the ledger is a trunk's; numbers stay finite."""
    nodes = [*tiny(), replace(tiny()[0], name="M3")]
    script = "; ".join(f"{what} @{t}" for what, t in found)
    method = Watched(rounds=5, batch=40, lr=1e-2, head_epochs=0)
    done = run(method, nodes, topology=topology, fail=script, evaluate_every=9, progress=False)
    size = Message({**nodes[0].model.state("trunk"), "n": torch.tensor(0)}).nbytes
    assert all(c.bytes == size and c.source != c.to for c in done.ledger.crossings())
    own = {(t, m["node"]) for m in done.metrics if "trunk_loss" in m for t in [m["tick"]]}
    assert len(own) == len(method.visits)
    for node in done.nodes.values():
        assert all(torch.isfinite(t).all() for t in node.model.state().values())


# ---- many tasks, one set of inputs ---------------------------------------------------------------


def test_many_tasks_on_the_same_inputs_without_dealing_them_out() -> None:
    """SPEC 5.1, CelebA: nodes are tasks; inputs are held once, and every head learns its own."""
    with ambient(0, "tasks"):
        x = torch.randn(120, 6)
        nets = [
            nn.Sequential(OrderedDict(trunk=nn.Linear(6, 4), head=nn.Linear(4, 2))) for _ in "abc"
        ]
    nodes = [
        Node(
            f"task{k}",
            Data(train=(x[:80], (x[:80, k] > 0).long()), test=(x[80:], (x[80:, k] > 0).long())),
            Model.split(net, trunk="trunk", head="head"),
        )
        for k, net in enumerate(nets)
    ]
    shared = x[:80]
    for node in nodes:
        node.data = Data(train=(shared, node.data["train"].y), test=node.data["test"])
    method = LI(rounds=15, batch=16, lr=0.03, head_epochs=2, decay_every=0, weight_decay=0.0)
    done = run(method, nodes, evaluate_every=20, progress=False)
    assert len({node.data["train"].x.data_ptr() for node in done.nodes.values()}) == 1
    assert min(done.accuracy.values()) > 0.85


# ---- what cannot be ------------------------------------------------------------------------------


def test_fewer_than_two_nodes() -> None:
    with pytest.raises(ConfigError, match="a ring needs at least two nodes, got 1: M0"):
        run(LI(), tiny()[:1], progress=False)


def test_a_trunk_of_another_shape_is_named(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], plain_nodes(width=4)[2]]
    with pytest.raises(ModelError, match=r"part 'trunk' of node M2 .*'trunk\.2\.weight'"):
        run(LI(), nodes, progress=False)


def test_heads_may_differ(plain_nodes: Callable[..., list[Node]]) -> None:
    nodes = [*plain_nodes()[:2], replace(plain_nodes(classes=4)[2], classes=tuple("abcd"))]
    assert len(run(replace(SMALL, rounds=1), nodes, progress=False).accuracy) == 3


def test_parts_that_are_not_there_or_leave_no_head() -> None:
    with pytest.raises(UnknownNameError, match="unknown part of node M0 'body'"):
        run(LI(share="trunk+body"), tiny(), progress=False)
    for method in (
        LI(share="trunk+head"),
        LI(share="trunk+head", head_epochs=0, finetune_epochs=1),
    ):
        with pytest.raises(ModelError, match="all parts of node M0 travel"):
            run(method, tiny(), progress=False)


def test_if_all_is_shared_outputs_must_mean_the_same() -> None:
    nodes = [*tiny()[:2], replace(tiny()[2], classes=("x", "y", "z"))]
    with pytest.raises(ConfigError, match=r"the outputs of M0 mean .* and those of M2"):
        run(LI(share="trunk+head", head_epochs=0), nodes, progress=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((n, -1) for n in ("head_epochs", "trunk_epochs", "full_epochs", "finetune_epochs")),
        *((n, -1) for n in ("decay_every", "visit_steps")),
        *((n, 0.0) for n in ("head_rate", "trunk_rate", "decay", "finetune_rate")),
        ("weighting", "some"),
    ],
)
def test_options_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        LI(**{name: value})

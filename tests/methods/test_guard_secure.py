"""The guard `secure`: the place of a meeting reads the mean, and no message."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import polyfed as pf
from polyfed import methods, topologies
from polyfed.core.guard import Guard
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.topology import State
from polyfed.engines.local import LocalEngine, Settings
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError
from polyfed.methods._guard import Guarded, guarded
from polyfed.record import Recorder
from polyfed.testing import CHECKS, tiny
from polyfed.testing.sets import tiny_sets

SMALL: dict[str, Any] = {"rounds": 2, "batch": 8}
SSL = {"projection": 4, "predictor_hidden": 6, "probe_epochs": 0, "neighbours": 5}
AGAIN = [name for name in CHECKS if name not in ("options", "nan")]


def four(seed: int = 0) -> list[Node]:
    nodes = tiny(seed)
    return [*nodes, replace(tiny(seed + 1)[1], name="M3")]


def secure(method: Method) -> Guarded:
    return Guarded.of(method, Guard(secure=True))


@pytest.mark.parametrize("check", AGAIN)
def test_conformance(check: str) -> None:
    """Not `nan`: whole numbers cannot be; see below what a diverged node does."""
    CHECKS[check](secure(pf.FedAvg(batch=8, lr=1e-2)), tiny)


# ---- the same mean -------------------------------------------------------------------------------

MEANS: list[tuple[Method, str, Callable[..., Sequence[Node]]]] = [
    (pf.FedAvg(**SMALL), "star", tiny),
    (pf.FedAvg(**SMALL, weighting="uniform"), "star", tiny),
    (pf.FedAvgTrunk(**SMALL, local_epochs=1, finetune_epochs=0), "star", tiny),
    (pf.FedPer(**SMALL), "star", tiny),
    (pf.FedRep(**SMALL), "star", tiny),
    (pf.FedBABU(**SMALL), "star", tiny),
    (pf.LGFedAvg(**SMALL), "star", tiny),
    (pf.FedALA(**SMALL), "star", tiny),
    (pf.FedBYOL(**SMALL, **SSL), "star", tiny),
    (pf.FedU(**SMALL, **SSL), "star", tiny),
    (pf.FedEMA(**SMALL, **SSL), "star", tiny),
    (pf.FedUL(**SMALL), "star", tiny_sets),
    (pf.FedULM1(**SMALL, hub_epochs=0), "star", tiny_sets),
    (pf.FedULM2(**SMALL, hub_epochs=0), "star", tiny_sets),
    (pf.FedULMgda(**SMALL, hub_epochs=0), "star", tiny_sets),
    (pf.FedLLP(**SMALL), "star", tiny_sets),
    (pf.FedPL(**SMALL), "star", tiny_sets),
    (pf.PartialAveraging(**SMALL, scheme="50%"), "star", tiny),
    (pf.PartialAveraging(**SMALL, scheme="50%", weighting="examples"), "groups", tiny),
    (pf.PartialAveraging(**SMALL, scheme=None, groups="ab=rest@M0+M1+M3"), "groups", four),
]


def test_these_are_all_methods_that_average() -> None:
    averaging = {name for name in methods.METHODS if methods.load(name).averages}
    assert {method.name for method, _, _ in MEANS} == averaging
    assert averaging.isdisjoint({"ccvr", "fedlinked", "fedfoa", "mocha", "feddf", "li"})


@pytest.mark.parametrize(
    ("method", "topology", "make"), MEANS, ids=lambda x: getattr(x, "name", "")
)
def test_one_round_is_the_plain_one_to_rounding(
    method: Method, topology: str, make: Callable[..., Sequence[Node]]
) -> None:
    """What `averages` claims: the place needs nothing but the weighted mean.

    Nothing is trained on receipt here: the tick for keys makes that the second visit to a node in a
    round, which draws other batches.
    """
    once = replace(method, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        bare = pf.run(once, make(), topology=topology)
        under = pf.run(replace(once, guard="secure"), make(), topology=topology)
    assert not under.faults
    for name, node in bare.nodes.items():
        parts = ("trunk",) if method.name == "fedala" else ()
        for key, wanted in node.model.state(*parts).items():
            got = under.nodes[name].model.state()[key]
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
    moved = [t for c in under.ledger.crossings() for t in c.tensors if c.source in bare.nodes]
    assert {t["dtype"] for t in moved} == {"int64", "uint8"}


def test_clip_and_noise_come_before_the_masks() -> None:
    text = "clip=0.1,noise=0.1"
    bare = pf.run(pf.FedAvg(rounds=1, batch=8, guard=text), tiny())
    under = pf.run(pf.FedAvg(rounds=1, batch=8, guard=f"{text},secure"), tiny())
    assert under.epsilon == bare.epsilon
    assert set(under.epsilon) == {"M0", "M1", "M2"}
    for key, wanted in bare.nodes["M0"].model.state().items():
        torch.testing.assert_close(under.nodes["M0"].model.state()[key], wanted, rtol=0, atol=2e-6)


# ---- what the hub sees ---------------------------------------------------------------------------


def sent(method: Guarded, nodes: Sequence[Node]) -> dict[Name, Message]:
    """What nodes send to a place that passes their keys on."""
    ready = list(method.prepare(nodes))
    keys = {node.name: method.send(node) for node in ready}
    replies = method.combine(Node("hub"), keys, list(keys))
    for node in ready:
        keys[node.name].check(method.sends(node))
        replies[node.name].check(method.hears(node))
        list(method.receive(node, replies[node.name]))
    messages = {node.name: method.send(node) for node in ready}
    for node in ready:
        messages[node.name].check(method.sends(node))
    return messages


def test_a_message_is_indistinguishable_from_uniform_bytes() -> None:
    """Chi-square over bytes at one in a million, of equal messages, and of their pairwise sums."""
    nodes = [replace(four()[0], name=f"M{i}") for i in range(4)]
    messages = [sent(secure(pf.FedAvg()), nodes) for _ in range(12)]
    whole = ("guard.company", "guard.nodes")
    names = [n for n in messages[0]["M0"].tensors if n not in whole]
    for who in (("M0",), ("M1",), ("M0", "M1"), ("M0", "M1", "M2")):
        raw = bytearray()
        for each in messages:
            for name in names:
                total = sum(each[n].tensors[name] for n in who)
                raw += torch.as_tensor(total).numpy().tobytes()
        counts, mean = Counter(bytes(raw)), len(raw) / 256
        statistic = sum((counts[b] - mean) ** 2 / mean for b in range(256))
        assert statistic < chi2.ppf(1 - 1e-6, 255), who
    everybody = sum(messages[0][n].tensors["head.bias/float32"] for n in ("M0", "M1", "M2", "M3"))
    assert float(torch.as_tensor(everybody).abs().max()) < 2**48  # all together they are numbers


def test_the_same_message_twice_looks_different() -> None:
    first, second = (sent(secure(pf.FedAvg()), tiny())["M0"].tensors for _ in range(2))
    assert not bool((first["head.weight/float32"] == second["head.weight/float32"]).any())


def test_topics_of_one_message_have_masks_of_their_own() -> None:
    """With the same masks, the difference of two topics would be in the clear."""
    method = secure(pf.PartialAveraging(scheme="50%", groups="ab=rest@M0+M1+M2"))
    for message in sent(method, tiny()).values():
        weights = [int(message.tensors[f"{t}/guard.weight"]) for t in ("global", "ab")]
        assert weights[0] != weights[1]  # both are 1, under masks


def test_a_weight_is_hidden_too() -> None:
    messages = sent(secure(pf.FedAvg()), tiny())
    seen = [int(m.tensors["num_examples/int64"]) for m in messages.values()]
    assert not set(seen) & {25, 18, 33}
    assert sum(seen) % 2**64 == 25 + 18 + 33


def test_no_secret_stays_in_memory() -> None:
    method, nodes = secure(pf.FedAvg()), list(secure(pf.FedAvg()).prepare(tiny()))
    key = method.send(nodes[0])
    assert "guard/secret-key" in nodes[0].memory
    secret = nodes[0].memory["guard/secret-key"]
    assert not torch.equal(secret, key.tensors["guard.key"])
    method.send(nodes[0])
    assert set(nodes[0].memory) == {"guard/nodes"}


# ---- who is not there ----------------------------------------------------------------------------


def test_masks_are_among_those_who_are_there() -> None:
    away = {1: ["M2"], 2: ["M0"]}
    bare = pf.run(pf.FedAvg(**SMALL), four(), absent=away)
    under = pf.run(pf.FedAvg(**SMALL, guard="secure"), four(), absent=away)
    assert [f["fault"] for f in under.faults] == ["absent", "absent"]
    for name, node in bare.nodes.items():
        for key, wanted in node.model.state().items():
            got = under.nodes[name].model.state()[key]
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_two_tell_each_other_nothing() -> None:
    method = pf.FedAvg(rounds=1, batch=8, guard="secure")
    done = pf.run(method, tiny(), absent={1: ["M2"]})
    alone = pf.run(pf.FedAvg(rounds=1, batch=8), tiny()[:1])
    for key, wanted in alone.nodes["M0"].model.state().items():
        assert torch.equal(done.nodes["M0"].model.state()[key], wanted)
    told = {m["node"]: m["kept_back"] for m in done.metrics if "kept_back" in m}
    assert told == dict.fromkeys(("M0", "M1"), "fewer than 3 nodes meet")
    masked = [
        c for c in done.ledger.crossings() if "guard.company" in {t["name"] for t in c.tensors}
    ]
    assert len(masked) == 2  # zeros; and nobody is answered
    assert not [c for c in done.ledger.crossings() if c.bytes > 200 and c.source == "hub"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e12])
def test_a_diverged_node_adds_nothing_and_hears_the_mean_of_the_others(bad: float) -> None:
    nodes = four()
    nodes[0].model.load({"head.bias": torch.full((3,), bad)})
    done = pf.run(pf.FedAvg(rounds=1, batch=11, lr=1e-9, guard="secure"), nodes)
    others = pf.run(pf.FedAvg(rounds=1, batch=11, lr=1e-9), four()[1:])
    assert not [f for f in done.faults if f["fault"] != "training diverged"]
    kept = [(m["node"], m["kept_back"]) for m in done.metrics if "kept_back" in m]
    assert kept == [("M0", "numbers too large or not finite")]
    for key, wanted in others.nodes["M1"].model.state().items():
        torch.testing.assert_close(done.nodes["M0"].model.state()[key], wanted, rtol=0, atol=2e-6)


def spied(change: Callable[[Node, dict[str, Tensor]], None], tick: str) -> LocalEngine:
    """A run of one round where somebody changes what it sends in one of the two ticks."""

    class Spy(Guarded):
        def send(self, node: Node) -> Message:
            told = dict(super().send(node).tensors)
            if node.name == "M1" and ("guard.key" in told) == (tick == "keys"):
                change(node, told)
            return Message(told)

    method = Spy(inner=pf.FedAvg(rounds=1, batch=8), tools=Guard(secure=True), rounds=1)
    star = topologies.make("star")
    engine = LocalEngine(method, four(), star, Settings(), Recorder.in_memory(), Progress())
    engine.run()
    return engine


def _short(node: Node, told: dict[str, Tensor]) -> None:
    del told["head.bias/float32"]


def _floats(node: Node, told: dict[str, Tensor]) -> None:
    told["head.bias/float32"] = torch.full((3,), math.nan)


def _company(node: Node, told: dict[str, Tensor]) -> None:
    told["guard.company"] = told["guard.company"].flip(0)


def _size(node: Node, told: dict[str, Tensor]) -> None:
    told["guard.nodes"] = torch.tensor(3)


def _weight(node: Node, told: dict[str, Tensor]) -> None:
    told["num_examples/int64"] = told["num_examples/int64"] - 1000


def _no_key(node: Node, told: dict[str, Tensor]) -> None:
    told.clear()


def _zero_key(node: Node, told: dict[str, Tensor]) -> None:
    told["guard.key"] = torch.zeros(32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "tick", "faults"),
    [
        (_short, "masked", ["message refused", "messages do not meet"]),
        (_floats, "masked", ["message refused", "messages do not meet"]),
        (_company, "masked", ["messages do not meet"]),
        (_size, "masked", ["messages do not meet"]),
        (_weight, "masked", ["messages do not meet"]),
        (_no_key, "keys", ["message refused"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_sum_that_cannot_be_read_is_a_fault_and_everybody_keeps_its_own(
    change: Any, tick: str, faults: list[str]
) -> None:
    engine = spied(change, tick)
    assert [f["fault"] for f in engine.recorder.faults.records] == faults
    alone = pf.run(pf.FedAvg(rounds=1, batch=8), four()[:1]).nodes["M0"].model.state()
    is_own = all(torch.equal(engine.nodes["M0"].model.state()[n], t) for n, t in alone.items())
    assert is_own == (tick == "masked")  # who sent no key is not among them, and the others go on


def test_a_key_that_is_none_leaves_its_node_out() -> None:
    """A row of zeros counts as no key; its owner then finds itself in no company."""
    engine = spied(_zero_key, "keys")
    assert engine.recorder.faults.records == []
    kept = [m["node"] for m in engine.recorder.metrics.records if "kept_back" in m]
    assert kept == ["M1"]


# ---- errors before training ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fedlinked", "fedfoa", "ccvr", "li", "mocha", "dynamic-averaging"]
)
def test_methods_that_look_at_each_message_cannot_be_masked(name: str) -> None:
    method = methods.make(name, {"guard": "secure"})
    with pytest.raises(ConfigError, match=f"{name} looks at each message"):
        guarded(method, topologies.make(method.topologies[0]))


@pytest.mark.parametrize(
    ("method", "topology"),
    [(pf.PartialAveraging(guard="secure"), "gossip"), (pf.FedBYOL(guard="secure", **SSL), "mesh")],
)
def test_pairs_and_meshes_cannot_be_masked(method: Method, topology: str) -> None:
    with pytest.raises(ConfigError, match=f"not on {topology}"):
        pf.run(method, tiny(), topology=topology)


def test_three_nodes_are_needed_also_for_every_topic() -> None:
    with pytest.raises(ConfigError, match=r"2 nodes take part \(M0, M1\)"):
        pf.run(pf.FedAvg(guard="secure"), tiny()[:2])
    method = pf.PartialAveraging(groups="ab=rest@M0+M1", guard="secure")
    with pytest.raises(ConfigError, match=r"2 nodes speak about 'ab' \(M0, M1\)"):
        pf.run(method, tiny())


def test_dtypes_without_a_mean_are_named() -> None:
    nodes = tiny()
    for node in nodes:
        node.model.net.trunk.register_buffer("flag", torch.tensor(True))
        node.model = pf.Model.split(node.model.net, trunk="trunk", head="head")
    with pytest.raises(ConfigError, match=r"'trunk.flag' of node M0 is bool\[\]"):
        pf.run(pf.FedAvg(guard="secure"), nodes)


def test_ticks_with_meetings_come_twice_and_training_once() -> None:
    groups = topologies.make("groups:every=2")
    _, keyed = guarded(pf.PartialAveraging(guard="secure"), groups)
    bound = keyed.joined(0, ["A", "B", "C"], {"global": ("A", "B", "C")})
    assert (bound.name, bound.places, bound.names) == ("groups", ("hub-global",), ("A", "B", "C"))

    def seen(t: int) -> State:
        return State(frozenset("ABC"))

    assert [(len(t.active), len(t.meetings)) for t in bound.round(1, seen)] == [(3, 0)]
    assert [(len(t.active), len(t.meetings)) for t in bound.round(2, seen)] == [(3, 1), (0, 1)]

"""The local engine: who is called when, what crosses, what is refused, what never begins."""

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed import tasks
from polyfed.core.data import Data, Split
from polyfed.core.message import Message, Spec, TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.engines.local import torch_device
from polyfed.errors import ConfigError, DataError, ModelError, PolyfedError, UnknownNameError
from polyfed.testing.federations import tiny

FEDAVG = pf.FedAvg(rounds=2, batch=8)
FEDLINKED = pf.FedLinked(
    rounds=2, batch=16, init_epochs=1, distil_epochs=1, finetune_epochs=1, local_epochs=1
)


# ---- order of calls ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Script(Method):
    """Writes down every call; sends one number, hears the sum."""

    name: ClassVar[str] = "script"
    title: ClassVar[str] = "a script"
    topologies: ClassVar[tuple[str, ...]] = ("star", "alone")
    calls: list[str] = field(default_factory=list, hash=False)

    def check(self, nodes: Sequence[Node]) -> None:
        self.calls.append("check " + " ".join(n.name for n in nodes))

    def start(self, node: Node) -> Iterable[Phase]:
        yield from self._train("start", node)

    def local(self, node: Node) -> Iterable[Phase]:
        yield from self._train("local", node)

    def finish(self, node: Node) -> Iterable[Phase]:
        yield from self._train("finish", node)

    def _train(self, stage: str, node: Node) -> Iterable[Phase]:
        before = node.model.state()["head.bias"]
        yield self.phase("one", steps=1)
        trained = not torch.equal(before, node.model.state()["head.bias"])
        self.calls.append(f"{stage} {node.name}{' trained' if trained else ''}")

    def sends(self, node: Node) -> Spec:
        return {"x": TensorSpec(())}

    def send(self, node: Node) -> Message:
        self.calls.append(f"send {node.name}")
        return Message({"x": torch.tensor(float(node.name[1:]))})

    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        self.calls.append(f"combine {place.name} from {' '.join(got)} to {' '.join(to)}")
        total = torch.stack([m.tensors["x"] for m in got.values()]).sum()
        place.memory["seen"] = place.memory.get("seen", torch.zeros(())) + total
        place.notes["total"] = float(place.memory["seen"])
        return {name: Message({"x": total}) for name in reversed(to)}

    def receive(self, node: Node, message: Message) -> Iterable[Phase]:
        self.calls.append(f"receive {node.name} {message.tensors['x']:g}")
        return ()


def test_call_sequence() -> None:
    script = Script(rounds=2)
    run = pf.run(script, list(reversed(tiny()))[:2])  # M2, M1: order is by name all the same
    round_calls = [
        "local M1 trained", "local M2 trained", "send M1", "send M2",
        "combine hub from M1 M2 to M1 M2", "receive M1 3", "receive M2 3",
    ]  # fmt: skip
    assert script.calls == [
        "check M2 M1", "start M1 trained", "start M2 trained", *round_calls, *round_calls,
        "finish M1 trained", "finish M2 trained",
    ]  # fmt: skip
    totals = [(m["tick"], m["total"]) for m in run.metrics if "total" in m]
    assert totals == [(1, 3.0), (2, 6.0)]  # the hub remembers
    assert run.nodes.keys() == {"M1", "M2"}
    assert float(run.places["hub"].memory["seen"]) == 6


def test_alone_nobody_meets_and_no_rounds_is_no_training() -> None:
    script = Script(rounds=1)
    run = pf.run(script, tiny()[:1], topology="alone")
    assert script.calls == ["check M0", "start M0 trained", "local M0 trained", "finish M0 trained"]
    assert len(run.ledger) == 0
    idle = Script(rounds=0)
    nodes = tiny()
    run = pf.run(idle, nodes)
    assert idle.calls == ["check M0 M1 M2"]
    ticks = [m["tick"] for m in run.metrics if "node" in m]
    assert ticks == [0, 0, 0, "final", "final", "final"]
    for node in nodes:
        state = node.model.state()
        assert all(torch.equal(t, state[n]) for n, t in run.nodes[node.name].model.state().items())


def test_the_order_of_nodes_and_earlier_runs_change_nothing() -> None:
    nodes = tiny()
    first, second = pf.run(FEDAVG, nodes), pf.run(FEDAVG, list(reversed(nodes)))
    assert first.accuracy == second.accuracy
    for name, node in first.nodes.items():
        other = second.nodes[name].model.state()
        assert all(torch.equal(t, other[n]) for n, t in node.model.state().items())


def test_another_seed_is_another_run() -> None:
    a, b = (pf.run(FEDAVG, tiny(), seed=s).nodes["M0"].model.state() for s in (0, 1))
    assert not torch.equal(a["head.weight"], b["head.weight"])


# ---- every byte ----------------------------------------------------------------------------------

# Linear(6, 8), BatchNorm(8), Linear(8, 3); running mean and variance; its counter, an int64.
SMALL = 4 * (6 * 8 + 8 + 2 * 8 + 8 * 3 + 3 + 2 * 8) + 8
DIGITS = 4 * (120 + 1308 + 2616 + 5208 + 3104 + 330)  # four convolutions, trunk and head layer


def small() -> list[Node]:
    nodes = tiny()
    for node in nodes:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        node.model = Model.split(net, trunk=("0", "1"), head="2")
    return nodes


@pytest.mark.parametrize(
    ("weighting", "task", "up", "down"),
    [
        ("uniform", lambda: small(), SMALL, SMALL),
        ("examples", lambda: small(), SMALL + 8, SMALL),
        ("examples", lambda: tasks.digits(), DIGITS + 8, DIGITS),
    ],
)
def test_fedavg_bytes(weighting: Any, task: Callable[[], Any], up: int, down: int) -> None:
    ledger = pf.run(pf.FedAvg(rounds=3, local_epochs=0, weighting=weighting), task()).ledger
    for name in ("M0", "M1", "M2"):
        assert (ledger.bytes_sent(name), ledger.bytes_received(name)) == (3 * up, 3 * down)
    assert (ledger.bytes_sent("hub"), ledger.bytes_sent()) == (9 * down, 9 * (up + down))
    crossed = [(c.tick, c.source, c.to) for c in ledger.crossings()]
    up_then_down = [("M0", "hub"), ("M1", "hub"), ("M2", "hub")]
    up_then_down += [(to, source) for source, to in up_then_down]
    assert crossed == [(t, *pair) for t in (1, 2, 3) for pair in up_then_down]
    for crossing in ledger.crossings():
        assert crossing.bytes == sum(t["bytes"] for t in crossing.tensors)


@pytest.mark.parametrize(("strength", "extra"), [(False, 0), (True, 4)])
def test_fedlinked_bytes(strength: bool, extra: int) -> None:
    """SPEC 1.5: 4 N r up and 4 N r down; with `strength` one number more down."""
    task = tasks.digits(representation=16)
    public = len(task.nodes(0)[0].data["public"])
    method = pf.FedLinked(rounds=2, init_epochs=0, distil_epochs=0, finetune_epochs=0,
                          local_epochs=0, strength=strength)  # fmt: skip
    ledger = pf.run(method, task).ledger
    for name in ("M0", "M1", "M2"):
        assert ledger.bytes_sent(name) == 2 * 4 * public * 16
        assert ledger.bytes_received(name) == 2 * (4 * public * 16 + extra)
    assert {t["name"] for c in ledger.crossings() for t in c.tensors if c.to == "hub"} == {
        "representations"
    }


def test_local_training_sends_nothing() -> None:
    run = pf.run(pf.Local(rounds=1, local_epochs=1), tiny())
    assert (len(run.ledger), run.ledger.bytes_sent()) == (0, 0)


# ---- schedule, absence, refusal ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "ticks"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])]
)
def test_evaluation_is_on_schedule(every: int, ticks: list[int]) -> None:
    run = pf.run(pf.FedAvg(rounds=5, local_epochs=1), tiny(), evaluate_every=every)
    for name in ("M0", "M1", "M2"):
        mine = [m for m in run.metrics if m.get("node") == name and "test_accuracy" in m]
        assert [m["tick"] for m in mine] == [*ticks, "final"]
        assert run.accuracy[name] == mine[-1]["test_accuracy"]
    assert [m["tick"] for m in run.metrics if "seconds" in m] == [0, 1, 2, 3, 4, 5]


def test_absent_nodes_neither_train_nor_send_nor_hear() -> None:
    script = Script(rounds=3)
    run = pf.run(script, tiny(), absent={2: ["M1"], 3: ["M0", "M1", "M2"]})
    second = script.calls[script.calls.index("receive M2 3") + 1 :]
    assert second[:7] == [
        "local M0 trained", "local M2 trained", "send M0", "send M2",
        "combine hub from M0 M2 to M0 M2", "receive M0 2", "receive M2 2",
    ]  # fmt: skip
    assert second[7:] == [f"finish M{k} trained" for k in range(3)]  # round 3: nobody at all
    away = [(2, "M1"), (3, "M0"), (3, "M1"), (3, "M2")]
    assert run.faults == [{"tick": t, "node": n, "fault": "absent"} for t, n in away]
    assert {(c.source, c.to) for c in run.ledger.crossings() if c.tick == 2} == {
        ("M0", "hub"), ("M2", "hub"), ("hub", "M0"), ("hub", "M2"),
    }  # fmt: skip


@pytest.mark.parametrize("method", [FEDAVG, FEDLINKED, pf.FedAvgTrunk(rounds=2, local_epochs=1)])
def test_a_round_with_one_node_alone(method: Method) -> None:
    run = pf.run(method, tiny(), absent={1: ["M0", "M2"]})
    assert len(run.faults) == 2
    assert run.accuracy.keys() == {"M0", "M1", "M2"}


def spoilt(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    bad = dict(tensors)
    if kind == "nan":
        bad["head.bias"] = bad["head.bias"].index_fill(0, torch.tensor(1), torch.nan)
    elif kind == "missing":
        del bad["head.bias"]
    elif kind == "extra":
        bad["train.x"] = torch.zeros(2)
    elif kind == "shape":
        bad["head.bias"] = bad["head.bias"][:2]
    elif kind == "dtype":
        bad["head.bias"] = bad["head.bias"].double()
    return bad


REFUSALS = {
    "nan": "NaN or infinity in 'head.bias' (1 of 3 values)",
    "missing": "tensors missing: head.bias; not announced: none",
    "extra": "tensors missing: none; not announced: train.x",
    "shape": "'head.bias' is float32[2], expected float32[3]",
    "dtype": "'head.bias' is float64[3], expected float32[3]",
}


@dataclass(frozen=True, kw_only=True)
class Faulty(pf.FedAvg):
    """FedAvg, but some send bad messages in every round."""

    kind: str = "nan"
    liars: tuple[str, ...] = ()
    combined: list[list[str]] = field(default_factory=list, hash=False)

    def send(self, node: Node) -> Message:
        good = super().send(node)
        return Message(spoilt(self.kind, good.tensors)) if node.name in self.liars else good

    def combine(
        self, place: Node, got: Mapping[str, Message], to: Sequence[str]
    ) -> Mapping[str, Message]:
        self.combined.append(list(got))
        replies = dict(super().combine(place, got, to))
        if "hub" in self.liars:
            replies["M1"] = Message(spoilt(self.kind, replies["M1"].tensors))
        return replies


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_bad_message_is_refused_and_the_round_goes_on(kind: str) -> None:
    method = Faulty(rounds=2, kind=kind, liars=("M1",))
    run = pf.run(method, tiny())
    assert method.combined == [["M0", "M2"]] * 2
    record = {"node": "M1", "to": "hub", "fault": "message refused", "why": REFUSALS[kind]}
    assert run.faults == [{"tick": t, **record} for t in (1, 2)]
    assert sum(c.source == "M1" for c in run.ledger.crossings()) == 2  # it did cross
    assert sum(c.source == "hub" for c in run.ledger.crossings()) == 6  # and was answered
    states = [run.nodes[n].model.state() for n in ("M0", "M1", "M2")]
    assert all(torch.equal(states[0][n], s[n]) for s in states for n in s)
    assert all(torch.isfinite(t).all() for t in states[0].values())


def test_a_bad_reply_is_refused_by_the_node() -> None:
    run = pf.run(Faulty(rounds=1, liars=("hub",)), tiny())
    why = REFUSALS["nan"]
    assert run.faults == [
        {"tick": 1, "node": "hub", "to": "M1", "fault": "message refused", "why": why}
    ]
    m0, m1, m2 = (run.nodes[n].model.state()["head.weight"] for n in ("M0", "M1", "M2"))
    assert torch.equal(m0, m2)
    assert not torch.equal(m0, m1)


def test_nothing_but_bad_messages() -> None:
    method = Faulty(rounds=1, liars=("M0", "M1", "M2"))
    run = pf.run(method, tiny())
    assert (method.combined, len(run.faults), len(run.accuracy)) == ([], 3, 3)


def test_divergence_is_recorded() -> None:
    method = pf.FedAvg(rounds=1, local_epochs=3, optimiser="sgd", lr=1e30)
    faults = pf.run(method, tiny()).faults
    kinds = {(f["node"], f["fault"]) for f in faults}
    assert kinds == {(f"M{k}", why) for k in range(3) for why in
                     ("training diverged", "message refused")}  # fmt: skip


def test_divergence_is_told_while_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    method = pf.FedAvg(rounds=2, local_epochs=3, optimiser="sgd", lr=1e30)
    pf.run(method, tiny(), progress=True)
    told = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert told == [
        "fedavg seed 0: round 1, M0: loss of 'local' is NaN. It goes on; what follows is among its "
        "faults."
    ]


# ---- the gate ------------------------------------------------------------------------------------


def change(node: Node, **splits: Any) -> None:
    node.data = Data(may_miss_classes=node.data.may_miss_classes, **(dict(node.data) | splits))


def other_width(nodes: list[Node]) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    nodes[1].model = Model.split(net, trunk="0", head="1")


def other_order(nodes: list[Node]) -> None:
    change(nodes[2], public=nodes[2].data["public"].x.flip(0))


def other_length(nodes: list[Node]) -> None:
    change(nodes[2], public=nodes[2].data["public"].x[:-1])


def no_public(nodes: list[Node]) -> None:
    change(nodes[0], public=None)


def missing_class(nodes: list[Node]) -> None:
    split = nodes[1].data["val_rb"]
    assert split.y is not None
    change(nodes[1], val_rb=(split.x, split.y % 2))


def labels(value: int, name: str) -> Callable[[list[Node]], None]:
    def spoil(nodes: list[Node]) -> None:
        split = nodes[1].data[name]
        assert split.y is not None
        y = split.y.clone()
        y[4] = value
        change(nodes[1], **{name: (split.x, y)})

    return spoil


def nan(nodes: list[Node]) -> None:
    split = nodes[2].data["train"]
    x = split.x.clone()
    x[7, 2] = torch.nan
    change(nodes[2], train=(x, split.y))


def rename(name: str) -> Callable[[list[Node]], None]:
    def spoil(nodes: list[Node]) -> None:
        nodes[2].name = name

    return spoil


def no_train(nodes: list[Node]) -> None:
    change(nodes[0], train=None)


def unlabelled(nodes: list[Node]) -> None:
    change(nodes[0], test=nodes[0].data["test"].x)


def other_input(name: str) -> Callable[[list[Node]], None]:
    def spoil(nodes: list[Node]) -> None:
        split = nodes[0].data[name]
        change(nodes[0], **{name: Split(split.x[:, :4], split.y)})

    return spoil


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 4, "images only"
        return x


def picky(nodes: list[Node]) -> None:
    nodes[0].model = Model.split(Picky(), trunk="trunk", head="head")


def frozen(nodes: list[Node]) -> None:
    nodes[0].model.net.requires_grad_(False)


def nothing(nodes: list[Node]) -> None:
    nodes.clear()


def fine(nodes: list[Node]) -> None:
    pass


GATE: list[tuple[Callable[[list[Node]], None], Method, type[PolyfedError], str]] = [
    (other_width, FEDLINKED, ModelError, "representation sizes differ: M0 5, M1 4, M2 5"),
    (other_width, FEDAVG, ModelError, "network of node M1 differs from that of M0: '0.weight'|"
     "network of node M1 differs from that of M0: 'trunk.0.weight'"),
    (other_order, FEDLINKED, DataError, "public inputs of node M2 differ.*in another order"),
    (other_length, FEDLINKED, DataError, "node M2 holds 19 public inputs, M0 holds 20"),
    (no_public, FEDLINKED, DataError, "node M0 has no split 'public'"),
    (missing_class, FEDAVG, DataError, r"node M1: validation split 'val_rb'.*no sample of class 2"),
    (labels(3, "train"), FEDAVG, DataError,
     "node M1, split 'train': labels run from 0 to 3, but the network has 3 outputs"),
    (labels(-1, "test"), FEDAVG, DataError, "node M1, split 'test': labels run from -1 to 2"),
    (nan, FEDAVG, DataError, "node M2, split 'train': NaN or infinity in 1 of 33.*index 7"),
    (rename("M0"), FEDAVG, ConfigError, "two nodes are called M0"),
    (rename("a/b"), FEDAVG, ConfigError, "node name 'a/b': use letters, digits"),
    (rename(""), FEDAVG, ConfigError, "node name '': use letters, digits"),
    (rename("hub"), FEDAVG, ConfigError, "node name 'hub' is taken: the topology star has"),
    (no_train, FEDAVG, DataError, "node M0 has no split 'train'. Its splits: val_es, val_rb, test"),
    (unlabelled, FEDAVG, DataError, "node M0, split 'test' has no labels"),
    (other_input("train"), FEDAVG, ModelError, r"network of node M0 does not take its data.*\[4\]"),
    (other_input("test"), FEDAVG, ModelError,
     r"network of node M0 does not take its data, of shape \[4\].*'test'"),
    (picky, FEDAVG, ModelError, "network of node M0 does not take its data.*images only"),
    (other_input("public"), FEDLINKED, ModelError,
     r"network of node M0 does not take its data, of shape \[4\].*'public'"),
    (nothing, FEDAVG, ConfigError, "needs at least one node"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "method", "error", "text"), GATE)
def test_the_gate(
    tmp_path: Path, spoil: Callable[..., None], method: Method, error: type, text: str
) -> None:
    nodes = tiny()
    spoil(nodes)
    with pytest.raises(error, match=text):
        pf.run(method, nodes, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"topology": "alone"}, "fedavg runs on star, not on alone"),
        ({"topology": "strr"}, "unknown topology 'strr'. Did you mean 'star'"),
        ({"device": "gpu"}, "unknown device 'gpu'. Use cpu, cuda or cuda:0"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": "cuda:77"}, "device 'cuda:77'"),
        ({"evaluate_every": 0}, "evaluate_every must be >= 1, got 0"),
        ({"absent": {1: ["M7"]}}, "unknown absent node 'M7'.*There are: M0, M1, M2"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.run(FEDAVG, tiny(), folder=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_joint_can_be_compared_where_a_node_is_absent() -> None:
    """Its federation is one node; the absence is of a node it was made from."""
    assert pf.run(pf.Joint(rounds=1, local_epochs=1), tiny(), absent={1: ["M1"]}).accuracy


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_cuda() -> None:
    with pytest.raises(ConfigError, match=r"this machine has no CUDA device. Use --device cpu"):
        torch_device("cuda")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pf.methods.load("fedlinkt"), "unknown method 'fedlinkt'. .*'fedlinked'"),
        (lambda: tasks.make("digitz", {}), "unknown task 'digitz'. Did you mean 'digits'"),
        (lambda: tasks.digits(head="all"), "unknown option of task digits 'head'.*'heads'"),
    ],
)
def test_unknown_names(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(UnknownNameError, match=text):
        call()


def test_nodes_that_share_inputs_are_checked_for_their_own_labels() -> None:
    a = tiny()[0]
    held = {n: s for n, s in a.data.items() if n != "public"}
    b = dataclasses.replace(a, name="B", data=Data(**held))
    split = b.data["val_es"]
    assert split.y is not None
    change(b, val_es=(split.x, split.y % 2))
    with pytest.raises(DataError, match="node B: validation split 'val_es'"):
        pf.run(FEDAVG, [a, b])


def test_no_test_split_is_no_accuracy() -> None:
    nodes = tiny()
    for node in nodes:
        change(node, test=None)
    run = pf.run(FEDAVG, nodes)
    assert run.accuracy == {}
    assert "nan" not in run.table()
    assert "0.0000" not in run.table()


# ---- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("wanted", "stream", "shown"),
    [
        (True, io.StringIO, "fedavg seed 4  round 2/2  accuracy 0."),
        (None, Terminal, "round 2/2"),
        (None, io.StringIO, ""),
        (False, Terminal, ""),
    ],
)
def test_progress(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, stream: type[io.StringIO], shown: str
) -> None:
    monkeypatch.setattr("sys.stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    pf.run(FEDAVG, tiny(), seed=4, progress=wanted)
    import sys

    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown in text
    assert bool(shown) == bool(text)

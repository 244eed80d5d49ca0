"""Guards: clip, noise and compression, around any method. Masks are in test_guard_secure.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import polyfed as pf
from polyfed import cli
from polyfed.core.guard import Guard
from polyfed.core.message import Message, TensorSpec
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.maths.accountant import epsilon
from polyfed.methods._guard import Guarded, own_root
from polyfed.testing import CHECKS, tiny

SMALL: dict[str, Any] = {"rounds": 3, "batch": 8}
FEDLINKED = {"init_epochs": 1, "distil_epochs": 1, "finetune_epochs": 1, "local_epochs": 1}
AGAIN = [name for name in CHECKS if name not in ("options", "stacked")]


def guarded(method: Method, text: str) -> Guarded:
    return Guarded.of(method, Guard.parse(text))


# ---- good citizens -------------------------------------------------------------------------------


@pytest.mark.parametrize("check", AGAIN)
def test_conformance(check: str) -> None:
    """Not `stacked`: a number that is rounded to one of 255 values may fall the other way."""
    method = guarded(pf.FedAvg(batch=8, lr=1e-2), "clip=0.5,noise=0.01,compress=int8")
    CHECKS[check](method, tiny)


@pytest.mark.parametrize("check", ["deterministic", "resume", "declared", "nan", "absent"])
def test_conformance_of_what_shares_no_parameters(check: str) -> None:
    method = pf.FedLinked(batch=8, **FEDLINKED)
    CHECKS[check](guarded(method, "clip=5,noise=0.01,compress=float16"), tiny)


@pytest.mark.parametrize("check", ["options", "stacked"])
def test_conformance_where_the_guard_is_an_option(check: str) -> None:
    CHECKS[check](pf.FedAvg(batch=8, guard="clip=0.5,noise=0.01"), tiny)


def even(seed: int = 0) -> list[Node]:
    """Without BatchNorm: much noise turns a running variance negative."""
    nodes = tiny(seed)
    for node in nodes:
        node.model.net.trunk[1] = nn.LayerNorm(8)
        node.model = pf.Model.split(node.model.net, trunk="trunk", head="head")
    return nodes


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        (pf.FedAvg(**SMALL), "star"),
        (pf.FedLinked(**SMALL, **FEDLINKED), "star"),
        (pf.LI(**SMALL), "ring"),
        (pf.PartialAveraging(**SMALL, scheme="50%"), "gossip:cycles=2"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_guard_that_does_nothing_changes_no_bit(method: Method, topology: str) -> None:
    bare = pf.run(method, tiny(), topology=topology)
    for nothing in (guarded(method, ""), guarded(method, "clip=1e9")):
        same = pf.run(nothing, tiny(), topology=topology)
        assert same.accuracy == bare.accuracy
        assert same.ledger.crossings() == bare.ledger.crossings()
        for name, node in bare.nodes.items():
            for key, tensor in node.model.state().items():
                assert torch.equal(same.nodes[name].model.state()[key], tensor)


# ---- clip and noise ------------------------------------------------------------------------------


def floats(message: Message) -> Tensor:
    found = [t.flatten() for t in message.tensors.values() if t.is_floating_point()]
    return torch.cat(found).double()


def trained(text: str, move: float = 1.0) -> tuple[Guarded, Node, Tensor]:
    """A guarded method, a node that has gone somewhere from its start, and where it began."""
    method, node = guarded(pf.FedAvg(), text), tiny()[0]
    list(method.start(node))
    before = floats(Message(node.model.state()))
    drawn = node.stream("test")
    moved = {
        n: t + move * torch.randn(t.shape, generator=drawn)
        for n, t in node.model.state().items()
        if t.is_floating_point()
    }
    node.model.load(moved)
    return method, node, before


def test_the_update_is_scaled_to_the_bound_and_keeps_its_direction() -> None:
    method, node, before = trained("clip=0.5")
    update = floats(Message(node.model.state())) - before
    assert float(update.norm()) > 5
    sent = floats(method.send(node)) - before
    assert float(sent.norm()) == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(sent, update * (0.5 / update.norm()), rtol=1e-4, atol=1e-6)
    assert node.notes["update_norm"] == pytest.approx(float(update.norm()))


def test_a_small_update_is_sent_bit_for_bit() -> None:
    method, node, _ = trained("clip=100")
    wanted = pf.FedAvg().send(node).tensors
    for name, tensor in method.send(node).tensors.items():
        assert torch.equal(tensor, wanted[name])


def test_the_bound_is_from_what_was_heard_last() -> None:
    method, node, _ = trained("clip=0.5")
    told = {n: t + 3 for n, t in node.model.state().items() if t.is_floating_point()}
    counter = {n: t for n, t in node.model.state().items() if not t.is_floating_point()}
    list(method.receive(node, Message({**told, **counter})))
    head = node.model.state()["head.bias"]
    node.model.load({"head.bias": head + 100})
    sent = method.send(node).tensors
    torch.testing.assert_close(sent["head.bias"], told["head.bias"] + 0.5 / math.sqrt(3))
    assert torch.equal(sent["trunk.4.bias"], told["trunk.4.bias"])


def test_of_a_network_with_one_nan_nothing_is_told() -> None:
    method, node, _ = trained("clip=0.5,noise=1")
    node.model.load({"head.bias": torch.tensor([0.0, math.nan, 0.0])})
    assert bool(floats(method.send(node)).isnan().all())


def test_whole_numbers_pass_as_they_are() -> None:
    method, node, _ = trained("clip=0.5,noise=1")
    sent = method.send(node).tensors
    assert int(sent["num_examples"]) == len(node.data["train"])
    assert int(sent["trunk.1.num_batches_tracked"]) == 0


def test_what_was_never_heard_and_is_no_parameter_is_bounded_from_zero() -> None:
    method = guarded(pf.FedLinked(**FEDLINKED), "clip=2")
    node = tiny()[0]
    assert pf.FedLinked(**FEDLINKED).known(node) == {}
    list(method.start(node))
    assert float(method.send(node).tensors["representations"].norm()) == pytest.approx(2, rel=1e-5)


def test_partial_models_are_bounded_from_where_they_began() -> None:
    method, node = guarded(pf.PartialAveraging(scheme="50%"), "clip=0.5"), tiny()[0]
    list(method.start(node))
    before = floats(pf.PartialAveraging(scheme="50%").send(node))
    node.model.load({n: t + 1 for n, t in node.model.state("head").items()})
    assert float((floats(method.send(node)) - before).norm()) == pytest.approx(0.5, rel=1e-5)


def test_noise_has_the_deviation_it_says_and_is_new_for_every_message() -> None:
    method, node, before = trained("clip=0.5,noise=3", move=0.0)
    draws = torch.stack([floats(method.send(node)) - before for _ in range(200)])
    sigma = 1.5
    assert float(draws.std()) == pytest.approx(sigma, rel=0.02)
    assert abs(float(draws.mean())) < 5 * sigma / math.sqrt(draws.numel())
    kurtosis = float(((draws / sigma) ** 4).mean())
    assert kurtosis == pytest.approx(3, abs=0.15)
    neighbours = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 5 / math.sqrt(draws.numel())
    assert node.notes["noised"] == 200


def test_noise_is_of_the_seed_and_of_the_node() -> None:
    def sent(seed: int, which: int) -> Tensor:
        method, node = guarded(pf.FedAvg(), "clip=0.5,noise=1"), tiny()[which]
        node.seed = seed
        list(method.start(node))
        return floats(method.send(node))

    assert torch.equal(sent(0, 0), sent(0, 0))
    assert not torch.equal(sent(0, 0), sent(1, 0))
    assert not torch.equal(sent(0, 0), sent(0, 1))


def test_secret_noise_is_nobody_elses_and_bound_to_what_it_hides() -> None:
    def noise(memory: dict[str, Tensor], move: float) -> Tensor:
        method, node, _ = trained("clip=1000,noise=1", move=move)
        node.memory |= memory
        return floats(method.send(node)) - floats(Message(node.model.state()))

    first, second = tiny()[0], tiny()[0]
    own_root(first)
    own_root(second)
    assert torch.equal(noise(first.memory, 1.0), noise(first.memory, 1.0))
    assert not torch.allclose(noise(first.memory, 1.0), noise(second.memory, 1.0), atol=1)
    assert not torch.allclose(noise(first.memory, 1.0), noise({}, 1.0), atol=1)
    assert not torch.allclose(noise(first.memory, 1.0), noise(first.memory, 1.001), atol=1)


def test_epsilon_is_of_the_messages_that_were_sent(tmp_path: Path) -> None:
    method = pf.FedAvg(rounds=4, batch=8, guard="clip=0.1,noise=2,delta=1e-4")
    away = {2: ["M1"], 3: ["M1"]}
    done = pf.run(method, even(), absent=away, folder=tmp_path / "run")
    wanted = {"M0": epsilon(2, 4, 1e-4), "M1": epsilon(2, 2, 1e-4), "M2": epsilon(2, 4, 1e-4)}
    assert done.epsilon == wanted
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["epsilon"], result["delta"]) == (wanted, 1e-4)
    assert pf.Run.open(tmp_path / "run").epsilon == wanted
    assert pf.run(pf.FedAvg(rounds=1, batch=8, guard="clip=1"), tiny()).epsilon == {}


def test_every_message_of_a_round_counts() -> None:
    method = pf.PartialAveraging(rounds=1, batch=8, scheme="50%", guard="clip=0.1,noise=2")
    done = pf.run(method, tiny(), topology="gossip:cycles=3")
    sent = {m["node"]: m["noised"] for m in done.metrics if "noised" in m}
    assert max(sent.values()) > 1
    assert done.epsilon == {name: epsilon(2, n, 1e-5) for name, n in sent.items()}


# ---- compression ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drifting(pf.FedAvg):
    """Sends numbers that nobody trains, and does not listen."""

    def sends(self, node: Node) -> Any:
        return {"x": TensorSpec((40,))}

    def hears(self, node: Node) -> Any:
        return self.sends(node)

    def send(self, node: Node) -> Message:
        t = int(node.memory.get("t", torch.tensor(0)))
        node.memory["t"] = torch.tensor(t + 1)
        return Message({"x": torch.randn(40, generator=node.stream("x", t))})


@pytest.mark.parametrize(("kind", "quantum"), [("int8", 4 / 127), ("float16", 4 / 1024)])
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent(kind: str, quantum: float) -> None:
    """To within one quantum, however many messages; without feedback errors would add up."""
    method, node = guarded(Drifting(), f"compress={kind}"), tiny()[0]
    wanted, arrived = torch.zeros(40), torch.zeros(40)
    for t in range(100):
        wanted += torch.randn(40, generator=node.stream("x", t))
        message = method.send(node)
        message.check(method.sends(node))
        arrived += method._decoded(message).tensors["x"]
        assert float((wanted - arrived).abs().max()) <= quantum + 1e-5


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.25), ("float16", 0.5)])
def test_fewer_bytes_cross_in_both_directions(kind: str, share: float) -> None:
    bare = pf.run(pf.FedAvg(**SMALL), tiny())
    small = pf.run(pf.FedAvg(**SMALL, guard=f"compress={kind}"), tiny())
    first, second = (r.ledger.bytes_sent("M0") for r in (bare, small))
    tensors = [t for t in small.ledger.crossings()[0].tensors if t["dtype"] == kind]
    assert len(tensors) == 9
    scales = 3 * 9 * 4 if kind == "int8" else 0
    whole = 3 * 16  # the counter and the number of examples
    assert second == (first - whole) * share + whole + scales
    assert small.ledger.bytes_received("M0") < 0.6 * bare.ledger.bytes_received("M0")


def test_everybody_hears_the_same_bits() -> None:
    done = pf.run(pf.FedAvg(**SMALL, guard="compress=int8"), tiny())
    first, *others = (node.model.state() for node in done.nodes.values())
    for other in others:
        assert all(torch.equal(first[n], other[n]) for n in first)


def test_numbers_of_one_and_numbers_that_are_whole_are_not_compressed() -> None:
    method = guarded(pf.FedLinked(strength=True, **FEDLINKED), "compress=int8")
    assert str(method.hears(tiny()[0])["strength"]) == "float32[]"
    assert str(method.hears(tiny()[0])["regulariser"]) == "int8[20, 5]"
    assert str(guarded(pf.FedAvg(), "compress=int8").sends(tiny()[0])["num_examples"]) == "int64[]"


# ---- hostile and broken --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["clip=0.5", "clip=0.5,noise=1", "compress=int8", "compress=float16"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_node_is_refused_as_without_a_guard(text: str, bad: float) -> None:
    nodes = tiny()
    nodes[0].model.load({"head.bias": torch.full((3,), bad)})
    done = pf.run(pf.FedAvg(rounds=2, batch=8, guard=text), nodes)
    refused = [(f["tick"], f["node"]) for f in done.faults if f["fault"] == "message refused"]
    assert refused == [(1, "M0")]  # in round 2 it begins with the mean of the others
    for node in done.nodes.values():
        assert all(bool(t.isfinite().all()) for t in node.model.state().values())


def _reply(change: Callable[[dict[str, Tensor]], None]) -> list[dict[str, Any]]:
    @dataclass(frozen=True, kw_only=True)
    class Hostile(Guarded):
        def send(self, node: Node) -> Message:
            told = dict(super().send(node).tensors)
            if node.name == "M1":
                change(told)
            return Message(told)

    method = pf.FedAvg(rounds=1, batch=8)
    common = {"rounds": 1, "inner": method, "tools": Guard.parse("compress=int8")}
    return list(pf.run(Hostile(**common), tiny()).faults)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update({"head.bias": m["head.bias"].float()}), "expected int8"),
        (lambda m: m.update({"head.bias/scale": torch.tensor(math.nan)}), "NaN"),
        (lambda m: m.update({"head.bias/scale": torch.tensor(-1.0)}), "at least 0"),
        (lambda m: m.pop("head.bias/scale"), "tensors missing: head.bias/scale"),
        (lambda m: m.update({"more/scale": torch.tensor(1.0)}), "not announced: more/scale"),
        (lambda m: m.update({"head.bias": m["head.bias"].repeat(5)}), r"int8\[15\]"),
    ],
)
def test_what_is_no_compressed_message_is_refused(change: Any, why: str) -> None:
    (fault,) = _reply(change)
    assert (fault["node"], fault["fault"]) == ("M1", "message refused")
    assert re.search(why, fault["why"])


# ---- as people type it ---------------------------------------------------------------------------


def test_the_guard_is_in_the_folder_and_a_run_is_resumed_with_it(tmp_path: Path) -> None:
    method = pf.FedAvg(rounds=2, batch=8, guard="compress=int8")
    pf.run(method, tiny(), folder=tmp_path / "run")
    assert pf.Run.open(tmp_path / "run").config["options"]["guard"] == "compress=int8"
    (tmp_path / "run" / "result.json").unlink()
    again = pf.resume(tmp_path / "run", nodes=tiny())
    dtypes = {t["dtype"] for c in again.ledger.crossings() for t in c.tensors}
    assert dtypes == {"int8", "float32", "int64"}  # float32: scales


def test_the_wrapped_method_shows_as_itself() -> None:
    method = guarded(pf.LI(rounds=5), "clip=1")
    assert (method.name, method.title, method.topologies) == (
        pf.LI.name,
        pf.LI.title,
        pf.LI.topologies,
    )
    assert method.rounds == method.inner.rounds == 5


def test_the_command_line_takes_it_and_tells_the_loss(tmp_path: Path) -> None:
    words = ["run", "fedper", "--quick", "--rounds", "1", "--folder", str(tmp_path / "run")]
    words += ["--guard", "clip=1,noise=2,delta=1e-4", "--no-progress"]
    done = CliRunner().invoke(cli.app, words, prog_name="polyfed")
    assert done.exit_code == 0, done.output
    wanted = f"privacy: epsilon {epsilon(2, 1, 1e-4):.3g} for each node at delta 0.0001"
    assert wanted in done.output
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path / "run")], prog_name="polyfed")
    assert wanted in shown.output
    bad = CliRunner().invoke(cli.app, ["run", "fedper", "--guard", "noise=2"], prog_name="polyfed")
    assert bad.exit_code == 2
    assert "without a bound no noise is enough" in bad.output

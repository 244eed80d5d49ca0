"""What a person hands over by mistake: said before anything is trained, with what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError, ModelError, PolyfedError, RunError
from polyfed.testing import tiny
from polyfed.testing.federations import tiny_net

pytestmark = pytest.mark.usefixtures("untyped")

FEDAVG = pf.FedAvg(rounds=2, batch=8)
Spoil = Callable[[Node], None]


def splits(**changed: Any) -> Spoil:
    def spoil(node: Node) -> None:
        node.data = pf.Data(may_miss_classes=True, **(dict(node.data) | changed))

    return spoil


def labels(change: Callable[[Tensor], Tensor], *names: str) -> Spoil:
    def spoil(node: Node) -> None:
        for name in names or ("train", "val_es", "val_rb", "test"):
            split = node.data[name]
            splits(**{name: (split.x, change(split.y))})(node)

    return spoil


def inputs(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(node: Node) -> None:
        split = node.data["train"]
        splits(train=(change(split.x), split.y))(node)

    return spoil


def put(**fields: Any) -> Spoil:
    def spoil(node: Node) -> None:
        for name, value in fields.items():
            setattr(node, name, value)

    return spoil


def network(net: nn.Module, **parts: Any) -> Spoil:
    return put(model=Model.split(net, **parts))


def one_hot(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y, 3)


WIDE = nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (1, 3)))
WRONG: dict[str, tuple[Spoil, type[PolyfedError], str]] = {
    "float": (labels(Tensor.double), DataError,
              r"M0, split 'train': labels are float64\[25\].*int64\[25\]. Fix: y.long\(\)"),
    "float test": (labels(Tensor.float, "test"), DataError, r"'test': labels are float32\[9\]"),
    "column": (labels(lambda y: y[:, None]), DataError, r"int64\[25, 1\].*Fix: y.squeeze\(1\)"),
    "one-hot": (labels(one_hot), DataError, r"int64\[25, 3\].*Fix: y.argmax\(1\)"),
    "scored shares": (labels(lambda y: one_hot(y).float()), DataError, r"'val_rb'.*argmax"),
    "yes and no": (network(nn.Linear(6, 1), all=...), DataError,
                   "has 1 output .labels 0 to 0.*an output for every class, two for yes and no"),
    "pictures": (network(WIDE, all=...), ModelError, r"puts out \[1, 3\] a sample.*pf.Node.score"),
    "float64": (inputs(Tensor.double), ModelError,
                r"inputs are torch.float64, the parameters torch.float32. Fix: x.to\(torch.fl"),
    "uint8": (inputs(lambda x: x.abs().to(torch.uint8)), ModelError, "inputs are torch.uint8"),
    "sparse": (inputs(Tensor.to_sparse), ModelError, "does not take its data.*'train'"),
    "val": (splits(val=torch.zeros(3, 6)), ConfigError,
            "unknown data split of node M0 'val'. Did you mean 'val_.*own_..., "),
    "no Model": (put(model=tiny_net()), ModelError,
                 "node M0: its model is a Sequential. .*pf.Model.split"),
    "nothing": (put(model=Model.none()), ModelError, "node M0: its model is missing"),
    "no Data": (put(data={"train": 1}), DataError, r"node M0: its data are a dict.*pf.Data\(train"),
    "number": (put(name=3), ConfigError, "node name 3: expected a text, such as 'M3'"),
    "order": (network(tiny_net(), head="head", trunk="trunk"), ModelError,
              "order head, trunk, but data pass through them in the order trunk, head.*trunk=...,"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "error", "text"), WRONG.values(), ids=WRONG)
def test_a_node_that_cannot_be(
    tmp_path: Path, spoil: Spoil, error: type[PolyfedError], text: str
) -> None:
    nodes = tiny()
    spoil(nodes[0])
    with pytest.raises(error, match=text):
        pf.run(FEDAVG, nodes, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def all_the_same(model: Model, split: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    "spoil",
    [
        labels(Tensor.int),
        labels(lambda y: y.to(torch.uint8)),
        labels(lambda y: one_hot(y).float(), "train"),
        splits(own_calibration=torch.zeros(2, 99)),
        splits(public=(torch.zeros(4, 6), torch.tensor([7, 8, 9, 10]))),
        inputs(lambda x: x.clone().requires_grad_()),
        put(score=all_the_same),
    ],
)
def test_a_node_that_can_be(spoil: Spoil) -> None:
    nodes = tiny()
    for node in nodes:
        spoil(node)
    assert pf.run(FEDAVG, nodes).faults == []


def test_a_node_with_a_score_may_hold_other_labels_but_not_train_on_them_by_cross_entropy() -> None:
    nodes = tiny()
    for node in nodes:
        labels(Tensor.float)(node)
        node.score = all_the_same
    with pytest.raises(DataError, match=r"cross_entropy.*shape \[8\].*Fix: y.long\(\)"):
        pf.run(FEDAVG, nodes)


@pytest.mark.parametrize(
    ("y", "fits"),
    [
        (torch.zeros(4).long(), True),
        (torch.zeros(4, 3), True),
        (torch.zeros(4), False),
        (torch.zeros(4, 1), False),
        (torch.zeros(4, 1).long(), False),
        (torch.zeros(4, 3).long(), False),
    ],
)
def test_what_cross_entropy_takes(y: Tensor, fits: bool) -> None:
    model = Model.split(nn.Linear(2, 3), all=...)
    if fits:
        pf.core.phase.cross_entropy(model, torch.zeros(4, 2), y)
    else:
        with pytest.raises(DataError, match="cross_entropy takes whole class numbers"):
            pf.core.phase.cross_entropy(model, torch.zeros(4, 2), y)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (pf.FedLinked, "got class FedLinked. Fix: call the class"),
        ("fedlinked", "got 'fedlinked'.*from a name, pf.methods.make"),
        (None, "a method is made with its options.*got NoneType"),
    ],
)
def test_what_is_no_method(method: Any, text: str) -> None:
    for call in (
        lambda: pf.run(method, tiny()),
        lambda: pf.compare(method, tiny()),
        lambda: pf.compare([method], tiny()),
        lambda: pf.compare({"a": method}, tiny()),
    ):
        with pytest.raises(ConfigError, match=text):
            call()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (pf.tasks.digits, "got function digits. Fix: .*call the task: pf.tasks.digits"),
        (pf.tasks.load("digits"), "got class Digits"),
        ("digits", "got 'd'|got 'digits'"),
        ([Model.none()], "a federation is a list of pf.Node or a task, got Model"),
    ],
)
def test_what_is_no_federation(task: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.run(FEDAVG, task)
    with pytest.raises(ConfigError, match=text):
        pf.compare([FEDAVG], task)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seed": "0"}, "a seed must be a whole number, got '0'"),
        ({"seed": True}, "a seed must be a whole number, got True"),
        ({"evaluate_every": "1"}, "Settings.evaluate_every must be a whole number, got '1'"),
        ({"checkpoint_every": 1.5}, "Settings.checkpoint_every must be a whole number, got 1.5"),
        ({"absent": ["M0"]}, "absent must be names by round.*got .'M0'."),
        ({"absent": {"1": ["M0"]}}, "absent must be names by round"),
        ({"topology": pf.topologies}, "a topology is a name such as 'star', or a Topology"),
    ],
)
def test_settings_of_another_kind(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.run(FEDAVG, tiny(), **settings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rounds": "3"}, "FedAvg.rounds must be a whole number, got '3'"),
        ({"rounds": 2.5}, "FedAvg.rounds must be a whole number, got 2.5"),
        ({"local_epochs": None}, "FedAvg.local_epochs must be a whole number, got None"),
        ({"lr": "1e-3"}, "FedAvg.lr must be a number, got '1e-3'"),
        ({"batch": 2.5}, "batch is a whole number, or a share below 1, got 2.5"),
    ],
)
def test_options_of_another_kind(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.FedAvg(**options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seeds": "2"}, "a seed must be a whole number, got '2'"),
        ({"seeds": 2.0}, "a seed must be a whole number, got 2.0"),
        ({"seed": 1}, "unknown setting of compare 'seed'. Did you mean 'seeds'"),
        ({"divice": "cpu"}, "unknown setting of compare 'divice'. Did you mean 'device'"),
    ],
)
def test_settings_of_compare(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.compare([FEDAVG], tiny(), **settings)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """A seed of numpy's names the same streams; what was run can be written down and read."""
    method = pf.FedAvg(rounds=np.int64(1), lr=np.float64(1e-3), batch=np.int32(8))
    there = tmp_path / "run"
    run = pf.run(method, tiny(), seed=np.int64(0), absent={np.int64(1): ["M0"]}, folder=there)
    plain = pf.run(pf.FedAvg(rounds=1, lr=1e-3, batch=8), tiny(), absent={1: ["M0"]})
    assert run.accuracy == plain.accuracy == pf.Run.open(there).accuracy
    both = pf.compare(method, tiny(), seeds=np.arange(2), folder=tmp_path / "two")
    assert [run.folder.name for run in both.runs["fedavg"]] == ["seed-0", "seed-1"]


def test_a_score_may_be_a_tensor(tmp_path: Path) -> None:
    nodes = tiny()
    for node in nodes:
        node.score = lambda model, split: (model(split.x).argmax(1) == split.y).float().mean()
    run = pf.run(pf.FedAvg(rounds=1), nodes, folder=tmp_path / "run")
    assert {type(value) for value in run.accuracy.values()} == {float}


def test_a_run_is_not_resumed_with_another_method(tmp_path: Path) -> None:
    pf.run(FEDAVG, tiny(), folder=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for other, text in [
        (pf.Local(rounds=2, batch=8), "was begun with fedavg, got local"),
        (pf.FedAvg(rounds=3, batch=8), "begun with fedavg rounds=2, got fedavg rounds=3"),
        (pf.FedAvg, "got class FedAvg"),
    ]:
        with pytest.raises((RunError, ConfigError), match=text):
            pf.resume(tmp_path / "run", method=other, nodes=tiny())
    assert pf.resume(tmp_path / "run", method=FEDAVG, nodes=tiny()).accuracy


class Nothing(pf.Method):
    name, title = "nothing", "forgets to yield"

    def local(self, node: Node) -> Any:
        self.phase("local", epochs=1)


class Elsewhere(pf.Method):
    name, title = "elsewhere", "names a part that is not there"

    def local(self, node: Node) -> Any:
        yield self.phase("local", epochs=1, parts=("hed",))


class Text(pf.Method):
    name, title = "text", "names parts by a text"

    def local(self, node: Node) -> Any:
        yield self.phase("local", epochs=1, parts="head")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Nothing(), r"nothing.local returns nothing: write return \(\)"),
        (Elsewhere(), "unknown part 'hed'. Did you mean 'head'"),
        (Text(), r"phase 'local': write parts=\('head',\), a tuple"),
    ],
)
def test_slips_in_a_method_of_ones_own(method: pf.Method, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pf.run(method, tiny())


class Unannounced(pf.Method):
    name, title = "unannounced", "sends what it does not announce"

    def local(self, node: Node) -> Any:
        yield self.phase("local", epochs=1)

    def send(self, node: Node) -> pf.Message:
        return pf.Message(node.model.state())


def test_the_table_of_a_run_tells_of_its_faults() -> None:
    """In Python nobody else does: here nothing was shared at all."""
    run = pf.run(Unannounced(rounds=2), tiny())
    assert run.table().endswith("M1 message refused (2), M2 message refused (2)")
    assert "fault" not in pf.run(pf.Local(rounds=1), tiny()).table()

"""Federations of unlabelled sets: who holds what, and what they know about it."""

from __future__ import annotations

import os
import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed import methods, tasks
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError, DataError
from polyfed.models.digit_model import digit_model
from polyfed.tasks.embedded import moved_digits
from polyfed.tasks.task import Task
from polyfed.tasks.unlabelled import DigitsSets, MnistSets, Repeated
from polyfed.train.surrogate import SETS, examine, set_proportions

MEAN, SD = 0.1307, 0.3081


def digit_of() -> dict[bytes, int]:
    """The label of every embedded image, by its pixels."""
    x, y = moved_digits()
    known = {row.numpy().tobytes(): int(label) for row, label in zip(x, y, strict=True)}
    assert len(known) == 1797
    return known


def keys(x: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in x]


def labels_of(node: Node, split: str) -> list[int]:
    y = node.data[split].y
    assert y is not None
    return y.tolist()


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    return DigitsSets().nodes(0)


# ---- digits --------------------------------------------------------------------------------------


def test_who_holds_what(nodes: list[Node]) -> None:
    *parties, hub = nodes
    assert [n.name for n in nodes] == ["M0", "M1", "M2", "M3", "M4", "hub"]
    assert {name: len(split) for name, split in hub.data.items()} == {"train": 100, "val_rb": 200}
    for node in parties:
        assert set(node.data) == {"train", "test"}
        assert node.data["train"].y is None
        assert node.classes == hub.classes == tuple("0123456789")
        assert np.bincount(labels_of(node, "test")).tolist() == [7] * 10  # 397 // 5 // 10


def test_labels_are_those_of_the_images(nodes: list[Node]) -> None:
    truth = digit_of()
    for node in nodes:
        for name, split in node.data.items():
            if split.y is not None:
                assert [truth[k] for k in keys(split.x)] == labels_of(node, name)


def test_pools_do_not_meet(nodes: list[Node]) -> None:
    *parties, hub = nodes
    pools = {node.name: set(keys(node.data["train"].x)) for node in nodes}
    pools["val_rb"] = set(keys(hub.data["val_rb"].x))
    pools["test"] = {k for node in parties for k in keys(node.data["test"].x)}
    for a, b in combinations(pools, 2):
        assert not pools[a] & pools[b], (a, b)


@pytest.mark.parametrize("iid", [True, False])
def test_proportions_are_those_of_the_sets(iid: bool) -> None:
    truth = digit_of()
    for node in DigitsSets(iid=iid).nodes(1)[:-1]:
        digits = torch.tensor([truth[k] for k in keys(node.data["train"].x)])
        for m, row in enumerate(set_proportions(node.model)):
            inside = digits[node.memory[SETS] == m]
            counted = torch.bincount(inside, minlength=10) / len(inside)
            torch.testing.assert_close(row, counted.float(), rtol=0, atol=1e-6)


def test_nodes_that_are_not_alike_have_mostly_two_digits() -> None:
    truth = digit_of()
    for c, node in enumerate(DigitsSets(iid=False).nodes(0)[:-1]):
        digits = [truth[k] for k in set(keys(node.data["train"].x))]
        assert sum(d in (2 * c, 2 * c + 1) for d in digits) > 0.75 * len(digits)
    assert examine(DigitsSets(iid=True).nodes(0)[:-1]).is_certain
    assert not examine(DigitsSets(iid=False).nodes(0)[:-1]).is_certain


def test_a_seed_is_a_federation() -> None:
    first, again, other = (DigitsSets().nodes(seed) for seed in (3, 3, 4))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.data["train"].x, two.data["train"].x)
    assert not torch.equal(first[0].data["test"].x, other[0].data["test"].x)


def test_fewer_labels_change_nothing_else(nodes: list[Node]) -> None:
    few, none = (DigitsSets(hub_labels=n).nodes(0) for n in (30, 0))
    assert torch.equal(few[-1].data["train"].x, nodes[-1].data["train"].x[:30])
    assert torch.equal(few[-1].data["val_rb"].x, nodes[-1].data["val_rb"].x)
    assert "train" not in none[-1].data
    for one, two in zip(few[:-1], nodes[:-1], strict=True):
        assert torch.equal(one.data["train"].x, two.data["train"].x)
        assert torch.equal(one.memory[SETS], two.memory[SETS])


def test_options_reach_the_sets() -> None:
    made = DigitsSets(num_nodes=3, sets=8, overlap=False, pi_noise=0.3).nodes(0)
    assert [n.name for n in made] == ["M0", "M1", "M2", "hub"]
    exact = DigitsSets(num_nodes=3, sets=8, overlap=False).nodes(0)
    for node, other in zip(made[:-1], exact[:-1], strict=True):
        assert set_proportions(node.model).shape == (8, 10)
        assert len(set(keys(node.data["train"].x))) == len(node.data["train"])
        error = (set_proportions(node.model) - set_proportions(other.model)).abs()
        assert 0.01 < float(error.mean()) < 0.1


def test_everybody_starts_from_the_same_weights_unless_each_from_its_own(nodes: list[Node]) -> None:
    def weights(made: list[Node]) -> list[Tensor]:
        return [n.model.state()["head.weight"] for n in made]

    assert all(torch.equal(w, weights(nodes)[0]) for w in weights(nodes))
    own = weights(DigitsSets(init="own").nodes(0))
    assert not any(torch.equal(a, b) for a, b in combinations(own, 2))


@pytest.mark.parametrize(("share", "counted"), [(1.0, 1.0), (0.1, 0.1)])
def test_with_labels_nodes_know_those_of_the_same_images(
    nodes: list[Node], share: float, counted: float
) -> None:
    truth = digit_of()
    made = DigitsSets(labels=share).nodes(0)
    assert [n.name for n in made] == ["M0", "M1", "M2", "M3", "M4"]
    for node, twin in zip(made, nodes[:-1], strict=True):
        held, known = set(keys(twin.data["train"].x)), keys(node.data["train"].x)
        assert len(known) == len(set(known)) == round(counted * len(held))
        assert set(known) <= held
        assert labels_of(node, "train") == [truth[k] for k in known]
        assert torch.equal(node.data["test"].x, twin.data["test"].x)
        assert SETS not in node.memory


def test_fedavg_takes_the_labelled_federation() -> None:
    task = DigitsSets(labels=0.1, quick=True)
    ended = run(methods.make("fedavg", {}, task), task, progress=False)
    assert ended.accuracy.keys() == {"M0", "M1", "M2", "M3", "M4"}


@pytest.mark.parametrize("name", ["fedul-m1", "hub-only"])
def test_quick_runs(name: str) -> None:
    task = tasks.digits_sets(quick=True)
    ended = run(methods.make(name, {}, task), task, progress=False)
    assert ended.faults == []
    assert max(m["tick"] for m in ended.metrics if m["tick"] != "final") == 2


@pytest.mark.slow
def test_labels_at_the_hub_help() -> None:
    """Sets and labels are better than the labels alone."""
    task = DigitsSets()
    found = {
        name: run(methods.make(name, {}, task), task, progress=False).mean_accuracy
        for name in ("hub-only", "fedul-m1")
    }
    assert found["fedul-m1"] > found["hub-only"] + 0.1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hub_labels": 101}, "DigitsSets.hub_labels must be between 0 and 100, got 101"),
        ({"hub_labels": -1}, "hub_labels must be between"),
        ({"labels": 1.5}, "DigitsSets.labels must be between 0 and 1"),
        ({"num_nodes": 0}, "SurrogateSets.nodes must be >= 1"),
        ({"sets": 0}, "SurrogateSets.sets must be >= 1"),
        ({"pi_noise": 2.0}, "SurrogateSets.noise must be between 0 and 0.99"),
    ],
)
def test_options_that_cannot_be(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DigitsSets(**values)


def test_too_many_sets_say_so() -> None:
    with pytest.raises(DataError, match=r"no sample for set .* Fix: fewer sets, or more samples"):
        DigitsSets(sets=200).nodes(0)


# ---- MNIST ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,200 and 600 images of noise; the first three pixels spell the index, the fourth the digit.

    A fiftieth of MNIST's: 720 in sets, 240 labelled, 240 to validate.
    """
    folder = tmp_path_factory.mktemp("data")

    def idx(a: np.ndarray[Any, Any]) -> bytes:
        return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()

    for name, first, n in (("train", 0, 1200), ("t10k", 1200, 600)):
        x = np.random.default_rng(first).integers(0, 256, (n, 28, 28), np.uint8)
        index = np.arange(first, first + n)
        spelled = np.stack([index >> 16, index >> 8 & 255, index & 255, index % 10], axis=1)
        x.reshape(n, -1)[:, :4] = spelled
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(x))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx((index % 10).astype(np.uint8)))
    return folder


def spelled(x: Tensor) -> tuple[list[int], list[int]]:
    """Index and digit that the pixels of each image spell, once MNIST's scale is taken back."""
    pixels = ((x * SD + MEAN) * 255).round().long().flatten(1)
    index = pixels[:, 0] * 65536 + pixels[:, 1] * 256 + pixels[:, 2]
    return index.tolist(), pixels[:, 3].tolist()


@pytest.mark.parametrize("quick", [False, True])
def test_mnist_is_cut_as_the_paper_cuts_it(mnist: Path, quick: bool) -> None:
    """36 : 12 : 12 of the official train images, the test images are the official ones."""
    *parties, hub = MnistSets(data=mnist, net="cnn", quick=quick, sets=3 if quick else 10).nodes(0)
    part = 12 if quick else 1
    assert {n: len(s) for n, s in hub.data.items()} == {"train": 240 // part, "val_rb": 240 // part}
    seen = [set(spelled(hub.data[n].x)[0]) for n in ("train", "val_rb")]
    for node in parties:
        index, digits = spelled(node.data["train"].x)
        seen.append(set(index))
        for m, row in enumerate(set_proportions(node.model).tolist()):
            own = [d for d, s in zip(digits, node.memory[SETS].tolist(), strict=True) if s == m]
            assert row == pytest.approx([own.count(d) / len(own) for d in range(10)], abs=1e-6)
        tested, known = spelled(node.data["test"].x)
        assert min(tested) >= 1200
        assert len(tested) == (10 if quick else 120)
        assert labels_of(node, "test") == known
    assert all(max(s) < 1200 for s in seen)
    assert not any(a & b for a, b in combinations(seen, 2))
    assert labels_of(hub, "train") == spelled(hub.data["train"].x)[1]


def test_the_digit_model_sees_three_equal_channels() -> None:
    net = MnistSets(net="digit").make_network()
    assert sum(p.numel() for p in net.parameters()) == 14_219_210
    small = MnistSets(net="digit", quick=True).make_network().eval()
    bare = digit_model((3, 28, 28), 10, width=8).eval()
    bare.load_state_dict(small.state_dict())
    x = torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(small(x), bare(torch.cat([x, x, x], 1)))
    assert isinstance(small.grey, Repeated)
    assert isinstance(MnistSets(net="cnn").make_network(), nn.Sequential)


@pytest.mark.parametrize("method", ["fedul", "fedul-m1", "fedul-m2", "fedul-mgda", "fedpl"])
def test_the_papers_settings(method: str) -> None:
    made = methods.make(method, {}, MnistSets())
    got = [getattr(made, n) for n in ("rounds", "batch", "lr", "local_epochs", "rotate", "l1")]
    assert got == [100, 100, 1e-4, 1, 20.0, 1e-5]
    assert made.fill == pytest.approx((0 - MEAN) / SD)
    assert methods.make(method, {}, MnistSets(sets=40)).l1 == 2e-6
    assert methods.make("fedavg", {}, MnistSets()).weighting == "uniform"


def test_both_networks_train(mnist: Path) -> None:
    for net in ("digit", "cnn"):
        task: Task = tasks.mnist_sets(data=mnist, net=net, quick=True, sets=3)
        ended = run(methods.make("fedul-m1", {"rounds": 1}, task), task, progress=False)
        assert ended.faults == []


@pytest.mark.skipif("POLYFED_DATA" not in os.environ, reason="POLYFED_DATA is not set")
@pytest.mark.real_data
def test_mnist_for_real() -> None:
    task = MnistSets(data=Path(os.environ["POLYFED_DATA"]))
    *parties, hub = task.nodes(0)
    assert (len(hub.data["train"]), len(hub.data["val_rb"])) == (12_000, 12_000)
    assert len(parties) == 5
    assert [len(n.data["test"]) for n in parties] == [2000] * 5  # uniform, of 10,000
    assert examine(parties).is_certain

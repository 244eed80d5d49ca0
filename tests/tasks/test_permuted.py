"""Permuted digits: who calls what by which name, on the embedded digits and on tiny MNIST files."""

from __future__ import annotations

import struct
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import tasks
from polyfed.errors import ConfigError, DataError
from polyfed.methods import make
from polyfed.tasks.permuted import DigitsPermuted, MnistPermuted, renaming

IDENTITY = tuple(range(10))
SWAP = (0, 1, 2, 3, 4, 5, 6, 7, 9, 8)


def test_swap_and_cycle_are_of_the_first_nodes() -> None:
    assert renaming("swap", 5, 2).permutations == (SWAP, SWAP)
    assert renaming("cycle:2", 5, 2).permutations == (SWAP, SWAP)
    assert renaming("cycle:10", 5, 1).permutations == ((1, 2, 3, 4, 5, 6, 7, 8, 9, 0),)
    assert renaming("cycle:4", 5, 1).permutations == ((0, 1, 2, 3, 4, 5, 7, 8, 9, 6),)
    for kind, permuted in (("same", 3), ("cycle:0", 3), ("swap", 0)):
        assert renaming(kind, 5, permuted).permutations == ()


def test_s3_has_every_permutation_of_the_last_three_digits_twice() -> None:
    found = renaming("s3", 12, 0).permutations
    assert len(found) == 12
    assert {names[7:] for names in found} == set(permutations((7, 8, 9)))
    assert all(names[:7] == IDENTITY[:7] for names in found)
    assert all(found[k] == found[k + 6] for k in range(6))
    assert found[0] == IDENTITY


def test_v3e() -> None:
    """SPEC 2.8: peers 2 and 3 exchange 8 and 9; peer 3 also 6 and 7."""
    both = (0, 1, 2, 3, 4, 5, 7, 6, 9, 8)
    assert renaming("v3e", 4, 0).permutations == (IDENTITY, IDENTITY, SWAP, both)


def idx(a: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 and 60 images; the first two pixels of image i spell i, its label is i mod 10."""
    folder = tmp_path_factory.mktemp("data")
    for name, n in (("train", 300), ("t10k", 60)):
        x = np.zeros((n, 28, 28), np.uint8)
        x[:, 0, 0], x[:, 0, 1], x[:, 5, 5] = np.arange(n) // 256, np.arange(n) % 256, 255
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(x))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            idx((np.arange(n) % 10).astype(np.uint8))
        )
    return folder


def numbers(x: torch.Tensor) -> list[int]:
    pixels = (x[:, 0, 0, :2] * 255).round().long()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


def test_stretches_of_the_training_images_and_the_first_test_images(mnist: Path) -> None:
    task = MnistPermuted(data=mnist, num_nodes=4, permuted=3, train=70, test=50)
    nodes = task.nodes(0)
    assert [node.name for node in nodes] == ["M0", "M1", "M2", "M3"]
    for k, node in enumerate(nodes):
        names = SWAP if k < 3 else IDENTITY
        train, test = node.data["train"], node.data["test"]
        assert numbers(train.x) == list(range(70 * k, 70 * k + 70))
        assert train.y.tolist() == [names[i % 10] for i in numbers(train.x)]
        assert numbers(test.x) == list(range(50))
        assert test.y.tolist() == [names[i % 10] for i in range(50)]
        assert float(train.x.max()) == 1.0
        assert float(train.x.min()) == 0.0
        assert node.classes == tuple("0123456789")


def test_the_network_is_the_papers(mnist: Path) -> None:
    node = MnistPermuted(data=mnist, num_nodes=2, permuted=1, train=10, test=10).nodes(0)[0]
    assert sum(p.numel() for p in node.model.parameters()) == 266_610
    shapes = [tuple(t.shape) for n, t in node.model.state().items() if "weight" in n]
    assert shapes == [(300, 784), (100, 300), (10, 100)]
    for name, tensor in node.model.state().items():
        if "bias" in name:
            assert not bool(tensor.any())
        else:  # four times Xavier, for logistic units: uniform to 4 sqrt(6 / (in + out))
            bound = 4 * (6 / sum(tensor.shape)) ** 0.5
            assert float(tensor.abs().max()) == pytest.approx(bound, rel=0.01)
    out = node.model(node.data["train"].x[:3])
    assert bool(((out > 0) & (out < 1)).all())


def test_networks_may_start_in_other_ways() -> None:
    sizes = [2560, 800, 200]
    steep = DigitsPermuted(weights="xavier:4").nodes(0)[0].model.state()
    wide = DigitsPermuted(weights="uniform:0.5").nodes(0)[0].model.state()
    assert [t.numel() for n, t in wide.items() if "weight" in n] == sizes
    for name, tensor in steep.items():
        bound = 4 * (6 / sum(tensor.shape)) ** 0.5 if "weight" in name else 0.0
        assert float(tensor.abs().max()) == pytest.approx(bound, rel=0.02)
    for name, tensor in wide.items():  # biases too
        assert 0.2 < float(tensor.abs().max()) <= 0.5, name
        assert float(tensor.min()) < 0 < float(tensor.max())


def test_seeds_change_the_weights_and_not_the_data() -> None:
    task = DigitsPermuted()
    one, other, again = task.nodes(0), task.nodes(1), task.nodes(0)
    for a, b, c in zip(one, other, again, strict=True):
        assert a.data["train"].x is b.data["train"].x  # memory is shared between runs
        assert not torch.equal(a.model.state()["head.0.weight"], b.model.state()["head.0.weight"])
        assert torch.equal(a.model.state()["head.0.weight"], c.model.state()["head.0.weight"])
    first, second = (node.model.state()["head.0.weight"] for node in one[:2])
    assert torch.equal(first, second)
    own = DigitsPermuted(init="own").nodes(0)
    first, second = (node.model.state()["head.0.weight"] for node in own[:2])
    assert not torch.equal(first, second)


def test_the_embedded_digits() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {tuple(x): y for x, y in zip(images.astype(int).tolist(), labels.tolist(), strict=True)}
    seen: list[tuple[int, ...]] = []
    for k, node in enumerate(DigitsPermuted(num_nodes=5, permuted=2, train=80).nodes(0)):
        names = SWAP if k < 2 else IDENTITY
        for split in ("train", "test"):
            x, y = node.data[split].x, node.data[split].y
            assert x.shape[1:] == (1, 8, 8)
            rows = [tuple(row) for row in (x.flatten(1) * 16).round().long().tolist()]
            assert y.tolist() == [names[known[row]] for row in rows]
            seen += rows if split == "train" or k == 0 else []
    assert len(seen) == len(set(seen)) == 5 * 80 + 500  # no image twice
    assert len({known[row] for row in seen[:80]}) == 10


def test_a_linear_head_and_other_layers() -> None:
    node = DigitsPermuted(head="linear", hidden="12=7=5").nodes(0)[0]
    widths = [t.shape[0] for n, t in node.model.state().items() if "weight" in n]
    assert widths == [12, 7, 5, 10]
    assert bool((node.model(node.data["train"].x) < 0).any())


def test_recipes() -> None:
    """The paper's training: single samples, squared error, steps of 0.1."""
    task = tasks.mnist_permuted()
    recipe = task.recipe("partial-averaging")
    assert recipe == {
        "rounds": 30,
        "block": 500,
        "batch": 1,
        "lr": 0.1,
        "optimiser": "sgd",
        "loss": "squared",
        "own_start": False,
        "scheme": "784-250-80-10",
    }
    assert tasks.digits_permuted().recipe("partial-averaging")["own_start"] is True
    assert (task.weights, tasks.digits_permuted().weights) == ("xavier:4", "xavier:1")
    assert tasks.mnist_permuted(hidden="300=100=10").recipe("partial-averaging")["scheme"] == "80%"
    assert task.recipe("fedavg") == {}
    for name in ("partial-averaging", "dynamic-averaging", "auto-slices"):
        for chosen in (task, tasks.digits_permuted(), tasks.mnist_writers(), tasks.letters_hands()):
            assert make(name, {}, chosen).block == chosen.recipe(name)["block"]
    quick = tasks.digits_permuted(quick=True).recipe("partial-averaging")
    assert (quick["rounds"], quick["block"], quick["lr"]) == (5, 50, 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "s4"}, "kind 's4' is not understood. Use same, swap, cycle:4"),
        ({"kind": "cycle:11"}, "kind 'cycle:11' is not understood"),
        ({"kind": "cycle:1"}, "A cycle has none, or two"),
        ({"kind": "v3e", "num_nodes": 3}, "kind 'v3e' is for 4 nodes, got 3"),
        ({"permuted": 5}, "DigitsPermuted.permuted must be between 0 and 4"),
        ({"hidden": "30-10"}, "hidden '30-10': write widths with = between them"),
        ({"hidden": "0"}, "hidden '0': write widths"),
        ({"train": 0}, "DigitsPermuted.train must be >= 1"),
        ({"head": "softmax"}, "DigitsPermuted.head must be one of"),
        ({"weights": "normal:1"}, "weights 'normal:1': write xavier:1"),
        ({"weights": "xavier"}, "weights 'xavier': write xavier:1"),
        ({"weights": "uniform:0"}, "weights 'uniform:0': write"),
        ({"weights": "uniform:inf"}, "weights 'uniform:inf': write"),
    ],
)
def test_wrong_options_are_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        DigitsPermuted(**settings)
    assert said in str(error.value)


def test_too_many_images_are_asked_for(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    with pytest.raises(DataError, match="need 400 and 60 images; there are 300 to train on and 60"):
        MnistPermuted(data=mnist, num_nodes=4, permuted=0, train=100, test=60).nodes(0)
    with pytest.raises(DataError, match="there are 300 to train on and 60 to test on"):
        MnistPermuted(data=mnist, num_nodes=3, permuted=0, train=100, test=61).nodes(0)
    with pytest.raises(DataError, match="task mnist-permuted reads published files"):
        MnistPermuted().nodes(0)

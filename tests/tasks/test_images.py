"""CIFAR-10, SVHN, MNIST as federations: on tiny files in the publishers' layout, and for real."""

import os
import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import tasks
from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.models.cnn import conv_net
from polyfed.tasks.images import Cifar10, ImageTask, Svhn

PRIVATE = ("train", "val_es", "val_rb", "test")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def pictures(first: int, n: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Noise, but the first three pixels spell the image's index, and the fourth its label."""
    x = np.random.default_rng(first).integers(0, 256, (n, *shape), np.uint8)
    flat = x.reshape(n, -1)
    index = np.arange(first, first + n)
    flat[:, :4] = np.stack([index >> 16, index >> 8 & 255, index & 255, index % 10], axis=1)
    return x


def identity(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Index and digit that the pixels of each image spell."""
    pixels = ((x + 1) * 127.5).round().long().flatten(1)
    index = pixels[:, 0] * 65536 + pixels[:, 1] * 256 + pixels[:, 2]
    return index.tolist(), pixels[:, 3].tolist()


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 batches of 500 images: 300 of each class."""
    folder = tmp_path_factory.mktemp("data")
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for b, name in enumerate(names):
        x = pictures(500 * b, 500, (3, 32, 32)).reshape(500, -1)
        y = np.arange(500 * b, 500 * b + 500, dtype=np.int64) % 10
        (folder / f"{name}.bin").write_bytes(
            np.concatenate([y[:, None].astype(np.uint8), x], axis=1).tobytes()
        )
    return folder


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,400 and 600 images: 300 of each digit."""
    folder = tmp_path_factory.mktemp("data")

    def idx(a: np.ndarray[Any, Any]) -> bytes:
        return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()

    for name, first, n in (("train", 0, 2400), ("t10k", 2400, 600)):
        x, y = pictures(first, n, (28, 28)), (np.arange(first, first + n) % 10).astype(np.uint8)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(x))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(y))
    return folder


def check(nodes: list[Node], names: tuple[str, ...], renamed: int = 0) -> None:
    """No image twice, public in common, and every label the class of its image."""
    held: dict[str, set[int]] = {}
    for k, node in enumerate(nodes):
        assert node.model(node.data["train"].x[:2]).shape == (2, len(node.classes))
        for name in PRIVATE:
            if name not in node.data:
                continue
            split = node.data[name]
            assert split.y is not None
            index, digits = identity(split.x)
            held[f"{node.name} {name}"] = set(index)
            assert len(set(index)) == len(index)
            if k >= renamed:
                assert [node.classes[c] for c in split.y.tolist()] == [names[d] for d in digits]
    public = nodes[0].data["public"]
    assert all(n.data["public"].x is public.x for n in nodes)
    held["public"] = set(identity(public.x)[0])
    for a, b in combinations(held, 2):
        assert not held[a] & held[b], f"{a} and {b} share images"
    x = nodes[0].data["train"].x
    assert (float(x.min()), float(x.max())) == (-1, 1)
    assert x.dtype == torch.float32


def sizes(node: Node) -> list[int]:
    return [len(node.data[name]) for name in ("train", "val_es", "val_rb", "test")]


def test_fedlinked_partition(cifar: Path) -> None:
    """Three nodes get 100 of each of their classes; SPEC 1.6's rounding, by hand."""
    nodes = tasks.cifar10(data=cifar).nodes(0)
    check(nodes, CIFAR)
    # 400: public 100, of 300 val_es 30, of 270 test 27, of 243 val_rb 25, train 218
    # 300: public  75, of 225 val_es 23, of 202 test 21, of 181 val_rb 19, train 162
    assert [sizes(n) for n in nodes] == [[218, 30, 25, 27], [162, 23, 19, 21], [218, 30, 25, 27]]
    assert len(nodes[0].data["public"]) == 275
    assert [n.classes for n in nodes] == [
        ("cat", "deer", "dog", "horse"),
        ("cat", "deer", "frog"),
        ("airplane", "automobile", "ship", "truck"),
    ]
    assert "bird" not in {CIFAR[d] for d in identity(nodes[0].data["public"].x)[1]}


def test_a_seed_is_a_federation(cifar: Path) -> None:
    def images(seed: int) -> list[list[int]]:
        return [identity(n.data["train"].x)[0] for n in tasks.cifar10(data=cifar).nodes(seed)]

    assert images(0) == images(0)
    assert images(0) != images(1)


def test_every_class_an_output(cifar: Path) -> None:
    nodes = tasks.cifar10(data=cifar, heads="all").nodes(0)
    check(nodes, CIFAR)
    assert all(n.classes == CIFAR for n in nodes)


@pytest.mark.parametrize("heads", ["own", "all"])
def test_dirichlet_partition(mnist: Path, heads: str) -> None:
    task = tasks.mnist(data=mnist, num_nodes=5, partition="dirichlet:0.3", heads=heads)
    nodes = task.nodes(0)
    check(nodes, tuple("0123456789"))
    assert [n.name for n in nodes] == ["M0", "M1", "M2", "M3", "M4"]
    assert len(nodes[0].data["public"]) == 300
    assert sum(len(n.data[s]) for n in nodes for s in PRIVATE if s in n.data) == 2700
    held = [set(identity(n.data["train"].x)[1]) for n in nodes]
    assert min(map(len, held)) < 10  # some node lacks a class: that is what Dirichlet is for
    assert nodes[0].data.may_miss_classes


def test_iid_without_public_images(mnist: Path) -> None:
    nodes = tasks.mnist(data=mnist, num_nodes=12, partition="iid", public=0).nodes(0)
    assert (nodes[0].name, nodes[-1].name) == ("M00", "M11")
    assert all("public" not in n.data for n in nodes)
    assert all(sum(sizes(n)) == 250 for n in nodes)


def test_the_split_of_personalised_learning(mnist: Path) -> None:
    """Loop Improvement, Table 1: no public images, no validation, three quarters and one."""
    task = tasks.mnist(
        data=mnist, num_nodes=5, partition="pathological:2", public=0, validation=0, model="cnn"
    )
    for node in task.nodes(0):
        assert {name: len(split) for name, split in node.data.items()} == {
            "train": 450,
            "test": 150,
        }
        assert sum(p.numel() for p in node.model.parameters()) == 582_026


@pytest.mark.parametrize("model", ["resnet18", "coatnet", "vgg9"])
def test_another_network(cifar: Path, model: str) -> None:
    nodes = tasks.cifar10(data=cifar, model=model, quick=True).nodes(0)
    check(nodes, CIFAR)


def test_permuted_labels(mnist: Path) -> None:
    """The first two of three nodes call 8 9 and 9 8."""
    nodes = tasks.mnist(data=mnist, num_nodes=3, partition="permute:8,9@2").nodes(0)
    check(nodes, tuple("0123456789"), renamed=2)
    swap = {8: 9, 9: 8}
    for node in nodes[:2]:
        split = node.data["train"]
        assert split.y is not None
        digits = identity(split.x)[1]
        assert split.y.tolist() == [swap.get(d, d) for d in digits]
        assert {8, 9} <= set(digits)


def test_quick_is_every_twelfth_image(cifar: Path) -> None:
    whole, quick = (tasks.cifar10(data=cifar, quick=q).nodes(0) for q in (False, True))
    check(quick, CIFAR)
    for a, b in zip(whole, quick, strict=True):
        for name in a.data:
            assert identity(b.data[name].x)[0] == identity(a.data[name].x)[0][::12]
    parameters = [sum(p.numel() for p in n[0].model.parameters("trunk")) for n in (whole, quick)]
    assert parameters[1] < parameters[0] == 2_194_240


def test_where_the_files_are(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    with pytest.raises(DataError, match=r"--data DIR.*data=DIR.*POLYFED_DATA"):
        tasks.cifar10().nodes(0)
    with pytest.raises(DataError, match="nowhere does not exist"):
        tasks.cifar10(data=tmp_path / "nowhere").nodes(0)
    monkeypatch.setenv("POLYFED_DATA", str(cifar))
    assert len(tasks.cifar10().nodes(0)) == 3


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"partition": "dirichlt:1"}, UnknownNameError, "'dirichlt'. Did you mean 'dirichlet'"),
        ({"partition": "dirichlet:x"}, ConfigError, "dirichlet:x' is not understood"),
        ({"num_nodes": 0}, ConfigError, "Mnist.num_nodes must be >= 1"),
        ({"public": 0.95}, ConfigError, "Mnist.public must be between 0 and 0.9"),
        ({"nodes": 3}, UnknownNameError, "unknown option of task mnist 'nodes'"),
    ],
)
def test_options_are_checked_before_a_file_is_read(values: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tasks.mnist(data="/nowhere", **values)


def test_only_the_own_network_mirrors() -> None:
    with pytest.raises(ConfigError, match="mirror=True: model cnn is as its paper has it"):
        tasks.cifar10(model="cnn", mirror=True)


# ---- the published files -------------------------------------------------------------------------

DATA = os.environ.get("POLYFED_DATA")
real = pytest.mark.skipif(DATA is None, reason="POLYFED_DATA names no folder of published files")


@real
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("task", "want", "public"),
    [
        (Cifar10(), [[4374, 600, 486, 540], [3280, 450, 365, 405], [4374, 600, 486, 540]], 5500),
        (Svhn(), [[5450, 748, 606, 673], [5918, 812, 658, 731], [9346, 1283, 1039, 1154]], 9474),
    ],
    ids=["cifar10", "svhn"],
)
def test_table_4_1(task: Any, want: list[list[int]], public: int) -> None:
    """Kadar 2021: all 26 numbers."""
    nodes = task.nodes(0)
    assert [sizes(n) for n in nodes] == want
    assert len(nodes[0].data["public"]) == public
    assert task.shortfall() == ""
    for node, group in zip(nodes, task.groups, strict=True):
        assert len(node.classes) == len(group)


@real
@pytest.mark.real_data
def test_mnist_for_real() -> None:
    task = tasks.mnist(num_nodes=20)
    assert task.shortfall() == ""
    nodes = task.nodes(0)
    assert len(nodes) == 20
    assert len(nodes[0].data["public"]) == 7000
    assert sum(len(n.data[s]) for n in nodes for s in PRIVATE if s in n.data) == 63_000


def test_a_pool_is_whole_for_the_split_that_it_was_drawn_for(tmp_path: Path) -> None:
    totals = np.full(10, 700)
    x, y = np.zeros((40, 32, 32, 3), np.uint8), (np.arange(40) % 10).astype(np.uint8)
    np.savez(tmp_path / "svhn_fedlinked_pool.npz", x=x, y=y, class_totals=totals)
    assert Svhn(data=tmp_path).shortfall() == ""
    assert Svhn(data=tmp_path, partition="iid").shortfall() == "40 of 7,000 images"


@pytest.mark.parametrize(("task", "trunk"), [(Cifar10(), 2_194_240), (Svhn(), 203_280)], ids=str)
def test_the_defaults_are_fedlinkeds_networks(task: ImageTask, trunk: int) -> None:
    net = task.own_network((3, 32, 32), 10)
    assert sum(p.numel() for p in net.get_submodule("trunk").parameters()) == trunk


@pytest.mark.parametrize("kind", [Cifar10, Svhn])
def test_every_option_of_the_network_reaches_it(kind: type[Cifar10] | type[Svhn]) -> None:
    given = {
        "blocks": 2,
        "channels": 8,
        "representation": 32,
        "dropout": 0.11,
        "last_dropout": 0.22,
        "mirror": True,
    }
    net = kind(**given).own_network((3, 32, 32), 10)  # type: ignore[arg-type]
    same = conv_net((3, 32, 32), 10, **given)  # type: ignore[arg-type]
    assert str(net) == str(same)
    for name, value in given.items():
        assert str(kind(**{name: value}).own_network((3, 32, 32), 10)) != str(  # type: ignore[arg-type]
            kind().own_network((3, 32, 32), 10)
        ), name

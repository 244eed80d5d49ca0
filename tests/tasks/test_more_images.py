"""CIFAR-100 and letters as federations, with networks by name."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError
from polyfed.tasks.images import ImageTask
from polyfed.tasks.more_files import CIFAR100_CLASSES, LETTERS
from polyfed.tasks.more_images import Cifar100, Letters


def pictures(first: int, n: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Noise, but the first two pixels spell the image's index."""
    x = np.random.default_rng(first).integers(0, 256, (n, *shape), np.uint8)
    index = np.arange(first, first + n)
    x.reshape(n, -1)[:, :2] = np.stack([index >> 8, index & 255], axis=1)
    return x


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 and 500 images: 20 of each class; image i is of class i mod 100."""
    folder = tmp_path_factory.mktemp("data")
    for name, first, n in (("train", 0, 1500), ("test", 1500, 500)):
        fine = (np.arange(first, first + n) % 100)[:, None]
        x = pictures(first, n, (3, 32, 32)).reshape(n, -1)
        raw = np.concatenate([fine // 5, fine, x], axis=1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(raw.tobytes())
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """780 and 260 images: 40 of each letter; image i is of letter i mod 26."""
    folder = tmp_path_factory.mktemp("data")
    for name, first, n in (("train", 0, 780), ("test", 780, 260)):
        y = (np.arange(first, first + n) % 26 + 1).astype(np.uint8)
        for kind, a in (("images-idx3", pictures(first, n, (28, 28))), ("labels-idx1", y)):
            raw = struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(raw)
    return folder


def check(nodes: list[Node], names: tuple[str, ...]) -> list[int]:
    """Every label is the class of its image; the images of all nodes, public ones once."""
    seen = []
    for k, node in enumerate(nodes):
        for name, split in node.data.items():
            pixels = ((split.x + 1) * 127.5).round().long().flatten(1)
            index = pixels[:, 0] * 256 + pixels[:, 1]
            seen += index.tolist() if name != "public" or k == 0 else []
            if split.y is not None:
                got = [node.classes[c] for c in split.y.tolist()]
                assert got == [names[i % len(names)] for i in index.tolist()]
    return seen


def test_cifar100_by_dirichlet(cifar: Path) -> None:
    nodes = Cifar100(data=cifar, num_nodes=5).nodes(0)
    assert sorted(check(nodes, CIFAR100_CLASSES)) == list(range(2000))
    assert len(nodes) == 5
    assert all(n.classes == CIFAR100_CLASSES for n in nodes)
    parameters = sum(p.numel() for p in nodes[0].model.parameters())
    assert parameters == 878_538 + 513 * 90  # 100 outputs in place of 10


def test_a_part_of_a_set_is_known_by_its_size(cifar: Path, letters: Path) -> None:
    assert Cifar100(data=cifar).shortfall() == "2,000 of 60,000 images"
    assert Letters(data=letters).shortfall() == ""  # published in more than one size


def test_ten_nodes_with_ten_classes_of_their_own(cifar: Path) -> None:
    task = Cifar100(data=cifar, num_nodes=10, partition="pathological:10", heads="own", public=0)
    nodes = task.nodes(0)
    assert sorted(check(nodes, CIFAR100_CLASSES)) == list(range(2000))
    assert sorted(c for n in nodes for c in n.classes) == sorted(CIFAR100_CLASSES)
    assert all(len(n.classes) == 10 for n in nodes)


def test_letters(letters: Path) -> None:
    nodes = Letters(data=letters, num_nodes=3, partition="iid").nodes(0)
    assert sorted(check(nodes, LETTERS)) == list(range(1040))
    parameters = sum(p.numel() for p in nodes[0].model.parameters())
    assert parameters == 785 * 300 + 301 * 100 + 101 * 26
    assert nodes[0].model.output(nodes[0].data["train"].x, "trunk").min() < 0
    relu = Letters(data=letters, num_nodes=3, partition="iid", relu=True).nodes(0)
    assert relu[0].model.output(relu[0].data["train"].x, "trunk").min() == 0


@pytest.mark.parametrize("model", ["cnn", "resnet18", "resnet34", "vgg9", "alexnet", "coatnet"])
def test_networks_by_name(model: str) -> None:
    task = Cifar100(model=model, quick=True)  # type: ignore[arg-type]
    net = task.make_network((3, 32, 32), 7).eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert sum(p.numel() for p in net.parameters()) < 400_000


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"partition": "fedlinked"}, "names no classes of cifar100. Use dirichlet:0.1"),
        ({"relu": True}, "relu=True: model cnn is as its paper has it"),
        ({"num_nodes": 0}, r"Cifar100\.num_nodes must be >= 1"),
    ],
)
def test_options_that_cannot_be(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Cifar100(**values)


def test_an_image_too_small_for_its_network(letters: Path) -> None:
    with pytest.raises(ConfigError, match="AlexNet takes images from 29x29 on, got 28x28"):
        Letters(data=letters, model="alexnet").nodes(0)


@pytest.mark.real_data
@pytest.mark.parametrize("task", [Cifar100(), Letters()], ids=["cifar100", "letters"])
def test_for_real(task: ImageTask) -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA names no folder of published files")
    try:
        nodes = task.nodes(0)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert len(nodes) == 20
    assert len(nodes[0].classes) == (100 if task.name == "cifar100" else 26)
    total = sum(len(s) for n in nodes for name, s in n.data.items() if name != "public")
    assert total + len(nodes[0].data["public"]) in (12_000, 60_000, 15_600, 103_600, 145_600)

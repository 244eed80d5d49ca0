"""Handwriting with a hand for every node: on tiny files in the publishers' layout."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.errors import ConfigError, DataError
from polyfed.tasks.writers import LettersHands, MnistWriters, turned_by

WRITERS = [7] * 30 + [3] * 50 + [5] * 40 + [9] * 20 + [-1] * 60  # of 200 digits, before a shuffle


def idx(a: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()


def write(folder: Path, name: str, first: int, n: int, labels: int, least: int = 0) -> None:
    """Image i spells i in its first two pixels, and is of class i mod labels."""
    index = np.arange(first, first + n)
    x = np.zeros((n, 28, 28), np.uint8)
    x[:, 0, 0], x[:, 0, 1], x[:, 14, 10:18] = index // 256, index % 256, 255
    (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(x))
    y = (index % labels + least).astype(np.uint8)
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(y))


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder, "train", 0, 200, 10)
    write(folder, "t10k", 200, 20, 10)
    writers = np.random.default_rng(0).permutation(WRITERS)
    np.savez(folder / "writers.npz", train_writer=writers, test_writer=np.full(20, 3))
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder, "train", 0, 260, 26, least=1)
    write(folder, "test", 260, 52, 26, least=1)
    return folder


def numbers(x: torch.Tensor) -> list[int]:
    pixels = (x[:, 0, 0, :2] * 255).round().long()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


def test_a_node_is_a_writer_with_the_most_digits(mnist: Path) -> None:
    """Writer 3 has 70 with those of the test files, then come 5, 7 and 9; -1 is nobody."""
    task = MnistWriters(data=mnist, num_nodes=3, train=20, test=10)
    nodes = task.nodes(0)
    who = np.concatenate([np.load(mnist / "writers.npz")["train_writer"], np.full(20, 3)])
    for node, writer in zip(nodes, (3, 5, 7), strict=True):
        own = numbers(node.data["train"].x) + numbers(node.data["test"].x)
        assert len(own) == len(set(own)) == 30
        assert {int(who[i]) for i in own} == {writer}
        assert (len(node.data["train"]), len(node.data["test"])) == (20, 10)
        for split in node.data.values():
            assert split.y.tolist() == [i % 10 for i in numbers(split.x)]
    first, again = (numbers(task.nodes(seed)[0].data["train"].x) for seed in (0, 0))
    assert first == again
    assert first != numbers(task.nodes(1)[0].data["train"].x)
    assert first != sorted(first)


def test_writers_who_have_too_few_digits(mnist: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="for 4 writers, but the last of them has 20 digits"):
        MnistWriters(data=mnist, num_nodes=4, train=20, test=1).nodes(0)
    MnistWriters(data=mnist, num_nodes=4, train=19, test=1).nodes(0)
    for name in ("train", "t10k"):
        write(tmp_path, name, 0, 10, 10)
    with pytest.raises(DataError, match=r"must know who wrote each digit\. Fix: put writers\.npz"):
        MnistWriters(data=tmp_path, num_nodes=1).nodes(0)


def test_letters_are_shares_in_made_up_hands(letters: Path) -> None:
    task = LettersHands(data=letters, num_nodes=3, train=60, test=20)
    plain = LettersHands(data=letters, num_nodes=3, train=60, test=20, turn=0, slant=0)
    seen: list[int] = []
    for node, straight in zip(task.nodes(0), plain.nodes(0), strict=True):
        assert len(node.classes) == 26
        for name, split in straight.data.items():
            index = numbers(split.x)
            assert split.y.tolist() == [i % 26 for i in index]
            assert torch.equal(split.y, node.data[name].y)
            assert not torch.allclose(split.x, node.data[name].x)
            seen += index
    assert len(seen) == len(set(seen)) == 3 * 80
    one, other = (node.data["train"].x[0, 0, 5:] for node in task.nodes(0)[:2])
    assert not torch.allclose(one, other, atol=0.1)  # all images look alike below the numbers
    with pytest.raises(DataError, match="for 4 nodes need 320 letters, there are 312"):
        LettersHands(data=letters, num_nodes=4, train=60, test=20).nodes(0)
    with pytest.raises(ConfigError, match=r"LettersHands\.turn must be between 0 and 180"):
        LettersHands(turn=200)
    with pytest.raises(ConfigError, match=r"LettersHands\.slant must be >= 0"):
        LettersHands(slant=-1)


def dot(row: int, column: int) -> torch.Tensor:
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, row, column] = 1
    return x


def test_turning_and_slanting() -> None:
    """A quarter clockwise takes the top to the right; a slant takes the top right, bottom left."""
    quarter = torch.pi / 2
    torch.testing.assert_close(turned_by(dot(0, 2), quarter, 0), dot(2, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(turned_by(dot(0, 2), 0, 0.5), dot(0, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(turned_by(dot(4, 2), 0, 1.0), dot(4, 0), rtol=0, atol=1e-5)
    torch.testing.assert_close(turned_by(dot(1, 3), 0, 0), dot(1, 3), rtol=0, atol=1e-5)
    both = turned_by(dot(2, 0), quarter, 1.0)  # left to the top, then the top to the right
    torch.testing.assert_close(both, dot(0, 4), rtol=0, atol=1e-5)

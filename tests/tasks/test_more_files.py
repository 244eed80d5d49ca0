"""CIFAR-100 and EMNIST letters, written here byte by byte and read back."""

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.errors import DataError
from polyfed.tasks import more_files
from polyfed.tasks.files import Images


def pictures(first: int, n: int, *shape: int) -> np.ndarray[Any, Any]:
    """Different along every axis, so that a swapped axis shows."""
    axes = np.meshgrid(*(np.arange(k) for k in (n, *shape)), indexing="ij")
    value = 101 * (axes[0] + first) + 5 * axes[-2] + 3 * axes[-1] + axes[-2] * axes[-1]
    if len(shape) == 3:
        value = value + 67 * axes[1]
    return (value % 256).astype(np.uint8)


def write_cifar(folder: Path, train: int = 3, test: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, n in (("train", 0, train), ("test", train, test)):
        raw = b""
        for i, (red, green, blue) in enumerate(pictures(first, n, 3, 32, 32)):
            coarse, fine = (first + i) % 20, 99 - (first + i)
            raw += bytes([coarse, fine]) + red.tobytes() + green.tobytes() + blue.tobytes()
        (folder / f"{name}.bin").write_bytes(raw)
    return folder


def idx(a: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes()


def write_letters(folder: Path, *, official: bool = False, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.array([1, 26, 2, 3, 25], np.uint8)
    for split, first, n in (("train", 0, 3), ("test", 3, 2)):
        x = pictures(first, n, 28, 28)
        x = np.ascontiguousarray(x.transpose(0, 2, 1)) if official else x
        for kind, raw in (("images-idx3", idx(x)), ("labels-idx1", idx(labels[first : first + n]))):
            name = f"{'emnist-letters-' if official else ''}{split}-{kind}-ubyte"
            path = folder / (name + (".gz" if packed else ""))
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return folder


@pytest.mark.parametrize("below", ["", "cifar-100-binary", "cifar-100-binary-subset"])
def test_cifar100(tmp_path: Path, below: str) -> None:
    write_cifar(tmp_path / below)
    images = more_files.cifar100(tmp_path)
    np.testing.assert_array_equal(images.x.numpy(), pictures(0, 5, 3, 32, 32))
    assert images.y.tolist() == [99, 98, 97, 96, 95]
    assert (images.num_train, images.totals) == (3, None)
    assert [images.classes[y] for y in images.y.tolist()][:2] == ["worm", "woman"]


def test_cifar100_packed(tmp_path: Path) -> None:
    for path in write_cifar(tmp_path).glob("*.bin"):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    np.testing.assert_array_equal(
        more_files.cifar100(tmp_path).x.numpy(), pictures(0, 5, 3, 32, 32)
    )


def test_the_hundred_names() -> None:
    names = more_files.CIFAR100_CLASSES
    assert len(set(names)) == 100
    assert list(names) == sorted(names)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("below", "official"),
    [
        ("", True),
        ("EMNIST/raw", True),
        ("gzip", True),
        ("", False),
        ("EMNIST-letters-subset", False),
    ],
)
def test_letters(tmp_path: Path, below: str, official: bool, packed: bool) -> None:
    write_letters(tmp_path / below, official=official, packed=packed)
    images = more_files.letters(tmp_path)
    np.testing.assert_array_equal(images.x[:, 0].numpy(), pictures(0, 5, 28, 28))
    assert images.x.shape == (5, 1, 28, 28)
    assert images.x.is_contiguous()
    assert [images.classes[y] for y in images.y.tolist()] == ["A", "Z", "B", "C", "Y"]
    assert images.num_train == 3


# ---- missing and damaged -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (more_files.cifar100, ["CIFAR-100", "train.bin, test.bin", "cifar-100-binary", "toronto"]),
        (more_files.letters, ["EMNIST", "emnist-letters-test-labels-idx1-ubyte", "nist.gov"]),
    ],
)
def test_missing_files_say_what_where_and_whence(
    tmp_path: Path, read: Callable[[Path], Images], texts: list[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            read(folder)
        assert all(text in str(caught.value) for text in [str(folder), "--data", *texts])
        assert ("which is not a folder" in str(caught.value)) == (folder != tmp_path)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    (write_cifar(tmp_path / "cifar-100-binary") / "test.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-100-binary lacks test\.bin\n") as caught:
        more_files.cifar100(tmp_path)
    assert str(caught.value).count("lacks") == 1  # places that have nothing are not listed


@pytest.mark.parametrize(
    ("keep", "text"),
    [(3073, r"got 3073 bytes, expected 3074 \(1 x 3074\)"), (0, "got 0 bytes, expected 3074"),
     (3075, r"got 3075 bytes, expected 6148 \(2 x 3074\)")],
)  # fmt: skip
def test_truncated_cifar100(tmp_path: Path, keep: int, text: str) -> None:
    path = write_cifar(tmp_path) / "test.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"test\.bin is truncated or damaged: {text}"):
        more_files.cifar100(tmp_path)


@pytest.mark.parametrize(
    ("at", "text"), [(0, "label 20, expected 0 to 19"), (1, "label 100, expected 0 to 99")]
)
def test_impossible_labels_of_cifar100(tmp_path: Path, at: int, text: str) -> None:
    path = write_cifar(tmp_path) / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[3074 + at] = 20 if at == 0 else 100
    path.write_bytes(raw)
    with pytest.raises(DataError, match=text):
        more_files.cifar100(tmp_path)


@pytest.mark.parametrize("label", [0, 27])
def test_impossible_letters(tmp_path: Path, label: int) -> None:
    raw = idx(np.array([1, label, 2], np.uint8))
    (write_letters(tmp_path) / "train-labels-idx1-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match=f"label {label}, expected 1 to 26"):
        more_files.letters(tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [
        ("train-images", b"", "got 0 bytes that start with , expected 00 00 08"),
        ("train-images", b"<html>", "got 6 bytes that start with 3c 68 74 6d, expected 00 00 08"),
        ("train-labels", idx(np.ones(3, np.uint8))[:-1], "got 10 bytes, expected 11"),
        ("train-labels", b"\0\0\x08\x01\0\0", "got 6 bytes, expected 9"),
        ("train-labels", b"\0\0\x08\0\x01", "got 5 bytes, expected 5"),
        ("train-labels", idx(np.ones(4, np.uint8)), r"train-images.*3 images, expected 4 as in"),
        ("train-images", idx(np.ones(3, np.uint8)), "1 axes and labels of 1, expected 3 and 1"),
        ("test-images", idx(np.ones((2, 9, 9), np.uint8)), r"\(9, 9\), expected \(28, 28\)"),
    ],
)
def test_damaged_letters(tmp_path: Path, name: str, raw: bytes, text: str) -> None:
    kind = "idx3" if name.endswith("images") else "idx1"
    (write_letters(tmp_path) / f"{name}-{kind}-ubyte").write_bytes(raw)
    with pytest.raises(DataError, match=text):
        more_files.letters(tmp_path)


def test_no_letters(tmp_path: Path) -> None:
    write_letters(tmp_path)
    (tmp_path / "test-images-idx3-ubyte").write_bytes(idx(np.zeros((0, 28, 28), np.uint8)))
    (tmp_path / "test-labels-idx1-ubyte").write_bytes(idx(np.zeros(0, np.uint8)))
    with pytest.raises(DataError, match=r"test-labels-idx1-ubyte .*no images, expected at least 1"):
        more_files.letters(tmp_path)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = write_letters(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"ubyte\.gz .*got 40 bytes of gzip that do not unpack"):
        more_files.letters(tmp_path)


# ---- the published files -------------------------------------------------------------------------


@pytest.fixture
def data() -> Path:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: it names a folder with the published files")
    return Path(os.environ["POLYFED_DATA"])


def present(read: Callable[[Path], Images], folder: Path) -> Images:
    try:
        return read(folder)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.mark.real_data
def test_real_cifar100(data: Path) -> None:
    """All of it, or a part with equally many of each class."""
    images = present(more_files.cifar100, data)
    assert len(torch.bincount(images.y).unique()) == 1
    mean = images.x.double().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.5071, 0.4866, 0.4409], abs=0.01)


@pytest.mark.real_data
def test_real_letters_are_upright(data: Path) -> None:
    """The mean T has more ink in its upper third than in its lower, a mean L the reverse."""
    images = present(more_files.letters, data)
    assert torch.bincount(images.y).min() > 0
    assert len(torch.bincount(images.y)) == 26
    for letter, sign in (("T", 1), ("L", -1)):
        mean = images.x[images.y == more_files.LETTERS.index(letter), 0].double().mean(0)
        assert sign * (mean[:10].sum() - mean[-10:].sum()) > 0

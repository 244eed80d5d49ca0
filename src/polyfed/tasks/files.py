"""Published image sets, read from the layouts their publishers use.

    cifar10   cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin: records of label, 3072 pixels
              cifar-10-batches-py/{data_batch_1..5,test_batch}: pickled {"data", "labels"}
    svhn      {train,test}_32x32.mat: X (32, 32, 3, n), y (n, 1) where 10 means the digit 0
              svhn_fedlinked_pool.npz: x (n, 32, 32, 3), y (n), class_totals (10) of the whole set
    mnist     {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz; perhaps writers.npz:
              train_writer, test_writer

Every set comes back merged, official train images first, as uint8 (n, channel, row, column). The
folder given may be the layout folder or the one that holds it. No file can run code: the pickled
layout is read by an unpickler that knows two inert classes of this module and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from polyfed.errors import DataError
from polyfed.tasks.layout import (
    Bytes,
    Layout,
    Published,
    arrays,
    check_labels,
    damaged,
    labelled_idx,
    locate,
    mat,
    npz,
    unpacked,
)

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
DIGITS = tuple("0123456789")


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, official train images first.

    Attributes:
        x: Pixels.
        y: Labels.
        classes: Name of each label.
        num_train: The first so many are the official train images.
        writers: Who wrote each digit, -1 where that is not known; None where nothing is known.
        totals: Class totals of the whole set, where `x` is only a pool drawn from it.
        whole: How many images were published; 0 where that is not known or `x` is such a pool.
    """

    x: UInt8[Tensor, "n c h w"]
    y: Int64[Tensor, " n"]
    classes: tuple[str, ...]
    num_train: int
    writers: Int64[Tensor, " n"] | None = None
    totals: tuple[int, ...] | None = None
    whole: int = 0


def official_split(images: Images) -> tuple[Int64[Tensor, " train"], Int64[Tensor, " test"]]:
    """Indices of the official train and test images."""
    if images.totals is not None:
        raise DataError(
            f"these {len(images.y)} images are a pool drawn from train and test together, "
            "so it has no official split. Fix: use the publisher's files, or split the pool."
        )
    return torch.arange(images.num_train), torch.arange(images.num_train, len(images.y))


def cifar10(folder: Path) -> Images:
    """Read CIFAR-10, binary version or python version."""
    layout, paths = locate(folder, _CIFAR10)
    read = _cifar_binary if layout.files[0].endswith(".bin") else _cifar_pickled
    batches = [read(path) for path in paths]
    sizes = [len(y) for _, y in batches]
    for path, size in zip(paths, sizes, strict=True):
        if size != max(sizes):
            damaged(path, f"{size} images, expected {max(sizes)} as in the other batches", _CIFAR10)
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*batches, strict=True))
    x, y = x.reshape(-1, 3, 32, 32), y.long()
    return Images(x, y, CIFAR10_CLASSES, num_train=sum(sizes[:-1]), whole=60_000)


def svhn(folder: Path) -> Images:
    """Read SVHN's cropped digits, all of them or FedLinked's pool."""
    _, paths = locate(folder, _SVHN)
    if len(paths) == 1:
        return _svhn_pool(paths[0])
    (x_train, y_train), (x_test, y_test) = map(_svhn_mat, paths)
    x = torch.from_numpy(np.ascontiguousarray(np.concatenate([x_train, x_test])))
    y = torch.from_numpy(np.concatenate([y_train, y_test])).long()
    return Images(x, y, DIGITS, num_train=len(y_train), whole=99_289)


def mnist(folder: Path) -> Images:
    """Read MNIST, and who wrote each digit where `writers.npz` lies beside it."""
    _, paths = locate(folder, _MNIST)
    x_train, y_train = labelled_idx(paths[0], paths[1], _MNIST)
    x_test, y_test = labelled_idx(paths[2], paths[3], _MNIST)
    if x_test.shape[1:] != x_train.shape[1:]:
        got = f"images of {x_test.shape[1:]}, expected {x_train.shape[1:]} as in {paths[0].name}"
        damaged(paths[2], got, _MNIST)
    x = torch.from_numpy(np.concatenate([x_train, x_test]))[:, None]
    y = torch.from_numpy(np.concatenate([y_train, y_test])).long()
    writers = _writers(paths[0].parent / "writers.npz", (len(y_train), len(y_test)))
    return Images(x, y, DIGITS, num_train=len(y_train), writers=writers, whole=70_000)


# ---- the sets ------------------------------------------------------------------------------------

_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10 = Published(
    "CIFAR-10",
    (
        Layout(tuple(f"{b}.bin" for b in _BATCHES), (".", "cifar-10-batches-bin")),
        Layout(_BATCHES, (".", "cifar-10-batches-py")),
    ),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
_SVHN = Published(
    "SVHN",
    (
        Layout(("train_32x32.mat", "test_32x32.mat"), (".", "svhn", "SVHN")),
        Layout(("svhn_fedlinked_pool.npz",), (".", "svhn", "SVHN")),
    ),
    "http://ufldl.stanford.edu/housenumbers/",
    {"train_32x32.mat": 182_040_794, "test_32x32.mat": 64_275_384},
)
_MNIST = Published(
    "MNIST",
    (
        Layout(
            (
                "train-images-idx3-ubyte",
                "train-labels-idx1-ubyte",
                "t10k-images-idx3-ubyte",
                "t10k-labels-idx1-ubyte",
            ),
            (".", "raw", "MNIST/raw", "MNIST", "mnist"),
        ),
    ),
    "http://yann.lecun.com/exdb/mnist/ (mirror: https://ossci-datasets.s3.amazonaws.com/mnist/)",
)
_QMNIST = Published("QMNIST", (), "https://github.com/facebookresearch/qmnist")


# ---- CIFAR-10 ------------------------------------------------------------------------------------

_PIXELS = 3 * 32 * 32


def _cifar_binary(path: Path) -> tuple[Bytes, Bytes]:
    raw = np.frombuffer(unpacked(path, _CIFAR10), np.uint8)
    if raw.size == 0 or raw.size % (1 + _PIXELS):
        whole = max(1, math.ceil(raw.size / (1 + _PIXELS)))
        got = f"{raw.size} bytes, expected {whole * (1 + _PIXELS)} ({whole} x {1 + _PIXELS})"
        damaged(path, got, _CIFAR10)
    records = raw.reshape(-1, 1 + _PIXELS)
    check_labels(path, records[:, 0], _CIFAR10)
    return records[:, 1:], records[:, 0]


def _cifar_pickled(path: Path) -> tuple[Bytes, Bytes]:
    raw = unpacked(path, _CIFAR10)
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        return _cifar_batch(batch)
    except _Forbidden as error:
        raise DataError(
            f"{path} is refused: its pickle asks for {error}, and a CIFAR-10 batch holds only byte "
            f"arrays, lists and text. Nothing in it was run. Fix: get it from {_CIFAR10.address}."
        ) from error
    except _UNPICKLING as error:
        damaged(path, f"{len(raw)} bytes that are no batch", _CIFAR10, because=error)


def _cifar_batch(batch: Any) -> tuple[Bytes, Bytes]:
    if not isinstance(batch, dict):
        raise ValueError(f"a {type(batch).__name__}, expected a dictionary")
    data = batch.get(b"data", batch.get("data"))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise ValueError("no 'data' array or no 'labels' list")
    x = data.value()
    if not labels or x.shape != (len(labels), _PIXELS):
        raise ValueError(f"data of shape {x.shape}, expected ({len(labels)}, {_PIXELS})")
    if not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise ValueError("a label that is not one of 0 to 9")
    return x, np.array(labels, np.uint8)


class _Forbidden(pickle.UnpicklingError):
    """A pickle named something other than an array."""


_UNPICKLING = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


class _Dtype:
    """Stands in for numpy.dtype: remembers its code, does nothing."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, _: Any) -> None:
        """Ignored: one byte has no byte order."""


class _Array:
    """Stands in for numpy's array reconstruction: remembers its state, does nothing."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> Bytes:
        """The array; only plain bytes in C order are taken."""
        _version, shape, dtype, fortran, data = self.state
        code = dtype.code if isinstance(dtype, _Dtype) else None
        if code not in (b"u1", "u1") or fortran or not isinstance(data, bytes):
            raise ValueError(f"an array of {code!r}, expected plain bytes ('u1') in C order")
        if len(data) != math.prod(shape):
            raise ValueError(f"got {len(data)} bytes of pixels, expected {math.prod(shape)}")
        pixels: Bytes = np.frombuffer(data, np.uint8).reshape(shape)
        return pixels


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that can build text, numbers, lists, dictionaries and `_Array`; nothing else."""

    _KNOWN: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): "numpy.ndarray",  # only ever an argument of _reconstruct
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of that name, or a refusal."""
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise _Forbidden(f"{module}.{name}") from None


# ---- SVHN ----------------------------------------------------------------------------------------


def _svhn_mat(path: Path) -> tuple[Bytes, Bytes]:
    held = arrays(path, mat, _SVHN, ("X", "y"))
    x, y = held["X"], held["y"]
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, y.size):
        damaged(path, f"X {x.dtype} {x.shape}, expected uint8 (32, 32, 3, {y.size})", _SVHN)
    labels = y.reshape(-1).astype(np.int64)
    if labels.size == 0 or labels.min() < 1 or labels.max() > 10:
        damaged(path, f"labels {np.unique(labels).tolist()}, expected 1 to 10", _SVHN)
    return x.transpose(3, 2, 0, 1), (labels % 10).astype(np.uint8)


def _svhn_pool(path: Path) -> Images:
    held = arrays(path, npz, _SVHN, ("x", "y", "class_totals"))
    x, y, totals = held["x"], held["y"].reshape(-1), held["class_totals"]
    if x.dtype != np.uint8 or x.shape != (len(y), 32, 32, 3) or totals.shape != (10,):
        got = f"x {x.dtype} {x.shape}, class_totals {totals.shape}"
        damaged(path, f"{got}, expected uint8 ({len(y)}, 32, 32, 3), (10,)", _SVHN)
    check_labels(path, y, _SVHN)
    pixels = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(y.astype(np.int64))
    return Images(pixels, labels, DIGITS, len(labels), totals=tuple(map(int, totals)))


# ---- MNIST ---------------------------------------------------------------------------------------


def _writers(path: Path, sizes: tuple[int, int]) -> Tensor | None:
    """`train_writer` and `test_writer` end to end; -1 for a part the file does not have."""
    if not path.is_file():
        return None
    held = arrays(path, npz, _QMNIST)
    parts = []
    for name, size in zip(("train_writer", "test_writer"), sizes, strict=True):
        part = held.get(name, np.full(size, -1))
        if part.shape != (size,) or part.dtype.kind not in "iu":
            got = f"{name} {part.dtype} {part.shape}, expected {size} integers"
            damaged(path, got, _QMNIST)
        parts.append(part.astype(np.int64))
    return torch.from_numpy(np.concatenate(parts))

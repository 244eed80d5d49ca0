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

import gzip
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from polyfed.errors import DataError

Bytes = npt.NDArray[np.uint8]

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
    """

    x: UInt8[Tensor, "n c h w"]
    y: Int64[Tensor, " n"]
    classes: tuple[str, ...]
    num_train: int
    writers: Int64[Tensor, " n"] | None = None
    totals: tuple[int, ...] | None = None


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
    layout, place = _locate(folder, _CIFAR10)
    paths = [place / name for name in layout.files]
    read = _cifar_binary if layout.files[0].endswith(".bin") else _cifar_pickled
    batches = [read(path) for path in paths]
    sizes = [len(y) for _, y in batches]
    for path, size in zip(paths, sizes, strict=True):
        if size != max(sizes):
            _damaged(
                path, f"{size} images, expected {max(sizes)} as in the other batches", _CIFAR10
            )
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*batches, strict=True))
    return Images(x.reshape(-1, 3, 32, 32), y.long(), CIFAR10_CLASSES, num_train=sum(sizes[:-1]))


def svhn(folder: Path) -> Images:
    """Read SVHN's cropped digits, all of them or FedLinked's pool."""
    layout, place = _locate(folder, _SVHN)
    if len(layout.files) == 1:
        return _svhn_pool(place / layout.files[0])
    (x_train, y_train), (x_test, y_test) = (_svhn_mat(place / name) for name in layout.files)
    x = np.ascontiguousarray(np.concatenate([x_train, x_test]))
    y = np.concatenate([y_train, y_test])
    return Images(torch.from_numpy(x), torch.from_numpy(y).long(), DIGITS, num_train=len(y_train))


def mnist(folder: Path) -> Images:
    """Read MNIST, and who wrote each digit where `writers.npz` lies beside it."""
    layout, place = _locate(folder, _MNIST)
    paths = [_stored(place, name) for name in layout.files]
    (x_train, y_train), (x_test, y_test) = _mnist_half(*paths[:2]), _mnist_half(*paths[2:])
    if x_test.shape[1:] != x_train.shape[1:]:
        got = f"images of {x_test.shape[1:]}, expected {x_train.shape[1:]} as in {paths[0].name}"
        _damaged(paths[2], got, _MNIST)
    x = torch.from_numpy(np.concatenate([x_train, x_test]))[:, None]
    y = torch.from_numpy(np.concatenate([y_train, y_test])).long()
    writers = _writers(place / "writers.npz", (len(y_train), len(y_test)))
    return Images(x, y, DIGITS, num_train=len(y_train), writers=writers)


# ---- where things are ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Files that lie together in one of several places below the folder."""

    files: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class _Published:
    """A set, the layouts it is published in (the first found is read), and where to get it."""

    name: str
    layouts: tuple[_Layout, ...]
    address: str


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10 = _Published(
    "CIFAR-10",
    (
        _Layout(tuple(f"{b}.bin" for b in _BATCHES), (".", "cifar-10-batches-bin")),
        _Layout(_BATCHES, (".", "cifar-10-batches-py")),
    ),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
_SVHN = _Published(
    "SVHN",
    (
        _Layout(("train_32x32.mat", "test_32x32.mat"), (".", "svhn", "SVHN")),
        _Layout(("svhn_fedlinked_pool.npz",), (".", "svhn", "SVHN")),
    ),
    "http://ufldl.stanford.edu/housenumbers/",
)
_SVHN_BYTES = {"train_32x32.mat": 182_040_794, "test_32x32.mat": 64_275_384}
_MNIST = _Published(
    "MNIST",
    (
        _Layout(
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
_QMNIST = _Published("QMNIST", (), "https://github.com/facebookresearch/qmnist")


def _stored(place: Path, name: str) -> Path:
    """The file itself, or its .gz where only that is there."""
    plain, packed = place / name, place / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def _locate(folder: Path, published: _Published) -> tuple[_Layout, Path]:
    """The first layout all of whose files are in one place."""
    folder = folder.expanduser()
    for layout in published.layouts:
        for place in layout.places:
            if all(_stored(folder / place, name).is_file() for name in layout.files):
                return layout, folder / place
    raise DataError(_not_found(folder, published))


def _not_found(folder: Path, published: _Published) -> str:
    there = "" if folder.is_dir() else ", which is not a folder"
    lines = [f"{published.name} was not found in {folder}{there}. Expected:"]
    for layout in published.layouts:
        places = ", ".join(str(folder / place) for place in layout.places)
        lines.append(f"  {', '.join(layout.files)}; looked in {places}")
        lines += [f"    {text}" for text in _partly(folder, layout)]
    lines.append(f"Fix: get the files from {published.address} and name their folder with --data.")
    return "\n".join(lines)


def _partly(folder: Path, layout: _Layout) -> list[str]:
    """What is missing, for places that have some of the files."""
    texts = []
    for place in layout.places:
        lacks = [name for name in layout.files if not _stored(folder / place, name).is_file()]
        if len(lacks) < len(layout.files):
            texts.append(f"{folder / place} lacks {', '.join(lacks)}")
    return texts


def _damaged(path: Path, got: str, published: _Published, *, because: Any = None) -> NoReturn:
    reason = f" ({because})" if because else ""
    raise DataError(
        f"{path} is truncated or damaged: got {got}{reason}. "
        f"Fix: get it again from {published.address}."
    ) from (because if isinstance(because, BaseException) else None)


def _check_labels(path: Path, y: Bytes, published: _Published) -> None:
    if y.size == 0:
        _damaged(path, "no images, expected at least 1", published)
    if int(y.max()) > 9:
        _damaged(path, f"label {int(y.max())}, expected 0 to 9", published)


# ---- CIFAR-10 ------------------------------------------------------------------------------------

_PIXELS = 3 * 32 * 32


def _cifar_binary(path: Path) -> tuple[Bytes, Bytes]:
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % (1 + _PIXELS):
        whole = max(1, math.ceil(raw.size / (1 + _PIXELS)))
        got = f"{raw.size} bytes, expected {whole * (1 + _PIXELS)} ({whole} x {1 + _PIXELS})"
        _damaged(path, got, _CIFAR10)
    records = raw.reshape(-1, 1 + _PIXELS)
    _check_labels(path, records[:, 0], _CIFAR10)
    return records[:, 1:], records[:, 0]


def _cifar_pickled(path: Path) -> tuple[Bytes, Bytes]:
    raw = path.read_bytes()
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        return _cifar_batch(batch)
    except _Forbidden as error:
        raise DataError(
            f"{path} is refused: its pickle asks for {error}, and a CIFAR-10 batch holds only byte "
            f"arrays, lists and text. Nothing in it was run. Fix: get it from {_CIFAR10.address}."
        ) from error
    except _UNPICKLING as error:
        _damaged(path, f"{len(raw)} bytes that are no batch", _CIFAR10, because=error)


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

_UNREADABLE = (
    OSError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def _arrays(
    path: Path, load: Callable[[Path], Any], published: _Published, names: Sequence[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """The named arrays (or all) of a container file, or a DataError that names the file."""
    try:
        held = load(path)
        return {name: np.asarray(held[name]) for name in names or held}
    except _UNREADABLE as error:
        whole = _SVHN_BYTES.get(path.name)
        expected = f", expected {whole} as published" if whole else " that do not read as arrays"
        got = f"{path.stat().st_size} bytes{expected}"
        _damaged(path, got, published, because=error)


def _npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
        return {name: held[name] for name in held.files}


def _mat(path: Path) -> Any:
    from scipy.io import loadmat, matlab  # here: importing takes longer than reading MNIST

    try:
        return loadmat(path, variable_names=["X", "y"])
    except matlab.MatReadError as error:  # of no family of its own
        raise ValueError(str(error)) from error


def _svhn_mat(path: Path) -> tuple[Bytes, Bytes]:
    held = _arrays(path, _mat, _SVHN, ("X", "y"))
    x, y = held["X"], held["y"]
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, y.size):
        _damaged(path, f"X {x.dtype} {x.shape}, expected uint8 (32, 32, 3, {y.size})", _SVHN)
    labels = y.reshape(-1).astype(np.int64)
    if labels.size == 0 or labels.min() < 1 or labels.max() > 10:
        _damaged(path, f"labels {np.unique(labels).tolist()}, expected 1 to 10", _SVHN)
    return x.transpose(3, 2, 0, 1), (labels % 10).astype(np.uint8)


def _svhn_pool(path: Path) -> Images:
    held = _arrays(path, _npz, _SVHN, ("x", "y", "class_totals"))
    x, y, totals = held["x"], held["y"].reshape(-1), held["class_totals"]
    if x.dtype != np.uint8 or x.shape != (len(y), 32, 32, 3) or totals.shape != (10,):
        got = f"x {x.dtype} {x.shape}, class_totals {totals.shape}"
        _damaged(path, f"{got}, expected uint8 ({len(y)}, 32, 32, 3), (10,)", _SVHN)
    _check_labels(path, y, _SVHN)
    pixels = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(y.astype(np.int64))
    return Images(pixels, labels, DIGITS, len(labels), totals=tuple(map(int, totals)))


# ---- MNIST ---------------------------------------------------------------------------------------


def _idx(path: Path) -> Bytes:
    """One IDX file: 0, 0, 8 (unsigned byte), number of axes; each axis as big-endian u32; bytes."""
    raw = _unpacked(path)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        start = bytes(raw[:4]).hex(" ")
        _damaged(path, f"{len(raw)} bytes that start with {start}, expected 00 00 08", _MNIST)
    first = 4 + 4 * raw[3]
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4) if len(raw) >= first else ()
    expected = first + math.prod(shape)
    if len(raw) != expected or not shape:
        _damaged(path, f"{len(raw)} bytes, expected {expected}", _MNIST)
    held: Bytes = np.frombuffer(raw, np.uint8, offset=first).reshape(shape)
    return held


def _mnist_half(images: Path, labels: Path) -> tuple[Bytes, Bytes]:
    x, y = _idx(images), _idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        _damaged(images, f"{x.ndim} axes and labels of {y.ndim}, expected 3 and 1", _MNIST)
    if len(x) != len(y):
        _damaged(images, f"{len(x)} images, expected {len(y)} as in {labels.name}", _MNIST)
    _check_labels(labels, y, _MNIST)
    return x, y


def _unpacked(path: Path) -> bytearray:
    try:
        return bytearray(gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        size = f"{path.stat().st_size} bytes of gzip that do not unpack"
        _damaged(path, size, _MNIST, because=error)


def _writers(path: Path, sizes: tuple[int, int]) -> Tensor | None:
    """`train_writer` and `test_writer` end to end; -1 for a part the file does not have."""
    if not path.is_file():
        return None
    held = _arrays(path, _npz, _QMNIST)
    parts = []
    for name, size in zip(("train_writer", "test_writer"), sizes, strict=True):
        part = held.get(name, np.full(size, -1))
        if part.shape != (size,) or part.dtype.kind not in "iu":
            got = f"{name} {part.dtype} {part.shape}, expected {size} integers"
            _damaged(path, got, _QMNIST)
        parts.append(part.astype(np.int64))
    return torch.from_numpy(np.concatenate(parts))

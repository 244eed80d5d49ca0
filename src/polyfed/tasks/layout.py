"""Where published files lie, and what is said when they are missing or damaged.

Readers name the set they read as a `Published`; its files are looked for below the folder a person
names, plain or as .gz. No file can run code.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from polyfed.errors import DataError

Bytes = npt.NDArray[np.uint8]

UNREADABLE = (
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


@dataclass(frozen=True)
class Layout:
    """Files that lie together in one of several places below the folder."""

    files: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """A set, the layouts it is published in (the first found is read), and where to get it.

    Attributes:
        name: of the set.
        layouts: in order of preference.
        address: where the files come from.
        sizes: bytes that a file has as published, where that is known.
    """

    name: str
    layouts: tuple[Layout, ...]
    address: str
    sizes: Mapping[str, int] = field(default_factory=dict)


def stored(place: Path, name: str) -> Path:
    """The file itself, or its .gz where only that is there."""
    plain, packed = place / name, place / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def locate(folder: Path, published: Published) -> tuple[Layout, list[Path]]:
    """The first layout all of whose files are in one place, and the files."""
    folder = folder.expanduser()
    for layout in published.layouts:
        for place in layout.places:
            found = [stored(folder / place, name) for name in layout.files]
            if all(path.is_file() for path in found):
                return layout, found
    raise DataError(_not_found(folder, published))


def _not_found(folder: Path, published: Published) -> str:
    there = "" if folder.is_dir() else ", which is not a folder"
    lines = [f"{published.name} was not found in {folder}{there}. Expected:"]
    for layout in published.layouts:
        places = ", ".join(str(folder / place) for place in layout.places)
        lines.append(f"  {', '.join(layout.files)}; looked in {places}")
        lines += [f"    {text}" for text in _partly(folder, layout)]
    lines.append(f"Fix: get the files from {published.address} and name their folder with --data.")
    return "\n".join(lines)


def _partly(folder: Path, layout: Layout) -> list[str]:
    """What is missing, for places that have some of the files."""
    texts = []
    for place in layout.places:
        lacks = [name for name in layout.files if not stored(folder / place, name).is_file()]
        if len(lacks) < len(layout.files):
            texts.append(f"{folder / place} lacks {', '.join(lacks)}")
    return texts


def damaged(path: Path, got: str, published: Published, *, because: Any = None) -> NoReturn:
    """Raise DataError: what the file holds, what it should hold, and where to get it again."""
    reason = f" ({because})" if because else ""
    raise DataError(
        f"{path} is truncated or damaged: got {got}{reason}. "
        f"Fix: get it again from {published.address}."
    ) from (because if isinstance(because, BaseException) else None)


def unpacked(path: Path, published: Published) -> bytearray:
    """The bytes of a file, or of what a .gz holds."""
    try:
        return bytearray(gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        size = f"{path.stat().st_size} bytes of gzip that do not unpack"
        damaged(path, size, published, because=error)


def arrays(
    path: Path,
    load: Callable[[Path], Mapping[str, Any]],
    published: Published,
    names: Sequence[str] = (),
) -> dict[str, npt.NDArray[Any]]:
    """The named arrays (or all) of a container file, or a DataError that names the file."""
    try:
        held = load(path)
        return {name: np.asarray(held[name]) for name in names or held}
    except UNREADABLE as error:
        whole = published.sizes.get(path.name)
        expected = f", expected {whole} as published" if whole else " that do not read as arrays"
        damaged(path, f"{path.stat().st_size} bytes{expected}", published, because=error)


def npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a NumPy archive."""
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
        return {name: held[name] for name in held.files}


def mat(path: Path) -> Mapping[str, Any]:
    """The variables of a MATLAB file."""
    from scipy.io import loadmat, matlab  # here: importing takes longer than reading MNIST

    try:
        held: Mapping[str, Any] = loadmat(path)
        return held
    except matlab.MatReadError as error:  # of no family of its own
        raise ValueError(str(error)) from error


def idx(path: Path, published: Published) -> Bytes:
    """One IDX file: 0, 0, 8 (unsigned byte), number of axes; each axis as big-endian u32; bytes."""
    raw = unpacked(path, published)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        start = bytes(raw[:4]).hex(" ")
        damaged(path, f"{len(raw)} bytes that start with {start}, expected 00 00 08", published)
    first = 4 + 4 * raw[3]
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4) if len(raw) >= first else ()
    expected = first + math.prod(shape)
    if len(raw) != expected or not shape:
        damaged(path, f"{len(raw)} bytes, expected {expected}", published)
    held: Bytes = np.frombuffer(raw, np.uint8, offset=first).reshape(shape)
    return held


def labelled_idx(
    images: Path, labels: Path, published: Published, allowed: range = range(10)
) -> tuple[Bytes, Bytes]:
    """A file of images and the file of their labels, which fit each other."""
    x, y = idx(images, published), idx(labels, published)
    if x.ndim != 3 or y.ndim != 1:
        damaged(images, f"{x.ndim} axes and labels of {y.ndim}, expected 3 and 1", published)
    if len(x) != len(y):
        damaged(images, f"{len(x)} images, expected {len(y)} as in {labels.name}", published)
    check_labels(labels, y, published, allowed)
    return x, y


def check_labels(path: Path, y: Bytes, published: Published, allowed: range = range(10)) -> None:
    """Raise DataError unless there are labels and all are allowed."""
    if y.size == 0:
        damaged(path, "no images, expected at least 1", published)
    wrong = [label for label in (int(y.max()), int(y.min())) if label not in allowed]
    if wrong:
        expected = f"expected {allowed.start} to {allowed.stop - 1}"
        damaged(path, f"label {wrong[0]}, {expected}", published)

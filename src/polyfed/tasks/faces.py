"""CelebA: forty yes-or-no attributes of faces, one node each, from the published files.

    list_attr_celeba.txt      number of images; names of the attributes; name and -1 or 1 for each
    list_eval_partition.txt   name of an image, and 0 (train), 1 (validation) or 2 (test)
    img_align_celeba/*.jpg    178 x 218 pixels

The files may lie together, or in the folders Anno, Eval and Img as they are published. Images are
cut to their middle square and made smaller; reading them needs Pillow.

Liu, Luo, Wang, Tang, ICCV 2015, arXiv:1411.7766. Loop Improvement, section 4.2, trains ResNet-18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from polyfed import check
from polyfed.core.node import Node
from polyfed.errors import DataError
from polyfed.models.named import NETWORKS, TINY, NetworkName
from polyfed.tasks.layout import Layout, Published, damaged, locate, unpacked
from polyfed.tasks.shared_inputs import AttributeTask
from polyfed.tasks.task import data_folder

_PLACES = (".", "celeba", "CelebA")
_CELEBA = Published(
    "CelebA",
    (
        Layout(("list_attr_celeba.txt", "list_eval_partition.txt"), _PLACES),
        Layout(("Anno/list_attr_celeba.txt", "Eval/list_eval_partition.txt"), _PLACES),
    ),
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
)
_IMAGES = "img_align_celeba"
_QUICK_NODES, _QUICK_SHARE = 4, 400


@dataclass(frozen=True, eq=False)
class Faces:
    """Images and their attributes.

    Attributes:
        x: Pixels.
        labels: 1 where an image has the attribute, else 0.
        names: Of the attributes.
        part: 0 for images to train on, 1 for validation, 2 for the test.
    """

    x: UInt8[Tensor, "n 3 size size"]
    labels: Int64[Tensor, "n attributes"]
    names: tuple[str, ...]
    part: Int64[Tensor, " n"]


@lru_cache(maxsize=1)
def celeba(folder: Path, *, size: int = 32, every: int = 1) -> Faces:
    """Read CelebA.

    Args:
        folder: The folder of the lists, or the one that holds it.
        size: Pixels of a side of an image, after it was made smaller.
        every: Keep one image of so many.
    """
    _, (attributes, partition) = locate(folder, _CELEBA)
    files, names, labels = _attributes(attributes)
    part = _partition(partition, files)
    images = _image_folder(attributes)
    x = _pixels([images / name for name in files[::every]], size)
    return Faces(x, labels[::every], names, part[::every])


@dataclass(frozen=True, kw_only=True)
class CelebA(AttributeTask):
    """Attributes of faces.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
        size: pixels of a side, to which images are made smaller.
        every: keep one image of so many.
        model: the network; Loop Improvement takes resnet18.
    """

    name: ClassVar[str] = "celeba"
    title: ClassVar[str] = "CelebA: forty attributes of the same faces, one a node"
    needs_data: ClassVar[bool] = True

    data: Path | None = None
    size: int = 32
    every: int = 1
    model: NetworkName = "resnet18"

    def __post_init__(self) -> None:
        check.at_least(self, "size", 1)
        check.at_least(self, "every", 1)

    def nodes(self, seed: int) -> list[Node]:
        """A node for each attribute, by the official partition; validation is cut in two."""
        every = self.every * (_QUICK_SHARE if self.quick else 1)
        faces = celeba(data_folder(self.data, self.name), size=self.size, every=every)
        pixels = faces.x.float() / 127.5 - 1
        train, validation, test = ((faces.part == p).nonzero().squeeze(1) for p in range(3))
        index = {"train": train, "val_es": validation[::2], "val_rb": validation[1::2]}
        index["test"] = test
        splits = {name: (pixels[i], faces.labels[i]) for name, i in index.items()}
        names = faces.names[:_QUICK_NODES] if self.quick else faces.names
        width = {"width": TINY} if self.quick else {}
        make = partial(NETWORKS[self.model], (3, self.size, self.size), 2, **width)
        return self.assemble(seed, names, splits, make)


def _attributes(path: Path) -> tuple[list[str], tuple[str, ...], Int64[Tensor, "n attributes"]]:
    """Names of the images, names of the attributes, and whether an image has one."""
    lines = unpacked(path, _CELEBA).decode("latin-1").splitlines()
    rows = [line.split() for line in lines[2:] if line]
    if len(lines) < 3 or lines[0].strip() != str(len(rows)):
        first = lines[0][:40] if lines else ""
        damaged(path, f"{len(rows)} rows, expected '{first}' as in its first line", _CELEBA)
    names = tuple(lines[1].split())
    for row in rows:
        if len(row) != len(names) + 1 or not {"1", "-1"}.issuperset(row[1:]):
            expected = f"expected a name and {len(names)} times 1 or -1"
            damaged(path, f"row '{' '.join(row)[:40]}', {expected}", _CELEBA)
    labels = torch.tensor([[value == "1" for value in row[1:]] for row in rows]).long()
    return [row[0] for row in rows], names, labels


def _partition(path: Path, files: Sequence[str]) -> Int64[Tensor, " n"]:
    """For each image 0, 1 or 2."""
    rows = [line.split() for line in unpacked(path, _CELEBA).decode("latin-1").splitlines()]
    part = {row[0]: row[1] for row in rows if len(row) == 2 and row[1] in ("0", "1", "2")}
    lacking = [name for name in files if name not in part]
    if lacking:
        got = f"no part for {len(lacking)} of {len(files)} images, {lacking[0]} for one"
        damaged(path, f"{got}, expected 0, 1 or 2", _CELEBA)
    return torch.tensor([int(part[name]) for name in files])


def _image_folder(attributes: Path) -> Path:
    """Beside the lists, or in Img beside the folder Anno."""
    beside = attributes.parent / _IMAGES
    places = (beside, attributes.parent.parent / "Img" / _IMAGES)
    for place in places:
        if place.is_dir():
            return place
    raise DataError(
        f"the images of CelebA were not found: looked for the folders {places[0]} and {places[1]}. "
        f"Fix: get {_IMAGES}.zip from {_CELEBA.address} and unpack it there."
    )


def _pixels(paths: Sequence[Path], size: int) -> UInt8[Tensor, "n 3 {size} {size}"]:
    pillow = _pillow()
    x = np.empty((len(paths), size, size, 3), np.uint8)
    for row, path in zip(x, paths, strict=True):
        try:
            row[:] = _small(pillow, path, size)
        except OSError as error:
            damaged(path, "no image that can be read", _CELEBA, because=error)
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()


def _small(pillow: Any, path: Path, size: int) -> Any:
    """The middle square of an image, made smaller."""
    with pillow.open(path) as image:
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
        rgb = image.convert("RGB")
        return np.asarray(rgb.resize((size, size), pillow.Resampling.BILINEAR, box=box))


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise DataError(
            "reading the JPEG images of CelebA needs Pillow. Fix: pip install pillow."
        ) from error

"""CIFAR-100 and the letters of EMNIST, read from the layouts their publishers use.

    cifar100  cifar-100-binary/{train,test}.bin: records of coarse label, fine label, 3072 pixels
    letters   emnist-letters-{train,test}-{images-idx3,labels-idx1}-ubyte, plain or .gz: labels 1 to
              26, each image with its rows and columns exchanged
              EMNIST-letters-subset/{train,test}-{images-idx3,labels-idx1}-ubyte: upright images

Both come back as `Images` (`tasks/files.py`): merged, official train images first.
"""

from __future__ import annotations

import math
import string
from pathlib import Path

import numpy as np
import torch

from polyfed.tasks.files import Images
from polyfed.tasks.layout import (
    Bytes,
    Layout,
    Published,
    check_labels,
    damaged,
    labelled_idx,
    locate,
    unpacked,
)

CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 (a list takes a hundred lines)
)
LETTERS = tuple(string.ascii_uppercase)

_CIFAR100 = Published(
    "CIFAR-100 (binary version)",
    (Layout(("train.bin", "test.bin"), (".", "cifar-100-binary", "cifar-100-binary-subset")),),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
_KINDS = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
_TURNED = Layout(
    tuple(f"emnist-letters-{kind}-ubyte" for kind in _KINDS),
    (".", "gzip", "EMNIST/raw", "EMNIST", "emnist"),
)
_UPRIGHT = Layout(tuple(f"{kind}-ubyte" for kind in _KINDS), (".", "EMNIST-letters-subset"))
_EMNIST = Published(
    "EMNIST letters",
    (_TURNED, _UPRIGHT),
    "https://www.nist.gov/itl/products-and-services/emnist-dataset",
)
_PIXELS = 3 * 32 * 32


def cifar100(folder: Path) -> Images:
    """Read CIFAR-100, binary version, with its 100 fine labels."""
    _, paths = locate(folder, _CIFAR100)
    (x_train, y_train), (x_test, y_test) = map(_cifar100_half, paths)
    x = torch.from_numpy(np.concatenate([x_train, x_test])).reshape(-1, 3, 32, 32)
    y = torch.from_numpy(np.concatenate([y_train, y_test])).long()
    return Images(x, y, CIFAR100_CLASSES, num_train=len(y_train), whole=60_000)


def _cifar100_half(path: Path) -> tuple[Bytes, Bytes]:
    raw, record = np.frombuffer(unpacked(path, _CIFAR100), np.uint8), 2 + _PIXELS
    if raw.size == 0 or raw.size % record:
        whole = max(1, math.ceil(raw.size / record))
        got = f"{raw.size} bytes, expected {whole * record} ({whole} x {record})"
        damaged(path, got, _CIFAR100)
    records = raw.reshape(-1, record)
    check_labels(path, records[:, 0], _CIFAR100, range(20))
    check_labels(path, records[:, 1], _CIFAR100, range(100))
    return records[:, 2:], records[:, 1]


def letters(folder: Path) -> Images:
    """Read the letters of EMNIST: upright, upper and lower case in one class, A to Z."""
    layout, paths = locate(folder, _EMNIST)
    allowed = range(1, 27)
    x_train, y_train = labelled_idx(paths[0], paths[1], _EMNIST, allowed)
    x_test, y_test = labelled_idx(paths[2], paths[3], _EMNIST, allowed)
    if x_test.shape[1:] != x_train.shape[1:]:
        got = f"images of {x_test.shape[1:]}, expected {x_train.shape[1:]} as in {paths[0].name}"
        damaged(paths[2], got, _EMNIST)
    x = np.concatenate([x_train, x_test])
    if layout is _TURNED:
        x = np.ascontiguousarray(x.transpose(0, 2, 1))
    y = torch.from_numpy(np.concatenate([y_train, y_test])).long() - 1
    return Images(torch.from_numpy(x)[:, None], y, LETTERS, num_train=len(y_train))

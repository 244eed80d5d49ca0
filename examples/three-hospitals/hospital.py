"""What one hospital writes: how to read its own file, and its own network."""

import csv
import math
from pathlib import Path
from typing import Any

import torch

import polyfed as pf
from polyfed.models import mlp
from polyfed.random import ambient, stream
from polyfed.tasks.split import stratified
from polyfed.tasks.tables import fill_missing, standardise

CLASSES = ("healthy", "ill")
SPLITS = {"train": 0.5, "val_es": 0.125, "val_rb": 0.125, "test": 0.25}


def node(name: str, seed: int, file: str, public: int = 0) -> pf.Node:
    """The patients of one hospital; nothing else is read, and nothing of it leaves.

    FedLinked compares networks on `public` inputs, the same at all hospitals: patients made up from
    the seed, of nobody's data.
    """
    with Path(file).open(encoding="utf-8") as rows:
        found = [[math.nan if v == "?" else float(v) for v in row] for row in csv.reader(rows)]
    table = torch.tensor([row for row in found if row])
    x, ill = table[:, :-1], table[:, -1].gt(0).long()
    index = stratified(ill, SPLITS, stream(seed, "split", name))
    x = fill_missing(x, x[index["train"]])
    x = standardise(x, x[index["train"]])
    parts: dict[str, Any] = {part: (x[i], ill[i]) for part, i in index.items()}
    if public:
        parts["public"] = torch.randn(public, x.shape[1], generator=stream(seed, "public"))
    data = pf.Data(may_miss_classes=True, **parts)
    with ambient(seed, "init"):
        net = mlp(x.shape[1], [16], 2)
    return pf.Node(name, data, pf.Model.split(net, trunk="trunk", head="head"), CLASSES)

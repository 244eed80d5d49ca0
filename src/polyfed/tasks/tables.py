"""Tables of many parties: one table a node, read from the layouts their publishers use.

    landmine  LandmineData.mat: cells `feature` (n, 9) and `label` (n, 1), one for each of 29 fields
    vehicle   vsn/vehicle.npz: x (n, 100), y (-1 or 1), node (n); standardised for each sensor node
    heart     heart_disease/processed.{cleveland,hungarian,switzerland,va}.data: 14 columns with
              commas, '?' for a missing value; the last is 0 for a healthy patient, 1 to 4 for an
              ill one

A missing value comes back as NaN: `fill_missing` puts a median in its place. A blood pressure or a
cholesterol of 0, which no living patient has, is missing too.

Xue, Liao, Carin, Krishnapuram, JMLR 8, 2007 (landmine); Duarte and Hu, J. Parallel and Distributed
Computing 64, 2004 (vehicle); Detrano et al., Am. J. Cardiology 64, 1989 (heart).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.tasks.layout import Layout, Published, arrays, damaged, locate, mat, npz, unpacked

HEART_FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_NEVER_ZERO = [HEART_FEATURES.index("trestbps"), HEART_FEATURES.index("chol")]
_UCI = "https://archive.ics.uci.edu/dataset/45/heart+disease"

_LANDMINE = Published(
    "landmine data",
    (Layout(("LandmineData.mat",), (".", "landmine")),),
    "http://www.ee.duke.edu/~lcarin/LandmineData.zip",
)
_VEHICLE = Published(
    "vehicle sensor data",
    (Layout(("vehicle.npz",), (".", "vsn")),),
    "whoever made it from Duarte and Hu's vehicle data (DARPA SensIT)",
)
_HEART = Published(
    "heart disease data",
    (
        Layout(
            tuple(f"processed.{name}.data" for name in HOSPITALS),
            (".", "heart_disease", "heart+disease"),
        ),
    ),
    _UCI,
)

Features = Float[Tensor, "n d"]
Reference = Float[Tensor, "m d"]


@dataclass(frozen=True, eq=False)
class Table:
    """What one party holds.

    Attributes:
        name: Of the party.
        x: A row for each sample; NaN where a value is missing.
        y: Label 0 or 1 of each sample.
    """

    name: str
    x: Features
    y: Int64[Tensor, " n"]


def landmine(folder: Path) -> list[Table]:
    """Read the mine fields: 9 features of a radar image, and whether there is a mine."""
    _, (path,) = locate(folder, _LANDMINE)
    held = arrays(path, mat, _LANDMINE, ("feature", "label"))
    features, labels = held["feature"].ravel(), held["label"].ravel()
    if not len(features) or len(features) != len(labels):
        got = f"features of {len(features)} fields and labels of {len(labels)}"
        damaged(path, f"{got}, expected 29 of each", _LANDMINE)
    width = len(str(len(features) - 1))
    pairs = enumerate(zip(features, labels, strict=True))
    return [_table(path, _LANDMINE, f"F{k:0{width}d}", x, y, (0, 1)) for k, (x, y) in pairs]


def vehicle(folder: Path) -> list[Table]:
    """Read the sensor nodes: 50 acoustic and 50 seismic features, and one of two vehicles."""
    _, (path,) = locate(folder, _VEHICLE)
    held = arrays(path, npz, _VEHICLE, ("x", "y", "node"))
    x, y, owner = held["x"], held["y"], held["node"]
    if x.ndim != 2 or y.shape != owner.shape or y.shape != x.shape[:1]:
        got = f"x {x.shape}, y {y.shape}, node {owner.shape}"
        damaged(path, f"{got}, expected (n, 100), (n,), (n,)", _VEHICLE)
    return [
        _table(path, _VEHICLE, f"S{k:02d}", x[owner == k], y[owner == k], (-1, 1))
        for k in np.unique(owner).tolist()
    ]


def heart(folder: Path) -> list[Table]:
    """Read the four hospitals: 13 features of a patient, and whether the heart is diseased."""
    _, paths = locate(folder, _HEART)
    tables = []
    for name, path in zip(HOSPITALS, paths, strict=True):
        rows = _numbers(path)
        x, y = rows[:, :-1], rows[:, -1]
        if not np.isin(y, range(5)).all():
            damaged(path, "a diagnosis that is not one of 0 to 4", _HEART)
        zero = x[:, _NEVER_ZERO] == 0
        x[:, _NEVER_ZERO] = np.where(zero, np.nan, x[:, _NEVER_ZERO])
        tables.append(Table(name, torch.from_numpy(x).float(), torch.from_numpy(y > 0).long()))
    return tables


def fill_missing(x: Features, reference: Reference) -> Features:
    """Put the median of a column of `reference` in the place of NaN; 0 if it has only NaN.

    >>> x = torch.tensor([[1.0, float("nan")], [float("nan"), 2.0], [5.0, 3.0]])
    >>> fill_missing(x, x[:2]).tolist()
    [[1.0, 2.0], [1.0, 2.0], [5.0, 3.0]]
    """
    median = reference.nanquantile(0.5, dim=0).nan_to_num()
    return torch.where(x.isnan(), median, x)


def standardise(x: Features, reference: Reference) -> Features:
    """Shift and scale each column so that `reference` has mean 0 and standard deviation 1.

    A column that is constant there is only shifted.
    """
    spread = reference.std(0, correction=0)
    return (x - reference.mean(0)) / torch.where(spread > 0, spread, 1.0)


def _table(
    path: Path,
    published: Published,
    name: str,
    x: npt.NDArray[np.generic],
    y: npt.NDArray[np.generic],
    values: tuple[int, int],
) -> Table:
    """A table whose labels are given by two values, the second of which means 1."""
    y = y.reshape(-1)
    if x.dtype.kind not in "fiu" or x.shape[:1] != y.shape or x.ndim != 2 or not x.size:
        got = f"{name}: features {x.dtype} {x.shape} and labels {y.shape}"
        damaged(path, f"{got}, expected numbers, one row for each label", published)
    features = x.astype(np.float32)
    if not np.isfinite(features).all():
        damaged(path, f"{name}: features that are not finite", published)
    if not np.isin(y, values).all():
        got = f"{name}: labels {np.unique(y).tolist()[:5]}, expected {values[0]} and {values[1]}"
        damaged(path, got, published)
    return Table(name, torch.from_numpy(features), torch.from_numpy(y == values[1]).long())


def _numbers(path: Path) -> npt.NDArray[np.float64]:
    """The rows of a file of the hospitals."""
    columns = len(HEART_FEATURES) + 1
    rows = []
    for i, line in enumerate(unpacked(path, _HEART).decode("latin-1").split(), 1):
        try:
            row = [float("nan") if text == "?" else float(text) for text in line.split(",")]
        except ValueError as error:
            damaged(path, f"row {i} '{line[:40]}'", _HEART, because=error)
        if len(row) != columns:
            damaged(path, f"{len(row)} columns in row {i}, expected {columns}", _HEART)
        rows.append(row)
    if not rows:
        damaged(path, "no rows, expected at least 1", _HEART)
    return np.array(rows)

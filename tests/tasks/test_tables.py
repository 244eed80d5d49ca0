"""Tables of many parties, written here and read back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.errors import DataError
from polyfed.tasks import tables
from polyfed.tasks.tables import Table, fill_missing, standardise

NAN = float("nan")


def cells(parts: list[Any]) -> np.ndarray[Any, Any]:
    """A row of cells, as MATLAB stores them."""
    held = np.empty((1, len(parts)), dtype=object)
    for k, part in enumerate(parts):
        held[0, k] = part
    return held


def write_landmine(folder: Path, **change: Any) -> Path:
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    sizes = [3, 2, 4]
    values: dict[str, Any] = {
        "feature": cells([np.full((n, 9), 10.0 * k) + np.arange(9) for k, n in enumerate(sizes)]),
        "label": cells([(np.arange(n)[:, None] % 2).astype(np.uint8) for n in sizes]),
    }
    savemat(folder / "LandmineData.mat", values | change)
    return folder


def write_vehicle(folder: Path, **change: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    owner = np.array([0, 0, 3, 3, 3], np.int8)
    values = {
        "x": np.arange(500, dtype=np.float32).reshape(5, 100),
        "y": np.array([-1, 1, 1, 1, -1], np.int8),
        "node": owner,
    }
    np.savez(folder / "vehicle.npz", **(values | change))
    return folder


ROWS = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    "67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n",
    "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,1\n",
    "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,4\n",
    "va": "60,1,3,0,0,?,1,?,?,?,?,?,?,3\n",
}


def write_heart(folder: Path, **change: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (ROWS | change).items():
        (folder / f"processed.{name}.data").write_text(rows, encoding="ascii")
    return folder


# ---- read back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "landmine"])
def test_landmine(tmp_path: Path, below: str) -> None:
    write_landmine(tmp_path / below)
    held = tables.landmine(tmp_path)
    assert [t.name for t in held] == ["F0", "F1", "F2"]
    assert [t.y.tolist() for t in held] == [[0, 1, 0], [0, 1], [0, 1, 0, 1]]
    assert held[2].x.shape == (4, 9)
    assert held[2].x[1].tolist() == [20 + i for i in range(9)]
    assert held[0].x.dtype == torch.float32


@pytest.mark.parametrize("below", ["", "vsn"])
def test_vehicle(tmp_path: Path, below: str) -> None:
    write_vehicle(tmp_path / below)
    held = tables.vehicle(tmp_path)
    assert [t.name for t in held] == ["S00", "S03"]
    assert [t.y.tolist() for t in held] == [[0, 1], [1, 1, 0]]
    assert held[1].x[:, 0].tolist() == [200, 300, 400]


@pytest.mark.parametrize("below", ["", "heart_disease"])
def test_heart(tmp_path: Path, below: str) -> None:
    write_heart(tmp_path / below)
    held = tables.heart(tmp_path)
    assert [t.name for t in held] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [t.y.tolist() for t in held] == [[0, 1], [1], [1], [1]]
    first = [63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3, 3, 0, 6]
    assert held[0].x[0].tolist() == pytest.approx(first)
    assert held[1].x[0, :10].tolist() == [28, 1, 2, 130, 132, 0, 2, 185, 0, 0]
    assert held[1].x[0].isnan().nonzero().flatten().tolist() == [10, 11, 12]
    # cholesterol 0 is missing, other zeros are values
    assert held[2].x[0].isnan().nonzero().flatten().tolist() == [4, 5, 11, 12]
    assert held[3].x[0].isnan().nonzero().flatten().tolist() == [3, 4, 5, *range(7, 13)]


# ---- prepared ------------------------------------------------------------------------------------


def test_missing_values_are_the_medians_of_the_reference() -> None:
    x = torch.tensor([[1.0, NAN, NAN], [2.0, 8.0, NAN], [9.0, 4.0, NAN], [NAN, 99.0, 7.0]])
    filled = fill_missing(x, x[:3])
    assert filled.tolist() == [[1, 6, 0], [2, 8, 0], [9, 4, 0], [2, 99, 7]]


def test_standardised_by_the_reference() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [11.0, 6.0]])
    assert standardise(x, x[:2]).tolist() == [[-1, 0], [1, 0], [9, 1]]
    assert standardise(x, x[:1]).isfinite().all()


# ---- missing and damaged -------------------------------------------------------------------------

READERS: list[tuple[Callable[[Path], list[Table]], str]] = [
    (tables.landmine, "LandmineData.mat"),
    (tables.vehicle, "vehicle.npz"),
    (tables.heart, "processed.va.data"),
]


@pytest.mark.parametrize(("read", "name"), READERS)
def test_nothing_there(tmp_path: Path, read: Callable[[Path], list[Table]], name: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert all(text in str(caught.value) for text in (name, "was not found in", "--data"))


@pytest.mark.parametrize("keep", [0, 50, 300])
def test_truncated_landmine(tmp_path: Path, keep: int) -> None:
    path = write_landmine(tmp_path) / "LandmineData.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"LandmineData\.mat is truncated .*got {keep} bytes"):
        tables.landmine(tmp_path)


@pytest.mark.parametrize("keep", [0, 30, 900])
def test_truncated_vehicle(tmp_path: Path, keep: int) -> None:
    path = write_vehicle(tmp_path) / "vehicle.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"vehicle\.npz is truncated .*got {keep} bytes"):
        tables.vehicle(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"label": cells([np.ones((3, 1))])}, "features of 3 fields and labels of 1, expected 29"),
        ({"label": cells([np.ones((n, 1)) for n in (3, 3, 4)])},
         r"F1: features float64 \(2, 9\) and labels \(3,\), expected numbers"),
        ({"label": cells([np.full((n, 1), 2) for n in (3, 2, 4)])},
         r"F0: labels \[2\], expected 0 and 1"),
        ({"feature": cells([np.full((n, 9), NAN) for n in (3, 2, 4)])}, "F0: .* not finite"),
        ({"feature": cells(["abc", "ab", "abcd"])}, "F0: features .* expected numbers"),
    ],
)  # fmt: skip
def test_landmine_that_does_not_fit(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        tables.landmine(write_landmine(tmp_path, **change))


def test_landmine_without_labels(tmp_path: Path) -> None:
    from scipy.io import savemat

    savemat(tmp_path / "LandmineData.mat", {"feature": cells([np.ones((2, 9))])})
    with pytest.raises(DataError, match=r"do not read as arrays \('label'\)"):
        tables.landmine(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": np.array([0, 1, 1, 1, 0])}, r"S00: labels \[0, 1\], expected -1 and 1"),
        ({"y": np.ones(4)}, r"x \(5, 100\), y \(4,\), node \(5,\), expected"),
        ({"node": np.ones(4)}, r"node \(4,\), expected"),
        ({"x": np.ones(5)}, r"x \(5,\), y \(5,\)"),
        ({"x": np.full((5, 100), np.inf)}, "S00: features that are not finite"),
        ({"x": np.array([{}] * 5, dtype=object)}, "allow_pickle"),
    ],
)
def test_vehicle_that_does_not_fit(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        tables.vehicle(write_vehicle(tmp_path, **change))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("", "no rows, expected at least 1"),
        ("1,2,3\n", "3 columns in row 1, expected 14"),
        (ROWS["va"] + "a,b\n", "row 2 'a,b' .*could not convert"),
        (ROWS["va"].replace(",3\n", ",5\n"), "diagnosis that is not one of 0 to 4"),
        (ROWS["va"].replace(",3\n", ",?\n"), "diagnosis that is not one of 0 to 4"),
    ],
)
def test_heart_that_does_not_fit(tmp_path: Path, rows: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"processed\.va\.data is truncated or damaged: .*{says}"):
        tables.heart(write_heart(tmp_path, va=rows))


# ---- the published files -------------------------------------------------------------------------


@pytest.fixture
def data() -> Path:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: it names a folder with the published files")
    return Path(os.environ["POLYFED_DATA"])


def present(read: Callable[[Path], list[Table]], folder: Path) -> list[Table]:
    try:
        return read(folder)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.mark.real_data
def test_real_landmine(data: Path) -> None:
    held = present(tables.landmine, data)
    assert len(held) == 29
    assert {t.x.shape[1] for t in held} == {9}
    rows, mines = sum(len(t.y) for t in held), sum(int(t.y.sum()) for t in held)
    assert (rows, mines) == (14_820, 904)


@pytest.mark.real_data
def test_real_heart(data: Path) -> None:
    """Patients, and those that are ill, as the publisher counts them."""
    held = present(tables.heart, data)
    assert [len(t.y) for t in held] == [303, 294, 123, 200]
    assert [int(t.y.sum()) for t in held] == [139, 106, 115, 149]


@pytest.mark.real_data
def test_real_vehicle(data: Path) -> None:
    held = present(tables.vehicle, data)
    assert len(held) == 23
    assert {t.x.shape[1] for t in held} == {100}
    assert sum(len(t.y) > 36 for t in held) == 9

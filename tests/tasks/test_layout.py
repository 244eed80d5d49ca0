"""What all readers share; the rest of it is tested through them."""

from pathlib import Path

import numpy as np
import pytest

from polyfed.errors import DataError
from polyfed.tasks.layout import Layout, Published, arrays, locate, npz

SET = Published(
    "things", (Layout(("a.npz", "b.txt"), (".", "x")),), "https://example.org", {"a.npz": 999}
)


def test_a_size_that_is_known_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"abc")
    (tmp_path / "b.npz").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"a\.npz .*got 3 bytes, expected 999 as published"):
        arrays(tmp_path / "a.npz", npz, SET)
    with pytest.raises(
        DataError, match=r"b\.npz .*got 3 bytes that do not read as arrays"
    ) as caught:
        arrays(tmp_path / "b.npz", npz, SET)
    assert "get it again from https://example.org" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_all_arrays_or_some(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", p=np.arange(2), q=np.arange(3))
    assert set(arrays(tmp_path / "a.npz", npz, SET)) == {"p", "q"}
    assert arrays(tmp_path / "a.npz", npz, SET, ("q",))["q"].tolist() == [0, 1, 2]


def test_files_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One here and one there are not a set."""
    (tmp_path / "x").mkdir()
    (tmp_path / "a.npz").touch()
    (tmp_path / "x" / "b.txt").touch()
    with pytest.raises(DataError, match="things was not found"):
        locate(tmp_path, SET)
    (tmp_path / "x" / "a.npz").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    layout, paths = locate(Path("~"), SET)
    assert layout is SET.layouts[0]
    assert paths == [tmp_path / "x" / "a.npz", tmp_path / "x" / "b.txt"]

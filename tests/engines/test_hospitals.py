"""The example of the hospitals, as a person would start it, on files made up for the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyfed.random import stream

pytest.importorskip("zenoh")
pytest.importorskip("cryptography")
pytestmark = [pytest.mark.peer, pytest.mark.slow]

START = Path(__file__).parents[2] / "examples" / "three-hospitals" / "start.py"


def test_four_hospitals_train_together(tmp_path: Path) -> None:
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        x = torch.randn(40, 13, generator=stream(0, name))
        rows = [[*(f"{v:.2f}" for v in row), str(i % 5)] for i, row in enumerate(x.tolist())]
        rows[3][4] = "?"
        text = "\n".join(",".join(row) for row in rows) + "\n"
        (tmp_path / f"processed.{name}.data").write_text(text)
    ran = subprocess.run(
        [sys.executable, str(START), "--data", ".", "--rounds", "2", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    line = r"^cleveland: test accuracy 0\.\d{3}; 2 messages left, 1808 bytes: trunk\.1\.weight, "
    assert re.search(line, ran.stdout, re.MULTILINE), ran.stdout
    assert len(ran.stdout.splitlines()) == 4

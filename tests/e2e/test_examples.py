"""Every example runs as a person would run it, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "fedavg": r"^west +0\.\d{4} +144\.5 kB +144\.4 kB$",
    "fedavg_trunk": r"^M0 to hub: trunk\.0\.weight, .*; 49424 bytes$",
    "fedlinked": r"^bytes that left M0: 384000$",
    "joint": r"^joint +0\.\d{3} ± 0\.\d{3}",
    "local": r"^bytes sent: 0$",
    "own_method": r"^check_method: no complaint$",
}


def test_every_example_is_here() -> None:
    """An example of another method adds its line to PRINTED."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("stem", sorted(PRINTED))
def test_an_example_runs(stem: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{stem}.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(PRINTED[stem], ran.stdout, re.MULTILINE), ran.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is written unless a folder is named

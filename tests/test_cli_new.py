import subprocess
import sys
from pathlib import Path

import pytest

from typed import call

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run_tests(path: Path) -> str:
    line = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(path),
    ]
    done = subprocess.run(line, capture_output=True, text=True, cwd=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checked(*paths: Path) -> None:
    """The house's own linter has nothing to say about what is written."""
    line = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    ignored = ["--ignore", "T201,D103,S101,I001"]
    done = subprocess.run([*line, *ignored, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_new_method_passes_its_test(tmp_path: Path) -> None:
    said = call("new", "method", "soft-average").stdout
    assert "written: soft_average.py" in said
    assert "pytest test_soft_average.py" in said
    passed = run_tests(tmp_path / "test_soft_average.py")
    assert "passed" in passed
    checked(tmp_path / "soft_average.py", tmp_path / "test_soft_average.py")
    text = (tmp_path / "soft_average.py").read_text()
    assert "class SoftAverage(pf.Method)" in text
    assert 'name: ClassVar[str] = "soft-average"' in text


def test_a_new_site_passes_its_test(tmp_path: Path) -> None:
    call("new", "site", "north-hospital", "--folder", "sites")
    run_tests(tmp_path / "sites" / "test_north_hospital.py")
    checked(tmp_path / "sites" / "north_hospital.py", tmp_path / "sites" / "test_north_hospital.py")


def test_a_second_site_keeps_the_federation(tmp_path: Path) -> None:
    call("new", "site", "north")
    Path("federation.yaml").write_text("mine")
    call("new", "site", "south")
    assert Path("federation.yaml").read_text() == "mine"
    assert Path("south.yaml").exists()


def test_nothing_is_overwritten() -> None:
    Path("test_mine.py").write_text("mine")
    assert "test_mine.py exists" in call("new", "method", "mine", code=2).stderr
    assert not Path("mine.py").exists()


@pytest.mark.parametrize("name", ["Mine", "my method", "1st", "class", "a--b", "-a"])
def test_names(name: str) -> None:
    assert call("new", "method", "--", name, code=2).stderr.startswith("error: name")


def test_help_teaches_by_examples() -> None:
    assert "Example: polyfed new method" in call("new", "method", "--help").stdout
    assert "Example: polyfed new site" in call("new", "site", "--help").stdout
    assert "new" in call("--help").stdout

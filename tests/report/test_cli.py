"""`polyfed report` and the report that every run leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyfed import cli
from polyfed.errors import RunError


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(args), prog_name="polyfed")
    assert result.exit_code == code, result.output
    return result.output


def test_report(make: Any, tmp_path: Path) -> None:
    folder = make()
    assert call("report", str(folder)) == f"report: {folder / 'report.html'}\n"
    out = tmp_path / "out.html"
    said = json.loads(call("report", str(folder), str(make("b")), "--out", str(out), "--json"))
    assert said == {"report": str(out), "bytes": out.stat().st_size}


def test_several_runs_leave_the_report_of_each(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = make("one"), make("other", method="local", topology="alone")
    call("report", str(one))
    own = (one / "report.html").read_bytes()
    monkeypatch.chdir(tmp_path)
    assert call("report", "one", "other") == "report: report.html\n"
    assert "fedavg and local" in Path("report.html").read_text()
    for out in ("one/report.html", "other/report.html", str(one / "report.html")):
        assert "is that run's own report" in call("report", "one", "other", "--out", out, code=2)
    assert "own report" in call("report", "other", "--out", "one/report.html", code=2)
    monkeypatch.chdir(one)
    assert "is that run's own report" in call("report", ".", "../other", code=2)
    assert (one / "report.html").read_bytes() == own
    assert call("report", "../one") == "report: ../one/report.html\n"


def test_errors_are_one_line(tmp_path: Path) -> None:
    assert call("report", str(tmp_path), code=2).startswith("error: ")
    assert call("watch", str(tmp_path), code=2).startswith("error: ")


def test_a_run_ends_with_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = call("run", "fedavg", "--quick", "--rounds", "0", "--folder", "here")
    assert text.splitlines()[-2:] == ["report: here/report.html", "run folder: here"]
    assert Path("here/report.html").exists()
    call("compare", "fedavg", "--quick", "--rounds", "0", "--seeds", "1", "--folder", "both")
    assert Path("both/report.html").exists()


def test_no_report_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise RunError(f"could not write {path}: No space left on device.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyfed.report.page.write_text", full)
    text = call("run", "fedavg", "--quick", "--rounds", "0", "--folder", "here")
    assert "no report: could not write" in text
    assert text.splitlines()[-1] == "run folder: here"

"""What `pf.run` and `pf.compare` give back can be looked at, and leaves a report in its folder."""

import inspect
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.engines import compare, run
from polyfed.errors import RunError
from polyfed.testing.federations import tiny

METHOD = pf.FedAvg(rounds=1)


def test_a_run_in_a_folder_has_its_report(tmp_path: Path) -> None:
    done = pf.run(METHOD, tiny(), folder=tmp_path / "run")
    page = tmp_path / "run" / "report.html"
    first = page.read_bytes()
    assert b"fedavg on own nodes" in first
    page.unlink()
    assert done.report() == page
    assert page.read_bytes() == first
    page.unlink()
    assert isinstance(pf.resume(tmp_path / "run"), pf.Run)
    assert page.read_bytes() == first
    assert isinstance(pf.Run.open(tmp_path / "run"), pf.Run)


def test_a_comparison_in_a_folder_has_its_report(tmp_path: Path) -> None:
    done = pf.compare([METHOD, pf.Local(rounds=1)], tiny(), seeds=2, folder=tmp_path / "both")
    assert b"fedavg and local on own nodes" in (tmp_path / "both" / "report.html").read_bytes()
    assert not list((tmp_path / "both").glob("*/*/report.html"))
    assert all(isinstance(each, pf.Run) for runs in done.runs.values() for each in runs)
    assert done.table() == compare.open_comparison(tmp_path / "both").table()


def test_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = pf.run(METHOD, tiny())
    assert list(tmp_path.iterdir()) == []
    assert done.report() == Path("report.html")
    assert "Training samples by node and class" in Path("report.html").read_text()  # own nodes
    both = pf.compare([METHOD, pf.Local(rounds=1)], tiny(), seeds=2)
    assert b"fedavg and local" in both.report(tmp_path / "both.html").read_bytes()


def test_at_a_prompt_a_run_is_its_table() -> None:
    run = pf.run(METHOD, tiny())
    assert repr(run) == str(run.table())
    both = pf.compare([METHOD], tiny(), seeds=1)
    assert repr(both) == str(both.table())


def test_a_report_that_cannot_be_written_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise RunError(f"could not write {path}: No space left on device.")

    monkeypatch.setattr("polyfed.report.page.write_text", full)
    with pytest.warns(UserWarning, match="no report: could not write"):
        done = pf.run(METHOD, tiny(), folder=tmp_path / "run")
    assert set(done.accuracy) == {"M0", "M1", "M2"}


def test_the_same_signature() -> None:
    for shown, plain in ((pf.run, run.run), (pf.resume, run.resume), (pf.compare, compare.compare)):
        assert inspect.signature(shown) == inspect.signature(plain)
        assert shown.__doc__ == plain.__doc__


def test_notebooks_show_table_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    done = pf.run(METHOD, tiny())
    html = done._repr_html_()
    assert str(done.table()) in html
    assert "<svg" in html
    assert "<svg" in pf.compare([METHOD], tiny(), seeds=2)._repr_html_()
    monkeypatch.setattr("polyfed.report.shown.is_available", lambda: False)
    assert "<svg" not in done._repr_html_()


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = pf.run(METHOD, tiny())
    assert done.plot("accuracy", tmp_path / "a.svg").exists()
    both = pf.compare([METHOD], tiny(), seeds=2)
    assert both.plot("loss", tmp_path / "b.png").exists()

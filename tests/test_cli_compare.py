import json
from pathlib import Path

import pytest

from typed import call

TINY = ("--rounds", "1", "--init-epochs", "0", "--local-epochs", "1", "--stack", "never")
TWO = ("compare", "local", "fedper", "--seeds", "2", *TINY)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_pairs_and_tables_for_papers() -> None:
    text = call(*TWO, "--folder", "here", "--labels", "2").stdout
    assert "exact one-sided signed-rank test over seeds" in text
    assert "2 seeds cannot reach p = 0.05" in text
    assert r"\begin{tabular}{lrrrr}" in call("show", "here", "--latex").stdout
    assert "| method | M0 | M1 | M2 | mean |" in call("show", "here", "--markdown").stdout
    (pair,) = json.loads(call("show", "here", "--json").stdout)["pairs"]
    assert {pair["best"], pair["other"]} == {"local", "fedper"}
    assert pair["seeds"] == 2
    assert "choose one" in call("show", "here", "--latex", "--markdown", code=2).stderr


@pytest.mark.parametrize("style", ["--latex", "--markdown"])
def test_a_table_for_a_paper_is_alone_on_standard_output(style: str) -> None:
    begins, ends = (r"\begin{tabular}", "\n") if style == "--latex" else ("| method", "\n")
    made = call(*TWO, "--folder", "here", "--labels", "2", style)
    shown = call("show", "here", style)
    assert made.stdout == shown.stdout
    assert made.stdout.startswith(begins)
    assert made.stdout.endswith(f"bold: highest mean.{ends}")
    assert made.stderr.endswith("report: here/report.html\nrun folder: here\n")
    assert shown.stderr.startswith("finished: 4 of 4 runs\n")
    one = call("show", "here/local/seed-0", style, code=2)
    assert f"here/local/seed-0 is a single run: {style} is for comparisons" in one.stderr


def test_tables_of_several_tasks_for_a_paper() -> None:
    both = ("--task", "digits,attributes", "--labels", "2", "--quick", "--folder", "here")
    made = call(*TWO, *both, "--latex")
    assert made.stdout.startswith("% digits\n\n\\begin{tabular}")
    assert made.stdout.count("its figures mean nothing.") == 2
    assert "Mean rank over 2 tasks" in made.stderr
    assert "runs: here" in made.stderr


def test_several_tasks_are_ranked() -> None:
    both = ("--task", "digits,attributes", "--labels", "2", "--quick", "--folder", "here")
    text = call(*TWO, *both).stdout
    assert "Mean rank over 2 tasks" in text
    assert "critical difference (Nemenyi)" in text
    assert "digits\n\nTest accuracy" in text
    assert Path("here/digits/local/seed-1/result.json").exists()
    assert Path("here/attributes/fedper/seed-0/result.json").exists()
    assert "CD = " in Path("here/ranks.svg").read_text()


def test_what_cannot_run_is_said_before_anything_is_trained() -> None:
    line = ("compare", "local", "fedlinked", "--task", "digits,attributes", "--seeds", "1")
    assert "no split 'public'" in call(*line, *TINY, code=2).stderr
    assert not Path("runs").exists()
    one = ("compare", "local", "--task", "digits,attributes", *TINY)
    assert "name at least two" in call(*one, code=2).stderr
    assert "unknown task" in call(*TWO, "--task", "digits,atributes", code=2).stderr

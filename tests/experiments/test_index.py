"""The pages in docs/results are those that their summaries make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polyfed.experiments.index import pages, write_pages

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = pages(RESULTS)  # before a fixture adds an experiment for tests


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(RESULTS)))
def test_a_page_is_what_its_summary_makes(path: Path) -> None:
    again = "run: polyfed experiments --out docs/results --pages"
    assert path.read_text(encoding="utf-8") == PAGES[path], again


def test_every_summary_belongs_to_an_experiment() -> None:
    made = {path.parent for path in PAGES}
    assert {path.parent for path in RESULTS.glob("*/summary.json")} <= made


def test_another_figure_makes_another_page(tmp_path: Path) -> None:
    name = "partial-averaging-V.3.c"
    shutil.copytree(RESULTS / name, tmp_path / name)
    before = pages(tmp_path)
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    summary["cells"][0]["figures"]["accuracy"] = [0.0] * len(summary["seeds"])
    (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    after = pages(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[path] != after[path] for path in before)


def test_the_list_says_what_was_not_run(tmp_path: Path) -> None:
    (index,) = write_pages(tmp_path)
    text = index.read_text()
    assert "| `partial-averaging-V.3.c` |" in text
    assert "not run" in text
    assert text.count("## partial-averaging\n") == 1

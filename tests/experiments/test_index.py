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
    assert {path.name for path in before if before[path] != after[path]} == {"page.md", "index.md"}


def test_another_reading_is_listed_below_its_experiment(tmp_path: Path) -> None:
    name = "partial-averaging-V.3.c"
    other = f"{name}-own_start=true-weights=uniform-1"
    shutil.copytree(RESULTS / other, tmp_path / other)
    shutil.copytree(RESULTS / other, tmp_path / f"{other}-quick")
    found = pages(tmp_path)
    assert "weights xavier:4 → uniform:1" in found[tmp_path / other / "page.md"]
    lines = found[tmp_path / "index.md"].splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| `{name}`"))
    assert lines[at].endswith(" | partly (with other options only) |  |")
    below = lines[at + 1]
    assert below.startswith(f"| [… with `own_start=true-weights=uniform-1`]({other}/page.md) |")
    assert "quick" not in found[tmp_path / "index.md"]
    costs = found[tmp_path / "costs.md"].splitlines()
    assert [line for line in costs if line.startswith(f"| [`{other}`]({other}/page.md) | cuda")]
    assert not any("quick" in line for line in costs)


def test_the_list_says_what_was_not_run(tmp_path: Path) -> None:
    index, costs = write_pages(tmp_path)
    text = index.read_text()
    assert "| `partial-averaging-V.3.c` |" in text
    assert "not run" in text
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(set(heads)) == len(heads)  # each paper once
    assert {"## fedlinked", "## partial-averaging", "## fedfoa", "## fedul", "## li"} < set(heads)
    assert "seconds in all" in costs.read_text()


def test_what_an_experiment_cost(tmp_path: Path) -> None:
    name = "partial-averaging-V.3.b"
    shutil.copytree(RESULTS / name, tmp_path / name)
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    for k, cell in enumerate(summary["cells"]):
        cell["seconds"] = [1.0, 2.0, 6.0]
        cell["bytes_sent_per_node"] = [1000.0 * k] * 3
    (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    runs = 3 * len(summary["cells"])
    said = pages(tmp_path)[tmp_path / "costs.md"]
    row = next(line for line in said.splitlines() if name in line).split(" | ")
    assert row[2:] == [str(runs), f"{3 * runs:,}", "2.00 (1.00 to 6.00)", "0 to 2.0 kB |"]
    assert "bare loop" not in said
    measured = {"experiment": "li-table-1", "cell": "MNIST, LI", "device": "CPU"}
    measured |= {"seconds": 2.0, "ratios": [1.0, 1.2, 1.1]}
    (tmp_path / "bare_loop.json").write_text(json.dumps([measured]))
    said = pages(tmp_path)[tmp_path / "costs.md"]
    assert "| `li-table-1` | MNIST, LI | CPU | 2.000 | 1.100 (1.000 to 1.200) |" in said

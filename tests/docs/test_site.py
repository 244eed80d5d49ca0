"""The site builds without a broken link, whole, and asks the network for nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyfed as pf

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


FETCHED = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^">\s]*')
LED = re.compile(r'href="([^"]*procrustes\.py\.html)#__codelineno-0-(\d+)"[^>]*><code>link<')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    wanted = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")]
    assert len(wanted) > 50
    assert [str(page) for page in wanted if not (site / page).exists()] == []


@pytest.mark.slow
def test_nothing_is_fetched(site: Path) -> None:
    """No script, style, font or picture comes from elsewhere; links that a reader follows may."""
    pages = [page.read_text("utf-8") for page in site.rglob("*.html")]
    assert {m[0] for page in pages for m in FETCHED.finditer(page)} == set()
    styles = [sheet.read_text("utf-8") for sheet in site.rglob("*.css")]
    assert not any(re.search(r"url\(\W?https?:|@import", style) for style in styles)


def test_a_page_that_fetches_would_be_found() -> None:
    assert FETCHED.search('<script src="https://unpkg.com/iframe-worker/shim">')


@pytest.mark.slow
def test_links_to_our_files_lead_to_their_lines(site: Path) -> None:
    found = LED.search((site / "methods" / "fedlinked.html").read_text("utf-8"))
    assert found is not None
    shown = (site / "methods" / found[1]).resolve().read_text("utf-8")
    assert f'"__codelineno-0-{found[2]}"' in shown
    lines = (ROOT / "src/polyfed/maths/procrustes.py").read_text("utf-8").splitlines()
    assert lines[int(found[2]) - 1].startswith("def link(")


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text("utf-8") for page in (site / "reference").glob("*.html"))
    names = set(pf.__all__) - {"errors", "methods", "tasks", "testing", "topologies"}
    assert [n for n in sorted(names) if not re.search(rf'id="polyfed\.[\w.]*\b{n}"', text)] == []


@pytest.mark.slow
def test_doctests_are_code_and_not_quotations(site: Path) -> None:
    pages = [page.read_text("utf-8") for page in (site / "reference").glob("*.html")]
    assert not any("<blockquote>" in page for page in pages)
    assert sum(page.count('class="gp"') for page in pages) > 10  # the prompts of highlighted code


@pytest.mark.slow
@pytest.mark.browser
def test_search_works_in_pages_opened_as_files(site: Path) -> None:
    """Browsers refuse workers there; docs/iframe-worker.js stands in."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    address = f"file://{site}/index.html?q=ledger"
    done = subprocess.run(
        [browser, *options, "--dump-dom", address], capture_output=True, text=True, timeout=600
    )
    assert re.search(r"\b[1-9]\d* matching documents", done.stdout)

"""Every code block of the site runs: Python as it stands, commands as they stand but `--quick`."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyfed import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
FILES = {DOCS / "writing_a_method.md", *(DOCS / "methods").glob("*.md")}  # shown: tests/e2e runs
OWN = sorted(set(DOCS.rglob("*.md")) - FILES)
TYPED = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ELSEWHERE = {"DIR", "RUN", "METHOD", "FOLDER", "SITE.yaml", "S", "cuda"}  # what a reader fills in


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def blocks(page: Path, *kinds: str) -> list[str]:
    """The code blocks of some languages, in order."""
    return [m[3] for m in FENCE.finditer(page.read_text(encoding="utf-8")) if m[2] in kinds]


def commands(page: Path) -> list[str]:
    """The lines that begin with `polyfed`, without their comments."""
    text = "\n".join(blocks(page, "sh", "")).replace("\\\n", " ")
    found = [line for line in text.splitlines() if line.startswith("polyfed ")]
    return [line.partition(" #")[0].strip() for line in found]


def is_runnable(line: str) -> bool:
    """Whether a line runs on any machine: it names no data, no device and no folder of others."""
    words = shlex.split(line)[1:]
    named = set(words) | {part for word in words for part in word.split("=")}
    return not named & ELSEWHERE and words[0] in ("run", "compare", "show", "methods", "tasks")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def call(words: list[str]) -> str:
    result = CliRunner().invoke(cli.app, words, prog_name="polyfed")
    assert result.exit_code == 0, f"polyfed {shlex.join(words)}\n{result.output}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in OWN if blocks(p, "python")], ids=name_of)
def test_the_python_of_a_page_runs(page: Path) -> None:
    namespace = {"__name__": "__page__"}
    for number, block in enumerate(blocks(page, "python"), 1):
        code = compile(block, f"{page.name}, block {number}", "exec", dont_inherit=True)
        exec(code, namespace)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in OWN if any(map(is_runnable, commands(p)))], ids=name_of
)
def test_the_commands_of_a_page_run(page: Path) -> None:
    """In order, in one folder; shortened, because what they compute is tested elsewhere."""
    for line in filter(is_runnable, commands(page)):
        words = shlex.split(line)[1:]
        short = {"run": ["--quick"], "compare": ["--quick", "--seeds", "1"]}  # the last one counts
        call([*words, *short.get(words[0], [])])


@pytest.mark.parametrize("page", [p for p in TYPED if commands(p)], ids=name_of)
def test_the_commands_of_a_page_can_be_typed(page: Path) -> None:
    """Commands, methods, tasks and options exist."""
    for line in commands(page):
        words = [word for word in shlex.split(line)[1:] if word != "..."]
        if "METHOD" not in words:
            call([*words, "--help"])


def test_a_line_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(AssertionError, match="unknown option"):
        call(["run", "fedlinked", "--etta", "1", "--help"])


def test_every_method_is_in_the_table_of_situations() -> None:
    from polyfed.methods import METHODS

    text = (DOCS / "which_method.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"`{name}`" not in text] == []

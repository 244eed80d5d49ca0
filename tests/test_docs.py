"""The pages: links lead somewhere, included files are the files."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from polyfed.methods import METHODS, load

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"\(\S*?(examples/\w+\.py)\)[^\n]*\n\n```python\n(.*?)^```$", re.M | re.S)


def relative_links(page: Path) -> list[tuple[str, Path]]:
    """Text and target of every link to a file of ours, outside code."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = [(m[1], m[2].partition("#")[0]) for m in LINK.finditer(text)]
    return [(t, (page.parent / to).resolve()) for t, to in found if to and ":" not in to]


def included(page: Path) -> list[tuple[str, str]]:
    """Path and text of every code block that stands below a link to an example."""
    return INCLUDED.findall(page.read_text(encoding="utf-8"))


def test_there_are_pages() -> None:
    assert len(PAGES) >= 6
    assert sum(len(relative_links(page)) for page in PAGES) >= 50


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_relative_links_resolve(page: Path) -> None:
    broken = [str(to) for _, to in relative_links(page) if not to.exists()]
    assert broken == []
    assert all(to.is_relative_to(ROOT) for _, to in relative_links(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_linked_functions_are_in_the_file(page: Path) -> None:
    """A link `name` to a file of the source names something that the file defines."""
    wrong = []
    for text, to in relative_links(page):
        name = re.fullmatch(r"`(\w+)`", text)
        if name and to.suffix == ".py" and to.stem not in ("__init__", name[1]):
            defined = rf"^\s*(?:def|class) {name[1]}\b|^{name[1]}\b.* ="
            if not re.search(defined, to.read_text(encoding="utf-8"), re.MULTILINE):
                wrong.append((name[1], str(to.relative_to(ROOT))))
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_included_examples_are_the_files(page: Path) -> None:
    for path, text in included(page):
        assert text == (ROOT / path).read_text(encoding="utf-8"), f"copy {path} into {page.name}"


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda p: p.stem)
def test_a_method_page_includes_its_example(page: Path) -> None:
    assert [path for path, _ in included(page)] == [f"examples/{page.stem}.py"]


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda p: p.stem)
def test_a_method_page_has_its_sections_in_order(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    assert titles == [
        "Equations",
        "Limits",
        "What travels, what stays",
        "Example",
        "Implementation details",
        "Deviations from the paper",
        "Evidence",
        "Logged metrics",
        "What an honest-but-curious hub learns",
        "Citation",
    ]


def defaults_told(page: Path, options: set[str]) -> list[tuple[str, str]]:
    """Options and their defaults, as the page's table of symbols has them."""
    text = page.read_text(encoding="utf-8")
    table = text[text.index("code name | default |") :].partition("\n\n")[0].splitlines()[2:]
    found = []
    for row in table:
        code, told = [cell.strip() for cell in row.split("|")][2:4]
        code = re.sub(r"\(.*?\)", "", code)
        names = [n for n in dict.fromkeys(re.findall(r"`(\w+)[=`]", code)) if n in options]
        if names and told != "see there":
            values = [told] if len(names) == 1 else re.split("[,;] ", told)
            found += list(zip(names, values, strict=True))
    return found


def is_same(value: Any, told: str) -> bool:
    """Whether a page tells a value, in its way."""
    words = {"true": True, "false": False, "off": False, "none": None}
    told = told.replace("`", "")
    if told in words:
        return value == words[told] or (told == "none" and value == "")
    return told == value if isinstance(value, str) else float(told) == value


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda p: p.stem)
def test_a_method_page_tells_every_option_and_its_default(page: Path) -> None:
    """All that the method's file declares; those of a family are told where it is explained."""
    told, declared = set(), set()
    for name in (n for n, (module, _) in METHODS.items() if module == page.stem):
        method = load(name)
        defaults = {field.name: field.default for field in fields(method)}
        here = [cls for cls in method.__mro__ if cls.__module__.endswith(f".{page.stem}")]
        own = {option for cls in here for option in set(cls.__annotations__) & defaults.keys()}
        declared |= own
        for option, value in defaults_told(page, set(defaults)):
            told.add(option)
            apart = re.search(rf"{name} `(\w+)`", value)  # fedu `drift`, fedema `paper`
            if option in own or not name.endswith("-ssl"):  # whose defaults are fedbyol's
                said = apart[1] if apart else value
                assert is_same(defaults[option], said), (name, option)
    assert declared - told == set()

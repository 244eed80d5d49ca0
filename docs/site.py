"""What MkDocs does not do by itself.

Folders in the menu. Lists in the reference that follow from the code: methods, modules, commands.
And links to our own files: pages link to files of the checkout (`../src/polyfed/core/node.py`),
which a site cannot, because it holds only what lies in docs/. So every file that a page links to
becomes a page of the site, and a link whose text is a name in that file leads to its line.
"""

import json
import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FRONT = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n\n"  # of a page of code
SOURCE = "source"  # the site's folder of files from outside docs/


def on_config(config: Any) -> Any:
    """Put pages in the place of `methods/` in the menu, and of `*` those that it does not name."""
    config.nav = [_opened(entry) for entry in config.nav]
    named = repr(config.nav)
    others = [page.name for page in sorted(DOCS.glob("*.md")) if f"'{page.name}'" not in named]
    for entry in config.nav:
        for what in entry.values():
            if isinstance(what, list) and "*" in what:
                what[what.index("*") :] = others
    return config


def _opened(entry: dict[str, Any]) -> dict[str, Any]:
    (title, what), *_ = entry.items()
    if not (isinstance(what, str) and what.endswith("/")):
        return entry
    pages = sorted((DOCS / what).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return {title: [page.relative_to(DOCS).as_posix() for page in pages]}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside docs/ that a page links to, and for those it links to."""
    waiting = [target for page in DOCS.rglob("*.md") for target in _outside(page)]
    seen: set[Path] = set()
    while waiting:
        target = waiting.pop()
        if target in seen or not target.exists():
            continue
        seen.add(target)
        made = File.generated(config, _page_of(target), content=_shown(target))
        files.append(made)
        if target.is_dir():
            waiting += _listed(target)
        elif target.suffix == ".md":
            waiting += _outside(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files of the checkout to their pages."""
    here = page.file.src_uri
    origin = _origin(here)
    for marker, made in FOLLOWING.items():
        if marker in markdown:
            markdown = markdown.replace(marker, made())

    def led(match: re.Match[str]) -> str:
        text, to, anchor = match[1], match[2], match[3] or ""
        target = (origin.parent / to).resolve()
        if ":" in to or not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        inside = target.is_relative_to(DOCS)
        uri = target.relative_to(DOCS).as_posix() if inside else _page_of(target)
        line = _line(text, target)
        return f"[{text}]({relpath(uri, Path(here).parent.as_posix())}{line or anchor})"

    return _outside_code(markdown, lambda part: LINK.sub(led, part))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let MkDocs see the numbered lines of a file, so that it checks the links to them."""
    if page.file.src_uri.startswith(f"{SOURCE}/") and page.present_anchor_ids is not None:
        page.present_anchor_ids |= set(re.findall(r'(?:id|name)="(__codelineno-0-\d+)"', html))
    return html


def _origin(uri: str) -> Path:
    """The file of the checkout that a page of the site shows."""
    parts = Path(uri).parts
    if parts[0] != SOURCE:
        return DOCS / uri
    shown = ROOT.joinpath(*parts[1:])
    return shown if shown.exists() else shown.with_suffix("")


def _outside_code(markdown: str, change: Any) -> str:
    pieces, last = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [change(markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*pieces, change(markdown[last:])])


def _outside(page: Path) -> list[Path]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = [(page.parent / m[2]).resolve() for m in LINK.finditer(text) if ":" not in m[2]]
    return [f for f in found if f.is_relative_to(ROOT) and not f.is_relative_to(DOCS)]


def _page_of(target: Path) -> str:
    path = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return f"{SOURCE}/{path}/index.md"
    return f"{SOURCE}/{path}" if target.suffix == ".md" else f"{SOURCE}/{path}.md"


def _listed(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in (".py", ".md"))


def _shown(target: Path) -> str:
    path = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return "\n".join([f"# {path}\n", *(f"- [{f.name}]({f.name})" for f in _listed(target))])
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return text
    if target.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    kind = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json"}.get(target.suffix)
    return f'{FRONT}# {path}\n\n````{kind or "text"} linenums="1"\n{text}\n````\n'


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook as Markdown, without what it printed."""
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def _line(text: str, target: Path) -> str:
    """Where a file defines what the link is called, as an anchor of its page."""
    name = re.fullmatch(r"`(\w+)`", text)
    if name is None or target.suffix != ".py":
        return ""
    defined = rf"^\s*(?:def|class) {name[1]}\b|^{name[1]}\b.* ="
    found = re.search(defined, target.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        return ""
    number = target.read_text(encoding="utf-8")[: found.end()].count("\n") + 1
    return f"#__codelineno-0-{number}"


# ---- lists that follow from the code -------------------------------------------------------------


def _every_method() -> str:
    from polyfed.methods import METHODS

    shown = "options: {members: false, heading_level: 3, heading: polyfed."
    return "\n\n".join(
        f"::: polyfed.methods.{module}.{cls}\n    {shown}{cls}}}"
        for module, cls in METHODS.values()
    )


def _every_module_of_maths() -> str:
    found = sorted((ROOT / "src" / "polyfed" / "maths").glob("[a-z]*.py"))
    return "\n\n".join(f"::: polyfed.maths.{path.stem}" for path in found)


def _every_command() -> str:
    from typer.main import get_command
    from typer.testing import CliRunner

    from polyfed.cli import app

    def helped(*words: str) -> str:
        wide = {"COLUMNS": "84", "NO_COLOR": "1"}
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="polyfed", env=wide)
        return f"```text\n{done.stdout}\n```\n"

    names = list(get_command(app).commands)  # type: ignore[attr-defined]
    each = (f"## polyfed {name}\n\n{helped(name)}" for name in names)
    return "\n".join([helped(), *each])


FOLLOWING = {
    "<!-- every method -->": _every_method,
    "<!-- every module of maths -->": _every_module_of_maths,
    "<!-- every command -->": _every_command,
}

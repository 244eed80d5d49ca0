"""The tree says what it is: layers, public names, docstrings, one page and one test a method."""

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed import methods, options, tasks

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "polyfed"
LAYERS = (
    ("errors", "check", "random", "options"),
    ("core",), ("maths",), ("train",), ("models",), ("tasks",), ("methods",), ("topologies",),
    ("record",), ("engines",), ("experiments",), ("studies",), ("report",), ("testing",), ("cli",),
    ("__main__",),
)  # fmt: skip
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def layer_of(module: str) -> str | None:
    """The folder or file below polyfed that a module is in; None for others and for polyfed."""
    parts = module.split(".")
    return parts[1] if parts[0] == "polyfed" and len(parts) > 1 else None


def imports(source: str, module: str) -> set[str]:
    """Every polyfed module that a file names in an import, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if layer_of(name) in RANK}


def upwards(source: str, module: str) -> list[str]:
    own = RANK[str(layer_of(module))]
    return sorted(name for name in imports(source, module) if RANK[str(layer_of(name))] > own)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_folder_imports_only_from_folders_before_it(path: Path) -> None:
    module = module_of(path)
    assert layer_of(module) in RANK, f"{module} is in no layer: name it in LAYERS and in DESIGN.md"
    assert upwards(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from polyfed.engines.run import run", ["polyfed.engines.run.run"]),
        ("import polyfed.train.loop", ["polyfed.train.loop"]),
        ("from polyfed import record, errors", ["polyfed.record"]),
        ("def f():\n    from ..train import fit", ["polyfed.train.fit"]),
        ("if TYPE_CHECKING:\n    from polyfed.cli import main", ["polyfed.cli.main"]),
        ("from polyfed.core.model import Model\nfrom polyfed import __version__", []),
    ],
)
def test_the_layer_test_sees_every_import(source: str, found: list[str]) -> None:
    assert upwards(source, "polyfed.maths.procrustes") == found


# ---- public names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pf.__all__)
def test_public_names_are_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(pf, name))
    assert name in dir(pf)


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fedavg'"):
        pf.fedavg  # noqa: B018


def test_importing_polyfed_imports_nothing_heavy() -> None:
    code = (
        "import sys, polyfed, polyfed.errors; sorted(polyfed.__all__);"
        "print([n for n in ('torch', 'numpy', 'sklearn', 'pydantic') if n in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert printed.stdout.decode().strip() == "[]"


# ---- docstrings ----------------------------------------------------------------------------------


def section(doc: str | None, title: str) -> list[str]:
    """The names that a section of a google docstring explains."""
    match = re.search(rf"^( *){title}:\n((?:\1 +.*\n|\s*\n)+)", (doc or "") + "\n", re.MULTILINE)
    if match is None:
        return []
    depth = len(match[1]) + 4
    return re.findall(rf"^ {{{depth}}}(\w+):", match[2], re.MULTILINE)


def public_callables() -> list[Any]:
    """Functions of every module, and methods of every class, that polyfed defines and exports."""
    found = []
    for path in FILES:
        module = importlib.import_module(module_of(path).removesuffix(".__init__"))
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(value):
                found.append(value)
            elif inspect.isclass(value):
                members = [v for n, v in vars(value).items() if n == "__init__" or n[0] != "_"]
                members = [getattr(m, "__func__", m) for m in members]
                found += [m for m in members if inspect.isfunction(m)]
    return found


def test_args_are_the_signatures() -> None:
    """A docstring that explains arguments explains all of them, in their order, and no others."""
    wrong, seen = {}, 0
    for function in public_callables():
        explained = section(inspect.unwrap(function).__doc__, "Args")
        if not explained:
            continue
        seen += 1
        names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
        if explained != names:
            wrong[f"{function.__module__}.{function.__qualname__}"] = (explained, names)
    assert wrong == {}
    assert seen >= 10  # the search itself works


@pytest.mark.parametrize("function", [pf.run, pf.resume, pf.compare], ids=lambda f: f.__name__)
def test_the_main_functions_explain_their_arguments(function: Any) -> None:
    doc = inspect.unwrap(function).__doc__
    assert section(doc, "Args") == list(inspect.signature(function).parameters)


CONFIGS = [
    *(pytest.param(methods.load(n), id=f"method {n}") for n in methods.METHODS),
    *(pytest.param(tasks.load(n), id=f"task {n}") for n in tasks.TASKS),
]


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_its_help(cls: type) -> None:
    helps = options.help_of(cls)
    assert set(helps) == set(options.fields_of(cls))
    for name, text in helps.items():
        assert len(text.split()) >= 2, f"{name}: {text!r} says nothing"


def test_attributes_are_fields() -> None:
    """`Attributes:` of any dataclass explains fields it has, in their order."""
    wrong, seen = {}, 0
    for path in FILES:
        module = importlib.import_module(module_of(path).removesuffix(".__init__"))
        for value in vars(module).values():
            if inspect.isclass(value) and dataclasses.is_dataclass(value):
                explained = section(value.__doc__, "Attributes")
                seen += bool(explained)
                fields = [f.name for f in dataclasses.fields(value)]
                if explained != [n for n in fields if n in explained]:
                    wrong[value.__qualname__] = (explained, fields)
    assert wrong == {}
    assert seen >= 5


def test_registered_names_are_the_classes_own() -> None:
    assert {n: methods.load(n).name for n in methods.METHODS} == {n: n for n in methods.METHODS}
    assert {n: tasks.load(n).name for n in tasks.TASKS} == {n: n for n in tasks.TASKS}


# ---- same stem everywhere ------------------------------------------------------------------------

STEMS = sorted(p.stem for p in (SOURCE / "methods").glob("*.py") if not p.stem.startswith("_"))


@pytest.mark.parametrize("stem", STEMS)
def test_a_method_has_its_page_and_its_tests(stem: str) -> None:
    assert (ROOT / "docs" / "methods" / f"{stem}.md").is_file()
    assert (ROOT / "tests" / "methods" / f"test_{stem}.py").is_file()
    assert stem in {module for module, _ in methods.METHODS.values()}


@pytest.mark.parametrize("stem", STEMS)
def test_a_method_file_says_its_deviations(stem: str) -> None:
    doc = importlib.import_module(f"polyfed.methods.{stem}").__doc__ or ""
    for word in ("Symbols:", "Limits:", "Deviations"):
        assert word in doc

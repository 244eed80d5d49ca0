import os
import subprocess
import sys

import pytest

from polyfed import methods, tasks
from polyfed.cli import complete as names
from polyfed.cli.complete import method_names, task_names
from polyfed.methods import METHODS
from polyfed.tasks import TASKS
from polyfed.topologies import TOPOLOGIES


def test_names_are_those_of_the_tables() -> None:
    assert method_names("") == list(METHODS)
    assert task_names("") == list(TASKS)


def test_names_that_begin_so() -> None:
    assert method_names("fedli") == ["fedlinked"]
    assert task_names("digits,hea") == ["digits,heart"]


def test_lists_say_what_the_classes_say() -> None:
    assert names.methods() == [
        {"name": name, "what_it_does": cls.title, "topologies": list(cls.topologies)}
        for name, cls in zip(METHODS, map(methods.load, METHODS), strict=True)
    ]
    assert names.tasks() == [
        {"name": name, "what_it_is": cls.title, "needs_data": cls.needs_data}
        for name, cls in zip(TASKS, map(tasks.load, TASKS), strict=True)
    ]
    assert names.topologies() == [
        {"name": cls.name, "what_it_is": str(cls.__doc__).partition("\n")[0]}
        for cls in TOPOLOGIES.values()
    ]
    assert {name: cls.name for name, cls in TOPOLOGIES.items()} == {n: n for n in TOPOLOGIES}


def complete(line: str) -> list[str]:
    """What bash is told when a person types this and Tab."""
    code = "from polyfed.cli import main; import sys; sys.argv = ['polyfed']; main()"
    count = len(line.split(" ")) - 1
    env = {"_POLYFED_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("polyfed swe", ["sweep"]),
        ("polyfed run fedli", ["fedlinked"]),
        ("polyfed run fedlinked --dist", ["--distil-epochs"]),
    ],
)
def test_a_shell_is_told(line: str, expected: list[str]) -> None:
    assert complete(line) == expected

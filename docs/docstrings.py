"""Doctests of docstrings as code blocks: Markdown would take `>>>` for a quotation."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> )\S.*\n?|^ .*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put every doctest between fences before it is read as Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called once for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The docstring with its doctests as blocks.

    A doctest ends at an empty line, as Python's own do.
    """
    return _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)

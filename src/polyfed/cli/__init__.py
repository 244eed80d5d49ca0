"""The command line: `polyfed run fedlinked`, `polyfed compare fedlinked local`, ...

commands   what can be typed, and from text to configurations
dynamic    options that come from the dataclasses of methods and tasks
reproduce  the papers' tables and figures
show       what is printed; imported when there is something to print

Nothing heavy is imported before a line names a method or a task: `polyfed --help` answers at once.
"""

from polyfed.cli import reproduce as reproduce
from polyfed.cli.commands import app, main

__all__ = ["app", "main"]

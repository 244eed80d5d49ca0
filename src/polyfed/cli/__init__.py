"""The command line: `polyfed run fedlinked`, `polyfed compare fedlinked local`, ...

commands   what can be typed, and from text to configurations
across     methods ranked over several tasks
complete   names, for shells and lists, read from source
dynamic    options that come from the dataclasses of methods and tasks
report     a page about runs, as a file or live
peer       across machines, and on a simulated network
flower     across machines on Flower: a hub, and nodes
reproduce  the papers' tables and figures
lists      tables of what there is
config     runs written in files, and the schema of those
new        files to begin with: a method, a site
sweep      search the settings of a method
show       what is printed; imported when there is something to print

Nothing heavy is imported before a line names a method or a task: `polyfed --help` answers at once.
"""

from polyfed.cli import config as config
from polyfed.cli import flower as flower
from polyfed.cli import new as new
from polyfed.cli import peer as peer
from polyfed.cli import report as report
from polyfed.cli import reproduce as reproduce
from polyfed.cli import sweep as sweep
from polyfed.cli.commands import app, main

__all__ = ["app", "main"]

"""`polyfed hub` and `polyfed node`: across machines on Flower."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.commands import AsJson, app
from polyfed.cli.dynamic import Command
from polyfed.cli.peer import Insecure, Quiet, SiteFile

HubFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="the hub's site file, or the federation file")
]


@app.command("hub", cls=Command)
def hub_command(
    config: HubFile, insecure: Insecure = False, quiet: Quiet = False, as_json: AsJson = False
) -> None:
    """Be the hub of a run on Flower: starts a SuperLink, admits the nodes, conducts the run.

    A hub that was stopped or killed goes on when the same command is given again.

    Example: polyfed hub federation.yaml
    """
    from polyfed.cli import show
    from polyfed.engines.flower_start import run_hub

    done = run_hub(config, insecure=insecure, shown=None if quiet else _clock())
    show.finished(done, as_json)


@app.command("node", cls=Command)
def node_command(
    site: SiteFile, insecure: Insecure = False, quiet: Quiet = False, as_json: AsJson = False
) -> None:
    """Be a node of a run on Flower: starts a SuperNode that stays until the run is over.

    A node that was stopped or killed goes on when the same command is given again.

    Example: polyfed node cleveland.yaml
    """
    from polyfed.cli import show
    from polyfed.engines.flower_start import run_node

    done = run_node(site, insecure=insecure, shown=None if quiet else _clock())
    show.finished(done, as_json)


def _clock() -> Callable[[str], None]:
    begun = time.monotonic()

    def shown(text: str) -> None:
        typer.echo(f"{time.monotonic() - begun:8.1f} s  {text}", err=True)

    return shown

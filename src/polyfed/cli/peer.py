"""`polyfed peer` and `polyfed simulate`: across machines, and on a network that breaks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.commands import AsJson, app
from polyfed.cli.dynamic import Command

SiteFile = Annotated[Path, typer.Argument(metavar="SITE.yaml", help="what this site has")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="without certificates: anybody can speak as anybody")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="say only how it ended")]
FirstSeed = Annotated[int, typer.Option("--seed", help="the first seed")]
HowMany = Annotated[int, typer.Option("--count", min=1, help="how many seeds from there on")]
Trace = Annotated[bool, typer.Option("--trace", help="say everything that happens")]


@app.command("peer", cls=Command)
def peer_command(
    site: SiteFile, insecure: Insecure = False, quiet: Quiet = False, as_json: AsJson = False
) -> None:
    """Take part in a run without a server; every site types this and nothing else.

    A peer that was stopped or killed goes on when the same command is given again.

    Example: polyfed peer cleveland.yaml
    """
    from polyfed.cli import show
    from polyfed.engines.peer import run_peer

    begun = time.monotonic()

    def shown(text: str) -> None:
        typer.echo(f"{time.monotonic() - begun:8.1f} s  {text}", err=True)

    done = run_peer(site, insecure=insecure, shown=None if quiet else shown)
    show.finished(done, as_json)


@app.command("simulate", cls=Command)
def simulate_command(seed: FirstSeed = 0, count: HowMany = 1, trace: Trace = False) -> None:
    """Run the parties of the peer engine on a simulated network that breaks, and check them.

    Example: polyfed simulate --seed 7 --trace
    """
    from polyfed.engines.chaos import simulate

    for each in range(seed, seed + count):
        drawn = simulate(each, typer.echo if trace else None)
        if count == 1:
            typer.echo(str(drawn))
    typer.echo(f"{count} of {count} seeds held")

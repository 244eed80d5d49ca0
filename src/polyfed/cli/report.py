"""`polyfed report` and `polyfed watch`: a page about runs, as a file or live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.commands import AsJson, RunFolder, app
from polyfed.cli.dynamic import Command

Folders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="where to write; else report.html, in the run's folder, of several runs here"
    ),
]
Maps = Annotated[
    bool, typer.Option("--maps", help="also 2-D maps of representations; seconds each")
]
Port = Annotated[int, typer.Option("--port", help="of this machine; 0 takes any that is free")]


@app.command("report", cls=Command)
def report_command(
    folders: Folders, out: Out = None, maps: Maps = False, as_json: AsJson = False
) -> None:
    """Write one HTML file about runs and comparisons.

    It opens offline: everything it shows is in it.

    Example: polyfed report runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.report.page import write_report

    path = write_report(folders, out, with_maps=maps)
    said = {"report": str(path), "bytes": path.stat().st_size}
    typer.echo(json.dumps(said, indent=2) if as_json else f"report: {path}")


@app.command("watch", cls=Command)
def watch_command(folder: RunFolder, port: Port = 8377) -> None:
    """Show a run while it goes on, on this machine only.

    Example: polyfed watch runs/20270131-120000-fedlinked-digits-s0
    """
    from polyfed.report.watch import server

    with server(folder, port) as serving:
        typer.echo(f"http://127.0.0.1:{serving.server_port} (stop with Ctrl-C)")
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped")

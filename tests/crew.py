"""What other processes do in tests: in a module that they find wherever the tests are run from."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from polyfed.engines.progress import Progress


def work(what: dict[str, Any], told: Progress) -> None:
    """Write down who does it; then rounds, or whatever else is asked for."""
    Path(what["file"]).write_text(str(os.getpid()))
    for tick in range(1, 3):
        told.round_done(tick, {"M0": 0.25, "M1": 0.75})
    if "trouble" in what:
        told.trouble(what["trouble"])
    if "raises" in what:
        raise what["raises"]
    if "dies" in what:
        os.kill(os.getpid(), signal.SIGKILL)
    if "waits" in what:
        time.sleep(600)


def count_nodes(run: Any) -> dict[str, float]:
    return {"nodes": float(len(run.nodes))}

"""Several processes: the same runs, told of as one; whatever ends one of them ends all."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crew import count_nodes, work
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.experiment import Experiment
from polyfed.experiments.parallel import Piece, in_processes
from polyfed.experiments.runner import AFTER, ORIGIN, run_cells
from polyfed.record.recorder import read_config


class Heard(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.rounds: list[int] = []
        self.means: list[float] = []
        self.troubles: list[str] = []
        self.has_ended = False

    def begin(self, title: str, rounds: int) -> None:
        self.begun.append((title, rounds))

    def round_done(self, tick: int, accuracies: Mapping[str, float]) -> None:
        self.rounds.append(tick)
        self.means += accuracies.values()

    def trouble(self, what: str) -> None:
        self.troubles.append(what)

    def end(self) -> None:
        self.has_ended = True


def pieces(tmp_path: Path, *each: dict[str, Any]) -> list[Piece]:
    return [
        Piece(f"piece {i}", 2, {"file": str(tmp_path / str(i)), **own})
        for i, own in enumerate(each)
    ]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(path: Path) -> int:
    end = time.monotonic() + 240
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path} was never written"
        time.sleep(0.05)
    return int(path.read_text())


def test_pieces_are_shared_out_and_shown_as_one(tmp_path: Path) -> None:
    heard = Heard()
    in_processes(pieces(tmp_path, {}, {}, {}), work, 2, heard)
    pids = {int((tmp_path / str(i)).read_text()) for i in range(3)}
    assert len(pids - {os.getpid()}) == 2
    assert not any(map(is_there, pids))
    assert (heard.begun, heard.has_ended) == ([("2 processes", 6)], True)
    assert heard.rounds == sorted(heard.rounds)
    assert heard.rounds[-1] == 6
    assert heard.means == [0.5] * 6
    assert heard.troubles == []


def test_trouble_is_told_and_ends_nothing(tmp_path: Path) -> None:
    heard = Heard()
    in_processes(pieces(tmp_path, {}, {"trouble": "M0 diverged"}), work, 2, heard)
    assert heard.troubles == ["piece 1: M0 diverged"]
    assert heard.rounds[-1] == 4


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("lr must be > 0."), "^piece 0: lr must be > 0.$"),
        (KeyError("surprise"), "(?s)^piece 0: Traceback.*KeyError: 'surprise'"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried.\nMore"),
            r"^piece 0: the GPU's memory is full \(CUDA out of memory. Tried.\).*fewer jobs.$",
        ),
    ],
    ids=["refused", "failed", "full"],
)
def test_what_fails_is_named(error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=said):
        in_processes(pieces(tmp_path, {"raises": error}), work, 1, Heard())


def test_a_process_that_is_killed_is_named_and_ends_the_others(tmp_path: Path) -> None:
    heard, said = Heard(), r"^piece 1: its process was ended \(exit code -9"
    with pytest.raises(RunError, match=said):
        in_processes(pieces(tmp_path, {"waits": True}, {"dies": True}), work, 2, heard)
    assert heard.has_ended
    assert not any(is_there(wait_for(path)) for path in tmp_path.iterdir())


def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    def interrupt() -> None:
        for i in range(2):
            wait_for(tmp_path / str(i))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_processes(pieces(tmp_path, {"waits": True}, {"waits": True}), work, 2, Heard())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(is_there(wait_for(tmp_path / str(i))) for i in range(2))


_CREW = """
import sys
from pathlib import Path
from crew import work
from polyfed.engines.progress import Progress
from polyfed.experiments.parallel import Piece, in_processes

if __name__ == "__main__":
    what = [{"file": str(Path(sys.argv[1], str(i))), "waits": True} for i in range(2)]
    in_processes([Piece("waits", 2, each) for each in what], work, 2, Progress())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "end"])
def test_the_processes_do_not_outlive_the_one_that_began_them(
    how: signal.Signals, tmp_path: Path
) -> None:
    script, told = tmp_path / "begins.py", tmp_path / "told"
    script.write_text(_CREW)
    told.mkdir()
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, str(script), str(told)], env=here) as begins:
        pids = [wait_for(told / str(i)) for i in range(2)]
        begins.send_signal(how)
    end = time.monotonic() + 60
    while any(map(is_there, pids)):
        assert time.monotonic() < end, "they go on"
        time.sleep(0.05)


def test_runs_of_two_processes_are_those_of_one(tmp_path: Path, table: Experiment) -> None:
    cells = [replace(cell, after=count_nodes) for cell in table.cells]
    one, two = (run_cells(cells, [3], tmp_path / str(n), jobs=n) for n in (1, 2))
    for (alone,), (shared,) in zip(one, two, strict=True):
        assert shared.folder is not None
        assert alone.folder is not None
        assert shared.accuracy == alone.accuracy
        assert shared.ledger.crossings() == alone.ledger.crossings()
        assert read_config(shared.folder) == read_config(alone.folder)
        assert shared.folder.relative_to(tmp_path / "2") == alone.folder.relative_to(tmp_path / "1")
        assert json.loads((shared.folder / AFTER).read_text()) == {"nodes": 3.0}
        assert (shared.folder / ORIGIN).read_text() == (alone.folder / ORIGIN).read_text()
        assert not (shared.folder / "checkpoints").exists()


def test_no_processes_are_refused(tmp_path: Path, table: Experiment) -> None:
    with pytest.raises(ConfigError, match="jobs must be >= 1, got 0"):
        run_cells(table.cells, [0], tmp_path, jobs=0)

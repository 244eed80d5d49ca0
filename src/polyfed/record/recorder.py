"""Recorder: what a run writes down, in memory and, if it has one, in its folder.

RUN/config.yaml        enough to run it again
RUN/environment.json   versions and machine
RUN/metrics.jsonl      accuracy, losses and notes, a line a node and tick
RUN/ledger.jsonl       every message that crossed
RUN/faults.jsonl       every message refused, every node absent
RUN/checkpoints/       the state after the last ticks
RUN/result.json        written last: a run that has it is finished
"""

from __future__ import annotations

import fcntl
import json
import platform
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import yaml

from polyfed.core.node import Node
from polyfed.errors import RunError
from polyfed.record import checkpoint
from polyfed.record.files import write_text
from polyfed.record.ledger import Ledger
from polyfed.record.log import Log

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # an eighth of the time
FORMAT = 1
_LOGS = ("metrics", "ledger", "faults")
CONFIG, _RESULT, _LOCK = "config.yaml", "result.json", ".lock"


class Recorder:
    """The three logs of a run, and its checkpoints."""

    def __init__(
        self, folder: Path | None, logs: Mapping[str, Log], lock: IO[str] | None = None
    ) -> None:
        self.folder = folder
        self.metrics, self.faults = logs["metrics"], logs["faults"]
        self.ledger = Ledger(logs["ledger"])
        self._logs, self._lock = logs, lock

    @classmethod
    def in_memory(cls) -> Recorder:
        """A recorder that keeps everything in memory only."""
        return cls(None, {name: Log() for name in _LOGS})

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any]) -> Recorder:
        """Begin a run in an empty or new folder."""
        _make_empty(folder)
        lock = _lock(folder)
        try:
            _make_empty(folder)  # another process may have begun before the lock was ours
            _write_config(folder, config)
            _write_environment(folder)
            return cls(folder, {name: Log(folder / f"{name}.jsonl") for name in _LOGS}, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def reopen(
        cls, folder: Path, config: Mapping[str, Any] | None = None
    ) -> tuple[Recorder, checkpoint.Checkpoint | None]:
        """Continue a run: its logs, cut back to its newest checkpoint, and that checkpoint.

        Args:
            folder: of the run.
            config: takes the place of the one there, if there is no checkpoint.
        """
        read_config(folder)
        lock = _lock(folder)
        try:
            point = checkpoint.latest(folder / "checkpoints")
            lengths = dict.fromkeys(_LOGS, 0) if point is None else point.lengths
            logs = {name: Log.reopen(folder / f"{name}.jsonl", lengths[name]) for name in _LOGS}
            if point is None and config is not None:
                _write_config(folder, config)
            _write_environment(folder)
        except BaseException:
            lock.close()
            raise
        return cls(folder, logs, lock), point

    def checkpoint(
        self, tick: int, nodes: Iterable[Node], kept: int = checkpoint.KEPT, label: str = ""
    ) -> None:
        """Make everything up to this tick durable."""
        if self.folder is not None:
            _check_there(self.folder)
            lengths = {name: log.sync() for name, log in self._logs.items()}
            checkpoint.save(self.folder / "checkpoints", tick, nodes, lengths, kept, label)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result: the run is over."""
        if self.folder is not None:
            _check_there(self.folder)
            for log in self._logs.values():
                log.sync()
            write_text(self.folder / _RESULT, json.dumps(result, indent=2) + "\n")
        self.close()

    def close(self) -> None:
        """Let go of the files, of all of them even if one cannot be written any more."""
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.close)
            for log in self._logs.values():
                stack.callback(log.close)


def _check_there(folder: Path) -> None:
    """A folder that went away would come back with a checkpoint or a result, and nothing else."""
    if not (folder / CONFIG).exists():
        raise RunError(
            f"{folder} is gone: it was removed or moved while the run went on, and with it what "
            "the run had written. Begin it again, in a folder that nothing else empties."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run folder, if this version can read it."""
    path = folder / CONFIG
    if not path.exists():
        raise RunError(f"{folder} is not a run folder: it has no {CONFIG}.")
    try:
        config = _SafeLoader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not YAML: {error}") from error
    found = config.get("format") if isinstance(config, dict) else None
    if found != FORMAT:
        raise RunError(
            f"{folder} has run-folder format {found}, this polyfed reads {FORMAT}. "
            "Open it with the version named in its environment.json."
        )
    if not config.keys() & {"method", "methods"}:
        raise RunError(f"{path} names no method: it is not of a run.")
    return dict(config)


def go_on(folder: Path) -> str:
    """What to type to continue a run that is not finished."""
    if "party" in read_config(folder):
        return "polyfed peer SITE.yaml, at its site (on Flower: polyfed hub or polyfed node)"
    return f"polyfed resume {folder}"


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run; None while it is not."""
    path = folder / _RESULT
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}. Remove it to finish the run again.") from error


def environment() -> dict[str, str]:
    """Versions and machine."""
    import numpy
    import torch

    import polyfed

    return {
        "polyfed": polyfed.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }


def _make_empty(folder: Path) -> None:
    """Make the folder, unless it holds anything but the leavings of a process killed at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [p for p in folder.iterdir() if p.name != _LOCK and p.suffix != ".partial"]
    except OSError as error:
        raise RunError(f"could not make {folder}: {error.strerror or error}.") from error
    if there:
        raise RunError(
            f"{folder} exists and is not empty. Choose another folder, or continue that run "
            f"with `polyfed resume {folder}`."
        )


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    write_text(folder / CONFIG, yaml.safe_dump({"format": FORMAT, **config}, sort_keys=False))


def _write_environment(folder: Path) -> None:
    path = folder / "environment.json"
    if not path.exists():
        write_text(path, json.dumps(environment(), indent=2) + "\n")


def _lock(folder: Path) -> IO[str]:
    try:
        handle = (folder / _LOCK).open("w")
    except OSError as error:
        raise RunError(f"could not write {folder}: {error.strerror or error}.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise RunError(
            f"{folder} is being written by another process: it has been started already."
        ) from error
    return handle

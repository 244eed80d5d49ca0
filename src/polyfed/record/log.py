"""An append-only list of JSON records, in memory and, for a run with a folder, on disk.

`sync` makes everything so far durable and returns the length in bytes; a checkpoint stores that
length, and `reopen` cuts the file back to it, so a resumed run writes no record twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from polyfed.errors import RunError

Record = dict[str, Any]


class Log:
    """One JSON object a line."""

    def __init__(self, path: Path | None = None) -> None:
        self.records: list[Record] = []
        self._path = path
        self._file: IO[str] | None = None
        self._is_durable = False
        if path is not None:
            self._file = self._guard(lambda: path.open("a", encoding="utf-8"))

    @classmethod
    def reopen(cls, path: Path, length: int) -> Log:
        """Continue a log at `length` bytes; whatever stands after that is dropped."""
        log = cls(path)
        size = path.stat().st_size
        if size < length:
            log.close()
            raise RunError(
                f"{path} has {size} bytes, but its checkpoint counts {length}: it was cut or "
                "edited."
            )
        log._guard(lambda: os.truncate(path, length))
        log._guard(lambda: log._file and log._file.seek(length))  # else `sync` tells the old length
        log.records = read(path)
        return log

    def append(self, record: Record) -> None:
        """Add one record."""
        own = _plain(record)
        self.add(own, lambda: json.dumps(own))

    def add(self, record: Record, text: Callable[[], str]) -> None:
        """Add a record that JSON can hold as it is, and that is written so."""
        self.records.append(record)
        self._is_durable = False
        if self._file is not None:
            line = text() + "\n"
            self._guard(lambda: self._file and self._file.write(line))

    def sync(self) -> int:
        """Make all records durable; the length of the file."""
        if self._file is None:
            return 0
        if not self._is_durable:
            self._guard(self._flush)
            self._is_durable = True
        return self._file.tell()

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._guard(self._file.close)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _guard(self, action: Any) -> Any:
        try:
            return action()
        except OSError as error:
            raise RunError(
                f"could not write {self._path}: {error.strerror or error}. The last checkpoint is "
                f"intact: make room, then `polyfed resume {self._path and self._path.parent}`."
            ) from error


def read(path: Path) -> list[Record]:
    """All whole records of a log; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.split("\n")[:-1] if line]
    try:
        records: list[Record] = json.loads(f"[{','.join(lines)}]")  # half the time of one by one
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: a line that is not JSON ({error}).") from error
    if len(records) != len(lines):
        raise RunError(f"{path} is damaged: {len(lines)} lines hold {len(records)} records.")
    return records


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value

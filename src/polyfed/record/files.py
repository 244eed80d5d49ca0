"""Writing files so that a reader finds the old one or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from polyfed.errors import RunError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, then rename it."""
    temporary = path.with_name(path.name + ".partial")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

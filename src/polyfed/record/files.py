"""Files: a reader finds the old one or the new one, never half of one; settings, summaries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError, RunError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, then rename it."""
    temporary = Path(f"{path}.partial")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # also where nothing can be removed, as nothing could be written
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


def read_yaml(path: Path, empty: str) -> dict[str, Any]:
    """The settings in a file that a person wrote; `empty` says what to do where there are none."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"could not read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no {empty}")
    return found


def read_summary(path: Path, what: str, version: int) -> dict[str, Any]:
    """Read what polyfed wrote as JSON; raises RunError if it is not that, or of another format.

    Args:
        path: the file.
        what: what it is to be, for the error.
        version: the format that is read.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        theirs = found["format"]
    except OSError as error:
        raise RunError(f"could not read {path}: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is not {what}.") from error
    if theirs != version:
        raise RunError(f"{path} has format {theirs}, this polyfed reads {version}.")
    return found

"""A resident at a site: it has torch imported and the data read when an exchange comes.

Flower starts a process for every message. That process hands the bytes to the resident, which lives
as long as `polyfed node`, through a socket in a folder that only its own user can enter; where
there is none, it does the exchange itself. Nothing but time depends on the resident: the state is
on disk, and every exchange begins from there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from polyfed.errors import PolyfedError, RunError

VARIABLE = "POLYFED_RESIDENT"  # names the socket, for processes that Flower starts
_HEAD = struct.Struct(">BQ")
_DONE, _FAILED = 0, 1
Handle = Callable[[bytes], bytes]


class Answers:
    """Exchanges of one site, from what is on its disk.

    Args:
        path: the site file.
    """

    def __init__(self, path: Path) -> None:
        from polyfed.engines.agreement import run_config
        from polyfed.engines.flower_site import charter_of
        from polyfed.engines.site import read_site

        self._site, federation = read_site(path)
        self._charter = charter_of(federation)
        self._config = run_config(self._site, federation, self._charter)
        self._made = self._site.make(federation.seed)

    def __call__(self, raw: bytes) -> bytes:
        """The answer to one exchange."""
        from polyfed.core.node import Node
        from polyfed.engines.clerk import serve
        from polyfed.engines.local import torch_device
        from polyfed.errors import ConfigError
        from polyfed.methods._guard import own_root

        site = self._site

        def make() -> Node:
            node = self._charter.enter(site.name, self._made, torch_device(site.device))
            if node is None:
                raise ConfigError(f"site {site.name} has no data and no network: give it a node.")
            if self._charter.method.guard:
                own_root(node)
            return node

        return serve(self._charter, make, site.folder, self._config, raw)


def answer(path: Path, raw: bytes) -> bytes:
    """Answer an exchange: by the resident, if there is one."""
    where = os.environ.get(VARIABLE)
    if where and Path(where).exists():
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(where)
            _write(line, _DONE, raw)
            status, found = _read(line)
        if status == _FAILED:
            raise RunError(found.decode())
        return found
    return Answers(path)(raw)


@contextlib.contextmanager
def resident(handle: Handle) -> Iterator[Path]:
    """Answer, in a thread, what comes through a socket; yields where that is."""
    with (
        tempfile.TemporaryDirectory(prefix="polyfed-") as folder,
        socket.socket(socket.AF_UNIX) as door,
    ):
        path = Path(folder) / "socket"
        door.bind(str(path))
        door.listen()
        thread = threading.Thread(target=_attend, args=(door, handle), daemon=True)
        thread.start()
        yield path


def _attend(door: socket.socket, handle: Handle) -> None:
    while True:
        try:
            line, _ = door.accept()
        except OSError:
            return  # the door is closed
        with line, contextlib.suppress(OSError, RunError):
            _, raw = _read(line)
            try:
                _write(line, _DONE, handle(raw))
            except (PolyfedError, RuntimeError, ValueError, LookupError, TypeError) as error:
                _write(line, _FAILED, f"{type(error).__name__}: {error}".encode())


def _write(line: socket.socket, status: int, raw: bytes) -> None:
    line.sendall(_HEAD.pack(status, len(raw)))
    if raw:
        line.sendall(raw)


def _read(line: socket.socket) -> tuple[int, bytes]:
    status, size = _HEAD.unpack(_exactly(line, _HEAD.size))
    return status, _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = line.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise RunError("the resident of this site is gone.")
        found += piece
    return bytes(found)

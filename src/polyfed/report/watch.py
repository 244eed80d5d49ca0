"""The report of a run that goes on, served on this machine: the page asks for news by itself."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from polyfed.errors import ConfigError, PolyfedError
from polyfed.record.recorder import read_config
from polyfed.report.collect import collect
from polyfed.report.page import as_json, html

HOST = "127.0.0.1"
_NAMES = (f"{HOST}:", "localhost:")  # others come from a page elsewhere, by a name of its own
_LOGS = ("config.yaml", "metrics.jsonl", "ledger.jsonl", "faults.jsonl", "result.json")


class News:
    """What there is to show about a run, collected anew only when its files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: Any = None
        self._data: dict[str, Any] = {}
        self._lock = Lock()

    def data(self) -> dict[str, Any]:
        """What `collect` finds now."""
        with self._lock:
            now = self._stamp()
            if now != self._seen:
                self._data, self._seen = collect([self.folder]), now
            return self._data

    def _stamp(self) -> list[tuple[str, int, int]]:
        files = (path for path in self.folder.rglob("*") if path.name in _LOGS)
        return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files)


class Server(ThreadingHTTPServer):
    """Answers two questions: the page, and its data."""

    daemon_threads = True

    def __init__(self, news: News, port: int) -> None:
        self.news = news
        super().__init__((HOST, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """The page at /, its data at /data.json."""
        if not self.headers.get("Host", "").startswith(_NAMES):
            self.send_error(403)
            return
        try:
            if self.path == "/":
                self._answer(html(self.server.news.data(), live=True), "text/html")
            elif self.path == "/data.json":
                self._answer(as_json(self.server.news.data()), "application/json")
            else:
                self.send_error(404)
        except PolyfedError as error:
            self._answer(str(error), "text/plain", 503)  # a browser that shows it asks again

    def _answer(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if status != 200:
            self.send_header("Refresh", "2")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a question every two seconds is no news."""


def server(folder: str | Path, port: int = 0) -> Server:
    """A server for the report of a run or comparison, on this machine only.

    Args:
        folder: of the run, finished or not.
        port: where to listen; 0 takes any that is free.
    """
    read_config(Path(folder))
    try:
        return Server(News(Path(folder)), port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} cannot be used ({error}). Try --port 0.") from error

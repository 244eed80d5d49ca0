"""Run folders without training, and a headless Chromium.

The browser is driven over its debugging pipe, so that nothing is installed beside it: messages are
JSON with a zero byte behind it, to file descriptor 3 and from 4 (Chrome DevTools Protocol).
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed import methods, tasks
from polyfed.engines.local import Settings
from polyfed.engines.run import plain
from polyfed.tasks.task import node_names

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars",
)  # fmt: skip
PATIENCE = 240.0


def executable() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab, with what it complained about and what it asked the network for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._number = write, read, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def open(self, where: str | Path) -> float:
        """Load a page, wait until it has drawn itself; the seconds that took."""
        self._loaded = False
        began = time.perf_counter()
        url = where if isinstance(where, str) else where.resolve().as_uri()
        self._ask("Page.navigate", url=url)
        while not self._loaded:
            self._take(time.monotonic() + PATIENCE)
        self.frame()
        return time.perf_counter() - began

    def frame(self) -> None:
        """Wait until what has changed is drawn."""
        twice = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        self.run(twice)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.frame()

    def type(self, selector: str, value: str, event: str = "input") -> None:
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event({json.dumps(event)})); }})()"
        )
        self.frame()

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        wanted, until = self._number, time.monotonic() + PATIENCE
        while True:
            answer = self._take(until)
            if answer.get("id") == wanted:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _take(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser has not answered for {PATIENCE} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise ConnectionError("the browser is gone")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details)))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A fresh browser with one tab."""
    here_read, there_write = os.pipe()
    there_read, here_write = os.pipe()
    line = f'exec "$@" 3<&{there_read} 4>&{there_write}'
    command = [str(executable()), *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", line, "browser", *command],
        pass_fds=(there_read, there_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there_read)
    os.close(there_write)
    try:
        yield Page(here_write, here_read)
    finally:
        os.close(here_write)  # without its pipe the browser ends
        os.close(here_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The one tab of one browser, for all tests."""
    if executable() is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Page:
    """A tab as new."""
    tab.resize(1280, 900)
    tab.prefer("light")
    tab.open("about:blank")
    tab.errors.clear()
    tab.requests.clear()
    return tab


class Make:
    """Writes run folders without training anything."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def __call__(
        self,
        name: str = "made",
        *,
        method: str = "fedavg",
        nodes: int = 3,
        rounds: int = 4,
        seed: int = 0,
        topology: str = "star",
        lift: float = 0.0,
        finished: bool = True,
        task: str | None = None,
        metrics: Sequence[Mapping[str, Any]] = (),
        faults: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        """A run whose accuracies rise by a tenth a round; `lift` above those of others."""
        folder = self.base / name
        folder.mkdir(parents=True)
        names = node_names(nodes)
        on = None if task is None else tasks.make(task, {})
        chosen = plain(methods.make(method, {"rounds": rounds, **(options or {})}, on))
        config = {
            "format": 1,
            "method": method,
            "options": chosen,
            "task": task,
            "task_options": {} if on is None else plain(on),
            "topology": topology,
            "settings": plain(Settings(seed=seed, **settings)),
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (folder / "environment.json").write_text('{"polyfed": "0.1.0"}')
        said = {"weight": ([4, 2], 32), "bias": ([], 4)}
        tensors = [
            {"name": n, "shape": shape, "dtype": "float32", "bytes": size}
            for n, (shape, size) in said.items()
        ]
        lines: list[Mapping[str, Any]] = []
        crossed: list[Mapping[str, Any]] = []
        for t in range(rounds + 1):
            for i, node in enumerate(names):
                if t:
                    lines.append({"tick": t, "node": node, "local_loss": 2.0 / t})
                value = min(1.0, 0.1 + 0.1 * t + i / 1000 + seed / 5000 + lift)
                lines.append({"tick": t, "node": node, "test_accuracy": value})
            lines.append({"tick": t, "seconds": 1.0 + t})
            for node in names if t else ():
                each = {"tick": t, "bytes": 36, "tensors": tensors, "hops": 1}
                crossed += [{**each, "source": node, "to": "hub"}]
                crossed += [{**each, "source": "hub", "to": node}]
        self._log(folder / "metrics.jsonl", [*lines, *metrics])
        self._log(folder / "ledger.jsonl", crossed)
        self._log(folder / "faults.jsonl", faults)
        if finished:
            last = {m["node"]: m["test_accuracy"] for m in lines if "test_accuracy" in m}
            (folder / "result.json").write_text(json.dumps({"accuracy": last}))
        return folder

    @staticmethod
    def _log(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 100 nodes and 500 rounds."""
    folder = Make(tmp_path_factory.mktemp("large"))(nodes=100, rounds=500)
    line = [sys.executable, "-m", "polyfed", "report", str(folder)]  # types are not checked there
    subprocess.run(line, check=True, capture_output=True)
    return folder / "report.html"

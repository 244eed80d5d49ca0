"""`polyfed watch`: the page and its data, on this machine only."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError, RunError
from polyfed.report import watch


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with watch.server(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def fetch(url: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_page_and_news(make: Any) -> None:
    folder = make(finished=False)
    with serving(folder) as url:
        status, page = fetch(url)
        assert status == 200
        assert '<html lang="en" class="live">' in page
        before = json.loads(fetch(f"{url}/data.json")[1])
        with (folder / "metrics.jsonl").open("a") as log:
            log.write('{"tick": 5, "seconds": 1.0}\n{"tick": 6, "seco')  # half a line
        after = json.loads(fetch(f"{url}/data.json")[1])
        assert (before["runs"][0]["rounds"], after["runs"][0]["rounds"]) == (4, 5)
        (folder / "result.json").write_text('{"accuracy": {"M0": 0.5}}')
        assert json.loads(fetch(f"{url}/data.json")[1])["runs"][0]["finished"]
        assert fetch(f"{url}/config.yaml")[0] == 404
        assert fetch(url, host="evil.example")[0] == 403
        assert fetch(url, host="localhost:1")[0] == 200
        (folder / "config.yaml").write_text("a: [")
        status, text = fetch(f"{url}/data.json")
        assert status == 503
        assert "is not YAML" in text


def test_nothing_is_read_twice_for_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    news, calls = watch.News(make()), list[Any]()
    monkeypatch.setattr(watch, "collect", lambda folders: calls.append(folders) or {"n": 1})
    assert news.data() == news.data() == {"n": 1}
    assert len(calls) == 1


def test_errors(make: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        watch.server(tmp_path)
    folder = make()
    with watch.server(folder) as first, pytest.raises(ConfigError, match="Try --port 0"):
        watch.server(folder, first.server_port)
    with pytest.raises(ConfigError, match="port 99999"):
        watch.server(folder, 99999)

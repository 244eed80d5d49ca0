"""Real Flower on loopback: a SuperLink, SuperNodes and their short-lived processes, with TLS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import polyfed as pf
from polyfed.core.method import Method
from polyfed.core.node import Name
from polyfed.engines.flower_resident import VARIABLE, Answers, answer, resident
from polyfed.engines.flower_site import charter_of, read_hub
from polyfed.engines.relay import bundle, unbundle
from polyfed.engines.run import Run, plain
from polyfed.engines.site import read_site
from polyfed.errors import ConfigError, RunError
from polyfed.testing import tiny
from ports import free_ports

pytest.importorskip("flwr")
pytestmark = pytest.mark.flower

from polyfed.engines.certificates import make_certificates  # noqa: E402
from polyfed.engines.flower_start import _aloud, run_hub, run_node  # noqa: E402

NODES = """
from polyfed.testing import tiny

def tiny_node(name, seed):
    return {node.name: node for node in tiny()}[name]
"""
FEDLINKED = pf.FedLinked(
    rounds=2, batch=16, init_epochs=1, distil_epochs=1, finetune_epochs=1, local_epochs=1
)
NAMES = ("M0", "M1", "M2")


def sites_of(
    folder: Path, method: Method, *, node: str = "nodes_of_test:tiny_node", **more: Any
) -> dict[Name, Path]:
    """The files of a hub and three nodes; the same as those of peers, but for addresses."""
    make_certificates(folder, [*NAMES, "hub"])
    federation = {"run": "test", "method": method.name, "options": plain(method)}
    federation |= {"nodes": list(NAMES), "grace": 60.0, **more}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    (folder / "nodes_of_test.py").write_text(NODES)
    address, sites = [f"tls/127.0.0.1:{free_ports(1)[0]}"], {}
    for name in (*NAMES, "hub"):
        site: dict[str, Any] = {"name": name, "federation": "federation.yaml"}
        site |= {"folder": f"run-{name}", "authority": "ca.pem"}
        site |= {"certificate": f"{name}.pem", "key": f"{name}.key"}
        site |= {"listen": address} if name == "hub" else {"connect": address, "node": node}
        sites[name] = folder / f"{name}.yaml"
        sites[name].write_text(yaml.safe_dump(site))
    return sites


@contextlib.contextmanager
def started(sites: dict[Name, Path], *more: str) -> Iterator[dict[Name, subprocess.Popen[bytes]]]:
    """`polyfed hub` and `polyfed node`, as typed; all are gone afterwards."""
    running = {name: type_for(name, path, *more) for name, path in sites.items()}
    try:
        yield running
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def type_for(name: Name, path: Path, *more: str) -> subprocess.Popen[bytes]:
    verb = "hub" if name == "hub" else "node"
    return subprocess.Popen(
        [sys.executable, "-m", "polyfed", verb, str(path), *more],
        cwd=path.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def last_state(folder: Path, name: Name) -> dict[str, torch.Tensor]:
    path = sorted((folder / f"run-{name}" / "checkpoints").glob("*.safetensors"))[-1]
    start = f"{name}/model/"
    return {k[len(start) :]: t for k, t in load_file(path).items() if k.startswith(start)}


def assert_equals(folder: Path, run: Run, names: Sequence[Name] = NAMES) -> None:
    for name in names:
        state, wanted = last_state(folder, name), run.nodes[name].model.state()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in state), name
        assert Run.open(folder / f"run-{name}").accuracy[name] == run.accuracy[name]


def test_flower_computes_what_one_process_computes(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, FEDLINKED, patience=600)
    with started(sites) as running:
        assert running["hub"].wait(600) == 0
        assert [running[name].wait(300) for name in NAMES] == [0, 0, 0]
    run = pf.run(FEDLINKED, tiny(), stack="never")
    assert_equals(tmp_path, run)
    hub = Run.open(tmp_path / "run-hub")
    assert not hub.faults
    assert hub.ledger.bytes_sent() == run.ledger.bytes_sent()
    assert len(hub.ledger) == len(run.ledger)
    said = (tmp_path / "run-hub-flower" / "flower.log").read_text()
    assert "authentication is disabled" not in said


def wait_for_round(folder: Path, number: int) -> None:
    """Until a run folder has a round's metrics."""
    path, end = folder / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < end:
        if path.exists() and f'"tick": {number},' in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{folder} never came to round {number}")


@pytest.mark.slow
@pytest.mark.skipif("POLYFED_KILLS" not in os.environ, reason="minutes; POLYFED_KILLS=1 runs it")
@pytest.mark.parametrize("victim", ["hub", "M1"])
def test_who_is_killed_comes_back_and_the_run_goes_on(victim: Name, tmp_path: Path) -> None:
    method = pf.FedAvg(rounds=4, batch=16, local_epochs=1)
    sites = sites_of(tmp_path, method)
    with started(sites) as running:
        wait_for_round(tmp_path / "run-hub", 1)
        running[victim].kill()
        running[victim].wait()
        running[victim] = type_for(victim, sites[victim])
        assert running["hub"].wait(600) == 0
        assert [running[name].wait(120) for name in NAMES] == [0, 0, 0]
    absent: dict[int, list[Name]] = {}
    for fault in Run.open(tmp_path / "run-hub").faults:
        if fault["fault"] == "absent":
            absent.setdefault(fault["tick"], []).append(fault["node"])
    assert victim == "M1" or not absent
    run = pf.run(method, tiny(), stack="never", absent=absent)
    assert_equals(tmp_path, run)


# ---- what can be tried without starting Flower ---------------------------------------------------


def test_what_is_not_secure_must_be_typed(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, FEDLINKED)
    (tmp_path / "M1.pem").unlink()
    with pytest.raises(ConfigError, match=r"M1\.pem.*--insecure"):
        run_hub(sites["hub"])
    with pytest.raises(ConfigError, match=r"certificate is .*M1\.pem.*--insecure"):
        run_node(sites["M1"])
    (tmp_path / "hub.key").unlink()
    with pytest.raises(ConfigError, match=r"key is .*--insecure"):
        run_hub(tmp_path / "federation.yaml")


def test_a_federation_file_is_enough_for_a_hub(tmp_path: Path) -> None:
    sites_of(tmp_path, FEDLINKED)
    site, federation = read_hub(tmp_path / "federation.yaml")
    assert (site.name, site.listen) == ("hub", ("tls/0.0.0.0:9092",))
    assert site.folder == tmp_path / "run-hub"
    assert charter_of(federation).host == "hub"


def test_no_node_can_be_the_host_on_flower(tmp_path: Path) -> None:
    sites_of(tmp_path, FEDLINKED, host="M1")
    with pytest.raises(ConfigError, match="host M1 is a node"):
        charter_of(read_site(tmp_path / "M0.yaml")[1])


def test_a_ring_needs_no_host(tmp_path: Path) -> None:
    sites_of(tmp_path, pf.LI(rounds=1), topology="ring")
    assert charter_of(read_site(tmp_path / "M0.yaml")[1]).host is None


def test_the_resident_answers_and_says_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(raw: bytes) -> bytes:
        if raw == b"no":
            raise ConfigError("not so")
        return raw[::-1]

    with resident(handle) as door:
        monkeypatch.setenv(VARIABLE, str(door))
        assert door.parent.stat().st_mode & 0o077 == 0
        large = bytes(range(256)) * 20_000
        assert answer(tmp_path / "none.yaml", large) == large[::-1]
        with pytest.raises(RunError, match="ConfigError: not so"):
            answer(tmp_path / "none.yaml", b"no")
        assert answer(tmp_path / "none.yaml", b"") == b""


def test_without_a_resident_a_process_answers_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = sites_of(tmp_path, FEDLINKED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    raw = bundle({"kind": "hello", "exchange": [1, 1], "terms": {}})
    assert unbundle(answer(sites["M0"], raw))[0]["kind"] == "refused"
    said: list[str] = []
    aloud = _aloud(Answers(sites["M0"]), said.append)
    assert unbundle(aloud(raw))[0] == unbundle(aloud(raw))[0]
    (line,) = said
    assert line.startswith("refused: the hub has another federation file than M0: run is test here")


def test_bytes_survive_flowers_records() -> None:
    from flwr.app import ConfigRecord, RecordDict

    from polyfed.engines.flower import unwrap, wrap

    assert unwrap(wrap(b"abc")) == b"abc"
    assert unwrap(RecordDict({"polyfed": ConfigRecord({"exchange": 1})})) == b""
    assert unwrap(RecordDict()) == b""

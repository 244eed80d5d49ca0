"""Real processes on loopback, with TLS and certificates: the same numbers, kill -9, forgery."""

from __future__ import annotations

import json
import os
import signal
import socket
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
from polyfed.engines.run import Run
from polyfed.engines.site import read_site
from polyfed.errors import ConfigError
from polyfed.random import stream
from polyfed.testing import tiny

pytest.importorskip("zenoh")
pytest.importorskip("cryptography")
pytestmark = pytest.mark.peer

from polyfed.engines.certificates import make_certificates  # noqa: E402

# A nursery: it imports and tries everything once, then forks a process for every line `SITE` and
# answers its id; to `wait ID` it answers how that process ended.
NURSERY = """
import os, sys, traceback
from pathlib import Path
import torch
import polyfed as pf
from polyfed.engines.peer import run_peer
from polyfed.testing import tiny
torch.set_num_threads(1)
pf.run(pf.LI(rounds=1), tiny())

for line in sys.stdin:
    words = line.split()
    if words[0] == "wait":
        print(os.waitpid(int(words[1]), 0)[1], flush=True)
        continue
    child = os.fork()
    if child == 0:
        try:
            site = Path(words[0])
            os.chdir(site.parent)
            run_peer(site)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
"""
NODES = """
from polyfed.testing import tiny

def tiny_node(name, seed):
    return {node.name: node for node in tiny()}[name]
"""


class Nursery:
    def __init__(self) -> None:
        pipe = subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", NURSERY]
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def ask(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, site: Path) -> int:
        return self.ask(str(site))

    def wait(self, process: int) -> int:
        return self.ask(f"wait {process}")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    assert made.process.stdin is not None
    assert made.process.stdout is not None
    made.process.stdin.close()
    made.process.wait(10)
    made.process.stdout.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def sites_of(
    folder: Path, method: Method, topology: str, *, host: Name | None = None, **more: Any
) -> dict[Name, Path]:
    """Site files for the tiny federation, each of whose parties knows one other, and the first."""
    names = [node.name for node in tiny()]
    parties = sorted({*names, *([host] if host else [])})
    make_certificates(folder, parties)
    from polyfed.engines.run import plain

    federation = {"run": "test", "method": method.name, "options": plain(method)}
    federation |= {"topology": topology, "nodes": names, "host": host, "grace": 2.0, **more}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    (folder / "nodes_of_test.py").write_text(NODES)
    ports = dict(zip(parties, free_ports(len(parties)), strict=True))
    sites = {}
    for i, name in enumerate(parties):
        site = {"name": name, "federation": "federation.yaml", "folder": f"run-{name}"}
        site["node"] = "nodes_of_test:tiny_node" if name in names else None
        site["listen"] = [f"tls/127.0.0.1:{ports[name]}"]
        site["connect"] = [f"tls/127.0.0.1:{ports[parties[j]]}" for j in {0, i - 1} - {i}]
        site |= {"authority": "ca.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
        sites[name] = folder / f"{name}.yaml"
        sites[name].write_text(yaml.safe_dump({k: v for k, v in site.items() if v is not None}))
    return sites


def last_state(folder: Path, name: Name) -> dict[str, torch.Tensor]:
    """A node's network as its last checkpoint holds it."""
    path = sorted((folder / f"run-{name}" / "checkpoints").glob("*.safetensors"))[-1]
    start = f"{name}/model/"
    return {k[len(start) :]: t for k, t in load_file(path).items() if k.startswith(start)}


def assert_equals(folder: Path, run: Run, names: Sequence[Name]) -> None:
    for name in names:
        state, wanted = last_state(folder, name), run.nodes[name].model.state()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in state), name
        done = Run.open(folder / f"run-{name}")
        assert done.accuracy[name] == run.accuracy[name]


def wait_for_round(folder: Path, number: int) -> None:
    """Until a party has begun a round."""
    path = folder / "party.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        held = json.loads(path.read_text())["accepted"] if path.exists() else None
        if held is not None and held["round"] >= number:
            return
        time.sleep(0.005)
    raise AssertionError(f"{folder} never came to round {number}")


LI = pf.LI(rounds=6, batch=8)
CASES = [
    (LI, "dual-ring", None),
    (pf.FedAvg(rounds=3, batch=8), "star", "hub"),
    (pf.PartialAveraging(rounds=3, batch=8, scheme="50%"), "gossip:cycles=2", None),
]


@pytest.mark.parametrize(("method", "topology", "host"), CASES, ids=[c[1] for c in CASES])
def test_peers_compute_what_one_process_computes(
    method: Method, topology: str, host: Name | None, tmp_path: Path, nursery: Nursery
) -> None:
    sites = sites_of(tmp_path, method, topology, host=host)
    processes = [nursery.start(site) for site in sites.values()]
    assert [nursery.wait(process) for process in processes] == [0] * len(processes)
    run = pf.run(method, tiny(), topology=topology, stack="never")
    names = [node.name for node in tiny()]
    assert_equals(tmp_path, run, names)
    done = {name: Run.open(tmp_path / f"run-{name}") for name in sites}
    for name in sites:
        assert not done[name].faults
        sent = [repr(vars(c)) for c in done[name].ledger.crossings() if c.source == name]
        assert sent == [repr(vars(c)) for c in run.ledger.crossings() if c.source == name]


KILLS = int(os.environ.get("POLYFED_KILLS", "2"))


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize(
    ("topology", "host", "victim"),
    [("dual-ring", None, "M1"), ("dual-ring", None, "M0"), ("star", "hub", "hub")],
)
def test_a_killed_peer_comes_back_and_the_numbers_are_the_same(
    topology: str, host: Name | None, victim: Name, number: int, tmp_path: Path, nursery: Nursery
) -> None:
    method: Method = LI if host is None else pf.FedAvg(rounds=6, batch=8)
    sites = sites_of(tmp_path, method, topology, host=host, grace=60.0)
    processes = {name: nursery.start(site) for name, site in sites.items()}
    chance = stream(number, "kill", topology, victim)
    wait_for_round(tmp_path / f"run-{victim}", int(torch.randint(1, 6, (), generator=chance)))
    time.sleep(0.1 * float(torch.rand((), generator=chance)))
    os.kill(processes[victim], signal.SIGKILL)
    killed = nursery.wait(processes[victim])
    processes[victim] = nursery.start(sites[victim])
    assert [nursery.wait(process) for process in processes.values()] == [0] * len(processes)
    assert killed in (0, signal.SIGKILL)
    run = pf.run(method, tiny(), topology=topology, stack="never")
    assert_equals(tmp_path, run, [node.name for node in tiny()])


def test_the_others_go_on_without_a_peer_that_stays_away(tmp_path: Path, nursery: Nursery) -> None:
    method = pf.LI(rounds=12, batch=8)
    sites = sites_of(tmp_path, method, "dual-ring", grace=0.5)
    processes = {name: nursery.start(site) for name, site in sites.items()}
    wait_for_round(tmp_path / "run-M1", 3)
    os.kill(processes["M1"], signal.SIGKILL)
    assert [nursery.wait(processes[name]) for name in ("M0", "M2")] == [0, 0]
    nursery.wait(processes["M1"])
    facts = json.loads((tmp_path / "run-M0" / "party.json").read_text())
    log = facts["accepted"]["log"]
    assert len(log) == 12
    absent = {t + 1: sorted({"M0", "M1", "M2"} - set(m)) for t, (_, _, m) in enumerate(log)}
    assert absent[12] == ["M1"]
    run = pf.run(method, tiny(), topology="dual-ring", stack="never", absent=absent)
    assert_equals(tmp_path, run, ["M0", "M2"])


def test_nobody_can_speak_for_another_or_without_a_certificate(tmp_path: Path) -> None:
    import zenoh

    from polyfed.engines.peer import _config, zenoh_link

    sites = {name: read_site(path) for name, path in sites_of(tmp_path, LI, "ring").items()}
    charter = sites["M0"][1].charter()
    stranger = tmp_path / "stranger"
    make_certificates(stranger, ["M1"])  # the right name, signed by somebody else

    def opened(name: Name, **changes: Any) -> Any:
        site = type(sites[name][0])(**{**vars(sites[name][0]), **changes})
        return zenoh.open(_config(zenoh.Config(), site, "polyfed/test", ["M0"], insecure=False))

    def heard(link: Any) -> list[tuple[Name, bytes]]:
        found = []
        while not link.events.empty():
            what, given = link.events.get()
            if what == "hear":
                found.append(given)
        return found

    with zenoh_link(sites["M0"][0], charter) as link:
        with opened("M1") as honest:
            deadline = time.monotonic() + 10
            while not (found := heard(link)) and time.monotonic() < deadline:
                honest.put("polyfed/test/to/M0/M1", b"as myself")
                time.sleep(0.05)
            assert set(found) == {("M1", b"as myself")}
            honest.put("polyfed/test/to/M0/M2", b"as another")
            honest.put("polyfed/test/to/M0/M1", b"the end")
            time.sleep(0.5)
            assert {raw for _, raw in heard(link)} <= {b"as myself", b"the end"}
        files = {"authority": "ca.pem", "certificate": "M1.pem", "key": "M1.key"}
        forged = {name: stranger / path for name, path in files.items()}
        with opened("M1", **forged, listen=()) as liar:
            liar.put("polyfed/test/to/M0/M1", b"forged")
            time.sleep(0.5)
            assert heard(link) == []


def test_what_is_not_secure_must_be_typed(tmp_path: Path) -> None:
    from polyfed.engines.peer import run_peer

    path = sites_of(tmp_path, LI, "ring")["M0"]
    site = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**site, "listen": ["tcp/127.0.0.1:0"]}))
    with pytest.raises(ConfigError, match=r"is not encrypted.*--insecure"):
        run_peer(path)
    path.write_text(yaml.safe_dump({k: v for k, v in site.items() if k != "key"}))
    with pytest.raises(ConfigError, match=r"key is not given.*--insecure"):
        run_peer(path)
    path.write_text(yaml.safe_dump({**site, "folde": "x"}))
    with pytest.raises(ConfigError, match="Did you mean"):
        run_peer(path)

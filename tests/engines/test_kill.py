"""kill -9 at any moment: what is left is continued to the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.random import stream

# A nursery: it imports everything once; for each line `FOLDER DELAY SYNCS` it forks a process that
# begins the run or continues what a killed one left, and kills that process, and no other, after
# DELAY seconds; or the process kills itself as it makes a file durable for the SYNCS-th time. With
# zeros it lives. The nursery answers how the process ended, how long it lived, what it said.
NURSERY = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import torch
import polyfed as pf
import polyfed.engines.run
pf.tasks.digits().nodes(0)
torch.set_num_threads(1)

def live(folder, out, syncs):
    fsync, left = os.fsync, [syncs]
    def dying(handle):
        fsync(handle)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = dying
    if (folder / "config.yaml").exists():
        run = pf.resume(folder)
    else:
        method = pf.FedLinked(rounds=6, batch=16, lr=2e-3, init_epochs=1, distil_epochs=1,
                              finetune_epochs=1, local_epochs=2)
        run = pf.run(method, pf.tasks.digits(labels=4), folder=folder)
    digest = hashlib.blake2b()
    for node in run.nodes.values():
        for name, t in sorted((node.model.state() | node.memory).items()):
            digest.update(f"{node.name} {name} {t.dtype}".encode() + t.numpy().tobytes())
    os.write(out, json.dumps({"bits": digest.hexdigest(), "accuracy": run.accuracy}).encode())

for line in sys.stdin:
    folder, delay, syncs = line.split()
    out, into = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        live(Path(folder), into, int(syncs))
        os._exit(0)
    os.close(into)
    if float(delay):
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
    said = os.read(out, 100_000)
    _, status = os.waitpid(child, 0)
    os.close(out)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - started,
                      said.decode()]), flush=True)
"""


def written(folder: Path) -> dict[str, Any]:
    """The logs, without how long things took."""
    logs = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "ledger", "faults")
    }
    logs["metrics"] = [m for m in logs["metrics"] if "seconds" not in m]
    return logs | {"result": json.loads((folder / "result.json").read_text())}


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    whole, hurt, cut = tmp_path / "whole", tmp_path / "hurt", tmp_path / "cut"
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None

        def live(folder: Path, delay: float = 0.0, syncs: int = 0) -> tuple[int, float, str]:
            nursery.stdin.write(f"{folder} {delay} {syncs}\n")
            nursery.stdin.flush()
            status, seconds, said = json.loads(nursery.stdout.readline())
            return status, seconds, said

        status, length, expected = live(whole)
        assert status == 0
        # Short lives: together they are about as long as the whole run, so the kills are spread
        # over its rounds, and over what comes before the first and after the last.
        delays = torch.rand(8, generator=stream(0, "kills")) * length / 3
        ends = [live(hurt, delay)[0] for delay in delays.tolist()]
        assert -9 in ends
        (hurt / "result.json").unlink(missing_ok=True)  # finished before the last kill
        assert live(hurt)[::2] == (0, expected)
        # A begin makes config and environment durable (2 syncs each), a checkpoint the three logs,
        # its file and its folder (5): die within each of them, and between.
        for syncs in (1, 2, 1, 3, 4, 5, 9, 4, 12, 3, 8):
            assert live(cut, syncs=syncs)[0] == -9
        assert live(cut)[::2] == (0, expected)
        nursery.stdin.close()
    for folder in (hurt, cut):
        assert written(folder) == written(whole)
        assert files(folder) == files(whole)
    assert len(written(whole)["ledger"]) == 6 * 6

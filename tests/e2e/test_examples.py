"""Every example runs as a person would run it, and prints what it promises."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "auto_slices": r"^seed 1, from round 41 on: M0\+M1\+M2 M3\+M4\+M5$",
    "ccvr": r"^with the head calibrated in round 11: 0\.\d{3}$",
    "cwt": r"^cwt +0\.\d{3} +0\.\d{3} +0\.\d{3} +0\.\d{3} +1\.5 MB",
    "ds_fl": r"^  round 4: accuracy 0\.\d{3}, entropy \d\.\d\d$",
    "dynamic_averaging": r"^round \d+: M0 sends its slice, 11112 bytes$",
    "fedala": r"^  M2( 0\.\d{3}){6}; \d+ 1 1 1 1 1$",
    "fedavg": r"^west +0\.\d{4} +144\.5 kB +144\.4 kB$",
    "fedavg_trunk": r"^M0 to hub: trunk\.0\.weight, .*; 49424 bytes$",
    "fedbabu": r"^fine-tuned head: 0\.\d{3} under the random head, then 0\.\d{3}$",
    "fedbyol": r"^fedema, mu of M0:( \d\.\d\d:\d\.\d+){4}$",
    "feddf": r"^mean accuracy with 50 steps of distillation: 0\.\d{3}$",
    "fedfoa": r"^M0-conv tells the hub 2120 bytes a round: correlation, correlation/wanted$",
    "fedlinked": r"^bytes that left M0: 384000$",
    "fedmd": r"^without labels M0-conv tells: scores \[300, 32\], aligned_round \[\]$",
    "fedper": r"^M2: 12356 numbers of the trunk are common, 165 of the head are its own$",
    "fedrep": r"^  round  8: 0\.\d{3} 0\.\d{3}$",
    "fedul": r"^east sends 19240 bytes a round: 0\.weight, 0\.bias, 2\.weight, 2\.bias$",
    "fedul_controls": r"^hub-only +0\.\d{3} +0\.\d{3} +0\.\d{3} +0\.\d{3} +- ",
    "fedul_pareto": r"^0\.5   \d\.\d{3}  \d\.\d{3}   0\.\d{3}( \*)?$",
    "joint": r"^joint +0\.\d{3} ± 0\.\d{3}",
    "lg_fedavg": r"^a message is 688 bytes: the head and a count$",
    "li": r"^round 3: M0 to M1, 49440 bytes over 2 link\(s\)$",
    "local": r"^bytes sent: 0$",
    "mocha": r"^  P5 -0\.\d\d -0\.\d\d -0\.\d\d \+0\.\d\d \+0\.\d\d \+1\.00$",
    "own_method": r"^check_method: no complaint$",
    "partial_averaging": r"^  M2 to hub-near: near, 1672 bytes$",
    "personal": r"^fedbabu +0\.\d{3} ± 0\.\d{3} +\d+\.\d kB",
}


# It imports torch once, and forks for every line `FILE FOLDER OUT ERR`; the last two are files.
NURSERY = """
import os, runpy, sys, traceback
import torch
import polyfed as pf
pf.run(pf.FedAvg(rounds=1), pf.testing.tiny())
for line in sys.stdin:
    path, folder, out, err = line.split()
    child = os.fork()
    if child == 0:
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        sys.argv = [path]
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as made:
        yield made
        assert made.stdin is not None
        made.stdin.close()


def test_every_example_is_here() -> None:
    """An example of another method adds its line to PRINTED."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("stem", sorted(PRINTED))
def test_an_example_runs(stem: str, tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    folder, out, err = (tmp_path / name for name in ("folder", "out", "err"))
    folder.mkdir()
    print(EXAMPLES / f"{stem}.py", folder, out, err, file=nursery.stdin, flush=True)
    code = int(nursery.stdout.readline())
    printed = out.read_text(encoding="utf-8")
    assert code == 0, err.read_text(encoding="utf-8")
    assert re.search(PRINTED[stem], printed, re.MULTILINE), printed
    assert list(folder.iterdir()) == []  # nothing is written unless a folder is named

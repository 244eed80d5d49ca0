"""Commands on a machine that is lent for a while, and what they finished brought back.

    python benchmarks/lease.py start PLAN --state DIR --seconds 1500 [--slots 3] [--mps]
    python benchmarks/lease.py wait --state DIR --seconds 500 --out OUT [--all]

A plan has a shell command a line, the most wanted first; `#` begins a comment. Before a command may
stand `[PATH]`: it is passed over until that file is there. In a command `polyfed` is this project,
and $RESULTS a folder for its runs.

`start` copies the project to DIR/tree, since the tree it was called in may change, and leaves a
process behind that does what the plan says, so many commands at a time, until the time is over;
then it ends what still runs. `wait` comes back after so many seconds, or when all is done, says
where everything stands, and packs the runs that are finished, without checkpoints, into OUT: put
together by `cat OUT/runs.tar.gz.* | tar xz`. Where `start` was not called, as on another machine,
it fails at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
PART = 15 << 20  # bytes of one part of a packed file
GRACE = 10.0  # seconds from being asked to end to being ended
_COMMENT = re.compile(r"(^|\s)#.*")
_LINE = re.compile(r"(?:\[(?P<needs>[^\]]+)\]\s*)?(?P<text>.*)")


@dataclass(frozen=True)
class Command:
    """A line of a plan.

    Attributes:
        number: its place in the plan, from 1.
        text: for the shell.
        needs: a file that must be there first; empty if none must.
    """

    number: int
    text: str
    needs: str

    @property
    def is_ready(self) -> bool:
        """Whether it can begin."""
        return not self.needs or Path(self.needs).expanduser().exists()


def read(plan: Path) -> list[Command]:
    """The commands of a plan."""
    lines = [_COMMENT.sub("", line).strip() for line in plan.read_text().splitlines()]
    found = [_LINE.fullmatch(line) for line in lines if line]
    return [Command(i, m["text"], m["needs"] or "") for i, m in enumerate(filter(None, found), 1)]


# ---- start ---------------------------------------------------------------------------------------


def start(plan: Path, state: Path, seconds: float, slots: int, mps: bool) -> None:
    """Leave a process behind that does what the plan says."""
    emptied = os.environ.get("OUT")  # what tools that lend machines empty before every command
    if emptied and state.is_relative_to(Path(emptied).resolve()):
        raise SystemExit(f"{state} is in {emptied}, which is emptied: choose another --state.")
    if not read(plan):
        raise SystemExit(f"{plan} has no command.")
    if (state / "plan").exists():
        raise SystemExit(f"{state} has a plan already: choose another --state.")
    for folder in ("results", "logs", "bin", "mps"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = ROOT / name, state / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    command = state / "bin" / "polyfed"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m polyfed "$@"\n')
    command.chmod(0o755)
    shutil.copy(plan, state / "plan")
    if mps:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=_environment(state), check=True)
    arguments = ["drive", "--state", state, "--seconds", str(seconds), "--slots", str(slots)]
    program = state / "tree" / "benchmarks" / "lease.py"
    no_mps = {} if mps else {"CUDA_MPS_PIPE_DIRECTORY": str(state / "no")}
    with (state / "logs" / "drive.err").open("w") as errors:
        subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env=_environment(state) | no_mps,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _environment(state: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [f"{state}/tree/src", os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PATH": f"{state}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "RESULTS": str(state / "results"),
        "CUDA_MPS_PIPE_DIRECTORY": str(state / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(state / "mps"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def drive(state: Path, seconds: float, slots: int) -> None:
    """Do what the plan says until the time is over."""
    began = time.monotonic()
    left, running = read(state / "plan"), dict[Command, subprocess.Popen[bytes]]()

    def note(said: str, command: Command) -> None:
        with (state / "log").open("a") as log:
            log.write(f"{time.monotonic() - began:6.0f} s  {said:<11}{command.number}\n")

    while left or running:
        late = time.monotonic() - began - seconds
        for command, process in list(running.items()):
            if process.poll() is not None:
                note("done" if process.returncode == 0 else f"failed {process.returncode}", command)
                del running[command]
            elif late >= 0:
                os.killpg(process.pid, signal.SIGTERM if late < GRACE else signal.SIGKILL)
        if late >= 0:
            left = []
        for command in [each for each in left if each.is_ready][: slots - len(running)]:
            left.remove(command)
            note("begun", command)
            with (state / "logs" / str(command.number)).open("w") as log:
                running[command] = subprocess.Popen(
                    command.text,
                    shell=True,
                    cwd=state / "tree",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        time.sleep(0.2)
    (state / "over").touch()


# ---- wait ----------------------------------------------------------------------------------------


def wait(state: Path, seconds: float, out: Path, everything: bool) -> None:
    """Come back when the time or the plan is over; tell, and pack what is finished."""
    if not (state / "plan").exists():
        raise SystemExit(f"{state} is not there: this is another machine, or nothing was started.")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (state / "over").exists():
        time.sleep(0.2)
    print("\n".join(told(state)))
    out.mkdir(parents=True, exist_ok=True)
    pack(state, out, everything)


def told(state: Path) -> Iterator[str]:
    """Where everything stands."""
    log = state / "log"
    yield log.read_text().rstrip() if log.exists() else "nothing has begun"
    for command in read(state / "plan"):
        path = state / "logs" / str(command.number)
        said = (
            path.read_bytes()[-200:].decode(errors="replace").split("\n") if path.exists() else []
        )
        yield f"{command.number}. {command.text}\n     " + "\n     ".join(said[-3:]).rstrip()
    for path in sorted((state / "results").glob("**/faults.jsonl")):
        if path.stat().st_size:
            yield f"FAULTS in {path.parent}: {path.read_text().splitlines()[0][:200]}"
    yield "all is over" if (state / "over").exists() else "it goes on"


def pack(state: Path, out: Path, everything: bool) -> None:
    """Finished runs, or all, and the logs, in parts of a size that can be carried."""
    runs = [
        path.parent
        for path in sorted((state / "results").glob("**/config.yaml"))
        if everything or (path.parent / "result.json").exists()
    ]
    packed = state / "runs.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=3) as archive:
        for folder in runs:
            name = folder.relative_to(state / "results")
            archive.add(folder, str(name), filter=None if everything else _small)
        archive.add(state / "logs", "logs")
    for old in out.glob(f"{packed.name}.*"):
        old.unlink()
    with packed.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(PART), b"")):
            (out / f"{packed.name}.{number:03}").write_bytes(part)
    print(f"{len(runs)} runs packed")


def _small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith(("/checkpoints", ".safetensors", "/.lock")) else entry


def main() -> None:
    """Start, wait, or be the process that was left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("start", "drive", "wait"):
        one = verbs.add_parser(verb)
        one.add_argument("--state", type=Path, required=True, help="a folder that stays")
        one.add_argument("--seconds", type=float, required=True)
        if verb == "wait":
            one.add_argument("--out", type=Path, required=True, help="what is brought back")
            one.add_argument("--all", action="store_true", help="checkpoints and all")
        else:
            one.add_argument("--slots", type=int, default=3, help="commands at a time")
        if verb == "start":
            one.add_argument("plan", type=Path)
            one.add_argument("--mps", action="store_true", help="let processes share a GPU")
    given = parser.parse_args()
    given.state = given.state.resolve()  # commands are run elsewhere
    if given.verb == "start":
        start(given.plan, given.state, given.seconds, given.slots, given.mps)
    elif given.verb == "drive":
        drive(given.state, given.seconds, given.slots)
    else:
        wait(given.state, given.seconds, given.out, given.all)


if __name__ == "__main__":
    main()

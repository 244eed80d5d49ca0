"""Small networks in several processes at once: which way fills a GPU?

    python benchmarks/side_by_side.py [--device cuda] [--network resnet] [--ways 1x1 5x1 1x5 3x5]

A way is so many processes, each with so many networks: 5x1 is five processes with a network each,
1x5 one process with a stack of five. Processes begin at the same moment, when all have warmed up,
and train phases of `--steps` steps through the library's own trainer for `--seconds`. Printed are
microseconds of a step for one network, and for all networks of all processes together: the time
divided by what all of them did. On a GPU let processes share it: begin `nvidia-cuda-mps-control -d`
before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cohort

from polyfed.train.together import Trainer
from polyfed.train.track import Job

READY, GO = "ready", "go"


def main() -> None:
    """Measure every way and print the table; or be one of the processes."""
    arguments = _arguments()
    if arguments.rows:
        one(arguments)
        return
    print(f"{'processes':>9}{'networks each':>15}{'us a step':>12}{'us, all together':>18}")
    for way in arguments.ways:
        processes, rows = map(int, way.split("x"))
        taken = measure(arguments, processes, rows)
        mean, shared = statistics.mean(taken) / rows, 1 / sum(rows / each for each in taken)
        print(f"{processes:>9}{rows:>15}{mean * 1e6:>12.1f}{shared * 1e6:>18.1f}", flush=True)


def measure(arguments: argparse.Namespace, processes: int, rows: int) -> list[float]:
    """Seconds of a step of each process's networks."""
    command = [sys.executable, __file__, "--rows", str(rows)]
    for name in ("device", "network", "steps", "seconds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    with_pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **with_pipes) for _ in range(processes)]  # type: ignore[call-overload]
    for process in running:
        if process.stdout.readline().strip() != READY:
            raise SystemExit(f"a process of {processes}x{rows} could not begin.")
    for process in running:
        process.stdin.write(f"{GO}\n")
        process.stdin.flush()
    return [float(json.loads(process.communicate()[0])) for process in running]


def one(arguments: argparse.Namespace) -> None:
    """Train, and print the seconds of a step."""
    torch.set_num_threads(1)
    device, trainer = torch.device(arguments.device), Trainer("always")
    jobs = cohort.federation(arguments.network, arguments.rows, device)
    phase = replace(jobs[0].phase, steps=arguments.steps)
    work = [Job(job.node, phase, job.path) for job in jobs]
    trainer.train(work)
    print(READY, flush=True)
    sys.stdin.readline()
    started, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < arguments.seconds or not count:
        trainer.train(work)
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += arguments.steps
    print(json.dumps(seconds / count))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=["small", "resnet", "mlp", "cnn"], default="resnet")
    parser.add_argument("--ways", nargs="*", default=["1x1", "5x1", "1x5", "3x5"])
    parser.add_argument("--steps", type=int, default=200, help="of a phase")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

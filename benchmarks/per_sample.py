"""Plain SGD one sample at a time, many networks: step by step, put off, written out, as a kernel.

    python benchmarks/per_sample.py --device cuda --rows 16 192 960 --steps 1000

784-300-100-10 with sigmoids and the squared error, as in partial averaging's experiments on MNIST;
random data. `autograd` is the bare loop of one network after the other, `stacked` all of them as
one. `put off` are the first layer's updates of the stack, for 64 samples; on a GPU these samples
may be one kernel, on a CPU a network by itself has its steps written out. Microseconds a step of
all networks, in turn, the median of the repeats; and the largest difference between the parameters
that the first way and the last end with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser, Phase, SquaredError
from polyfed.models.mlp import sigmoid_mlp
from polyfed.random import ambient
from polyfed.train import cohort, loop
from polyfed.train import deferred as put_off
from polyfed.train.track import Job


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    last = "kernel" if device.type == "cuda" else "written out"
    ways = ("autograd", "stacked", "put off", last)
    print(f"networks{''.join(f'{way:>13}' for way in ways)}  speed-up  largest difference")
    for rows in asked.rows:
        times: dict[str, list[float]] = {way: [] for way in ways}
        ends: dict[str, torch.Tensor] = {}
        for _ in range(asked.repeats):
            for way in ways:
                seconds, ends[way] = _one(rows, asked.steps, device, way)
                times[way].append(seconds / asked.steps * 1e6)
        each = [statistics.median(times[way]) for way in ways]
        off = (ends[ways[0]] - ends[ways[-1]]).abs().max()
        shown = "".join(f"{t:13.1f}" for t in each)
        print(f"{rows:8d}{shown}  {each[0] / each[-1]:7.1f}x  {off:.1e}", flush=True)


def _one(rows: int, steps: int, device: torch.device, way: str) -> tuple[float, torch.Tensor]:
    """Seconds of the second phase of two (the first builds the stack), and all parameters."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, 28, 28, generator=draw).to(device)
    y = torch.randint(0, 10, (2000,), generator=draw).to(device)
    data = Data(may_miss_classes=True, train=(x, y))
    nodes = []
    for i in range(rows):
        with ambient(i):
            net = sigmoid_mlp(784, 300, 100, 10).to(device)
        nodes.append(Node(f"N{i}", data, Model.split(net, all=...)))
    sgd = Optimiser(name="sgd", lr=0.1)
    phase = Phase(
        label="p", objective=SquaredError(), steps=steps, batch=1, walk=True, optimiser=sgd
    )
    jobs = [Job(node, phase, ("local",)) for node in nodes]
    kept: cohort.Kept = {}

    def train() -> None:
        if way in ("autograd", "written out"):
            for job in jobs:
                loop.fit(job.node, job.phase, *job.path)
        else:
            cohort.fit_cohort(jobs, kept=kept)
        _wait(device)

    wide = patch.object(put_off, "_WIDE", 10**9 if way == "stacked" else 1)  # inputs that it takes
    fused = patch.object(cohort, "can_fuse", lambda _: way == "kernel")
    written = patch.object(loop, "can_write_out", lambda *_: way == "written out")
    with wide, fused, written:
        train()
        begun = time.perf_counter()
        train()
        seconds = time.perf_counter() - begun
    return seconds, torch.cat(
        [p.detach().flatten().cpu() for n in nodes for p in n.model.net.parameters()]
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()

"""How time and memory grow with the number of nodes.

    python benchmarks/scale.py [--nodes 100 1000 10000] [--stack auto] [--device cpu]

FedAvg, one round of one epoch, the network 784-300-100-62, 180 made-up samples a node. Every count
runs in a process of its own, so that its peak memory is its own; what Python and torch take before
any node is made is taken off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

import polyfed as pf
from polyfed.core.node import Node
from polyfed.models import mlp
from polyfed.random import ambient, stream
from polyfed.tasks.task import Task, node_names

NET, SAMPLES = (784, 300, 100, 62), 180


@dataclass(frozen=True, kw_only=True)
class MadeUp(Task):
    """Nodes with random data; nothing can be learned."""

    name: ClassVar[str] = "made-up"
    title: ClassVar[str] = "random data"

    num_nodes: int = 100

    def nodes(self, seed: int) -> list[Node]:
        """All equal in shape."""
        made = []
        for name in node_names(self.num_nodes):
            draw = stream(seed, name)
            x = torch.rand(SAMPLES, NET[0], generator=draw)
            y = torch.randint(NET[-1], (SAMPLES,), generator=draw)
            with ambient(seed, "init"):
                model = pf.Model.split(mlp(NET[0], NET[1:-1], NET[-1]), trunk="trunk", head="head")
            made.append(Node(name, pf.Data(train=(x, y)), model))
        return made


def one(count: int, stack: str, device: str, threads: int) -> dict[str, float]:
    """One run, in this process."""
    torch.set_num_threads(threads)
    before = _peak()
    method = pf.FedAvg(rounds=1, batch=SAMPLES, optimiser="sgd", lr=0.1)
    started = time.perf_counter()
    run = pf.run(method, MadeUp(num_nodes=count), stack=stack, device=device, progress=False)  # type: ignore[arg-type]
    whole = time.perf_counter() - started
    return {
        "nodes": count,
        "seconds": whole,
        "round_seconds": run.seconds,
        "peak_gib": _peak() / 2**30,
        "mib_per_node": (_peak() - before) / count / 2**20,
    }


def main() -> None:
    """Run each count in a process of its own."""
    arguments = _arguments()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.stack, arguments.device, arguments.threads)))
        return
    own = sum(i * o + o for i, o in itertools.pairwise(NET))
    print(f"{'-'.join(map(str, NET))}: {own:,} parameters = {own * 4 / 2**20:.2f} MiB a node; ")
    print(f"its data {SAMPLES * (NET[0] + 2) * 4 / 2**20:.2f} MiB\n")
    columns = {"nodes": 7, "seconds": 10, "of the round": 14, "ms/node": 9, "MiB/node": 10}
    print("".join(f"{name:>{width}}" for name, width in columns.items()) + f"{'peak GiB':>10}")
    for count in arguments.nodes:
        command = [sys.executable, __file__, "--one", str(count), "--stack", arguments.stack]
        command += ["--device", arguments.device, "--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        print(
            f"{count:>7}{row['seconds']:>10.1f}{row['round_seconds']:>14.1f}"
            f"{row['seconds'] / count * 1e3:>9.1f}{row['mib_per_node']:>10.2f}"
            f"{row['peak_gib']:>10.1f}",
            flush=True,
        )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--stack", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

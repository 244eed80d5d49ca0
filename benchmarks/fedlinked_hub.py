"""FedLinked's hub step: `polyfed.maths.procrustes.link` against the paper's loop.

For each number of nodes: time of both (interleaved; median, fastest and slowest), their ratio, the
largest difference from the loop in float64 relative to the largest number, and the most memory each
took beyond its input. Then how the time of `link` grows with the number of nodes K, of public
examples N and of numbers per representation r: exponents fitted on a log-log scale.

Representations are random, with singular values that fall by `--decay` orders of magnitude. With 3,
those of the R_kj fall by 6 to 7; networks trained briefly on CIFAR-10 gave 7 to 8.5.

    python benchmarks/fedlinked_hub.py --nodes 3 10 30 --threads 2 --json hub.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.maths.procrustes import link, random_rotation
from polyfed.random import stream
from polyfed.testing.oracles import literal_link

Step = Callable[[list[Tensor]], Tensor]
STEPS: dict[str, Step] = {
    "literal": lambda Z: literal_link(Z)[0],
    "fast": lambda Z: link(Z).regularisers,
}
LITERAL_ONCE = 20  # from this many nodes on the literal loop is timed once


def representations(K: int, N: int, r: int, decay: float, device: str) -> list[Tensor]:
    """The same structure in every node, in its own coordinates, with its own noise."""
    common = torch.randn(N, r, generator=stream(0, "common"))
    spectrum = torch.logspace(0, -decay, r)
    nodes = []
    for k in range(K):
        own = torch.randn(N, r, generator=stream(0, "own", k)).mul_(0.5).add_(common)
        turn = random_rotation(r, stream(0, "turn", k))
        nodes.append(((own * spectrum) @ turn).to(device))
    return nodes


def seconds(step: Step, Z: list[Tensor]) -> float:
    """Time of one call."""
    started = time.perf_counter()
    step(Z)
    if Z[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def interleaved(Z: list[Tensor], repeats: int) -> dict[str, list[float]]:
    """Times of both steps, taken in turn after one call of each on two nodes."""
    for step in STEPS.values():
        step(Z[:2])
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for i in range(repeats):
        for name, step in STEPS.items():
            if name == "fast" or i == 0 or len(Z) < LITERAL_ONCE:
                times[name].append(seconds(step, Z))
    return times


def peak_mib(name: str, Z: list[Tensor]) -> float:
    """Memory beyond what is in use now, in MiB. On a CPU: of a fresh process."""
    if Z[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        STEPS[name](Z)
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak restarts from what is in use
    before = peak_resident_kib()
    STEPS[name](Z)
    return (peak_resident_kib() - before) / 2**10


def peak_resident_kib() -> int:
    """VmHWM of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def peak_of(name: str, K: int, args: argparse.Namespace) -> float:
    """`peak_mib`, on a CPU in a child process, where no earlier call has raised the peak."""
    if args.device != "cpu":
        return peak_mib(name, representations(K, args.samples, args.size, args.decay, args.device))
    child = [sys.executable, __file__, "--peak-of", name, "--nodes", str(K)]
    for option in ("samples", "size", "decay", "threads"):
        child += [f"--{option}", str(getattr(args, option))]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # hand freed memory back at once
    done = subprocess.run(child, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def compare(K: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    Z = representations(K, args.samples, args.size, args.decay, args.device)
    times = interleaved(Z, args.repeats)
    exact = STEPS["literal"]([z.double() for z in Z])
    scale = exact.abs().max()
    row: dict[str, Any] = {"nodes": K, "ratio": median(times["literal"]) / median(times["fast"])}
    for name, step in STEPS.items():
        row[name] = {
            "seconds": times[name],
            "median_s": median(times[name]),
            "difference": float((step(Z) - exact).abs().max() / scale),
            "peak_mib": peak_of(name, K, args),
        }
    return row


def growth(args: argparse.Namespace) -> dict[str, Any]:
    """Exponents of the time of `link` in K, N and r, one varied at a time around (8, 4000, 128)."""
    sweeps = {"K": [4, 8, 16, 32], "N": [2000, 4000, 8000, 16000], "r": [64, 128, 256, 512]}
    result: dict[str, Any] = {}
    for name, values in sweeps.items():
        times = []
        for value in values:
            size = {"K": 8, "N": 4000, "r": 128} | {name: value}
            Z = representations(size["K"], size["N"], size["r"], args.decay, args.device)
            seconds(STEPS["fast"], Z)
            times.append(median(seconds(STEPS["fast"], Z) for _ in range(args.repeats)))
        exponent = float(np.polyfit(np.log(values), np.log(times), 1)[0])
        result[name] = {"values": values, "seconds": times, "exponent": exponent}
    return result


def show_row(row: dict[str, Any]) -> None:
    """Print one row of the comparison."""
    cells = [f"{row['nodes']:>5}"]
    for name in STEPS:
        t = row[name]["seconds"]
        cells.append(f"{median(t):9.3f} ({min(t):.3f} to {max(t):.3f})")
    cells.append(f"{row['ratio']:6.2f}x")
    cells += [f"{row[name]['difference']:10.1e}" for name in STEPS]
    cells += [f"{row[name]['peak_mib']:9.0f}" for name in STEPS]
    print("  ".join(cells), flush=True)


def show_growth(result: dict[str, Any]) -> None:
    """Print the sweep."""
    print("\ngrowth of link around K = 8, N = 4000, r = 128")
    for name, sweep in result.items():
        points = zip(sweep["values"], sweep["seconds"], strict=True)
        cells = "  ".join(f"{value}: {s * 1e3:.1f} ms" for value, s in points)
        print(f"  {name}^{sweep['exponent']:.2f}   {cells}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 30])
    parser.add_argument("--samples", type=int, default=5500)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--decay", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak-of", choices=list(STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    if args.peak_of:
        STEPS[args.peak_of]([torch.eye(8)] * 2)  # load the libraries first
        Z = representations(args.nodes[0], args.samples, args.size, args.decay, "cpu")
        print(peak_mib(args.peak_of, Z))
        return

    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} threads"
    print(f"N = {args.samples}, r = {args.size}, decay = {args.decay:g}, float32, {args.device},")
    print(f"{where}, torch {torch.__version__}\n")
    print(
        "nodes   literal s (fastest to slowest)   fast s (fastest to slowest)    ratio"
        "  literal off   fast off  literal MiB  fast MiB"
    )
    rows = []
    for K in args.nodes:
        rows.append(compare(K, args))
        show_row(rows[-1])
    result = growth(args)
    show_growth(result)
    if args.json:
        options = {k: v for k, v in vars(args).items() if k not in ("json", "peak_of")}
        report = {"options": options, "torch": torch.__version__, "rows": rows, "growth": result}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

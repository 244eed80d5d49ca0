"""What guards cost: accuracy, bytes and privacy loss of one method under each tool.

    python benchmarks/privacy.py            # docs/privacy.md: digits, fedper, five seeds
    python benchmarks/privacy.py --seeds 1  # a look

Every row is the same method on the same data with the same seeds; only the guard differs.
"""

from __future__ import annotations

import argparse
import statistics

import polyfed as pf
from polyfed import methods
from polyfed.engines.table import size, spread

GUARDS = (
    "",
    "compress=float16",
    "compress=int8",
    "secure",
    "clip=3",
    "clip=1",
    "clip=1,noise=0.01",
    "clip=1,noise=0.1",
    "clip=1,noise=1",
    "clip=1,noise=0.01,secure",
)


def row(name: str, guard: str, seeds: int) -> str:
    """A line of the table."""
    task = pf.tasks.digits()
    method = methods.make(name, {"guard": guard or None}, task)
    runs = [pf.run(method, task, seed=seed, progress=False) for seed in range(seeds)]
    up = statistics.fmean(r.ledger.bytes_sent(n) for r in runs for n in r.accuracy)
    down = statistics.fmean(r.ledger.bytes_received(n) for r in runs for n in r.accuracy)
    lost = [value for r in runs for value in r.epsilon.values()]
    told = f"{max(lost):.3g}" if lost else "-"
    accuracy = spread([r.mean_accuracy for r in runs])
    return f"| {guard or '(none)'} | {accuracy} | {size(up)} | {size(down)} | {told} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedper")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    print("| guard | mean accuracy | sent per node | received | epsilon |")
    print("|---|---|---|---|---|")
    for guard in GUARDS:
        print(row(asked.method, guard, asked.seeds), flush=True)


if __name__ == "__main__":
    main()

"""Convolutions on a CPU with their channels last, against the usual layout.

    python benchmarks/layout.py --data DIR [--repeats 5] [--steps 4]

Some steps of a phase, and an evaluation of 256 images, of a node of each task, as polyfed does them
(`polyfed.train.layout`): in turn, with the layout that is taken and without. Processor time of one
thread, ratio of pairs: below 1, channels last are faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import polyfed as pf
from polyfed import tasks
from polyfed.core.data import Split
from polyfed.core.phase import Optimiser, Phase, cross_entropy
from polyfed.train.evaluate import accuracy
from polyfed.train.loop import fit

CASES: Mapping[str, tuple[str, Mapping[str, Any], int]] = {  # task, its options, batch
    "FedLinked, CIFAR-10": ("cifar10", {}, 87),
    "FedLinked, SVHN": ("svhn", {}, 600),
    "LI, MNIST": ("mnist", {"model": "cnn"}, 10),
    "LI, CIFAR-10": ("cifar10", {"model": "cnn"}, 10),
    "LI, CIFAR-10, ResNet-18": ("cifar10", {"model": "resnet18"}, 10),
    "LI, CIFAR-10, CoAtNet": ("cifar10", {"model": "coatnet"}, 10),
    "FedUL, MNIST": ("mnist-sets", {}, 100),
}
PLACES = ("polyfed.train.loop.is_faster", "polyfed.train.evaluate.is_faster")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the published files")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; ratio (least to most)")
    for name, (task, options, batch) in CASES.items():
        node = tasks.make(task, {"data": given.data, **options}).nodes(0)[0]
        print(f"{name:<26}batch {batch:<6}", end="", flush=True)
        phase = Phase(
            label="steps",
            objective=cross_entropy,
            steps=given.steps,
            batch=batch,
            optimiser=Optimiser(name="adam", lr=1e-4),
        )
        x = node.data["train"].x
        train, test = (
            Split(x[:count], torch.arange(count) % 2) for count in (given.steps * batch, 256)
        )
        short = pf.Node(node.name, pf.Data(train=train, may_miss_classes=True), node.model)
        ways: dict[str, Callable[[], object]] = {
            "a step": partial(fit, short, phase, "steps"),
            "an evaluation": partial(accuracy, short.model, test),
        }
        for what, go in ways.items():
            ratios = _ratios(go, given.repeats)
            low, high = min(ratios), max(ratios)
            print(f"{what} {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})", end="   ")
        print(flush=True)


def _ratios(go: Callable[[], object], repeats: int) -> list[float]:
    """Of every pair; the first warms up."""
    found = []
    for _ in range(repeats + 1):
        last = _seconds(go)
        with patch(PLACES[0], lambda x: False), patch(PLACES[1], lambda x: False):
            found.append(last / _seconds(go))
    return found[1:]


def _seconds(go: Callable[[], object]) -> float:
    started = time.process_time()
    go()
    return time.process_time() - started


if __name__ == "__main__":
    main()

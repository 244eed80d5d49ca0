"""What FedUL's loss costs over plain cross-entropy, as a share of a training step.

    python benchmarks/surrogate.py --repeats 30

A step is forward, backward and Adam, as nodes do it; the two losses take turns on the same network
and batch, and the ratio is taken pair by pair. Beside it the same for the losses alone, on logits,
which is less noisy: what one costs more than the other, over the time of a step. On a CPU, time is
that of the processor, so that others on the machine count less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.model import Model
from polyfed.core.phase import Objective, cross_entropy
from polyfed.maths.surrogate import log_transition, surrogate_losses
from polyfed.random import ambient, stream
from polyfed.tasks.surrogate_sets import draw_theta
from polyfed.tasks.unlabelled import DigitsSets, MnistSets
from polyfed.train.surrogate import SurrogateLoss

CLASSES = 10
NETWORKS = {
    "digit": ("DigitModel, batch 100", MnistSets().make_network, (100, 1, 28, 28)),
    "small": ("network of digits-sets, batch 32", DigitsSets().make_network, (32, 1, 10, 10)),
}


def main() -> None:
    """Measure and print the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    print(f"{device}, {arguments.threads} thread(s), torch {torch.__version__}\n")
    print(f"{'network':<34}{'sets':>5}{'ms/step':>9}{'ratio':>8}   spread (quartiles)", end="")
    print("   losses alone, of a step")
    for name, make, shape in (NETWORKS[chosen] for chosen in arguments.networks):
        for sets in arguments.sets:
            ratios, step, alone = _measure(make, shape, sets, arguments.repeats, device)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name:<34}{sets:>5}{1e3 * step:>9.2f}{middle:>8.3f}   {low:.3f} to {high:.3f}"
                f"{'':>7}{100 * alone:.2f} %",
                flush=True,
            )


def _measure(
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    sets: int,
    repeats: int,
    device: torch.device,
) -> tuple[list[float], float, float]:
    """Ratios of steps, seconds of a step by cross-entropy, and the losses' difference over it."""
    generator = stream(0, "surrogate benchmark")
    with ambient(0, "init"):
        net = make().to(device)
    Pi = draw_theta(sets, CLASSES, generator).float().to(device)
    T = log_transition(Pi, torch.ones(sets, device=device))
    net.register_buffer("set_transition", T, persistent=False)
    model = Model.split(net, all=...)
    x = torch.randn(*shape, generator=generator).to(device)
    y = torch.randint(CLASSES, shape[:1], generator=generator).to(device)
    m = torch.randint(sets, shape[:1], generator=generator).to(device)
    logits = torch.randn(shape[0], CLASSES, generator=generator).to(device).requires_grad_()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-6, fused=True)

    def step(objective: Objective, target: Tensor) -> None:
        optimiser.zero_grad()
        objective(model, x, target).backward()
        optimiser.step()

    steps = _times(
        [lambda: step(cross_entropy, y), lambda: step(SurrogateLoss(), m)], repeats, device
    )
    losses = _times(
        [
            lambda: torch.autograd.grad(nn.functional.cross_entropy(logits, y), logits),
            lambda: torch.autograd.grad(surrogate_losses(logits, m, T).mean(), logits),
        ],
        20 * repeats,
        device,
    )
    one, other = (statistics.median(each) for each in losses)
    median = statistics.median(steps[0])
    return [b / a for a, b in zip(*steps, strict=True)], median, (other - one) / median


def _times(
    ways: Sequence[Callable[[], object]], repeats: int, device: torch.device
) -> list[list[float]]:
    """Seconds of each, in turn; the first turns, which warm up, are left out."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 3):
        for way, seconds in zip(ways, found, strict=True):
            started = clock()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - started)
    return [seconds[3:] for seconds in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sets", nargs="+", type=int, default=[10, 40])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Equal networks of many nodes: one by one, stacked, and stacked with a CUDA graph.

    python benchmarks/cohort.py [--device cuda] [--nodes 16 160 960] [--repeats 5] [--json FILE]

Networks: `mlp` is 784-300-100-62 with batches of 180 (`--nodes`), `cnn` FedLinked's for CIFAR-10
with batches of 87 (`--cnn`), `small` LI's with batches of ten and AdamW (`--small`), which on a GPU
is stacked by columns (`train/columns.py`), `resnet` its ResNet-18, so too (`--resnet`); `a lane
each` is what would be done without them, and `a stack of one`, of a single network, what a lane is
preferred to.

Every way trains the same phase through the library's own trainer (`Trainer.train`, what `pf.run`
calls): SGD on made-up data of the shape named. Times are per step of all nodes, the median over
repeats, taken in turn; `of peak` is the share of the matrix-product rate that this device reaches
on one large product, counting 6 operations per parameter and sample (linear layers and
convolutions alike). `bmm prototype` is the same MLP step written by hand with `torch.baddbmm` (in a
CUDA graph on a GPU): what a person would write who had only this network. With `--tf32` all ways,
and the large product, round their factors to TF32, as a GPU's tensor cores want them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyfed as pf
from polyfed.core.phase import Optimiser, Phase, cross_entropy
from polyfed.models import conv_net, mlp, resnet18_224
from polyfed.models.fedavg_cnn import fedavg_cnn
from polyfed.train import together
from polyfed.train.cohort import Kept, fit_cohort
from polyfed.train.together import Trainer
from polyfed.train.track import Job

MLP, BATCH = (784, 300, 100, 62), 180


def main() -> None:
    """Measure and print the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    device = torch.device(arguments.device)
    rate = matrix_rate(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{arguments.threads} threads"
    print(f"{name}, torch {torch.__version__}; one large product: {rate / 1e12:.2f} Tflop/s\n")
    print(f"{'network':<8}{'nodes':>6}  {'way':<16}{'ms/step':>10}{'speed-up':>10}{'of peak':>9}")
    results = []
    for network, nodes in _cases(arguments):
        for row in measure(network, nodes, device, arguments.repeats, arguments.seconds):
            row["of_peak"] = row.pop("flop") / row["ms"] * 1e3 / rate
            results.append(row)
            print(
                f"{network:<8}{nodes:>6}  {row['way']:<16}{row['ms']:>10.3f}"
                f"{row['speed_up']:>10.2f}{row['of_peak']:>9.1%}",
                flush=True,
            )
    if arguments.json:
        head = {"device": name, "torch": torch.__version__, "matrix_rate": rate}
        arguments.json.write_text(json.dumps(head | {"rows": results}, indent=2) + "\n")


def measure(
    network: str, count: int, device: torch.device, repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Time per step of each way; one by one is timed on 16 nodes at most, and scaled."""
    few = min(count, 16)
    jobs = federation(network, count, device)
    loop, plain, graph = Trainer("never"), Trainer("always", graph=False), Trainer("always")
    ways: dict[str, tuple[Callable[[int], object], int]] = {
        "one by one": (lambda steps: _train(loop, jobs[:few], steps), few),
        "stacked": (lambda steps: _train(plain, jobs, steps), count),
    }
    if device.type == "cuda":
        ways["stacked, graph"] = (lambda steps: _train(graph, jobs, steps), count)
    if device.type == "cuda" and network in ("small", "resnet"):
        lanes = Trainer("always")
        ways["a lane each"] = (lambda steps: _train_lanes(lanes, jobs, steps), count)
    if count == 1:  # what the trainer does not do for such networks
        kept = Kept()
        ways["a stack of one"] = (lambda steps: fit_cohort(_phase(jobs, steps), kept=kept), count)
    if network == "mlp":
        ways["bmm prototype"] = (prototype(count, device), count)
    times: dict[str, list[float]] = {way: [] for way in ways}
    steps = {way: _enough(go, device, seconds) for way, (go, _) in ways.items()}
    for _ in range(repeats):
        for way, (go, timed) in ways.items():
            ms = _slope(go, steps[way], device) * 1e3
            times[way].append(ms * count / timed)
    base = statistics.median(times["one by one"])
    batch = jobs[0].node.data["train"].x[: int(jobs[0].phase.batch)]
    flop = 6.0 * count * _multiplications(jobs[0].node.model.net, batch)
    return [
        {
            "network": network,
            "nodes": count,
            "way": way,
            "ms": statistics.median(each),
            "all_ms": each,
            "speed_up": base / statistics.median(each),
            "flop": flop,
        }
        for way, each in times.items()
    ]


def federation(network: str, count: int, device: torch.device) -> list[Job]:
    """So many nodes with made-up data, four batches each, drawn on the device.

    The nodes begin with equal weights, and each has another stretch of one pool of samples, so that
    thousands are made in seconds; a stack holds the data of every node nevertheless.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape: tuple[int, ...]
    optimiser = SGD
    if network == "mlp":
        net, shape, classes, batch = mlp(MLP[0], MLP[1:-1], MLP[-1]), (784,), 62, BATCH
    elif network in ("small", "resnet"):
        shape, classes, batch = (3, 32, 32), 10, 10
        make = fedavg_cnn if network == "small" else resnet18_224
        net, optimiser = make(shape, classes), ADAMW
    else:  # FedLinked's for CIFAR-10, with its batch of 0.02 * 4374
        net = conv_net((3, 32, 32), 4, blocks=3, channels=64, representation=256, dropout=0.36)
        shape, classes, batch = (3, 32, 32), 4, 87
    own, all_of_them = 4 * batch, 4 * batch + count
    x = torch.randn(all_of_them, *shape, generator=generator, device=device)
    y = torch.randint(classes, (all_of_them,), generator=generator, device=device)
    model = pf.Model.split(net.to(device), all=...)
    phase = Phase(label="step", objective=cross_entropy, steps=1, batch=batch, optimiser=optimiser)
    jobs = []
    for i in range(count):
        data = pf.Data(train=(x[i : i + own], y[i : i + own]))
        node = pf.Node(f"N{i:05d}", data, model)
        jobs.append(Job(node.working_copy(0, device, {}), phase, ("benchmark",)))
    return jobs


SGD = Optimiser(name="sgd", lr=0.01)
ADAMW = Optimiser(name="adamw", lr=5e-4, weight_decay=0.1)


def prototype(count: int, device: torch.device) -> Callable[[int], object]:
    """The MLP step by hand: batched products, gradients by autograd, plain SGD."""
    generator = torch.Generator(device).manual_seed(0)
    pairs = list(itertools.pairwise(MLP))
    weights = [
        torch.randn(count, o, i, device=device, generator=generator).div_(i**0.5).requires_grad_()
        for i, o in pairs
    ]
    biases = [torch.zeros(count, o, 1, device=device, requires_grad=True) for _, o in pairs]
    x = torch.randn(count, MLP[0], BATCH, device=device, generator=generator)
    y = torch.randint(MLP[-1], (count * BATCH,), device=device, generator=generator)
    tensors = weights + biases

    def step() -> None:
        h = x
        for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
            h = torch.baddbmm(b, w, h)
            h = h.relu() if k < len(weights) - 1 else h
        scores = h.mT.reshape(count * BATCH, MLP[-1])
        loss = functional.cross_entropy(scores, y, reduction="sum") / BATCH
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            torch._foreach_add_(list[Tensor](tensors), gradients, alpha=-SGD.lr)

    if device.type != "cuda":
        return lambda steps: _repeat(step, steps)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    used = (tensors, x, y)  # the graph reads where they lie

    def replay(steps: int) -> object:
        _repeat(graph.replay, steps)
        return used

    return replay


def _repeat(do: Callable[[], None], times: int) -> None:
    for _ in range(times):
        do()


def matrix_rate(device: torch.device) -> float:
    """Operations a second of one large float32 product on this device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    times = [_seconds(lambda: a @ b, device) for _ in range(8)]
    return 2 * size**3 / min(times)


def _train(trainer: Trainer, jobs: Sequence[Job], steps: int) -> None:
    """A phase of so many steps, as in a run: the trainer lives on from phase to phase."""
    trainer.train(_phase(jobs, steps))


def _phase(jobs: Sequence[Job], steps: int) -> list[Job]:
    phase = replace(jobs[0].phase, steps=steps)
    return [Job(j.node, phase, j.path) for j in jobs]


def _train_lanes(trainer: Trainer, jobs: Sequence[Job], steps: int) -> None:
    """The same, with no networks stacked by columns."""
    fewest, together._FEWEST = together._FEWEST, len(jobs) + 1
    try:
        _train(trainer, jobs, steps)
    finally:
        together._FEWEST = fewest


def _enough(go: Callable[[int], object], device: torch.device, seconds: float) -> int:
    """Steps that take about so many seconds."""
    go(20 if device.type == "cuda" else 1)
    steps = 40 if device.type == "cuda" else 2
    each = _seconds(lambda: go(steps), device) / steps
    return max(steps, min(2000, int(seconds / each)))


def _slope(go: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Seconds a step: a long phase, and all that comes with a phase."""
    return _seconds(lambda: go(steps), device) / steps


def _seconds(do: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    do()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _multiplications(net: nn.Module, x: Tensor) -> int:
    """Multiplications of linear layers and convolutions for one batch."""
    total = 0

    def count(module: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Linear):
            total += out.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            total += out.numel() * module.weight[0].numel()

    handles = [m.register_forward_hook(count) for m in net.modules()]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return total


def _cases(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    asked = {name: getattr(arguments, name) for name in ("cnn", "small", "resnet")}
    asked = {"mlp": arguments.nodes, **asked}
    return [(network, n) for network, counts in asked.items() for n in counts]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tf32", action="store_true", help="matrix products by tensor cores")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 160, 960, 4800])
    parser.add_argument("--cnn", type=int, nargs="*", default=[3, 30])
    parser.add_argument("--small", type=int, nargs="*", default=[])
    parser.add_argument("--resnet", type=int, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each repeat, about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

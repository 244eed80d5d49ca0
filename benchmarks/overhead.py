"""What polyfed costs over the bare PyTorch loop that does the same steps.

    python benchmarks/overhead.py --data DIR --repeats 5

FedAvg, 20 nodes, Dirichlet 0.1 split of MNIST (made-up digits of that shape without --data), one
local epoch of batch 10, SGD. Both sides train the same batches, average the same way and evaluate
every node's test data in large batches after every round; that they end with the same parameters
is checked. They run in turn, one after the other, `repeats` times; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyfed as pf
from polyfed.models import mlp
from polyfed.random import ambient, stream
from polyfed.tasks.files import mnist
from polyfed.tasks.partition import Dirichlet
from polyfed.tasks.split import stratified

NODES, BATCH, LR = 20, 10, 0.005


def main() -> None:
    """Measure and print the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    x, y, source = _digits(arguments.data, arguments.samples)
    print(f"{source}: {len(y)} images, {NODES} nodes, Dirichlet 0.1, batch {BATCH}, ", end="")
    print(f"{arguments.rounds} rounds, {arguments.threads} thread(s), torch {torch.__version__}\n")
    print(f"{'network':<18}{'way':<24}{'s/round':>9}{'ratio':>8}   spread (min to max)")
    results = []
    for name, make in (NETWORKS[chosen] for chosen in arguments.networks):
        nodes = _federation(x, y, make)
        for row in _measure(nodes, arguments.rounds, arguments.repeats):
            results.append({"network": name} | row)
            ratios = row["ratios"]
            print(
                f"{name:<18}{row['way']:<24}{row['seconds']:>9.3f}"
                f"{statistics.median(ratios):>8.3f}   {min(ratios):.3f} to {max(ratios):.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def _measure(nodes: Sequence[pf.Node], rounds: int, repeats: int) -> list[dict[str, Any]]:
    method = pf.FedAvg(
        rounds=rounds, batch=BATCH, local_epochs=1, optimiser="sgd", lr=LR, weighting="uniform"
    )

    def in_memory() -> dict[str, Tensor]:
        return pf.run(method, nodes).nodes[nodes[0].name].model.state()

    def in_folder() -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            run = pf.run(method, nodes, folder=Path(folder) / "run")
            return run.nodes[nodes[0].name].model.state()

    ways: dict[str, Callable[[], dict[str, Tensor]]] = {
        "bare loop": lambda: bare(nodes, rounds),
        "polyfed": in_memory,
        "polyfed, run folder": in_folder,
    }
    _check_same(ways["bare loop"](), ways["polyfed"]())
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, go in ways.items():
            started = time.perf_counter()
            go()
            times[way].append((time.perf_counter() - started) / rounds)
    floor = times["bare loop"]
    return [
        {
            "way": way,
            "seconds": statistics.median(each),
            "ratios": [a / b for a, b in zip(each, floor, strict=True)],
        }
        for way, each in times.items()
    ]


def bare(nodes: Sequence[pf.Node], rounds: int) -> dict[str, Tensor]:
    """FedAvg as a person would write it for one experiment."""
    nets = [node.model.copy().net for node in nodes]
    data: list[Any] = [(n.data["train"].x, n.data["train"].y) for n in nodes]
    tests: list[Any] = [(n.data["test"].x, n.data["test"].y) for n in nodes]
    for t in range(rounds + 1):
        if t:
            for node, net, (x, y) in zip(nodes, nets, data, strict=True):
                net.train()
                optimiser = torch.optim.SGD(net.parameters(), lr=LR)
                path = ("node", node.name, "batches", "tick", t, "local", 0)
                order = torch.randperm(len(x), generator=stream(0, *path))
                for index in order.split(BATCH):
                    loss = functional.cross_entropy(net(x[index]), y[index])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
            states = [net.state_dict() for net in nets]
            mean = {k: sum(s[k] for s in states) / len(states) for k in states[0]}
            for net in nets:
                net.load_state_dict(mean)
        for net, (x, y) in zip(nets, tests, strict=True):
            net.eval()
            with torch.no_grad():
                right = 0
                for a, b in zip(x.split(2674), y.split(2674), strict=True):
                    right += int((net(a).argmax(1) == b).sum())
            _ = right / len(y)
    return nets[0].state_dict()


def _check_same(ours: dict[str, Tensor], bare: dict[str, Tensor]) -> None:
    for name, value in bare.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def _federation(x: Tensor, y: Tensor, make: Callable[[], nn.Module]) -> list[pf.Node]:
    generator = stream(0, "overhead")
    nodes = []
    for k, index in enumerate(Dirichlet(0.1).assign(y, NODES, generator)):
        cut = stratified(y[index], {"train": 0.75, "test": 0.25}, generator)
        splits: dict[str, Any] = {name: (x[index][i], y[index][i]) for name, i in cut.items()}
        with ambient(0, "init"):
            model = pf.Model.split(make(), all=...)
        nodes.append(pf.Node(f"N{k:02d}", pf.Data(**splits), model))
    return nodes


def _mlp() -> nn.Module:
    return nn.Sequential(mlp(784, [512], 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


NETWORKS = {"mlp": ("MLP 784-512-10", _mlp), "cnn": ("2-layer CNN", _cnn)}


def _digits(folder: Path | None, samples: int) -> tuple[Tensor, Tensor, str]:
    if folder is None:
        generator = stream(0, "made-up digits")
        y = torch.randint(10, (samples,), generator=generator)
        return torch.randn(samples, 1, 28, 28, generator=generator), y, "made-up digits"
    images = mnist(folder)
    chosen = torch.randperm(len(images.y), generator=stream(0, "chosen"))[:samples]
    return images.x[chosen].float() / 127.5 - 1, images.y[chosen], "MNIST"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--samples", type=int, default=12000, help="images to use, of 70,000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Self-supervised training against a bare loop: images a second, and what FedFoA's term costs.

    python benchmarks/self_supervised.py --data DIR --device cuda

BYOL on CIFAR-10 with FedFoA's four networks, batches of 500; in bfloat16 with channels last on a
GPU. The bare loop is the same computation (views, two forward passes each of both networks, SGD,
moving average) with nothing of polyfed around it but the function that makes the views. Ways take
turns; the ratio is that of the medians, the spread that of single turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn

import polyfed as pf
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser, Phase
from polyfed.maths.correlation import pack_triangle, triangular
from polyfed.random import stream
from polyfed.train.loop import fit

SGD: Mapping[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
HEARD = 3
Way = Callable[[], object]


def main() -> None:
    """Measure and print the table."""
    a = _arguments()
    torch.backends.cudnn.benchmark = True
    task = pf.tasks.cifar10_encoders(data=a.data, quick=a.quick)
    small = {"batch": 64, "projection": 32, "projector_hidden": 64} if a.quick else {}
    byol, foa = (pf.methods.make(name, small, task) for name in ("byol", "fedfoa"))
    found: dict[str, Any] = {}
    print(
        f"{'network':<12}{'bare':>10}{'polyfed':>10}{'of bare':>9}   spread{'':<12}with term   term"
    )
    for each in byol.prepare(task.nodes(0)):
        kind = each.name.partition("-")[2]
        if a.networks and kind not in a.networks:
            continue
        ways = {
            "bare": _bare(each, byol, a.steps, a.device),
            "polyfed": _ours(each, byol, a.steps, a.device),
            "with term": _ours(each, foa, a.steps, a.device, heard=True),
        }
        speed = _turns(ways, a.steps * byol.batch, a.repeats, a.device)
        found[kind] = speed
        bare, ours, term = (statistics.median(speed[way]) for way in ways)
        each_turn = [o / b for o, b in zip(speed["polyfed"], speed["bare"], strict=True)]
        print(
            f"{kind:<12}{bare:>10,.0f}{ours:>10,.0f}{ours / bare:>9.3f}   "
            f"{min(each_turn):.3f} to {max(each_turn):.3f}{term:>12,.0f}{1 - term / ours:>7.1%}",
            flush=True,
        )
    if a.json:
        a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _bare(node: Node, method: Any, steps: int, device: str) -> Way:
    on_gpu = device.startswith("cuda")
    net: Any = node.model.copy().net.to(device).train()
    net = net.to(memory_format=torch.channels_last) if on_gpu else net
    views, size = method.byol(node).views, int(method.batch)
    online = [*net.trunk.parameters(), *net.projector.parameters()]
    target = list(net.target.parameters())
    sgd = torch.optim.SGD([*online, *net.predictor.parameters()], **SGD, fused=True)
    average = get_ema_multi_avg_fn(0.99)
    x = node.data["train"].x.to(device)

    def view(batch: Tensor) -> Tensor:
        made: Tensor = views(batch)
        return made.contiguous(memory_format=torch.channels_last) if on_gpu else made

    def cosine(s: Tensor, t: Tensor) -> Tensor:
        return functional.cosine_similarity(s.float(), t.float(), dim=1).mean()

    def go() -> None:
        kind = device.partition(":")[0]
        for i in range(steps):
            batch = x[(i * size) % (len(x) - size) :][:size]
            u, v = view(batch), view(batch)
            with torch.autocast(kind, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
                p, q = (net.predictor(net.projector(net.trunk(w))) for w in (u, v))
                with torch.no_grad():
                    s, t = net.target(u), net.target(v)
            loss = 4 - 2 * cosine(p, t) - 2 * cosine(q, s)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            average(target, online, torch.tensor(0))

    return go


def _ours(node: Node, method: Any, steps: int, device: str, *, heard: bool = False) -> Way:
    """A phase of so many steps by polyfed's loop; with FedFoA's term if peers were heard."""
    node = node.working_copy(0, torch.device(device), {})
    node.model.precision = "bfloat16" if device.startswith("cuda") else "float32"
    if heard:
        n = method.projection
        draws = (torch.randn(2 * n, n, generator=stream(0, "bank", i)) for i in range(HEARD))
        node.memory["round"] = torch.tensor(method.warm_up + 1)
        node.memory["bank"] = torch.stack([pack_triangle(9 * triangular(z)) for z in draws]).to(
            device
        )

    def go() -> None:
        phase = Phase(
            label="byol",
            objective=method.objective(node),
            steps=steps,
            batch=int(method.batch),
            drop_last=True,
            optimiser=Optimiser(name="sgd", **SGD),
        )
        fit(node, phase, "benchmark")

    return go


def _turns(ways: Mapping[str, Way], images: int, repeats: int, device: str) -> dict[str, Any]:
    """Images a second of every way in every turn, after one that warms up."""
    speed: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, go in ways.items():
            _wait(device)
            begun = time.perf_counter()
            go()
            _wait(device)
            if repeat:
                speed[name].append(images / (time.perf_counter() - begun))
    return speed


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", help="of resnet18, vgg9, alexnet, resnet34")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few channels, few images")
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()

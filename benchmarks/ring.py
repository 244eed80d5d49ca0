"""Loop Improvement on rings: against a bare loop, one trunk against many, and in bfloat16.

    python benchmarks/ring.py --data DIR [--part loop topologies precision] [--device cuda]

loop        LI on a ring against a plain PyTorch loop over the same steps: the same batches, kept
            AdamW (fused) of head and trunk, and evaluation after every round; that both end with
            the same parameters is checked. In turn, `repeats` times, the ratio pair by pair, of
            processor time, which other work on the machine disturbs less.
topologies  one trunk that goes round (ring), or one for every node (pipeline: `mean` averages what
            arrives with what a node has, `replace` takes it): seconds, bytes and accuracy.
            `in a row` is what decides where every node is a machine of its own: visits of a round
            that wait for each other.
precision   ResNet-18 on CIFAR-10, float32 against bfloat16 with channels last, on a GPU: seconds of
            a round and accuracy, for small and for large batches.

MNIST and CIFAR-10 are read from DIR; without it `loop` has made-up digits, the rest is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from papers import against, ring

import polyfed as pf
from polyfed.models import mlp
from polyfed.models.fedavg_cnn import fedavg_cnn
from polyfed.random import ambient, stream
from polyfed.tasks.files import mnist
from polyfed.tasks.partition import Dirichlet
from polyfed.tasks.split import stratified

PARTS = ("loop", "topologies", "precision")
METHOD = pf.LI(rounds=2, batch=10, lr=2e-3, decay_every=0)
WAYS = {"ring": "ring", "pipeline, mean": "pipeline", "pipeline, replace": "pipeline:merge=replace"}


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    where = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU"
    print(f"{where}, {arguments.threads} thread(s), torch {torch.__version__}", flush=True)
    found: dict[str, Any] = {"device": where, "torch": torch.__version__}
    for part in arguments.part:
        if part == "loop":
            found[part] = loop(arguments)
        elif arguments.data is not None:
            found[part] = {"topologies": topologies, "precision": precision}[part](arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


# ---- against a bare loop -------------------------------------------------------------------------


def loop(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ratio of LI's time to that of the loop written out, for two networks."""
    rows = []
    for name in arguments.networks:
        nodes = federation(arguments.data, arguments.samples, 20, name)
        method = replace(METHOD, rounds=arguments.rounds or 2)
        found = against(ring, method, nodes, arguments.repeats)
        seconds, ratios = found["seconds"], found["ratios"]
        rows.append({"network": name, "bare_seconds": seconds, "ratios": ratios})
        print(
            f"loop: {name}, 20 nodes: bare {seconds:.3f} s a round, ratio "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    return rows


def federation(folder: Path | None, samples: int, count: int, network: str) -> list[pf.Node]:
    """Digits by Dirichlet 0.1; the network has a trunk and a head."""
    if folder is None:
        made = stream(0, "made-up digits")
        y = torch.randint(10, (samples,), generator=made)
        x = torch.randn(samples, 1, 28, 28, generator=made)
    else:
        images = mnist(folder)
        chosen = torch.randperm(len(images.y), generator=stream(0, "chosen"))[:samples]
        x, y = images.x[chosen].float() / 127.5 - 1, images.y[chosen]
    generator, nodes = stream(0, "ring"), []
    for k, index in enumerate(Dirichlet(0.1).assign(y, count, generator)):
        cut = stratified(y[index], {"train": 0.75, "test": 0.25}, generator)
        splits: dict[str, Any] = {name: (x[index][i], y[index][i]) for name, i in cut.items()}
        with ambient(0, "init"):
            net = mlp(784, [512], 10) if network == "mlp" else fedavg_cnn((1, 28, 28), 10)
        model = pf.Model.split(net, trunk="trunk", head="head")
        data = pf.Data(may_miss_classes=True, **splits)
        nodes.append(pf.Node(f"M{k:02d}", data, model, tuple("0123456789")))
    return nodes


# ---- one trunk or many ---------------------------------------------------------------------------


def topologies(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds, bytes and accuracy of a ring and of pipelines."""
    rows, rounds = [], arguments.rounds or 10
    method = replace(METHOD, rounds=rounds)
    print(f"topologies: mlp, {arguments.samples} images, {rounds} rounds", flush=True)
    print(f"{'nodes':>6} {'way':<20}{'s/round':>9}{'MB/round':>10}{'accuracy':>10}{'in a row':>10}")
    for count in arguments.nodes:
        nodes = federation(arguments.data, arguments.samples, count, "mlp")
        for way, topology in WAYS.items():
            done = pf.run(
                method,
                nodes,
                topology=topology,
                device=arguments.device,
                evaluate_every=rounds,
                progress=False,
            )
            row = {
                "nodes": count,
                "way": way,
                "seconds": done.seconds / rounds,
                "megabytes": sum(c.bytes for c in done.ledger.crossings()) / rounds / 1e6,
                "accuracy": done.mean_accuracy,
                "in_a_row": count if way == "ring" else 1,
            }
            rows.append(row)
            print(
                f"{count:>6} {way:<20}{row['seconds']:>9.3f}{row['megabytes']:>10.2f}"
                f"{row['accuracy']:>10.4f}{row['in_a_row']:>10}",
                flush=True,
            )
    return rows


# ---- float32 or bfloat16 -------------------------------------------------------------------------


def precision(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a round and accuracy of ResNet-18, in both precisions."""
    if arguments.device == "cpu":
        print("precision: left out, it is about a GPU (--device cuda)")
        return []
    rows, rounds = [], arguments.rounds or 4
    task = pf.tasks.cifar10(
        data=arguments.data,
        partition="pathological:2",
        num_nodes=5,
        public=0.0,
        validation=0.0,
        heads="all",
        model="resnet18",
    )
    for batch in (128, 512):
        method = replace(METHOD, rounds=rounds, batch=batch, lr=1e-3)
        for chosen in ("float32", "bfloat16"):
            accuracies, seconds = [], []
            for seed in range(arguments.seeds):
                done = pf.run(
                    method,
                    task,
                    seed=seed,
                    device=arguments.device,
                    precision=chosen,
                    evaluate_every=rounds,
                    progress=False,
                )
                accuracies.append(done.mean_accuracy)
                seconds.append([m["seconds"] for m in done.metrics if "seconds" in m][2:])
            each = statistics.median(s for own in seconds for s in own)
            rows.append({"batch": batch, "precision": chosen, "seconds": each, "acc": accuracies})
            shown = ", ".join(f"{a:.4f}" for a in accuracies)
            print(f"precision: batch {batch}, {chosen:<9} {each:.2f} s a round, accuracy {shown}",
                  flush=True)  # fmt: skip
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with the published files")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", nargs="+", type=int, default=[5, 20, 50])
    parser.add_argument("--networks", nargs="+", choices=("mlp", "cnn"), default=["mlp", "cnn"])
    parser.add_argument("--samples", type=int, default=12000, help="digits to use, of 70,000")
    parser.add_argument("--rounds", type=int, default=0, help="else as the part has them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()

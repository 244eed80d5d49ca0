"""The papers' own methods against bare PyTorch loops over the same steps.

    python benchmarks/papers.py --data DIR [--cases li fedul] [--device cuda] [--json FILE]

Each case is a cell of an experiment (`polyfed experiments`): its data, of which a share, its
networks and its settings, but for the number of rounds and epochs and for what is named in `CASES`.
The loop is what a person would write for that one experiment. That both end with the same
parameters is checked first, in float64, on a CPU; a GPU draws other noise for networks side by
side, and the check is left out there. Then they run in turn, `repeats` times; the ratio is taken
pair by pair: of processor time on a CPU, which other work on the machine disturbs less, of wall
time on a GPU, where more data are taken, as a few steps would only measure how a graph is captured.
FedFoA's steps have `benchmarks/self_supervised.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyfed as pf
from polyfed import experiments
from polyfed.random import ambient, stream

SEED = 0
States = dict[str, dict[str, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
Bare = Callable[[Any, Sequence[pf.Node]], States]


@dataclass(frozen=True)
class Case:
    """A method on one experiment's data.

    Attributes:
        experiment: whose cell it is.
        cell: the cell's label.
        bare: the loop; the networks it ends with, by node.
        changes: options of the method that are not the experiment's.
        share: of every split.
        apart: how far from each other polyfed and the loop may end, of the way they went.
        on_gpu: options of the method that are others on a GPU.
        share_on_gpu: of every split, there.
    """

    experiment: str
    cell: str
    bare: Bare
    changes: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    apart: float = 1e-6
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    share_on_gpu: float = 1.0


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    on_gpu = arguments.device != "cpu"
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{where}, {arguments.threads} thread(s), torch {torch.__version__}", flush=True)
    rows = _known(arguments.json)
    for name in arguments.cases:
        row = {"case": name, "device": where} | _measure(CASES[name], arguments)
        rows[name, where] = row
        ratios, apart = row["ratios"], row["apart"]
        print(
            f"{name:<20}{row['experiment']}, {row['cell']}: bare {row['seconds']:.3f} s a round, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            + ("ends not compared" if apart is None else f"ends {apart:.1e} apart"),
            flush=True,
        )
        if arguments.json:
            places = dict.fromkeys(place for _, place in rows)
            listed = [rows[at] for at in product(CASES, places) if at in rows]
            arguments.json.write_text(json.dumps(listed, indent=2) + "\n")


def _known(path: Path | None) -> dict[tuple[str, str], Any]:
    """What a file has of earlier runs, by case and device."""
    found = json.loads(path.read_text()) if path is not None and path.exists() else []
    return {(row["case"], row["device"]): row for row in found}


def _measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    known = experiments.every()[case.experiment]
    cell = next(each for each in known.cells if each.label == case.cell)
    on_gpu = arguments.device != "cpu"
    options = {**cell.options, **case.changes, **(case.on_gpu if on_gpu else {})}
    method, task = replace(cell, options=options).make(arguments.data)
    share = case.share_on_gpu if on_gpu else case.share
    nodes = [_cut(node, share) for node in task.nodes(SEED)]
    found = against(
        case.bare, method, nodes, arguments.repeats, device=arguments.device, allowed=case.apart
    )
    return {"experiment": case.experiment, "cell": case.cell} | found


def against(
    bare: Bare,
    method: pf.Method,
    nodes: Sequence[pf.Node],
    repeats: int,
    *,
    device: str = "cpu",
    allowed: float = 1e-6,
) -> dict[str, Any]:
    """How far apart the two end (on a CPU), the loop's seconds a round, the ratio of every pair."""
    where = torch.device(device)

    def ours(given: Sequence[pf.Node] = nodes) -> pf.Run:
        return pf.run(method, given, seed=SEED, device=device, progress=False)

    def loop(given: Sequence[pf.Node] = nodes) -> States:
        return bare(method, [node.working_copy(SEED, where, {}) for node in given])

    apart = None
    if where.type == "cpu":
        doubled = list(map(_doubled, nodes))
        apart = _apart(doubled, ours(doubled), loop(doubled))
    else:  # kernels are compiled and chosen
        ours(), loop()
    if apart is not None and apart > allowed:
        raise RuntimeError(f"{method.name}: the loop does something else ({apart:.1e} apart).")
    times = [(_seconds(loop, where), _seconds(ours, where)) for _ in range(repeats)]
    return {
        "apart": apart,
        "seconds": statistics.median(plain for plain, _ in times) / method.rounds,
        "ratios": [own / plain for plain, own in times],
    }


def _cut(node: pf.Node, share: float) -> pf.Node:
    """The first samples of every split."""
    counts = {name: max(1, round(share * len(split))) for name, split in node.data.items()}
    splits: dict[str, Any] = {
        name: split.x[: counts[name]]
        if split.y is None
        else (split.x[: counts[name]], split.y[: counts[name]])
        for name, split in node.data.items()
    }
    memory = {name: t[: counts["train"]] for name, t in node.memory.items()}
    return replace(node, data=pf.Data(may_miss_classes=True, **splits), memory=memory)


def _doubled(node: pf.Node) -> pf.Node:
    """The same in float64, where rounding does not make Adam go another way."""
    splits: dict[str, Any] = {
        name: split.x.double() if split.y is None else (split.x.double(), split.y)
        for name, split in node.data.items()
    }
    model = node.model.copy()
    model.net.double()
    return replace(node, data=pf.Data(may_miss_classes=True, **splits), model=model)


def _apart(nodes: Sequence[pf.Node], run: pf.Run, bare: States) -> float:
    """How far apart the two end, as a share of how far the loop went."""
    apart = gone = 0.0
    for node in (node for node in nodes if node.name in bare):
        begun, ours = node.model.state(), run.nodes[node.name].model.state()
        for key, value in bare[node.name].items():
            if value.is_floating_point():
                apart += float((ours[key] - value).square().sum())
                gone += float((begun[key].to(value) - value).square().sum())
    return math.sqrt(apart / gone)


def _seconds(go: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    go()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


# ---- what loops have in common -------------------------------------------------------------------


def train(
    net: nn.Module,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    loss: Loss,
    *,
    batch: float,
    order: torch.Generator,
) -> None:
    """One epoch of some parameters, the others at rest."""
    x, y = data
    size = max(1, round(batch * len(x))) if batch < 1 else int(batch)
    net.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    for index in torch.randperm(len(x), generator=order).to(x.device).split(size):
        value = loss(x[index], y[index])
        optimiser.zero_grad()
        value.backward()
        optimiser.step()


def _error(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


def judge(nodes: Sequence[pf.Node], nets: Sequence[nn.Module]) -> None:
    """Test accuracies, whenever polyfed looks: at first, after every round, after a finish."""
    for node, net in zip(nodes, nets, strict=True):
        net.eval()
        with torch.no_grad():
            test: Any = node.data["test"]
            found = [
                (net(x).argmax(1) == y).sum()
                for x, y in zip(test.x.split(1024), test.y.split(1024), strict=True)
            ]
            _ = float(torch.stack(found).sum()) / len(test.y)


def batches(node: pf.Node, tick: int, stage: str, place: int) -> torch.Generator:
    """The order in which polyfed takes a node's samples in a phase."""
    return stream(SEED, "node", node.name, "batches", "tick", tick, stage, place)


def noise(node: pf.Node, tick: int, stage: str, place: int) -> Any:
    """Its random numbers meanwhile, for dropout."""
    path = ("node", node.name, "noise", "tick", tick, stage, place)
    return ambient(SEED, *path, device=node.data["train"].x.device)


def adam(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam, in its fast form."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


# ---- FedLinked -----------------------------------------------------------------------------------


def fedlinked(method: Any, nodes: Sequence[pf.Node]) -> States:
    """Representations of public inputs, rotated onto each other, weighed, and distilled."""
    nets: list[Any] = [node.model.net for node in nodes]

    def go(
        k: int,
        at: tuple[int, str, int],
        epochs: int,
        loss: Loss,
        data: tuple[Tensor, Tensor],
        *moving: nn.Module,
    ) -> None:
        parameters = [p for part in moving for p in part.parameters()]
        nets[k].eval()
        for part in moving:
            part.train()
        optimiser, order = adam(parameters, method.lr), batches(nodes[k], *at)
        with noise(nodes[k], *at):
            for _ in range(epochs):
                train(nets[k], parameters, optimiser, data, loss, batch=method.batch, order=order)

    private: list[Any] = [(n.data["train"].x, n.data["train"].y) for n in nodes]
    errors = [partial(_error, net) for net in nets]
    for k, net in enumerate(nets):
        go(k, (0, "start", 0), method.init_epochs, errors[k], private[k], net)
    judge(nodes, nets)
    public = nodes[0].data["public"].x
    for t in range(1, method.rounds + 1):
        Z = []
        for net in nets:
            net.eval()
            with torch.no_grad():
                Z.append(torch.cat([net.trunk(x) for x in public.split(1024)]).float())
        for j, net in enumerate(nets):
            others = [k for k in range(len(nets)) if k != j]
            turned, utility = [], []
            for k in others:
                U, S, Vh = torch.linalg.svd(Z[k].double().T @ Z[j].double())
                turned.append(Z[k].double() @ U @ Vh)
                utility.append(float(S.sum()))
            F = sum(a * z for a, z in zip(utility, turned, strict=True)) / sum(utility)

            def distance(x: Tensor, y: Tensor, trunk: nn.Module = net.trunk) -> Tensor:
                return functional.mse_loss(trunk(x), y)

            go(
                j,
                (t, "receive", 0),
                method.distil_epochs,
                distance,
                (public, F.float()),
                net.trunk,
            )
            go(j, (t, "receive", 1), method.finetune_epochs, errors[j], private[j], net.head)
            go(j, (t, "receive", 2), method.local_epochs, errors[j], private[j], net)
        judge(nodes, nets)
    judge(nodes, nets)
    return {node.name: net.state_dict() for node, net in zip(nodes, nets, strict=True)}


# ---- partial averaging ---------------------------------------------------------------------------


def partial_averaging(method: Any, nodes: Sequence[pf.Node]) -> States:
    """One sample after the other; after every block the first neurons of layers are averaged."""
    nets: list[Any] = [node.model.net for node in nodes]
    _, first, second, _ = map(int, method.scheme.split("-"))
    one, two, three = "trunk.1", "trunk.3", "head.0"
    shared: dict[str, Any] = {
        f"{one}.weight": slice(first),
        f"{one}.bias": slice(first),
        f"{two}.weight": (slice(second), slice(first)),
        f"{two}.bias": slice(second),
        f"{three}.weight": (slice(None), slice(second)),
        f"{three}.bias": slice(None),
    }
    optimisers = [torch.optim.SGD(net.parameters(), lr=method.lr, fused=True) for net in nets]
    data: list[Any] = [(n.data["train"].x, n.data["train"].y) for n in nodes]
    targets = [functional.one_hot(y, 10).to(x) for x, y in data]
    orders = [_walk(node) for node in nodes]
    judge(nodes, nets)
    for _ in range(method.rounds):
        for net, optimiser, (x, _), y, order in zip(
            nets, optimisers, data, targets, orders, strict=True
        ):
            for _ in range(method.block):
                i = next(order)
                loss = (net(x[i : i + 1]) - y[i : i + 1]).square().sum() / 2
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        with torch.no_grad():
            tensors = [dict(net.named_parameters()) for net in nets]
            for name, part in shared.items():
                mean = torch.stack([own[name][part] for own in tensors]).mean(0)
                for own in tensors:
                    own[name][part] = mean
        judge(nodes, nets)
    return {node.name: net.state_dict() for node, net in zip(nodes, nets, strict=True)}


def _walk(node: pf.Node) -> Any:
    """Through the samples again and again, each time in another order."""
    count, epoch = len(node.data["train"]), 0
    while True:
        order = stream(SEED, "node", node.name, "batches", "walk", "train", epoch)
        yield from torch.randperm(count, generator=order).tolist()
        epoch += 1


# ---- FedUL ---------------------------------------------------------------------------------------


def fedul(method: Any, nodes: Sequence[pf.Node]) -> States:
    """The likelihood of the sets, and an L1 penalty; the hub averages and keeps the best."""
    *own, hub = nodes
    nets: list[Any] = [node.model.net for node in own]
    held_out: Any = hub.data["val_rb"]
    best, most = nets[0].state_dict(), 0
    judge(own, nets)
    for t in range(1, method.rounds + 1):
        for node, net in zip(own, nets, strict=True):
            T = net.set_transition
            T = T.clamp_min(torch.finfo(T.dtype).min / 4)
            parameters = list(net.parameters())

            def loss(x: Tensor, y: Tensor, net: Any = net, T: Tensor = T) -> Tensor:
                scores = torch.logsumexp(net(x)[:, None, :] + T, -1)
                size = torch.stack([p.abs().sum() for p in net.parameters()]).sum()
                return functional.cross_entropy(scores, y) + size * float(method.l1)

            net.train()
            data = node.data["train"].x, node.memory["sets"]
            optimiser, order = adam(parameters, method.lr), batches(node, t, "local", 0)
            train(net, parameters, optimiser, data, loss, batch=method.batch, order=order)
        states = [net.state_dict() for net in nets]
        mean = {
            k: torch.stack([s[k] for s in states]).mean(0) if v.is_floating_point() else v
            for k, v in states[0].items()
        }
        for net in nets:
            net.load_state_dict(mean)
        net = nets[0].eval()
        with torch.no_grad():
            pairs = zip(held_out.x.split(1024), held_out.y.split(1024), strict=True)
            right = sum(int((net(x).argmax(1) == y).sum()) for x, y in pairs)
        if right >= most:
            best, most = {k: v.clone() for k, v in mean.items()}, right
        judge(own, nets)
    for net in nets:
        net.load_state_dict(best)
    judge(own, nets)
    return {node.name: net.state_dict() for node, net in zip(own, nets, strict=True)}


# ---- Loop Improvement ----------------------------------------------------------------------------


def ring(method: Any, nodes: Sequence[pf.Node], *, whole: bool = False) -> States:
    """Head, then trunk, each with its kept AdamW, and on to the next node; or the whole network."""
    nets: list[Any] = [node.model.net for node in nodes]
    kept: list[Any] = [
        [
            torch.optim.AdamW(
                part.parameters(), lr=method.lr * rate, weight_decay=method.weight_decay, fused=True
            )
            for part, rate in ((net.head, method.head_rate), (net.trunk, method.trunk_rate))
        ]
        for net in nets
        if not whole
    ]
    travels = nets[0].state_dict() if whole else nets[0].trunk.state_dict()
    judge(nodes, nets)
    for t in range(1, method.rounds + 1):
        for k, (node, net) in enumerate(zip(nodes, nets, strict=True)):
            part = net if whole else net.trunk
            part.load_state_dict(travels)
            data: Any = node.data["train"].x, node.data["train"].y
            phases = (
                [(net, None)] if whole else list(zip((net.head, net.trunk), kept[k], strict=True))
            )
            for place, (moving, optimiser) in enumerate(phases):
                parameters = list(moving.parameters())
                own = optimiser or torch.optim.AdamW(
                    parameters, lr=method.lr, weight_decay=method.weight_decay, fused=True
                )
                order = batches(node, t, "local", place)
                for _ in range(method.local_epochs if whole else 1):
                    train(
                        net,
                        parameters,
                        own,
                        data,
                        partial(_error, net),
                        batch=method.batch,
                        order=order,
                    )
            travels = {name: value.clone() for name, value in part.state_dict().items()}
        judge(nodes, nets)
    return {node.name: net.state_dict() for node, net in zip(nodes, nets, strict=True)}


MNIST_5 = "MNIST, CNN, 5 nodes, pathological"
_ONCE = dict.fromkeys(("init_epochs", "distil_epochs", "finetune_epochs", "local_epochs"), 1)
CASES = {
    "fedlinked": Case(
        "fedlinked-table-5.3",
        "CIFAR-10, FedLinked",
        fedlinked,
        {**_ONCE, "rounds": 1, "batch": 40, "patience": 0, "rollback": False},
        share=0.03,
        apart=0.1,  # networks so young put out next to the same for all: rotations are ill-defined
        on_gpu={**dict.fromkeys(_ONCE, 4), "rounds": 2, "batch": 0.02},
    ),
    "partial-averaging": Case(
        "partial-averaging-V.3.a", "level 80 at 250", partial_averaging, {"rounds": 2}
    ),
    "fedul": Case(
        "fedul-table-2",
        "IID, FedUL",
        fedul,
        {"rounds": 2, "rotate": 0.0},
        share=0.05,
        share_on_gpu=0.5,
    ),
    "li": Case("li-table-1", f"{MNIST_5}, LI", ring, {"rounds": 2}, share=0.05, share_on_gpu=0.25),
    "cwt": Case(
        "li-table-1",
        f"{MNIST_5}, CWT",
        partial(ring, whole=True),
        {"rounds": 2},
        share=0.05,
        share_on_gpu=0.25,
    ),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the published files")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write figures here; other cases stay")
    return parser.parse_args()


if __name__ == "__main__":
    main()

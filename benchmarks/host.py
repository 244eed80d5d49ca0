"""What the host does for a node and a round, apart from the training itself.

    python benchmarks/host.py [--seeds 20] [--rounds 10] [--ways star groups] [--profile 30]

The structure of partial averaging's experiment V.3.d, in the small: 12 nodes, its six schemes, many
seeds, all runs in step and stacked, each with a run folder, 3500 samples a node; but 64=40=20=10
networks and one step between two averagings, so that there is next to nothing to compute. FedAvg
(20 samples a node, in one step) and LI beside it.

Microseconds of processor time for a node and round, by what they are spent on: the difference of a
long and a short run, so that beginnings do not count. Evaluation, after every round here, is not in
the sum: V.3.d evaluates once. "operations" are calls of torch's operators
for a node and round: on a GPU each of them costs the host a launch. The bare loop does one such
step, and the mean, node by node in plain PyTorch.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.node import Node
from polyfed.core.phase import SquaredError
from polyfed.engines import local
from polyfed.engines.progress import Progress
from polyfed.engines.run import begin, finish_together
from polyfed.record.ledger import Ledger
from polyfed.record.log import Log
from polyfed.tasks.perceptrons import Perceptrons
from polyfed.train.stepper import Stepper
from polyfed.train.together import Trainer

NODES, SHORT = 12, 2


@dataclass(frozen=True, kw_only=True)
class MadeUp(Perceptrons):
    """Random data, as many as V.3 has, of 64 numbers each; few to be tested on."""

    name: ClassVar[str] = "made-up"
    title: ClassVar[str] = "random data"
    training: ClassVar[Mapping[str, Any]] = {"block": 1}

    num_nodes: int = NODES
    train: int = 3500
    test: int = 20
    hidden: str = "40=20"

    def nodes(self, seed: int) -> list[Node]:
        """All with the same data."""
        return self.federation(seed, [_data(self.train, self.test)] * self.num_nodes, CLASSES)


@cache
def _data(train: int, test: int) -> pf.Data:
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(count, 64, generator=draw)
        return x, torch.randint(len(CLASSES), (count,), generator=draw)

    return pf.Data(may_miss_classes=True, train=some(train), test=some(test))


CLASSES = tuple("0123456789")
TASK, FEW = MadeUp(), MadeUp(train=20)
TWINS = ";".join(f"p{k}={{}}@M{k:02d}+M{k + 6:02d}" for k in range(6))
SCHEMES: list[dict[str, Any]] = [  # V.3.d's, in shares
    {"scheme": "0%"},
    {"scheme": "100%"},
    {"scheme": "0%", "groups": TWINS.replace("{}", "64-40-20-10")},
    {"scheme": "80%"},
    {"scheme": "80%", "groups": TWINS.replace("{}", "rest")},
    {"scheme": "80%", "groups": TWINS.replace("{}", "rest"), "depends": "global"},
]


def _partial(rounds: int) -> list[Method]:
    common = {**TASK.recipe("partial-averaging"), "rounds": rounds}
    return [pf.PartialAveraging(**(common | own)) for own in SCHEMES]


def _fedavg(rounds: int) -> list[Method]:
    return [pf.FedAvg(rounds=rounds, batch=FEW.train, optimiser="sgd", lr=0.1)] * len(SCHEMES)


def _li(rounds: int) -> list[Method]:
    return [pf.LI(rounds=rounds, visit_steps=1, optimiser="sgd", lr=0.1)] * len(SCHEMES)


WAYS: dict[str, tuple[Callable[[int], list[Method]], str, MadeUp]] = {
    "star": (_partial, "star", TASK),
    "groups": (_partial, "groups", TASK),
    "gossip": (_partial, "gossip:cycles=1", TASK),
    "fedavg": (_fedavg, "star", FEW),
    "li": (_li, "ring", TASK),
}


def main() -> None:
    """Measure and print the table."""
    asked = _arguments()
    torch.set_num_threads(1)
    runs = asked.seeds * len(SCHEMES)
    print(f"{runs} runs of {NODES} nodes in step, torch {torch.__version__}; us a node and round\n")
    print(f"{'way':<10}{'all':>7}" + "".join(f"{part:>11}" for part in PARTS), end="")
    print(f"{'operations':>12}{'of bare':>9}")
    bare = statistics.median(_bare() for _ in range(5))
    for way in asked.ways:
        spent = _difference(way, asked.seeds, asked.rounds, asked.repeats)
        count = _operations(way, asked.rounds)
        whole = sum(spent.values()) - spent["evaluation"]
        print(f"{way:<10}{whole:>7.0f}", end="")
        print("".join(f"{spent[part]:>11.1f}" for part in PARTS), end="")
        print(f"{count:>12.1f}{whole / bare:>9.2f}", flush=True)
        if asked.profile:
            _profile(way, asked.seeds, asked.rounds, asked.profile)
    print(f"\nbare loop: {bare:.0f}")


# ---- measuring -----------------------------------------------------------------------------------

SPLIT: dict[str, Sequence[tuple[Any, str]]] = {
    "steps": [(Stepper, "_run")],
    "training": [(Trainer, "train")],
    "messages": [
        (Message, "check"),
        (local, "look_at"),
        (local, "about"),
    ],
    "combining": [],
    "recording": [(Ledger, "enter"), (Log, "append")],
    "evaluation": [(Trainer, "examine")],
}
OF_METHODS = {"messages": ("send", "sends", "hears", "receive"), "combining": ("combine",)}
PARTS = (*SPLIT, "engine")


class Clock:
    """Processor time by what it is spent on; what is inside counts once."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside = ["engine"]
        self._since = time.process_time_ns()

    def enter(self, part: str) -> None:
        """From here on time goes to this part."""
        self._turn()
        self._inside.append(part)

    def leave(self) -> None:
        """Back to the part around."""
        self._turn()
        self._inside.pop()

    def _turn(self) -> None:
        now = time.process_time_ns()
        self.spent[self._inside[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self, method: type[Method]) -> Iterator[None]:
        """Time the functions of each part."""
        with ExitStack() as stack:
            for part, names in SPLIT.items():
                own = [(method, name) for name in OF_METHODS.get(part, ())]
                for owner, name in (*names, *own):
                    timed = self._timed(getattr(owner, name), part)
                    stack.enter_context(patch.object(owner, name, timed))
            self._since = time.process_time_ns()
            yield
            self._turn()

    def _timed(self, function: Any, part: str) -> Any:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed


def _run(way: str, seeds: int, rounds: int, clock: Clock | None = None) -> None:
    """All runs, in step."""
    make, topology, task = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        begun = [
            begin(
                method,
                task,
                nodes=task.nodes(seed),
                seed=seed,
                folder=Path(folder) / f"{i}-{seed}",
                progress=Progress(),
                moved={},
                topology=topology,
                stack="always",
                checkpoint_every=0,
            )
            for seed in range(seeds)
            for i, method in enumerate(make(rounds))
        ]
        gc.collect()
        if clock is None:
            finish_together(begun)
        else:
            with clock.watching(type(begun[0][0].method)):
                finish_together(begun)


def _difference(way: str, seeds: int, rounds: int, repeats: int) -> dict[str, float]:
    """Microseconds a node and round, by part: the median of the repeats."""
    found: list[Counter[str]] = []
    _run(way, 1, SHORT)  # what happens once in a process
    for _ in range(repeats):
        short, long = Clock(), Clock()
        _run(way, seeds, SHORT, short)
        _run(way, seeds, SHORT + rounds, long)
        found.append(Counter({p: long.spent[p] - short.spent[p] for p in PARTS}))
    scale = 1e-3 / (seeds * len(SCHEMES) * NODES * rounds)
    return {part: statistics.median(each[part] for each in found) * scale for part in PARTS}


class _Count(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then do it."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _operations(way: str, rounds: int, seeds: int = 4) -> float:
    """Calls of operators a node and round."""
    calls: list[int] = []
    for length in (SHORT, SHORT + rounds):
        with _Count() as mode:
            _run(way, seeds, length)
        calls.append(mode.calls)
    return (calls[1] - calls[0]) / (seeds * len(SCHEMES) * NODES * rounds)


def _profile(way: str, seeds: int, rounds: int, lines: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    _run(way, seeds, SHORT + rounds)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)


def _bare(rounds: int = 20) -> float:
    """Microseconds of one step of one sample and of the mean of all, a node and round."""
    nodes = TASK.nodes(0)
    nets, loss = [node.model.net for node in nodes], SquaredError()
    started = time.process_time_ns()
    for t in range(rounds):
        for node, net in zip(nodes, nets, strict=True):
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = node.data["train"].x[t : t + 1], node.data["train"].y
            loss(node.model, x, y[t : t + 1] if y is not None else None).backward()
            optimiser.step()
        states = [net.state_dict() for net in nets]
        mean = {name: sum(state[name] for state in states) / NODES for name in states[0]}
        for net in nets:
            net.load_state_dict(mean)
    return (time.process_time_ns() - started) * 1e-3 / (rounds * NODES)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="of each of the six schemes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile of each way")
    return parser.parse_args()


if __name__ == "__main__":
    main()

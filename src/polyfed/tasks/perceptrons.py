"""What the tasks of partial averaging have in common: sigmoid perceptrons, trained by samples.

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section V.1: 784=300=100=k, sigmoids, one
sample after another with steps of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.models.mlp import Start, sigmoid_mlp
from polyfed.tasks.task import Task, node_names, shortened

PARTIAL = ("partial-averaging", "dynamic-averaging", "auto-slices")
_BY_SAMPLE: Mapping[str, Any] = {
    "batch": 1,
    "lr": 0.1,
    "optimiser": "sgd",
    "loss": "squared",
    "own_start": True,
}
_QUICK = {"rounds": 5, "block": 50}


@dataclass(frozen=True, kw_only=True)
class Perceptrons(Task):
    """Nodes with equal perceptrons and equally many samples.

    Attributes:
        num_nodes: number of nodes.
        train: samples that each node trains on.
        test: samples that each node is tested on.
        hidden: widths of the hidden layers, 300=100.
        head: outputs pass a sigmoid, as in the paper, or not, as cross-entropy wants it.
        weights: how networks start, which the paper leaves open: xavier:GAIN or uniform:BOUND.
    """

    training: ClassVar[Mapping[str, Any]]  # of the methods with partial models

    num_nodes: int
    train: int
    test: int
    hidden: str = "300=100"
    head: Literal["sigmoid", "linear"] = "sigmoid"
    weights: str = "xavier:1"

    def __post_init__(self) -> None:
        for name in ("num_nodes", "train", "test"):
            check.at_least(self, name, 1)
        check.one_of(self, "head", ("sigmoid", "linear"))
        Start.parse(self.weights)
        if not all(width.strip().isdecimal() and int(width) for width in self.hidden.split("=")):
            raise ConfigError(f"hidden '{self.hidden}': write widths with = between them: 300=100.")

    def recipe(self, method: str) -> Mapping[str, Any]:
        """The paper's training: blocks of single samples."""
        if method not in PARTIAL:
            return {}
        chosen = {**_BY_SAMPLE, **self.training}
        if self.hidden != type(self).hidden:
            chosen["scheme"] = "80%"  # the paper's is for the paper's network
        return shortened(chosen, _QUICK) if self.quick else chosen

    def federation(self, seed: int, data: Sequence[Data], classes: tuple[str, ...]) -> list[Node]:
        """A node for each of these, with its perceptron."""
        widths = [data[0]["train"].x[0].numel(), *map(int, self.hidden.split("=")), len(classes)]
        start, is_sigmoid = Start.parse(self.weights), self.head == "sigmoid"
        make = partial(sigmoid_mlp, *widths, sigmoid_head=is_sigmoid, weights=start)
        names = node_names(len(data))
        return [
            Node(name, own, self.network(seed, name, make), classes)
            for name, own in zip(names, data, strict=True)
        ]

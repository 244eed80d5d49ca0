"""Node: one party, with its private data, its model, its random streams and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.random import stream

Name = str


@dataclass
class Node:
    """One party.

    Attributes:
        name: unique in the federation.
        data: private; it never leaves.
        model: the network and its parts; a hub may have an empty one.
        classes: names of the labels 0, 1, ...; for people, never sent.
        seed: root of the node's random streams; set by the engine.
        memory: what the method remembers between ticks: tensors only, so that it is checkpointed.
        notes: figures the method wants in the metrics of this tick; the engine empties it.
        score: how well a model does on a split, if not by accuracy: between 0 and 1.
    """

    name: Name
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model.none)
    classes: tuple[str, ...] = ()
    seed: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    score: Callable[[Model, Split], float] | None = None

    def stream(self, *path: str | int) -> torch.Generator:
        """The node's own random stream of that name."""
        return stream(self.seed, "node", self.name, *path)

    def remember(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a group of tensors in memory under `group/name`, replacing that group."""
        self.forget(group)
        self.memory.update({f"{group}/{name}": t for name, t in tensors.items()})

    def recall(self, group: str) -> dict[str, Tensor]:
        """The group of tensors kept by `remember`; empty if there is none."""
        start = f"{group}/"
        return {n[len(start) :]: t for n, t in self.memory.items() if n.startswith(start)}

    def forget(self, group: str) -> None:
        """Drop a group of tensors from memory."""
        for name in self.recall(group):
            del self.memory[f"{group}/{name}"]

    def working_copy(
        self, seed: int, device: torch.device, moved: dict[int, Tensor], *, owned: bool = False
    ) -> Node:
        """A node for one run: own model and memory, the same data, on the run's device.

        Args:
            seed: of the run.
            device: of the run.
            moved: tensors that other nodes have on the device; grows.
            owned: nobody else uses this node, so its model need not be copied.
        """
        model = self.model if owned else self.model.copy()
        model.net.to(device)
        return Node(
            self.name,
            self.data.to(device, moved),
            model,
            self.classes,
            seed,
            {name: t.to(device).clone() for name, t in self.memory.items()},
            score=self.score,
        )

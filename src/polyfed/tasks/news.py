"""AG News as a federation: short news in four classes, classified by fastText.

Loop Improvement, Table 1, last row: 20 nodes, Dirichlet 0.1, official train and test rows merged,
three quarters of a node's rows to train and one to test (here: `validation=0`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from polyfed import check
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.models.fasttext import fasttext
from polyfed.random import stream
from polyfed.tasks import text
from polyfed.tasks.deal import deal
from polyfed.tasks.partition import parse
from polyfed.tasks.task import Task, data_folder, node_names, part_of, shortened
from polyfed.tasks.text import Texts

_QUICK_SHARE = 12
_ALL: Mapping[str, Any] = {"rounds": 10, "batch": 32, "lr": 1e-2, "local_epochs": 1}
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": _ALL,
    "fedavg-trunk": {**_ALL, "init_epochs": 1, "finetune_epochs": 1},
    "local": {**_ALL, "init_epochs": 1},
    "joint": {**_ALL, "init_epochs": 1},
}
_QUICK = {"rounds": 2}


@dataclass(frozen=True, kw_only=True)
class AgNews(Task):
    """News about the world, sports, business, and science or technology.

    Attributes:
        data: folder with the published files; else the environment variable POLYFED_DATA.
        partition: iid, dirichlet:0.1, pathological:2, classes:0,1/1,2, permute:0,1@3.
        num_nodes: number of nodes.
        validation: share of a node's texts for validation; a quarter is for the test.
        length: words kept of a text.
        min_count: how often a word occurs at least, to be in the vocabulary.
        width: of a word's embedding.
    """

    name: ClassVar[str] = "agnews"
    title: ClassVar[str] = "AG News by any partition: four classes of short texts, fastText"
    needs_data: ClassVar[bool] = True

    data: Path | None = None
    partition: str = "dirichlet:0.1"
    num_nodes: int = 20
    validation: float = 0.1
    length: int = 64
    min_count: int = 2
    width: int = 32

    def __post_init__(self) -> None:
        for name in ("num_nodes", "length", "min_count", "width"):
            check.at_least(self, name, 1)
        check.between(self, "validation", 0, 0.5)
        parse(self.partition)

    def nodes(self, seed: int) -> list[Node]:
        """The federation of a seed."""
        folder = data_folder(self.data, self.name)
        texts = _cached(folder, self.length, self.min_count)
        rule, generator = parse(self.partition), stream(seed, "split", self.name)
        dealt = deal(texts.y, rule, self.num_nodes, generator, validation=self.validation)
        make = partial(fasttext, len(texts.vocabulary), len(texts.classes), width=self.width)
        nodes = []
        for k, (name, split) in enumerate(zip(node_names(len(dealt)), dealt, strict=True)):
            kept = {n: i[::_QUICK_SHARE] if self.quick else i for n, i in split.items()}
            pairs = {n: (texts.x[i], rule.relabel(k, texts.y[i])) for n, i in kept.items()}
            data = Data(may_miss_classes=True, **pairs)
            nodes.append(Node(name, data, self.network(seed, name, make), texts.classes))
        return nodes

    def shortfall(self) -> str:
        """How many of the published texts are in the folder, if not all."""
        texts = _cached(data_folder(self.data, self.name), self.length, self.min_count)
        return part_of(len(texts.y), texts.whole, "texts")

    def recipe(self, method: str) -> Mapping[str, Any]:
        """Settings that suit a mean of embeddings."""
        chosen = _RECIPES.get(method, {})
        return shortened(chosen, _QUICK) if self.quick else chosen


@lru_cache(maxsize=1)
def _cached(folder: Path, length: int, min_count: int) -> Texts:
    return text.agnews(folder, length=length, min_count=min_count)

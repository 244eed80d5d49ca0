"""Task: a ready-made federation, as a configuration that makes the same nodes for the same seed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.errors import DataError
from polyfed.random import ambient

DATA_VARIABLE = "POLYFED_DATA"


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A federation to train; its options are its fields.

    Attributes:
        init: equal networks begin with the same weights (common), or each with its own.
        quick: a small version that shows the way in seconds; its figures mean nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_data: ClassVar[bool] = False

    init: Literal["common", "own"] = "common"
    quick: bool = False

    @abstractmethod
    def nodes(self, seed: int) -> list[Node]:
        """The nodes of the federation for a seed."""

    def recipe(self, method: str) -> Mapping[str, Any]:
        """Hyper-parameters of a method that suit this task; empty for the method's own."""
        return {}

    def shortfall(self) -> str:
        """What part of the published set there is, in a few words; empty if all of it."""
        return ""

    def network(self, seed: int, node: str, make: Callable[[], nn.Module]) -> Model:
        """A network with children `trunk` and `head`, initialised from a named stream."""
        owner = (node,) if self.init == "own" else ()
        with ambient(seed, "init", *owner):
            return Model.split(make(), trunk="trunk", head="head")


def shortened(recipe: Mapping[str, Any], quick: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with the quick values of the options it has."""
    return {**recipe, **{name: quick[name] for name in recipe.keys() & quick.keys()}}


def part_of(held: int, whole: int, what: str) -> str:
    """How much of a published set is held; empty if all of it, or if its size is not known.

    >>> part_of(12_000, 60_000, "images"), part_of(60_000, 60_000, "images"), part_of(9, 0, "texts")
    ('12,000 of 60,000 images', '', '')
    """
    return f"{held:,} of {whole:,} {what}" if held < whole else ""


def data_folder(given: Path | None, task: str) -> Path:
    """The folder a person names by --data or by the environment."""
    chosen = given or os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise DataError(
            f"task {task} reads published files: say where they are with --data DIR "
            f"(in Python: data=DIR) or the environment variable {DATA_VARIABLE}."
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist.")
    return folder


def node_names(count: int) -> list[str]:
    """M0, M1, ...; padded so that names sort as numbers do.

    >>> node_names(3), node_names(12)[-1]
    (['M0', 'M1', 'M2'], 'M11')
    """
    width = len(str(count - 1))
    return [f"M{i:0{width}d}" for i in range(count)]

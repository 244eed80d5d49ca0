"""Data: the private, named splits of one node, kept as tensors.

The names have a meaning: `train`, `val_es` (early stopping), `val_rb` (rollback), `test`, and
`public` (inputs without labels that every node holds in the same order).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.weak import WeakTensorKeyDictionary

from polyfed.errors import DataError, UnknownNameError

_FINITE = WeakTensorKeyDictionary()  # inputs that were read: the version that was


@dataclass(frozen=True)
class Split:
    """Inputs and, unless unlabelled, one label each."""

    x: Tensor
    y: Tensor | None = None

    def __post_init__(self) -> None:
        for what, t in (("inputs", self.x), ("labels", self.y)):
            if t is not None and t.dim() == 0:
                raise DataError(f"the {what} are a single number, expected one per row.")
        if self.y is not None and len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels.")

    @classmethod
    def of(cls, source: Any) -> Split:
        """A split from a tensor, a pair of tensors (or arrays), or a map-style torch Dataset.

        A Dataset is read once, item by item, and kept as tensors. Random augmentation would be
        frozen by that: put it in the objective of a phase, where it runs on whole batches.
        """
        if isinstance(source, Split):
            return source
        if isinstance(source, Dataset):
            return cls._of_dataset(source)
        if isinstance(source, (tuple, list)) and len(source) == 2:
            return cls(_tensor(source[0]), _labels(_tensor(source[1])))
        return cls(_tensor(source))

    @classmethod
    def _of_dataset(cls, source: Dataset[Any]) -> Split:
        kind = type(source).__name__
        if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
            raise DataError(
                f"{kind} is iterable or has no length. polyfed takes map-style Datasets "
                "(with __len__ and __getitem__); read an iterable one into tensors first."
            )
        items = [source[i] for i in range(len(source))]
        if not items:
            raise DataError(f"{kind} is empty.")
        fields = [item if isinstance(item, (tuple, list)) else (item,) for item in items]
        if len(fields[0]) not in (1, 2):
            raise DataError(f"a Dataset item has {len(fields[0])} fields, expected (x, y).")
        try:
            x, *y = (
                torch.stack([torch.as_tensor(v) for v in column])
                for column in zip(*fields, strict=True)
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"the items of {kind} do not stack into tensors: {error}") from error
        return cls(x, *map(_labels, y))

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device) -> Split:
        """The same split on another device."""
        return Split(self.x.to(device), None if self.y is None else self.y.to(device))

    def fingerprint(self) -> str:
        """A digest of the inputs in their order: equal inputs in equal order, equal digest."""
        raw = self.x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        head = f"{self.x.dtype}{tuple(self.x.shape)}".encode()
        return hashlib.blake2b(head + raw.tobytes(), digest_size=8).hexdigest()


class Data(Mapping[str, Split]):
    """Named splits of one node.

    >>> data = Data(train=(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64)))
    >>> len(data["train"]), "test" in data
    (6, False)
    """

    def __init__(self, *, may_miss_classes: bool = False, **splits: Any) -> None:
        """Name the splits.

        Args:
            may_miss_classes: accept a validation split without some class of `train` (a Dirichlet
                partition makes such nodes); otherwise that is an error.
            splits: anything `Split.of` takes; an empty split counts as absent.
        """
        made = {name: Split.of(source) for name, source in splits.items() if source is not None}
        self._splits = {name: split for name, split in made.items() if len(split)}
        self.may_miss_classes = may_miss_classes

    def __getitem__(self, name: str) -> Split:
        if name not in self._splits:
            raise UnknownNameError("data split", name, self._splits)
        return self._splits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def get(self, name: str, default: Any = None) -> Any:
        """The split of that name, or the default."""
        return self._splits.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._splits

    def to(self, device: torch.device, moved: dict[int, Tensor]) -> Data:
        """The same data on another device; tensors that nodes share are moved once."""

        def move(t: Tensor) -> Tensor:
            return moved.setdefault(id(t), t if t.device == device else t.to(device))

        splits = {
            n: replace(s, x=move(s.x), y=None if s.y is None else move(s.y))
            for n, s in self._splits.items()
        }
        return Data(may_miss_classes=self.may_miss_classes, **splits)

    def check(self, node: str) -> None:
        """Raise DataError, with the name of the node, for what no training could use."""
        for name, split in self._splits.items():
            if _is_finite(split.x):
                continue
            rows = ~torch.isfinite(split.x)
            rows = rows.flatten(1).any(1) if rows.dim() > 1 else rows
            raise DataError(
                f"node {node}, split '{name}': NaN or infinity in {int(rows.sum())} of "
                f"{len(split)} inputs, the first at index {int(rows.nonzero()[0])}. Remove or "
                "impute them."
            )
        self._check_classes(node)

    def _check_classes(self, node: str) -> None:
        train = self._splits.get("train")
        if self.may_miss_classes or train is None or not _is_classes(train.y):
            return
        held = set(train.y.unique().tolist())  # type: ignore[union-attr]
        for name in ("val_es", "val_rb"):
            split = self._splits.get(name)
            if split is None or not _is_classes(split.y):
                continue
            missing = sorted(held - set(split.y.unique().tolist()))  # type: ignore[union-attr]
            if missing:
                raise DataError(
                    f"node {node}: validation split '{name}' ({len(split)} samples) has no sample "
                    f"of class {', '.join(map(str, missing))}, which 'train' has. Split by class "
                    "(polyfed.tasks.stratified), or pass Data(..., may_miss_classes=True)."
                )


def _is_finite(x: Tensor) -> bool:
    """Whether all values are; what hundreds of runs share is read once, unless it changes."""
    if not x.is_floating_point():
        return True
    version = -1 if x.is_inference() else x._version
    if _FINITE.get(x) != version or version < 0:
        total = x.detach().sum()  # finite only if all are
        if not bool(torch.isfinite(total)) and not bool(torch.isfinite(x).all()):
            return False
        _FINITE[x] = version
    return True


def _tensor(source: Any) -> Tensor:
    try:
        made = torch.as_tensor(source)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"a {type(source).__name__} does not become a tensor: {error}. Give tensors or arrays "
            "of numbers, (x, y), or a map-style Dataset. Fix: x.to_numpy() of a table; class "
            "numbers 0, 1, ... in place of names."
        ) from error
    return made.detach() if made.requires_grad else made


def _labels(y: Tensor) -> Tensor:
    """Labels of any integer dtype as int64, the only one that cross-entropy takes."""
    return y if y.is_floating_point() else y.long()


def _is_classes(y: Tensor | None) -> bool:
    return y is not None and y.dim() == 1 and not y.is_floating_point()

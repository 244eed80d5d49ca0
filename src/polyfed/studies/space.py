"""What a search may try for each option: a range or a choice, and how a person writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from polyfed import options
from polyfed.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_FORM = "Write lr=1e-4:1e-1:log, rounds=3:12, or optimiser=sgd,adamw."


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included.

    Attributes:
        low: lower bound.
        high: upper bound.
        log: as likely between 1 and 10 as between 10 and 100.
        whole: whole numbers only.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"range {self}: the first bound must be below the second.")
        if self.log and self.low <= 0:
            raise ConfigError(f"range {self}: with log, the first bound must be above 0.")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}{':log' if self.log else ''}"

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def nearest(self, value: Any) -> Any:
        """The value of the range that is nearest to another.

        >>> Range(3, 12, whole=True).nearest(20), Range(0.1, 1).nearest(0.5)
        (12, 0.5)
        """
        near = min(max(float(value), self.low), self.high)
        return round(near) if self.whole else near


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if len(set(self.values)) < max(2, len(self.values)):
            raise ConfigError(f"choice {self}: name at least two different values.")

    def __str__(self) -> str:
        return ",".join(map(str, self.values))

    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def nearest(self, value: Any) -> Any:
        """The value itself if it is one of them, else the first."""
        return value if value in self.values else self.values[0]


Dimension = Range | Choice
Space = Mapping[str, Dimension]


def parse_space(texts: Iterable[str], *configs: Any) -> dict[str, Dimension]:
    """What a person typed: `lr=1e-4:1e-1:log`, for options that the configurations have.

    Args:
        texts: one dimension each.
        configs: classes of the method and the task.

    >>> from polyfed.methods.fedavg import FedAvg
    >>> parse_space(["lr=1e-4:1e-1:log", "rounds=3:12"], FedAvg)["rounds"]
    Range(low=3.0, high=12.0, log=False, whole=True)
    """
    hints = {n: get_type_hints(cls)[n] for cls in reversed(configs) for n in options.fields_of(cls)}
    space = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not rest:
            raise ConfigError(f"space '{text}': what to try is missing. {_FORM}")
        if name not in hints:
            raise UnknownNameError("option to search", name, hints)
        space[name] = _dimension(rest, hints[name], text)
    return space


def _dimension(text: str, hint: Any, whole_text: str) -> Dimension:
    kinds = get_args(hint) or (hint,)
    parts = text.split(":")
    if len(parts) == 1:
        where = f"space '{whole_text}'"
        return Choice(tuple(options.coerce(hint, v, where) for v in text.split(",")))
    log = parts[2:] == ["log"]
    if not (log or len(parts) == 2) or not {int, float} & set(kinds):
        raise ConfigError(f"space '{whole_text}': this is no range. {_FORM}")
    try:
        low, high = map(float, parts[:2])
    except ValueError as error:
        raise ConfigError(f"space '{whole_text}': bounds are numbers. {_FORM}") from error
    return Range(low, high, log, whole=float not in kinds)

"""Checks of configuration values, with one wording; called from `__post_init__`, not in maths."""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from typing import Any

from polyfed.errors import ConfigError


def _fail(config: object, name: str, must: str, got: Any, hint: str) -> None:
    text = f"{type(config).__name__}.{name} must be {must}, got {got!r}."
    raise ConfigError(f"{text} {hint}".rstrip())


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "text"),
}


def types(config: Any) -> None:
    """Each field that is annotated as int, float, bool or str (or that or None) is one."""
    for field in dataclasses.fields(config):
        text = field.type if isinstance(field.type, str) else field.type.__name__
        kind = text.removesuffix(" | None")
        value = getattr(config, field.name)
        if kind not in _KINDS or (value is None and kind != text):
            continue
        cls, must = _KINDS[kind]
        if not isinstance(value, cls) or (isinstance(value, bool) and cls is not bool):
            _fail(config, field.name, must, value, "")


def positive(config: object, *names: str, hint: str = "") -> None:
    """Each named field is a finite number above zero."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            _fail(config, name, "> 0", value, hint)


def at_least(config: object, name: str, minimum: float, *, hint: str = "") -> None:
    """The named field is a finite number of at least `minimum`."""
    value = getattr(config, name)
    if not (math.isfinite(value) and value >= minimum):
        _fail(config, name, f">= {minimum:g}", value, hint)


def between(config: object, name: str, low: float, high: float, *, hint: str = "") -> None:
    """The named field is a number in [low, high]."""
    value = getattr(config, name)
    if not low <= value <= high:
        _fail(config, name, f"between {low:g} and {high:g}", value, hint)


def one_of(config: object, name: str, allowed: tuple[Any, ...], *, hint: str = "") -> None:
    """The named field is one of the allowed values."""
    value = getattr(config, name)
    if value not in allowed:
        _fail(config, name, "one of " + ", ".join(map(repr, allowed)), value, hint)

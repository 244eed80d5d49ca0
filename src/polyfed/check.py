"""Checks of configuration values, with one wording; called from `__post_init__`, not in maths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NoReturn

from polyfed.errors import ConfigError


def _fail(config: object, name: str, must: str, got: Any, hint: str) -> NoReturn:
    text = f"{type(config).__name__}.{name} must be {must}, got {got!r}."
    raise ConfigError(f"{text} {hint}".rstrip())


def is_whole(value: object) -> bool:
    """Whether it is an integer of Python's, numpy's or anybody's; true and false are not numbers.

    >>> is_whole(3), is_whole("3"), is_whole(3.0), is_whole(True)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_whole, "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "text"),
}


def types(config: Any) -> None:
    """Each field that is annotated as int, float, bool or str (or that or None) is one."""
    for field in dataclasses.fields(config):
        text = field.type if isinstance(field.type, str) else field.type.__name__
        kind = text.removesuffix(" | None")
        if kind in _KINDS and (kind == text or getattr(config, field.name) is not None):
            _of_kind(config, field.name, kind)


def _of_kind(config: object, name: str, kind: str) -> Any:
    value = getattr(config, name)
    fits, must = _KINDS[kind]
    if not fits(value):
        _fail(config, name, must, value, "")
    return value


def _number(config: object, name: str) -> Any:
    """The value of a field, if it is a number, and a whole one where the field is an `int`."""
    field = getattr(config, "__dataclass_fields__", {}).get(name)
    is_int = field is not None and field.type in (int, "int")
    return _of_kind(config, name, "int" if is_int else "float")


def positive(config: object, *names: str, hint: str = "") -> None:
    """Each named field is a finite number above zero."""
    for name in names:
        value = _number(config, name)
        if not (math.isfinite(value) and value > 0):
            _fail(config, name, "> 0", value, hint)


def at_least(config: object, name: str, minimum: float, *, hint: str = "") -> None:
    """The named field is a finite number of at least `minimum`."""
    value = _number(config, name)
    if not (math.isfinite(value) and value >= minimum):
        _fail(config, name, f">= {minimum:g}", value, hint)


def between(config: object, name: str, low: float, high: float, *, hint: str = "") -> None:
    """The named field is a number in [low, high]."""
    value = _number(config, name)
    if not low <= value <= high:
        _fail(config, name, f"between {low:g} and {high:g}", value, hint)


def one_of(config: object, name: str, allowed: tuple[Any, ...], *, hint: str = "") -> None:
    """The named field is one of the allowed values."""
    value = getattr(config, name)
    if value not in allowed:
        _fail(config, name, "one of " + ", ".join(map(repr, allowed)), value, hint)

"""Options by name: from what a person typed, or a file holds, to a checked configuration.

The command line and `config.yaml` are derived from the dataclasses of methods and tasks; this
module is the only place that turns their text into values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from polyfed.errors import ConfigError, UnknownNameError

T = TypeVar("T")


def fields_of(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The options of a configuration class, in order."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def help_of(cls: Any) -> dict[str, str]:
    """The sentence each option has in the `Attributes:` of its class or of a base class."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        body = (base.__doc__ or "").partition("Attributes:")[2]
        name = ""
        for line in body.splitlines():
            head, colon, rest = line.strip().partition(":")
            if colon and head.isidentifier() and head in fields_of(cls):
                name = head
                found[name] = rest.strip()
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found


def build(cls: type[T], values: Mapping[str, Any], kind: str) -> T:
    """An instance of a configuration class; unknown names and unfit values are clear errors."""
    known = fields_of(cls)
    hints = get_type_hints(cls)
    for name in values:
        if name not in known:
            raise UnknownNameError(f"option of {kind}", name, known)
    return cls(
        **{name: coerce(hints[name], value, f"{kind}, {name}") for name, value in values.items()}
    )


def coerce(hint: Any, value: Any, where: str) -> Any:
    """The value as the type that an annotation asks for.

    >>> coerce(float, "2.5", "fedlinked, eta"), coerce(bool, "no", "fedlinked, transform")
    (2.5, False)
    """
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, str) and value.lower() in ("none", "null"):
        value = None
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: {value!r} does not fit. {reason}.") from error

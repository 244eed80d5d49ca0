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


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as a person sees it; the owner is what it configures: `method fedlinked`."""

    owner: str
    name: str
    hint: Any
    default: Any
    help: str


def listed(cls: Any, owner: str, recipe: Mapping[str, Any] | None = None) -> list[Option]:
    """The options of a configuration class; a recipe's values go before the class's defaults."""
    helps, hints, known = help_of(cls), get_type_hints(cls), fields_of(cls)
    defaults = {
        n: None if f.default is dataclasses.MISSING else f.default for n, f in known.items()
    }
    defaults |= recipe or {}
    return [Option(owner, n, hints[n], defaults[n], helps.get(n, "").rstrip(".")) for n in known]


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


def parse_label(text: str) -> tuple[str, dict[str, str]]:
    """A name and the options after its colon.

    >>> parse_label("fedlinked:transform=false,local-epochs=1")
    ('fedlinked', {'transform': 'false', 'local_epochs': '1'})
    """
    name, _, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    for part, equals, _ in pairs:
        if not equals:
            raise ConfigError(
                f"'{text}': '{part}' has no value. Write name=value after the colon and commas "
                "between options, as in fedlinked:eta=1,rounds=3."
            )
    return name, {option.strip().replace("-", "_"): value for option, _, value in pairs}


def parse_seeds(text: str) -> list[int]:
    """How many seeds, or which.

    >>> parse_seeds("3"), parse_seeds("3,7"), parse_seeds("3,")
    ([0, 1, 2], [3, 7], [3])
    """
    parts = [part for part in text.split(",") if part]
    if not parts or not all(map(str.isdecimal, parts)):
        raise ConfigError(f"seeds {text}: say how many (5), or which (3,7,9).")
    return [int(part) for part in parts] if "," in text else list(range(int(text)))


def as_text(value: Any) -> str:
    """A value as a person reads it.

    >>> as_text(True), as_text(None), as_text(["star", "ring"]), as_text(0.5)
    ('yes', '', 'star, ring', '0.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)

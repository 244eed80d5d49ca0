"""Everything polyfed raises on purpose.

    PolyfedError
    ├── ConfigError(ValueError)      an option is wrong: a value, a name, a combination
    │   └── UnknownNameError         no such method, task, part, option, ...: says what there is
    ├── DataError(ValueError)        data is missing, has the wrong shape, labels or values
    ├── ModelError(ValueError)       a network does not split, or does not fit its data or its peers
    ├── MessageError(RuntimeError)   a message was refused: names, shapes, dtypes, values
    └── RunError(RuntimeError)       a run folder cannot be written, read or continued

Each message says what is wrong, where, what was found, and how to put it right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolyfedError(Exception):
    """The root: catch this to catch every deliberate error."""


class ConfigError(PolyfedError, ValueError):
    """An option is wrong."""


class DataError(PolyfedError, ValueError):
    """Data is missing or does not fit."""


class ModelError(PolyfedError, ValueError):
    """A network does not split into its parts, or does not fit its data or its peers."""


class MessageError(PolyfedError, RuntimeError):
    """A message was refused."""


class RunError(PolyfedError, RuntimeError):
    """A run folder cannot be written, read or continued."""


class UnknownNameError(ConfigError):
    """A name that does not exist.

    >>> print(UnknownNameError("method", "fedlinkd", ["fedavg", "fedlinked"]))
    unknown method 'fedlinkd'. Did you mean 'fedlinked'? There are: fedavg, fedlinked.
    """

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        small = {name.lower(): name for name in names}
        near = difflib.get_close_matches(got.lower(), small, n=1)
        hint = f" Did you mean '{small[near[0]]}'?" if near else ""
        listing = ", ".join(names) if names else "none"
        super().__init__(f"unknown {kind} '{got}'.{hint} There are: {listing}.")


def first_line(error: Exception) -> str:
    r"""What an error says, in short, for a sentence about what is done instead.

    >>> first_line(ValueError("too long\nfor a line")), first_line(KeyError())
    ('too long', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:120]

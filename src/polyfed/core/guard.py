"""Guard: privacy tools at the boundary of a node, as a person types them (docs/privacy.md).

    clip=1,noise=0.5     bound what a message says about the node's data, add Gaussian noise to it
    compress=int8        send fewer bytes
    secure               let the place of a meeting learn the mean of the messages, and no message

What a node sends passes them in this order: clip, noise, then compress or secure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from polyfed import check, options
from polyfed.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is done to messages; nothing, unless said.

    Attributes:
        clip: largest L2 norm of what a message adds to what others know already; 0 is no bound.
        noise: standard deviation of the Gaussian noise on every number, as a multiple of clip.
        delta: probability with which the privacy loss may exceed the epsilon that is told.
        compress: how numbers travel: float16, or int8 with one scale a tensor; none is as they are.
        secure: mask messages so that only their mean can be read.
    """

    clip: float = 0.0
    noise: float = 0.0
    delta: float = 1e-5
    compress: Literal["float16", "int8"] | None = None
    secure: bool = False

    def __post_init__(self) -> None:
        check.at_least(self, "clip", 0)
        check.at_least(self, "noise", 0)
        check.positive(self, "delta")
        check.between(self, "delta", 0, 0.5)
        check.one_of(self, "compress", ("float16", "int8", None))
        if self.noise and not self.clip:
            raise ConfigError(
                f"guard: noise={self.noise:g} is a multiple of clip, which is not set: without a "
                "bound no noise is enough. Add clip=1."
            )
        if self.compress and self.secure:
            raise ConfigError(
                "guard: compress and secure do not go together: masked numbers are whole, and as "
                "long as they are. Choose one."
            )

    @classmethod
    def parse(cls, text: str | None) -> Guard:
        """Read what a person typed; a semicolon does as well as a comma.

        >>> Guard.parse("clip=1,noise=0.5").noise, Guard.parse("secure").secure
        (0.5, True)
        """
        values: dict[str, str] = {}
        for part in filter(None, map(str.strip, re.split("[,;]", text or ""))):
            name, equals, value = part.partition("=")
            values[name.strip().replace("-", "_")] = value.strip() if equals else "true"
        return options.build(cls, values, "guard")

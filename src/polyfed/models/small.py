"""What the networks for small images have in common: the check that an image is large enough."""

from __future__ import annotations

from polyfed.errors import ConfigError


def check_side(name: str, image: tuple[int, int, int], least: int) -> None:
    """Raise ConfigError unless both sides of an image have so many pixels."""
    _, height, width = image
    if min(height, width) < least:
        raise ConfigError(f"{name} takes images from {least}x{least} on, got {height}x{width}.")

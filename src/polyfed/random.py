"""Named random streams: same seed and path, same numbers, whatever else runs.

A stream is named by a path such as ``(seed, "node", "M0", "tick", 3, "batches")``. Nothing is drawn
from a shared generator, so adding a draw in one place never shifts another, and a run that is
resumed needs no generator state: it names the same streams again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, *path: str | int) -> int:
    """A 63-bit seed for a path."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *path: str | int) -> torch.Generator:
    """Generator named by its path; adding a draw elsewhere never shifts this one.

    >>> a, b = stream(0, "init"), stream(0, "init")
    >>> bool(torch.equal(torch.randn(3, generator=a), torch.randn(3, generator=b)))
    True
    """
    return torch.Generator().manual_seed(seed_of(seed, *path))


@contextmanager
def ambient(seed: int, *path: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Point torch's own generators at a named stream for a while, then put them back.

    For code that cannot be handed a generator: weight initialisation and dropout.
    """
    with torch.random.fork_rng(
        devices=[device] if device is not None and device.type == "cuda" else [],
        device_type="cuda",
    ):
        torch.default_generator.manual_seed(seed_of(seed, *path))
        if device is not None and device.type == "cuda":
            torch.cuda.manual_seed(seed_of(seed, *path))
        yield

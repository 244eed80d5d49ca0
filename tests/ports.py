"""Free ports for the processes of a test."""

import itertools
import os
import socket

# From below those that the system hands out by itself; each test process begins elsewhere.
_CANDIDATES = itertools.cycle(range(12_000, 32_000))
_TRIED = itertools.islice(_CANDIDATES, os.getpid() * 997 % 20_000, None)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, and that were not given before."""
    found: list[int] = []
    for port in _TRIED:
        if len(found) == count:
            break
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found

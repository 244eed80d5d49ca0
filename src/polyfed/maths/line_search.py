r"""Line search by golden section: the lowest point of a function of one variable, without slopes.

    x1 = a + (1 - g)(b - a),   x2 = a + g (b - a),   g = (sqrt(5) - 1) / 2
    [a, b] <- [a, x2] if f(x1) <= f(x2), else [x1, b]                                      (1)

Kiefer, Proc. AMS 4, 1953. One of x1, x2 is a point of the step before, so a step costs one value.
Symbols: [a, b] = where the lowest point is sought; g = the golden section.
Limits: a function with one valley is narrowed down by g with each value. With several valleys, or
the lowest point at an end, the answer is the best point that was looked at, ends included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_G = (math.sqrt(5) - 1) / 2


def golden_section(f: Callable[[float], float], count: int) -> float:
    """Apply Eq. (1) on [0, 1]; of equal points the smaller one.

    Args:
        f: The function; it is called `count` + 2 times.
        count: Points to look at inside, at least 2.

    >>> round(golden_section(lambda x: (x - 0.3) ** 2, 20), 3)
    0.3
    """
    seen = {x: f(x) for x in (0.0, 1.0, 1 - _G, _G)}
    a, x1, x2, b = 0.0, 1 - _G, _G, 1.0
    for _ in range(count - 2):
        if seen[x1] <= seen[x2]:
            a, x1, x2, b = a, a + (1 - _G) * (x2 - a), x1, x2
            seen[x1] = f(x1)
        else:
            a, x1, x2, b = x1, x2, x1 + _G * (b - x1), b
            seen[x2] = f(x2)
    return min(seen, key=lambda x: (seen[x], x))

"""Which process speaks for a party: of several that come in one name, the first, until it is gone.

A process that dies and one that takes its place may be seen at the same time for a moment. So who
comes second is not heard yet, and is told so; it gives up only if the first stays. Lives are
numbered, later ones higher; one that began before another that was heard is never heard again.
"""

from __future__ import annotations

from collections import defaultdict

from polyfed.core.node import Name

Change = tuple[str, int]  # up, down, refused or excused; which life


class Lives:
    """The lives of all parties that are seen.

    Attributes:
        heard: the one of each party that is heard.
    """

    def __init__(self) -> None:
        self.heard: dict[Name, int] = {}
        self._there: dict[Name, set[int]] = defaultdict(set)
        self._latest: dict[Name, int] = {}

    def came(self, name: Name, life: int) -> list[Change]:
        """A life is seen; what follows."""
        self._there[name].add(life)
        if self.heard.get(name, life) != life or life < self._latest.get(name, 0):
            return [("refused", life)]
        self.heard[name] = self._latest[name] = life
        return [("up", life)]

    def went(self, name: Name, life: int) -> list[Change]:
        """A life is not seen any more; what follows."""
        self._there[name].discard(life)
        if self.heard.get(name) != life:
            return [("excused", life)]
        del self.heard[name]
        later = [each for each in self._there[name] if each > life]
        return [("down", life), *(self._follows(name, min(later)) if later else ())]

    def _follows(self, name: Name, life: int) -> list[Change]:
        return [("excused", life), *self.came(name, life)]

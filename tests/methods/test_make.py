from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from polyfed import methods
from polyfed.core.node import Node
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.methods.fedlinked import FedLinked
from polyfed.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Suggests(Task):
    name: ClassVar[str] = "suggests"
    title: ClassVar[str] = "a recipe and no nodes"

    def nodes(self, seed: int) -> list[Node]:
        return []

    def recipe(self, method: str) -> Mapping[str, Any]:
        return {"fedlinked": {"rounds": 3, "eta": 0.5}, "local": {"eta": 0.5}}.get(method, {})


def test_what_is_given_goes_before_the_recipe_and_that_before_the_defaults() -> None:
    assert methods.make("fedlinked", {}) == FedLinked()
    assert methods.make("fedlinked", {}, Suggests()) == FedLinked(rounds=3, eta=0.5)
    assert methods.make("fedlinked", {"eta": "2"}, Suggests()) == FedLinked(rounds=3, eta=2.0)


def test_a_recipe_with_a_name_that_the_method_lacks_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="unknown option of method local 'eta'"):
        methods.make("local", {}, Suggests())


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("fedlinkd", {}, "Did you mean 'fedlinked'"),
        ("fedlinked", {"etaa": 1}, "Did you mean 'eta'"),
        ("fedlinked", {"eta": "x"}, "method fedlinked, eta: 'x' does not fit"),
        ("fedlinked", {"eta": 0}, "FedLinked.eta must be > 0"),
    ],
)
def test_errors(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        methods.make(name, options, Suggests())

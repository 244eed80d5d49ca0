import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from polyfed import check, errors
from polyfed.errors import ConfigError, PolyfedError, UnknownNameError

KINDS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, PolyfedError)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_is_in_the_tree_and_a_builtin_too(kind: type[PolyfedError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    assert kind is PolyfedError or issubclass(kind, (ValueError, RuntimeError))


@pytest.mark.parametrize(
    ("got", "known", "text"),
    [
        ("fedlinkd", ["fedlinked", "fedavg"],
         "unknown method 'fedlinkd'. Did you mean 'fedlinked'? There are: fedavg, fedlinked."),
        ("FedULM1", ["fedul", "fedul-m1"],
         "unknown method 'FedULM1'. Did you mean 'fedul-m1'? There are: fedul, fedul-m1."),
        ("LI", ["LG", "li"], "unknown method 'LI'. Did you mean 'li'? There are: LG, li."),
        ("zzz", ["b", "a"], "unknown method 'zzz'. There are: a, b."),
        ("x", [], "unknown method 'x'. There are: none."),
    ],
)  # fmt: skip
def test_an_unknown_name_says_what_there_is(got: str, known: list[str], text: str) -> None:
    assert str(UnknownNameError("method", got, known)) == text


class Config:
    lr, rounds, share, kind = 0.0, 0, 1.5, "c"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: check.positive(c, "lr", hint="Use Local()."),
         "Config.lr must be > 0, got 0.0. Use Local()."),
        (lambda c: check.at_least(c, "rounds", 1), "Config.rounds must be >= 1, got 0."),
        (lambda c: check.between(c, "share", 0, 1),
         "Config.share must be between 0 and 1, got 1.5."),
        (lambda c: check.one_of(c, "kind", ("a", "b")),
         "Config.kind must be one of 'a', 'b', got 'c'."),
    ],
)  # fmt: skip
def test_checks_have_one_wording(call, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(Config())
    assert str(caught.value) == text


@dataclass
class Typed:
    rounds: "int" = 1  # a text, as where annotations come from the future
    lr: float = 0.5
    transform: bool = True
    guard: "str | None" = None
    patience: int = 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rounds": 2.5}, "Typed.rounds must be a whole number, got 2.5."),
        ({"rounds": 2.0}, "Typed.rounds must be a whole number, got 2.0."),
        ({"rounds": True}, "Typed.rounds must be a whole number, got True."),
        ({"rounds": "2"}, "Typed.rounds must be a whole number, got '2'."),
        ({"rounds": None}, "Typed.rounds must be a whole number, got None."),
        ({"lr": "x"}, "Typed.lr must be a number, got 'x'."),
        ({"lr": False}, "Typed.lr must be a number, got False."),
        ({"transform": "no"}, "Typed.transform must be True or False, got 'no'."),
        ({"transform": 0}, "Typed.transform must be True or False, got 0."),
        ({"guard": 3}, "Typed.guard must be text, got 3."),
        ({"patience": 0.5}, "Typed.patience must be a whole number, got 0.5."),
    ],
)
def test_a_value_is_of_the_type_of_its_option(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check.types(Typed(**wrong))
    assert str(caught.value) == text


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: dict[str, Any] = {"rounds": np.int64(3), "lr": np.float32(0.1)}
    check.types(Typed(**numbers, guard="secure"))
    check.types(Typed(lr=1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_checks_refuse_what_is_not_a_number(value: float) -> None:
    config = Config()
    config.lr = value
    for call in (
        lambda: check.positive(config, "lr"),
        lambda: check.at_least(config, "lr", 0),
        lambda: check.between(config, "lr", 0, 1),
    ):
        with pytest.raises(ConfigError):
            call()


def test_checks_pass_what_is_right() -> None:
    config = Config()
    config.lr, config.rounds, config.share, config.kind = 1e-9, 1, 1.0, "a"
    check.positive(config, "lr", "rounds")
    check.at_least(config, "rounds", 1)
    check.between(config, "share", 0, 1)
    check.one_of(config, "kind", ("a", "b"))

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from polyfed import methods, options, tasks, topologies
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.methods.fedlinked import FedLinked


@dataclass(frozen=True, kw_only=True)
class Base:
    """Base.

    Attributes:
        rounds: how many
            rounds; more: better.
    """

    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """Config.

    Attributes:
        lr: the rate.
        data: where.
    """

    name: ClassVar[str] = "config"

    lr: float = 0.1
    data: Path | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    away: Mapping[int, tuple[str, ...]] | None = None


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("rounds", "7", 7),
        ("lr", "2e-3", 2e-3),
        ("lr", 3, 3.0),
        ("data", "~/x", Path("~/x")),
        ("data", "none", None),
        ("data", "NULL", None),
        ("flag", "no", False),
        ("flag", "False", False),
        ("flag", "true", True),
        ("kind", "b", "b"),
        ("away", {"3": ["M1"]}, {3: ("M1",)}),
    ],
)
def test_text_becomes_what_the_annotation_says(name: str, value: Any, want: Any) -> None:
    got = getattr(options.build(Config, {name: value}, "method config"), name)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rounds": "seven"}, "method config, rounds: 'seven' does not fit"),
        ({"rounds": 1.5}, "method config, rounds: 1.5 does not fit"),
        ({"rounds": "none"}, "method config, rounds: None does not fit"),
        ({"flag": "maybe"}, "method config, flag: 'maybe' does not fit"),
        ({"kind": "c"}, "method config, kind: 'c' does not fit.*'a' or 'b'"),
        ({"lrr": 1}, "unknown option of method config 'lrr'. Did you mean 'lr'"),
        ({"name": "x"}, "unknown option of method config 'name'"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        options.build(Config, values, "method config")


def test_the_class_checks_too() -> None:
    with pytest.raises(ConfigError, match=r"FedLinked.eta must be > 0, got -1.0"):
        options.build(FedLinked, {"eta": "-1"}, "method fedlinked")


def test_help_is_read_from_the_class_and_its_bases() -> None:
    assert options.help_of(Config) == {
        "rounds": "how many rounds; more: better.",
        "lr": "the rate.",
        "data": "where.",
    }
    assert list(options.fields_of(Config)) == ["rounds", "lr", "data", "flag", "kind", "away"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: methods.load("fedlinkd"),
        lambda: tasks.load("digit"),
        lambda: tasks.make("digits", {"label": 3}),
        lambda: tasks.digits(labl=3),
    ],
)
def test_names_that_do_not_exist_suggest_one_that_does(call) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean '(fedlinked|digits|labels)'"):
        call()


CONFIGS: list[type[Any]] = [*map(methods.load, methods.METHODS), *topologies.TOPOLOGIES.values()]


@pytest.mark.parametrize("cls", CONFIGS)
def test_options_in_python_are_of_their_type(cls: type[Any]) -> None:
    for name, field in options.fields_of(cls).items():
        wrong = {"int": 2.5, "float": "x", "bool": 1, "str": 3}.get(str(field.type))
        if wrong is not None:
            with pytest.raises(ConfigError, match=f"{cls.__name__}.{name} must be "):
                cls(**{name: wrong})

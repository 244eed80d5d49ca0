import pytest

from polyfed import topologies
from polyfed.core.topology import Meeting
from polyfed.errors import ConfigError

TOPICS = {"global": ("M0", "M1", "M2"), "fr": ("M2", "M0")}


def test_a_hub_for_every_topic() -> None:
    groups = topologies.make("groups").joined(0, ["M2", "M1", "M0"], TOPICS)
    assert groups.places == ("hub-global", "hub-fr")
    tick = groups.tick(1, frozenset({"M0", "M1", "M2"}))
    assert tick.active == ("M0", "M1", "M2")
    everyone, some = ("M0", "M1", "M2"), ("M0", "M2")
    assert tick.meetings == (
        Meeting("hub-global", everyone, everyone, "global"),
        Meeting("hub-fr", some, some, "fr"),
    )


def test_who_is_away_meets_nobody() -> None:
    groups = topologies.make("groups").joined(0, ["M0", "M1", "M2"], TOPICS)
    tick = groups.tick(1, frozenset({"M1"}))
    assert tick.active == ("M1",)
    assert tick.meetings == (Meeting("hub-global", ("M1",), ("M1",), "global"),)


def test_meetings_in_every_third_round() -> None:
    groups = topologies.make("groups:every=3").joined(0, ["M0", "M1", "M2"], TOPICS)
    alive = frozenset({"M0", "M1", "M2"})
    assert [len(groups.tick(t, alive).meetings) for t in range(1, 8)] == [0, 0, 2, 0, 0, 2, 0]
    assert all(groups.tick(t, alive).active == ("M0", "M1", "M2") for t in range(1, 8))


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"Groups\.every must be >= 1, got 0"):
        topologies.make("groups:every=0")
    with pytest.raises(ConfigError, match="node name 'hub-fr' is taken"):
        topologies.make("groups").joined(0, ["M0", "hub-fr"], {"fr": ("M0", "hub-fr")})

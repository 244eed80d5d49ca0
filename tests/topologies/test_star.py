import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed import topologies
from polyfed.core.topology import Meeting, Tick
from polyfed.errors import UnknownNameError

NODES = st.frozensets(st.text("ABC012", min_size=1, max_size=3), max_size=6)


@given(st.integers(1, 100), NODES)
def test_everybody_alive_trains_and_meets_at_the_hub(t: int, alive: frozenset[str]) -> None:
    everyone = tuple(sorted(alive))
    assert topologies.make("star").tick(t, alive) == Tick(
        everyone, (Meeting("hub", everyone, everyone),)
    )
    assert topologies.make("alone").tick(t, alive) == Tick(everyone, ())


def test_places_are_known_before_the_first_tick() -> None:
    assert {n: t().places for n, t in topologies.TOPOLOGIES.items() if n in ("star", "alone")} == {
        "star": ("hub",),
        "alone": (),
    }


def test_unknown_topology() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown topology 'sta'. Did you mean 'star'"):
        topologies.make("sta")

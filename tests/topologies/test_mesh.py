from __future__ import annotations

from polyfed.core.topology import Meeting, State, Tick
from polyfed.engines.run import run
from polyfed.methods.fedbyol import FedBYOL
from polyfed.testing import tiny
from polyfed.topologies import Mesh, make

SMALL = {"batch": 8, "local_epochs": 1, "projection": 4, "predictor_hidden": 6, "probe_epochs": 0}


def test_everybody_meets_everybody_at_everybody() -> None:
    names = ("A", "B", "C")
    tick = make("mesh").tick(1, frozenset(names))
    assert tick == Tick(names, tuple(Meeting(at, names, (at,)) for at in names))
    assert make("mesh").places == ()


def test_a_cut_link_parts_two_and_nobody_else() -> None:
    names, cut = frozenset("ABC"), frozenset((frozenset("AB"),))
    (tick,) = Mesh().round(4, lambda t: State(names, cut if t == 4 else frozenset()))
    sources = {meeting.at: meeting.sources for meeting in tick.meetings}
    assert sources == {"A": ("A", "C"), "B": ("B", "C"), "C": ("A", "B", "C")}
    (tick,) = Mesh().round(5, lambda t: State(names - {"C"}))
    assert tick.active == ("A", "B")
    assert {meeting.at for meeting in tick.meetings} == {"A", "B"}


def test_messages_cross_where_links_work() -> None:
    """What a node says to itself crosses nothing, and there is no reply: it is at home."""
    done = run(
        FedBYOL(rounds=2, **SMALL), tiny(), topology="mesh", fail="cut 0-1 @2", progress=False
    )
    ways = {t: {(c.source, c.to) for c in done.ledger.crossings() if c.tick == t} for t in (1, 2)}
    every = {(a, b) for a in ("M0", "M1", "M2") for b in ("M0", "M1", "M2") if a != b}
    assert ways == {1: every, 2: every - {("M0", "M1"), ("M1", "M0")}}
    assert len(done.ledger.crossings()) == 10

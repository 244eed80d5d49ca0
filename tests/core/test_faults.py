"""Fault scripts: what they say, round by round, and what they cannot say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.faults import Faults
from polyfed.core.topology import State
from polyfed.errors import ConfigError, UnknownNameError

NAMES = ("M0", "M1", "M2", "M3")


def link(*ends: str) -> frozenset[str]:
    return frozenset(ends)


def test_the_script_of_the_manual() -> None:
    faults = Faults.parse("cut 0-1 @3; kill M2 @5; heal @8", NAMES)
    whole, three = frozenset(NAMES), frozenset(NAMES) - {"M2"}
    cut = frozenset({link("M0", "M1")})
    by_round = [faults.state(t) for t in range(1, 10)]
    assert by_round[:2] == [State(whole)] * 2
    assert by_round[2:4] == [State(whole, cut)] * 2
    assert by_round[4:7] == [State(three, cut)] * 3
    assert by_round[7:] == [State(whole)] * 2
    changes = {t: faults.changes(t) for t in range(1, 10) if faults.changes(t)}
    assert changes == {
        3: [("M0-M1", "cut")],
        5: [("M2", "killed")],
        8: [("M2", "healed"), ("M0-M1", "healed")],
    }


def test_what_comes_after_the_last_round_is_refused() -> None:
    assert Faults.parse("kill 0 @3", NAMES, 3).events
    with pytest.raises(ConfigError, match="fault 'heal @4' never happens: the last round is 3"):
        Faults.parse("kill 0 @3; heal @4", NAMES, 3)


def test_one_thing_is_healed_and_the_rest_stays_broken() -> None:
    faults = Faults.parse("kill 3 @1; kill 0 @1; cut M1-2 @1; heal M3 @2; heal 2-1 @3", NAMES)
    assert faults.state(1) == State(link("M1", "M2"), frozenset({link("M1", "M2")}))
    assert faults.state(2) == State(link("M1", "M2", "M3"), frozenset({link("M1", "M2")}))
    assert faults.state(3) == State(link("M1", "M2", "M3"))
    assert [faults.changes(t) for t in (2, 3)] == [[("M3", "healed")], [("M1-M2", "healed")]]


def test_rounds_count_and_of_one_round_the_order_of_the_text() -> None:
    faults = Faults.parse(" heal M0@4 ;kill M0 @ 2;kill M1 @4; heal @4; kill M2 @4;", NAMES)
    assert [sorted(frozenset(NAMES) - faults.state(t).alive) for t in (1, 2, 3, 4)] == [
        [], ["M0"], ["M0"], ["M2"],
    ]  # fmt: skip


def test_a_name_goes_before_a_place_and_may_have_hyphens() -> None:
    faults = Faults.parse("kill 1 @1; cut a-b-1 @1; cut 2-b @2", ["1", "a", "a-b", "b"])
    assert faults.state(1) == State(link("a", "a-b", "b"), frozenset({link("a-b", "1")}))
    assert faults.state(2).cut == {link("a-b", "1"), link("a-b", "b")}


@pytest.mark.parametrize(
    "script",
    ["cut @3", "kill M0", "kill M0 @0", "kill M0 @x", "smash M0 @1", "kill M0 M1 @1", "kill @2"],
)
def test_what_is_not_understood(script: str) -> None:
    with pytest.raises(ConfigError, match=r"fault|unknown"):
        Faults.parse(f"kill M1 @1; {script}", NAMES)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("kill M9 @1", "unknown node in fault 'kill M9 @1': 'M9'. There are"),
        ("kill 4 @1", "unknown node in fault 'kill 4 @1': '4'. There are: M0, M1, M2, M3"),
        ("kill M0-M1 @1", "unknown node in fault"),
        ("cut M0 @1", r"unknown link \(A-B\) in fault 'cut M0 @1'"),
        ("cut M0-M0 @1", r"unknown link \(A-B\)"),
        ("heal M0-M7 @2", r"unknown node or link \(A-B\)"),
    ],
)
def test_unknown_nodes_and_links(script: str, expected: str) -> None:
    with pytest.raises(UnknownNameError, match=expected):
        Faults.parse(script, NAMES)


WHAT = st.sampled_from(
    ["kill M0", "kill 2", "cut 0-1", "cut M2-M3", "cut 0-3", "heal", "heal 0", "heal 1-0"]
)


@given(st.lists(st.tuples(WHAT, st.integers(1, 6)), max_size=8))
def test_changes_lead_from_state_to_state(script: list[tuple[str, int]]) -> None:
    faults = Faults.parse("; ".join(f"{what} @{t}" for what, t in script), NAMES)
    alive, cut = set(NAMES), set[str]()
    for t in range(1, 8):
        for what, change in faults.changes(t):
            if "-" in what:
                (cut.add if change == "cut" else cut.remove)(what)
            else:
                (alive.remove if change == "killed" else alive.add)(what)
        assert faults.state(t).alive == alive
        assert {"-".join(sorted(ends)) for ends in faults.state(t).cut} == cut

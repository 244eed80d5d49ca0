"""Rings: who is visited when, who hands on to whom over how many links, whatever breaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed import topologies
from polyfed.core.faults import Faults
from polyfed.core.topology import Meeting, State, Tick
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.topologies.ring import Loop, cut_ring

SIX = tuple("ABCDEF")


def planned(
    text: str, rounds: int, script: str = "", names: Sequence[str] = SIX
) -> list[list[Tick]]:
    """The ticks of every round."""
    ring = topologies.make(text).joined(0, names, {})
    seen = Faults.parse(script, names).state
    return [list(ring.round(t, seen)) for t in range(1, rounds + 1)]


def short(tick: Tick) -> str:
    """A tick as text: who trains, then who hands on to whom over how many links."""
    meetings = [f"{''.join(m.sources)}>{''.join(m.to)}{m.hops}" for m in tick.meetings]
    assert all(m.at in m.to and len(m.to) == 1 and not m.topic for m in tick.meetings)
    return " ".join(["".join(tick.active) or "-", *meetings])


def texts(*args: object, **kwargs: object) -> list[list[str]]:
    return [[short(tick) for tick in ticks] for ticks in planned(*args, **kwargs)]  # type: ignore[arg-type]


WHOLE = [
    ["A A>B1", "B B>C1", "C C>D1", "D D>E1", "E E>F1", "F"],
    ["- F>A1", "A A>B1", "B B>C1", "C C>D1", "D D>E1", "E E>F1", "F"],
]


@pytest.mark.parametrize("text", ["ring", "dual-ring", "pipeline:tokens=1,merge=replace"])
def test_one_trunk_visits_every_node_in_turn(text: str) -> None:
    """SPEC 5.6, invariants 4 and 10; from the second round on C messages."""
    assert texts(text, 3) == [*WHOLE, WHOLE[1]]


def test_ticks_and_meetings_in_full() -> None:
    first, second = planned("ring", 2, names=("M1", "M0"))  # listed in any order
    handed = Meeting("M1", ("M0",), ("M1",), hops=1)
    assert first == [Tick(("M0",), (handed,)), Tick(("M1",), ())]
    assert second == [Tick((), (Meeting("M0", ("M1",), ("M0",), hops=1),)), *first]


# ---- links that are cut --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "way"), [("A-B", "A>B1"), ("D-E", "D>E1"), ("F-A", "F>A1"), ("A-C", "")]
)
def test_one_cut_changes_the_way_and_not_the_order(link: str, way: str) -> None:
    """SPEC 5.2: C-1 hops in place of 1; a link that the ring does not use changes nothing."""
    far = [[x.replace(way, way[:-1] + "5") if way else x for x in ticks] for ticks in WHOLE]
    assert texts("dual-ring", 3, f"cut {link} @1; heal @3") == [*far, WHOLE[1]]


def test_two_cuts_make_two_rings_that_meet_again() -> None:
    """Each goes on from the trunk of its node that was visited last; E, A, B are a line."""
    two = texts("dual-ring", 4, "cut B-C @2; cut D-E @2; heal @4")
    assert two[1:3] == [
        ["- D>C1 F>A1", "CA C>D1 A>B1", "DB B>E3", "E E>F1", "F"],
        ["- D>C1 F>A1", "CA C>D1 A>B1", "DB B>E3", "E E>F1", "F"],
    ]
    assert two[3] == ["- DF>A3", *WHOLE[1][1:]]


def test_every_link_cut_leaves_everybody_alone() -> None:
    cuts = "; ".join(f"cut {a}-{b} @1" for a, b in ["AB", "BC", "CD", "DE", "EF", "FA"])
    assert texts("dual-ring", 2, cuts) == [["BCDEFA"]] * 2
    assert texts("dual-ring", 2, "cut A-B @1", names="AB") == [["BA"]] * 2


def test_parts_may_change_partners() -> None:
    """{B, C} and the rest become {D, E} and the rest: both take what they have of both."""
    script = "cut A-B @1; cut C-D @1; heal @2; cut C-D @2; cut E-F @2"
    assert texts("dual-ring", 2, script)[1][0] == "- E>D1 CF>A2"


def test_one_way_round_a_cut_makes_a_line() -> None:
    """The first of the line hears from nobody; repaired, the ring goes on from its last."""
    plan = texts("ring", 3, "cut A-B @2; heal @3")
    assert plan[1] == ["B B>C1", "C C>D1", "D D>E1", "E E>F1", "F F>A1", "A"]
    assert plan[2] == WHOLE[0]  # A was visited last, and is the first now: nothing to hand on
    plan = texts("ring", 2, "cut A-B @1; cut D-E @1; heal @2")
    assert plan == [["BE B>C1 E>F1", "CF C>D1 F>A1", "DA"], ["- AD>A3", *WHOLE[1][1:]]]


# ---- nodes that die ------------------------------------------------------------------------------


def test_a_dead_node_is_skipped_and_rejoins() -> None:
    plan = texts("ring", 4, "kill C @2; heal @4")
    without = ["- F>A1", "A A>B1", "B B>D1", "D D>E1", "E E>F1", "F"]
    assert plan == [WHOLE[0], without, without, WHOLE[1]]


def test_if_the_last_node_dies_the_one_before_it_goes_on() -> None:
    plan = texts("ring", 3, "kill F @2; kill E @3")
    assert plan[1] == ["- E>A1", "A A>B1", "B B>C1", "C C>D1", "D D>E1", "E"]
    assert plan[2] == ["- D>A1", "A A>B1", "B B>C1", "C C>D1", "D"]


def test_nobody_is_there_for_a_while() -> None:
    dead = "; ".join(f"kill {n} @2" for n in SIX)
    plan = texts("dual-ring", 4, f"{dead}; heal @4")
    assert plan[1:3] == [[], []]
    assert plan[3] == WHOLE[1]  # F still has the trunk of round 1


def test_those_never_seen_before_begin_with_their_own() -> None:
    dead = "; ".join(f"kill {n} @1" for n in "ABC")
    plan = texts("dual-ring", 2, f"{dead}; heal @2; kill D @2; kill E @2; kill F @2")
    assert plan == [["D D>E1", "E E>F1", "F"], ["A A>B1", "B B>C1", "C"]]


def test_a_cut_beside_a_dead_node() -> None:
    """The ring joins those alive: with C dead the link B-D is one of it, and A-B-D... is a line."""
    assert texts("dual-ring", 1, "kill C @1; cut B-D @1")[0][1] == "B B>D4"
    assert texts("dual-ring", 1, "kill C @1; cut B-C @1")[0][1] == "B B>D1"


# ---- order and balance ---------------------------------------------------------------------------


def test_a_given_order_is_the_ring() -> None:
    plan = texts("ring:order=F+A+C+B+D+E", 2, "cut F-A @2")
    assert plan[0] == ["F F>A1", "A A>C1", "C C>B1", "B B>D1", "D D>E1", "E"]
    assert plan[1] == ["A A>C1", "C C>B1", "B B>D1", "D D>E1", "E E>F1", "F"]


def test_random_orders_differ_by_round_and_seed_and_go_along_the_ring_of_names() -> None:
    ring = topologies.make("dual-ring:order=random").joined(0, SIX, {})
    other = topologies.make("dual-ring:order=random").joined(1, SIX, {})
    seen = Faults.parse("", SIX).state
    orders = []
    for t in range(1, 9):
        ticks = list(ring.round(t, seen))
        orders.append("".join(name for tick in ticks for name in tick.active))
        for meeting in (m for tick in ticks for m in tick.meetings):
            apart = abs(SIX.index(meeting.sources[0]) - SIX.index(meeting.at))
            assert meeting.hops == min(apart, 6 - apart)
    assert all(sorted(order) == list(SIX) for order in orders)
    assert len(set(orders)) == 8
    again = ["".join(n for x in other.round(t, seen) for n in x.active) for t in range(1, 9)]
    assert again != orders
    one_way = topologies.make("ring:order=random").joined(0, SIX, {})
    for meeting in (m for tick in one_way.round(1, seen) for m in tick.meetings):
        assert meeting.hops == (SIX.index(meeting.at) - SIX.index(meeting.sources[0])) % 6


def test_slow_nodes_are_visited_less_often() -> None:
    plan = planned("ring:balance=B:2+F:3", 7)
    visited = ["".join(n for tick in ticks for n in tick.active) for ticks in plan]
    assert visited == ["ABCDEF", "ACDE", "ABCDE", "ACDEF", "ABCDE", "ACDE", "ABCDEF"]
    assert short(plan[1][1]) == "A A>C2"  # the message passes B
    assert short(plan[2][0]) == "- E>A2"


def test_where_all_would_rest_all_are_visited() -> None:
    plan = texts("ring:balance=A:2+B:2", 2, names="AB")
    assert plan == [["A A>B1", "B"], ["- B>A1", "A A>B1", "B"]]
    script = "cut B-C @2; cut F-A @2"  # A and B are a part of their own, and would rest
    assert texts("dual-ring:balance=A:2+B:2", 2, script)[1][:2] == ["- F>C3 B>A1", "CA C>D1 A>B1"]


# ---- pipelines -----------------------------------------------------------------------------------


def test_all_train_at_once_and_pass_on() -> None:
    replaced = texts("pipeline:merge=replace", 3, names="ABC")
    assert replaced == [["ABC"], *[["- C>A1 A>B1 B>C1", "ABC"]] * 2]
    mean = texts("pipeline", 3, names="ABC")
    assert mean == [["ABC"], *[["- CA>A1 AB>B1 BC>C1", "ABC"]] * 2]


def test_trunks_share_out_the_ring_and_every_node_is_visited_once() -> None:
    assert texts("pipeline:tokens=2,merge=replace", 2, names="ABCDE") == [
        ["AD A>B1 D>E1", "BE B>C1", "C"],
        ["- E>A1 C>D1", "AD A>B1 D>E1", "BE B>C1", "C"],
    ]


def test_trunks_go_on_along_the_ring_whatever_its_nodes_are_called() -> None:
    assert texts("pipeline:tokens=2,merge=replace,order=D+B+C+A", 2, names="ABCD") == [
        ["DC D>B1 C>A1", "BA"],
        ["- A>D1 B>C1", "DC D>B1 C>A1", "BA"],
    ]


def test_a_pipeline_goes_on_with_those_alive() -> None:
    plan = texts("pipeline", 4, "kill B @2; heal @4", names="ABCD")
    assert plan[1] == ["- DA>A1 AC>C1 CD>D1", "ACD"]
    assert plan[2] == plan[1]
    assert plan[3][-1] == "ABCD"
    back = plan[3][0].split()[1:]
    assert [m for m in back if m.split(">")[1][0] == "B"] == ["A>B1"]  # its own has gone stale
    assert sorted(m.split(">")[1][0] for m in back) == list("ABCD")


def test_pipelines_that_meet_again_lose_no_trunk() -> None:
    """Two trunks in each of two parts: all four meet at the firsts of the repaired ring."""
    script = "cut C-D @1; cut F-A @1; heal @2"
    plan = texts("pipeline:tokens=2,merge=replace", 2, script)
    assert plan[0][0] == "DFAC D>E1 A>B1"
    arrived = [m.split(">")[0] for m in plan[1][0].split()[1:]]
    assert sorted("".join(arrived)) == ["B", "C", "E", "F"]


# ---- any faults ----------------------------------------------------------------------------------

NAMES = tuple("ABCDE")
WHAT = st.sampled_from(
    [*(f"kill {n}" for n in NAMES), *(f"cut {a}-{b}" for a, b in ["AB", "BC", "CD", "DE", "EA"]),
     "cut A-C", "heal", "heal A", "heal B", "heal A-B"]
)  # fmt: skip
SCRIPTS = st.lists(st.tuples(WHAT, st.integers(1, 6)), max_size=10).map(
    lambda found: "; ".join(f"{what} @{t}" for what, t in found)
)
ROUNDS = 7


def links(state: State, names: Sequence[str] = NAMES) -> dict[str, set[str]]:
    """Who can talk directly: neighbours among those alive, unless their link is cut."""
    alive = [n for n in names if n in state.alive]
    found: dict[str, set[str]] = {n: set() for n in alive}
    for i, a in enumerate(alive):
        b = alive[(i + 1) % len(alive)]
        if a != b and frozenset((a, b)) not in state.cut:
            found[a].add(b)
            found[b].add(a)
    return found


def distances(graph: dict[str, set[str]], start: str) -> dict[str, int]:
    """Breadth first."""
    found, front = {start: 0}, [start]
    while front:
        front = [b for a in front for b in graph[a] if b not in found]
        found |= dict.fromkeys(front, max(found.values()) + 1)
    return found


@given(SCRIPTS)
def test_a_dual_ring_survives_any_faults(script: str) -> None:
    """Against a literal account: reachability by search, and a history of visits."""
    ring = topologies.make("dual-ring").joined(0, NAMES, {})
    seen = Faults.parse(script, NAMES).state
    history: list[list[list[str]]] = []  # by round, by part, in the order of visits
    for t in range(1, ROUNDS + 1):
        graph = links(seen(t))
        parts = {frozenset(distances(graph, n)) for n in graph}
        expected = {frozenset(p): [n for n in NAMES if n in p] for p in parts}
        ticks = list(ring.round(t, seen))
        begun = [m for tick in ticks for m in tick.meetings if not tick.active]
        handed = {m.at: set(m.sources) for m in begun}
        for part, order in expected.items():
            sources: set[str] = set()
            for old in reversed(history):
                sources = {[n for n in was if n in part][-1] for was in old if part & set(was)}
                if sources:
                    break
            assert handed.pop(order[0], {order[0]}) == (sources or {order[0]})
            visits = [n for tick in ticks for n in tick.active if n in part]
            assert visits == order  # everybody alive, once, in order
            passed = [(*m.sources, m.at) for tick in ticks if tick.active for m in tick.meetings]
            assert [p for p in passed if p[0] in part] == list(pairwise(order))
        assert not handed
        for meeting in (m for tick in ticks for m in tick.meetings):
            way = distances(graph, meeting.at)
            assert meeting.hops == max(way[source] for source in meeting.sources)
        history.append(list(expected.values()))


@given(
    SCRIPTS,
    st.sampled_from(
        ["ring", "ring:order=random", "dual-ring:balance=A:2+C:3", "dual-ring:order=random",
         "pipeline", "pipeline:merge=replace", "pipeline:tokens=2,merge=replace",
         "pipeline:order=random,balance=B:2"]
    ),
)  # fmt: skip
def test_no_ring_crashes_and_all_are_visited_but_those_that_rest(script: str, text: str) -> None:
    ring = topologies.make(text).joined(3, NAMES, {})
    assert isinstance(ring, Loop)
    seen = Faults.parse(script, NAMES).state
    for t in range(1, ROUNDS + 1):
        graph, ticks = links(seen(t)), list(ring.round(t, seen))
        assert ticks == list(ring.round(t, seen))  # a function of the round
        visits = [n for tick in ticks for n in tick.active]
        assert len(set(visits)) == len(visits)
        parts = {frozenset(distances(graph, n)) for n in graph}
        for part in parts:
            assert part & set(visits)
        if "balance" not in text:
            assert set(visits) == seen(t).alive
        has_trunk = set[str]()
        for i, tick in enumerate(ticks):
            for meeting in tick.meetings:
                assert set(meeting.sources) <= set(distances(graph, meeting.at))
                assert set(meeting.sources) != {meeting.at}
                assert meeting.hops >= 1
            receivers = [m.at for m in tick.meetings]
            assert len(set(receivers)) == len(receivers)
            if tick.active:  # who trains hands on what it trained; who is visited later, received
                assert {s for m in tick.meetings for s in m.sources} <= set(tick.active)
                assert i <= 1 or set(tick.active) <= has_trunk
            has_trunk |= set(receivers)


@given(st.lists(st.sampled_from(NAMES), min_size=2, unique=True), st.sets(st.sampled_from(NAMES)))
def test_lines_are_the_ring(ring: list[str], ends: set[str]) -> None:
    pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
    cut = [frozenset(pair) for pair in pairs if pair[0] in ends]
    lines, is_closed = cut_ring(ring, cut)
    assert sorted(n for line in lines for n in line) == sorted(ring)
    assert all(lines)
    assert is_closed == (not cut)
    inner = [frozenset(pair) for line in lines for pair in pairwise(line)]
    assert not set(inner) & set(cut)


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        (
            "ring",
            "A",
            "a ring needs at least two nodes, got 1: A. For one node use the method local",
        ),
        (
            "dual-ring:order=A+B",
            "ABC",
            "dual-ring: order 'A.B' names C 0 times. It must name every",
        ),
        ("ring:order=A+B+C+A", "ABC", "names A 2 times"),
        ("ring:balance=A:0", "AB", "balance 'A:0': write NODE:N"),
        ("ring:balance=A", "AB", "balance 'A': write NODE:N"),
        ("pipeline:tokens=3,merge=replace", "AB", "3 tokens for 2 nodes"),
    ],
)
def test_what_cannot_be(text: str, names: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        topologies.make(text).joined(0, names, {})


@pytest.mark.parametrize("text", ["ring:order=A+X", "ring:balance=X:2"])
def test_unknown_nodes(text: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown node of topology ring 'X'"):
        topologies.make(text).joined(0, "AB", {})


@pytest.mark.parametrize("text", ["pipeline:tokens=2", "pipeline:tokens=-1", "pipeline:merge=sum"])
def test_pipelines_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pipeline|Pipeline"):
        topologies.make(text)


def test_a_round_is_not_one_tick() -> None:
    with pytest.raises(NotImplementedError, match="several ticks"):
        topologies.make("ring").tick(1, frozenset(SIX))


@pytest.mark.parametrize(
    "text", ["ring:order=B+A,balance=A:2", "dual-ring", "pipeline:tokens=2,merge=replace"]
)
def test_labels_can_be_read_again(text: str) -> None:
    assert topologies.label(topologies.make(text)) == text

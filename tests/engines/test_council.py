"""The council note by note: who is followed, who may decide, what is overtaken."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.engines.council import Council
from polyfed.engines.decision import Decision, Settled
from polyfed.errors import MessageError

NAMES = ("M0", "M1", "M2")


def seat(me: str = "M1", names: tuple[str, ...] = NAMES, **more: Any) -> Council:
    made = Council(me, names, names, more.pop("host", None), 5, 1.0, 1, {}, **more)
    made.ready(0.0)
    for name in names:
        if name != me:
            made.up(name, 0.0)
    made.outbox.clear()
    return made


def go(decision: Decision) -> dict[str, Any]:
    note = {"kind": "go", "ballot": decision.attempt[0], "decision": decision.plain(), "count": 1}
    return {**note, "roster": {name: {} for name in NAMES}}


def kinds(council: Council) -> list[tuple[str, str]]:
    return [(to, note["kind"]) for to, note in council.outbox]


def test_the_leader_is_followed() -> None:
    council = seat()
    decision = Decision((0, 1), 1, NAMES)
    council.hear("M0", go(decision), 0.0)
    assert council.accepted == decision
    assert council.orders == [decision]


def test_a_decision_that_was_overtaken_is_not_followed() -> None:
    council = seat()
    late, early = Decision((0, 2), 1, ("M0", "M1")), Decision((0, 1), 1, NAMES)
    council.hear("M0", go(late), 0.0)
    council.hear("M0", go(early), 0.0)
    assert council.accepted == late
    assert council.orders == [late]


def test_an_older_leader_is_not_followed_and_told_so() -> None:
    council = seat(promised=1, me="M2")
    council.hear("M0", go(Decision((0, 1), 1, NAMES)), 0.0)
    assert council.accepted is None
    assert kinds(council) == [("M0", "stale")]
    assert council.outbox[0][1]["ballot"] == 1


def test_a_newer_leader_is_followed_whoever_tells_of_it() -> None:
    council = seat(me="M2")
    council.hear("M0", {"kind": "stale", "ballot": 4, "count": 1}, 0.0)
    assert (council.promised, council.leader) == (4, "M1")
    assert kinds(council) == [("M1", "hello")]


def test_a_decision_of_another_ballot_than_its_note_is_refused() -> None:
    note = go(Decision((3, 1), 1, NAMES)) | {"ballot": 0}
    with pytest.raises(MessageError, match="in ballot 0"):
        seat().hear("M0", note, 0.0)


@pytest.mark.parametrize(
    ("names", "present", "enough"),
    [
        (NAMES, "M0", False),
        (NAMES, "M1 M2", True),
        (("M0", "M1"), "M0", True),
        (("M0", "M1"), "M1", False),
        (("M0", "M1", "M2", "M3"), "M0 M3", True),
        (("M0", "M1", "M2", "M3"), "M1 M3", False),
        (("M0", "M1", "M2", "M3"), "M1 M2 M3", True),
    ],
)
def test_more_than_half_decide_or_half_with_the_first(
    names: tuple[str, ...], present: str, enough: bool
) -> None:
    assert seat("M1", names).is_enough(set(present.split())) == enough


def test_with_a_host_it_and_a_node_are_enough() -> None:
    council = Council("M0", ("M0", "M1", "hub"), ("M0", "M1"), "hub", 5, 1.0, 1, {})
    assert council.is_enough({"hub", "M1"})
    assert not council.is_enough({"hub"})
    assert not council.is_enough({"M0", "M1"})
    with pytest.raises(MessageError, match="hub leads for ever"):
        council.hear("M1", {"kind": "stale", "ballot": 1}, 0.0)


def test_who_is_next_takes_over_when_enough_agree() -> None:
    council = seat("M1")
    council.down("M0", 1.0)
    council.tick(1.9)
    assert kinds(council) == []
    council.tick(2.0)
    assert kinds(council) == [("M2", "canvass")]
    council.outbox.clear()
    council.hear("M2", {"kind": "agree", "ballot": 0, "count": 1}, 2.1)
    assert (council.promised, council.leader) == (1, "M1")
    assert kinds(council) == [("M2", "prepare")]


def test_who_comes_later_in_order_waits_longer_to_take_over() -> None:
    council = seat("M2")
    council.down("M0", 1.0)
    council.tick(2.9)
    assert kinds(council) == []  # it is the turn of M1
    council.tick(3.0)
    assert kinds(council) == [("M1", "canvass")]
    council.outbox.clear()
    council.tick(3.9)
    assert kinds(council) == []  # it has just asked
    council.tick(4.0)
    assert kinds(council) == [("M1", "canvass")]
    council.down("M1", 4.0)
    council.outbox.clear()
    council.tick(9.0)
    assert kinds(council) == []  # it is not enough alone


def test_the_leader_hears_once_whom_a_party_lacks_and_once_that_it_is_back() -> None:
    council = seat("M1")
    council.down("M2", 0.0)
    council.need({"M2"}, 0.9)
    assert kinds(council) == []  # it may be back in a moment
    for now in (1.0, 1.5, 2.0):
        council.need({"M2"}, now)
        assert kinds(council) == [("M0", "lacks")]
    assert council.outbox[0][1]["names"] == ["M2"]
    council.outbox.clear()
    council.up("M2", 3.0)
    council.up("M2", 3.1)
    assert [note["names"] for _, note in council.outbox] == [[]]


def test_who_sees_the_leader_does_not_agree() -> None:
    council = seat("M2")
    council.hear("M1", {"kind": "canvass", "ballot": 0, "count": 1}, 1.0)
    assert kinds(council) == []
    council.down("M0", 1.0)
    council.hear("M1", {"kind": "canvass", "ballot": 0, "count": 2}, 1.1)
    assert kinds(council) == [("M1", "agree")]


def hello(count: int, **more: Any) -> dict[str, Any]:
    note = {"kind": "hello", "ballot": 0, "count": count, "born": 1, "accepted": None, "done": None}
    return {**note, "card": {}, "roster": {}, "lacks": [], **more}


def test_a_run_begins_when_all_have_been_there() -> None:
    council = seat("M0")
    council.hear("M1", hello(1), 0.0)
    assert council.accepted is None
    council.hear("M2", hello(1), 0.0)
    assert council.accepted == Decision((0, 1), 1, NAMES)
    assert kinds(council) == [("M1", "go"), ("M2", "go")]
    assert all(note["roster"] == {name: {} for name in NAMES} for _, note in council.outbox)


def begun() -> Council:
    council = seat("M0")
    council.hear("M1", hello(1), 0.0)
    council.hear("M2", hello(1), 0.0)
    council.outbox.clear()
    return council


def done(number: int) -> dict[str, Any]:
    return {"kind": "done", "ballot": 0, "count": 5, "attempt": [0, number]}


def test_the_next_round_begins_when_all_are_done() -> None:
    council = begun()
    council.finished((0, 1), 1.0)
    council.hear("M1", done(1), 1.0)
    assert kinds(council) == []
    council.hear("M2", done(1), 1.0)
    assert council.accepted == Decision((0, 2), 2, NAMES, (Settled((0, 1), NAMES),))


def test_a_round_is_played_again_without_who_is_gone_for_long() -> None:
    council = begun()
    council.down("M2", 1.0)
    council.tick(1.9)
    assert kinds(council) == []
    council.tick(2.0)
    assert council.accepted == Decision((0, 2), 1, ("M0", "M1"))


def test_who_is_not_part_of_a_round_does_not_hold_it_up() -> None:
    council = begun()
    council.down("M2", 1.0)
    council.tick(2.0)
    council.up("M2", 2.5)
    council.down("M2", 2.6)  # it comes and goes
    council.finished((0, 2), 3.0)
    council.hear("M1", done(2), 3.0)
    assert council.accepted == Decision((0, 3), 2, ("M0", "M1"), (Settled((0, 2), ("M0", "M1")),))


def test_who_is_done_and_gone_is_not_waited_for() -> None:
    """M2 has played and is gone: nobody needs its word that it got what it was told."""
    council = begun()
    council.hear("M2", done(1), 1.0)
    council.down("M2", 1.0)
    council.tick(2.0)
    assert council.accepted == Decision((0, 1), 1, NAMES)
    assert kinds(council) == [("M1", "spare")]
    council.tick(2.5)
    assert kinds(council) == [("M1", "spare")]  # once is enough
    assert council.spared == ["M2"]
    other = seat()
    other.hear("M0", go(Decision((0, 1), 1, NAMES)), 0.0)
    other.hear("M0", council.outbox[0][1], 2.0)
    assert other.spared == ["M2"]


def test_a_round_is_played_again_with_who_begins_a_new_life() -> None:
    council = begun()
    council.hear("M2", hello(1, born=2), 1.0)
    assert council.accepted == Decision((0, 2), 1, NAMES)


def test_notes_that_overtake_each_other_count_by_when_they_were_written() -> None:
    council = begun()
    council.hear("M2", hello(3), 1.0)
    council.hear("M2", {"kind": "lacks", "ballot": 0, "count": 2, "names": ["M1"]}, 1.0)
    council.tick(9.0)
    assert council.accepted == Decision((0, 1), 1, NAMES)
    council.hear("M2", {"kind": "lacks", "ballot": 0, "count": 4, "names": ["M1"]}, 9.0)
    assert council.accepted == Decision((0, 2), 1, ("M0", "M1"))


def test_the_end_is_played_again_when_too_few_who_were_told_remain() -> None:
    """M2 has played the last round and is gone for ever; M1, away then, is here instead."""
    log = tuple(Settled((0, t), NAMES) for t in range(1, 6))
    last, cards = Decision((0, 5), 5, ("M0", "M2"), log[:4]), {name: {} for name in NAMES}
    council = seat("M0", accepted=last, done=(0, 5), roster=cards)
    council.down("M1", 0.0)
    council.hear("M2", {**hello(1), "accepted": last.plain(), "done": [0, 5]}, 2.0)
    end = council.accepted
    assert (end.round, end.members) == (6, ("M0", "M2"))
    council.finished(end.attempt, 2.0)
    council.down("M2", 2.0)
    council.tick(4.9)
    assert not council.is_over
    council.up("M1", 4.9)
    council.hear("M1", hello(1), 4.9)
    assert council.accepted == end  # M2 may still be back
    council.tick(5.0)
    again = council.accepted
    assert (again.round, again.members, again.log) == (6, ("M0", "M1"), end.log)
    assert not council.is_over
    council.finished(again.attempt, 5.0)
    council.hear("M1", {**done(again.attempt[1]), "count": 9}, 5.0)
    assert council.is_over


def test_the_end_stands_when_enough_have_played_it() -> None:
    log = tuple(Settled((0, t), NAMES) for t in range(1, 6))
    council = seat("M1")
    council.hear("M0", go(Decision((0, 6), 6, NAMES, log)), 0.0)
    council.finished((0, 6), 0.0)
    assert not council.is_over
    council.hear("M2", {"kind": "over", "ballot": 0, "count": 1, "attempt": [0, 6]}, 0.0)
    assert not council.is_over  # only the leader says so
    council.hear("M0", {"kind": "over", "ballot": 0, "count": 1, "attempt": [0, 6]}, 0.0)
    assert council.is_over

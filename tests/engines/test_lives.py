"""Which of several processes in one name is heard."""

from __future__ import annotations

from polyfed.engines.lives import Lives


def test_the_first_is_heard_and_the_second_refused_while_the_first_is_there() -> None:
    lives = Lives()
    assert lives.came("M1", 5) == [("up", 5)]
    assert lives.came("M1", 9) == [("refused", 9)]
    assert lives.came("M2", 7) == [("up", 7)]
    assert lives.heard == {"M1": 5, "M2": 7}
    assert lives.went("M1", 9) == [("excused", 9)]
    assert lives.heard["M1"] == 5


def test_who_takes_the_place_of_a_process_that_died_is_heard_when_that_is_gone() -> None:
    lives = Lives()
    lives.came("M1", 5)
    lives.came("M1", 9)
    assert lives.went("M1", 5) == [("down", 5), ("excused", 9), ("up", 9)]
    assert lives.heard == {"M1": 9}


def test_a_life_whose_link_was_cut_is_heard_again() -> None:
    lives = Lives()
    lives.came("M1", 5)
    assert lives.came("M1", 5) == [("up", 5)]
    assert lives.went("M1", 5) == [("down", 5)]
    assert lives.heard == {}
    assert lives.came("M1", 5) == [("up", 5)]


def test_an_earlier_life_is_never_heard_again() -> None:
    """What it says would count as of a life that is over."""
    lives = Lives()
    lives.came("M1", 9)
    assert lives.came("M1", 5) == [("refused", 5)]
    assert lives.went("M1", 9) == [("down", 9)]
    assert lives.came("M1", 5) == [("refused", 5)]
    assert lives.heard == {}

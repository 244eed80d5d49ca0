"""The replayed topology is the one that ran: its messages are those of the ledger."""

import dataclasses
from collections import Counter
from typing import Any

import pytest

import polyfed as pf
from polyfed import methods, tasks
from polyfed.report.again import Again, make_again
from polyfed.report.replay import explains, replay

QUICK = tasks.digits(quick=True)
LI = {"rounds": 9, "head_epochs": 1, "trunk_epochs": 0, "finetune_epochs": 0}
SLICES = {"rounds": 3, "block": 10, "local_epochs": 1}
CASES = {
    "star": ("fedavg", QUICK, {"rounds": 2, "local_epochs": 0}, {}),
    "away": ("fedavg", QUICK, {"rounds": 3, "local_epochs": 0}, {"absent": {2: ["M1"]}}),
    "alone": ("local", QUICK, {"rounds": 2, "local_epochs": 0, "init_epochs": 0}, {}),
    "joint": ("joint", QUICK, {"rounds": 1, "local_epochs": 0, "init_epochs": 0}, {}),
    "ring": ("li", QUICK, LI, {"topology": "ring"}),
    "broken ring": (
        "li", QUICK, LI, {"topology": "dual-ring", "fail": "cut 0-1 @3; kill M2 @5; heal @8"},
    ),
    "random ring": ("li", QUICK, LI, {"topology": "ring:order=random", "seed": 3}),
    "gossip": (
        "partial-averaging", tasks.make("digits-permuted", {"quick": True}), SLICES,
        {"topology": "gossip:cycles=2", "seed": 5},
    ),
    "groups": (
        "partial-averaging", tasks.make("digits-permuted", {"quick": True}), SLICES,
        {"topology": "groups"},
    ),
    "hub with data": ("fedul-m1", tasks.make("digits-sets", {"quick": True}), {"rounds": 1}, {}),
}  # fmt: skip


def finished(case: str) -> pf.Run:
    method, task, options, settings = CASES[case]
    return pf.run(methods.make(method, options, task), task, evaluate_every=9, **settings)


def replayed(run: pf.Run) -> tuple[dict[str, Any], Again]:
    again = make_again(run)
    assert isinstance(again, Again)
    names = sorted(node.name for node in again.parties)
    rounds = run.config["options"]["rounds"]
    return replay(run.config, again.parties, names, rounds), again


@pytest.mark.parametrize("case", CASES)
def test_messages_are_those_of_the_ledger(case: str) -> None:
    run = finished(case)
    work, _ = replayed(run)
    names = work["names"]
    told: Counter[tuple[int, str, str]] = Counter()
    for t, pattern in enumerate(work["rounds"], 1):
        for _, sent in work["patterns"][pattern]["ticks"]:
            told.update((t, names[a], names[b]) for a, b in sent)
    crossed = {(c.tick, c.source, c.to) for c in run.ledger.crossings()}
    assert set(told) == crossed
    assert explains(work, run.ledger.crossings())
    assert bool(crossed) == (case not in ("alone", "joint"))


def test_a_ring_is_a_staircase_and_faults_are_seen() -> None:
    work, _ = replayed(finished("broken ring"))
    assert work["ring"] == [0, 1, 2]
    rounds = [work["patterns"][k] for k in work["rounds"]]
    trains = [[sorted(active) for active, _ in p["ticks"] if active] for p in rounds]
    assert trains[0] == [[0], [1], [2]]
    assert trains[4] == [[0, 1]]  # cut, and M2 is away: two parts, each alone
    assert [list(map(list, p["cut"])) for p in rounds] == [[]] * 2 + [[[0, 1]]] * 5 + [[]] * 2
    assert [2 in p["alive"] for p in rounds] == [True] * 4 + [False] * 3 + [True] * 2


@pytest.mark.parametrize("case", ["gossip", "groups"])
def test_topics_that_are_not_known_are_noticed(case: str) -> None:
    run = finished(case)
    names = sorted(run.accuracy)
    assert not explains(replay(run.config, [], names, 3), run.ledger.crossings())
    nodes = list(run.nodes.values())
    assert explains(replay(run.config, nodes, names, 3), run.ledger.crossings())


def test_a_message_that_nobody_planned_is_noticed() -> None:
    run = finished("star")
    work, _ = replayed(run)
    crossings = run.ledger.crossings()
    for wrong in ({"to": "M1"}, {"source": "nobody"}):
        assert not explains(work, [*crossings, dataclasses.replace(crossings[0], **wrong)])
    assert explains(work, [dataclasses.replace(crossings[0], tick=3, to="M1")])  # not replayed


def test_only_so_much_is_kept() -> None:
    run = finished("gossip")
    whole, again = replayed(run)
    assert whole["of"] == len(whole["rounds"]) == 3
    names = sorted(node.name for node in again.parties)
    cut = replay(run.config, again.parties, names, 3, most=30)
    assert 0 < len(cut["rounds"]) < cut["of"]
    assert cut["patterns"] == whole["patterns"][: len(cut["patterns"])]

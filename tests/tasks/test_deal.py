"""From a partition to splits: nothing lost, nothing twice, classes in their shares."""

import pytest
import torch

from polyfed.errors import ConfigError
from polyfed.random import stream
from polyfed.tasks.deal import deal, shares
from polyfed.tasks.partition import parse


@pytest.mark.parametrize("validation", [0.0, 0.1, 0.2])
def test_shares_sum_to_one(validation: float) -> None:
    cut = shares(validation)
    assert sum(cut.values()) == pytest.approx(1)
    assert cut["test"] == 0.25
    assert cut.get("val_es", 0) + cut.get("val_rb", 0) == pytest.approx(validation)


@pytest.mark.parametrize("rule", ["iid", "pathological:2", "dirichlet:1,20"])
def test_every_sample_once_and_classes_in_their_shares(rule: str) -> None:
    y = torch.arange(2000) % 10
    nodes = deal(y, parse(rule), 5, stream(0, "deal"), validation=0.1)
    assert sorted(torch.cat([i for n in nodes for i in n.values()]).tolist()) == list(range(2000))
    for splits in nodes:
        whole = torch.bincount(y[torch.cat(list(splits.values()))], minlength=10)
        for name, share in shares(0.1).items():
            part = torch.bincount(y[splits[name]], minlength=10)
            assert bool(((part - share * whole).abs() < 1).all())


def test_five_nodes_with_two_classes_of_their_own() -> None:
    """Loop Improvement's pathological setting: three quarters to train, one to test."""
    y = torch.arange(4000) % 10
    nodes = deal(y, parse("pathological:2"), 5, stream(0, "deal"), validation=0)
    assert all(set(n) == {"train", "test"} for n in nodes)
    assert [(len(n["train"]), len(n["test"])) for n in nodes] == [(600, 200)] * 5
    held = [set(y[torch.cat(list(n.values()))].tolist()) for n in nodes]
    assert sorted(c for classes in held for c in classes) == list(range(10))


def test_writers_reach_the_rule() -> None:
    y, writers = torch.zeros(40, dtype=torch.int64), torch.arange(40) // 10
    nodes = deal(y, parse("writer"), 2, stream(0, "deal"), validation=0.2, writers=writers)
    held = [set(writers[torch.cat(list(n.values()))].tolist()) for n in nodes]
    assert held[0] & held[1] == set()
    assert held[0] | held[1] == {0, 1, 2, 3}


def test_all_for_validation() -> None:
    with pytest.raises(ConfigError, match="fractions must be > 0"):
        deal(torch.arange(9) % 2, parse("iid"), 1, stream(0), validation=0.75)

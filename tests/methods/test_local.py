from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from polyfed.core.data import Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import run
from polyfed.errors import ConfigError
from polyfed.methods.local import Local
from polyfed.testing import CHECKS, tiny


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](Local(batch=8, lr=1e-2, init_epochs=1, local_epochs=2, patience=1), tiny)


def test_equals_a_plain_training_loop(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    """Init and two rounds, each with a fresh Adam, over the same batches with the same dropout."""
    method = Local(
        rounds=2, batch=11, lr=1e-2, init_epochs=2, local_epochs=3, patience=0, rollback=False
    )
    done = run(method, tiny(), progress=False)
    for node in tiny():
        net, split = copy.deepcopy(node.model.net), node.data["train"]
        for epochs, path in (
            (2, ("tick", 0, "start", 0)),
            (3, ("tick", 1, "local", 0)),
            (3, ("tick", 2, "local", 0)),
        ):
            literal_train(
                net,
                [net],
                split.x,
                split.y,
                name=node.name,
                path=path,
                epochs=epochs,
                batch=11,
                lr=1e-2,
            )
        assert_close(done.nodes[node.name], net, 1e-5)


def test_equals_a_plain_training_loop_with_early_stopping(
    literal_train: Callable[..., None], assert_close: Callable[..., None]
) -> None:
    method = Local(rounds=1, batch=11, lr=0.05, local_epochs=30, patience=2, rollback=False)
    done = run(method, tiny(), progress=False)
    epochs = {m["node"]: m["local_epochs"] for m in done.metrics if "local_epochs" in m}
    assert min(epochs.values()) < 30
    for node in tiny():
        net, split, held = copy.deepcopy(node.model.net), node.data["train"], node.data["val_es"]
        literal_train(
            net,
            [net],
            split.x,
            split.y,
            name=node.name,
            path=("tick", 1, "local", 0),
            epochs=30,
            batch=11,
            lr=0.05,
            stop=(held.x, held.y, 2),
        )
        assert_close(done.nodes[node.name], net, 1e-4)


@pytest.mark.parametrize(
    ("script", "patience", "stops_after", "best"),
    [
        ([5, 3, 4, 4, 1, 0, 0, 0], 2, 4, 2),  # epoch 5 would be better, but two were not
        ([5, 4, 3, 2, 2, 2, 2, 1], 3, 7, 4),  # equal is not better
        ([5, 4, 3, 2, 1, 0.5, 0.4, 0.3], 1, 8, 8),  # always better: to the end
        ([1, 2, 2, 2, 2, 2, 2, 2], 1, 2, 1),
        ([2, 3, 1, 3, 0.5, 0.4, 2, 2], 2, 8, 6),  # better again before patience runs out
    ],
)
def test_early_stopping_restores_the_best_epoch_and_stops_after_patience(
    script: Sequence[float],
    patience: int,
    stops_after: int,
    best: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With scripted validation losses; the state of epoch n is that of n epochs and no stopping."""
    node = tiny()[:1]

    def settings(epochs: int, patience: int) -> Local:
        return Local(
            rounds=1, batch=8, lr=0.01, local_epochs=epochs, patience=patience, rollback=False
        )

    wanted = run(settings(best, 0), node, progress=False).nodes["M0"].model.state()
    losses = iter(script)

    def scripted(model: Model, split: Split, objective: Any) -> float:
        assert split.x is node[0].data["val_es"].x
        return float(next(losses))

    monkeypatch.setattr("polyfed.train.loop.mean_loss", scripted)
    done = run(settings(8, patience), node, progress=False)
    assert [m["local_epochs"] for m in done.metrics if "local_epochs" in m] == [stops_after]
    for name, tensor in done.nodes["M0"].model.state().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_node_without_val_es_trains_to_the_end(without: Callable[..., Node]) -> None:
    node = without(tiny()[0], "val_es")
    done = run(Local(rounds=1, batch=8, lr=0.5, local_epochs=6, patience=1), [node], progress=False)
    assert [m["local_epochs"] for m in done.metrics if "local_epochs" in m] == [6]


def _val_rb(done: Any, node: str) -> list[float]:
    return [
        m["val_rb_accuracy"]
        for m in done.metrics
        if m.get("node") == node and "tick" in m and "val_rb_accuracy" in m
    ]


@pytest.mark.parametrize("seed", range(3))
def test_rollback_ends_with_the_last_of_the_best_rounds(seed: int) -> None:
    """SPEC 1.8, oracle 10: n rounds without rollback are the first n rounds of a longer run."""

    def settings(rounds: int, rollback: bool) -> Local:
        return Local(rounds=rounds, batch=8, lr=0.08, local_epochs=1, patience=0, rollback=rollback)

    done = run(settings(5, True), tiny(), seed=seed, progress=False)
    prefixes = {n: run(settings(n, False), tiny(), seed=seed, progress=False) for n in range(1, 6)}
    for name, node in done.nodes.items():
        scores = _val_rb(done, name)
        assert len(scores) == 5
        last_best = max(range(5), key=lambda i: (scores[i], i)) + 1
        wanted = prefixes[last_best].nodes[name].model.state()
        for key, tensor in node.model.state().items():
            assert torch.equal(tensor, wanted[key]), (name, scores, key)


def test_rollback_is_by_a_nodes_own_score() -> None:
    """Here the one that likes small heads: the first round is best, whatever its accuracy."""
    nodes = [replace(node, score=_smallness) for node in tiny()]
    method = Local(rounds=3, batch=8, lr=0.08, local_epochs=1, patience=0)
    done = run(method, nodes, seed=0, progress=False)
    first = run(replace(method, rounds=1), tiny(), seed=0, progress=False)
    for name, node in done.nodes.items():
        scores = _val_rb(done, name)
        assert scores[0] == max(scores)
        assert torch.equal(*(r.nodes[name].model.state()["head.weight"] for r in (done, first)))
        assert done.accuracy[name] == _smallness(node.model, node.data["test"])


def _smallness(model: Model, split: Split) -> float:
    return 1 / (1 + float(model.state()["head.weight"].abs().sum()))


def test_that_rollback_test_sees_ties_and_early_bests() -> None:
    """Otherwise the test above could not tell >= from >, or rollback from none."""
    kinds = set()
    for seed in range(3):
        method = Local(rounds=5, batch=8, lr=0.08, local_epochs=1, patience=0)
        done = run(method, tiny(), seed=seed, progress=False)
        for name in done.nodes:
            scores = _val_rb(done, name)
            best = [i for i, s in enumerate(scores) if s == max(scores)]
            kinds.add(("tie", len(best) > 1))
            kinds.add(("before the last", best[-1] < 4))
    assert {("tie", True), ("before the last", True)} <= kinds


def test_nothing_is_sent() -> None:
    assert len(run(Local(rounds=2, local_epochs=1), tiny(), progress=False).ledger) == 0


def test_a_node_trains_the_same_whoever_else_does() -> None:
    method = Local(rounds=2, batch=8, local_epochs=2)
    alone = run(method, tiny()[1:2], progress=False).nodes["M1"].model.state()
    for name, tensor in run(method, tiny(), progress=False).nodes["M1"].model.state().items():
        assert torch.equal(tensor, alone[name]), name


@pytest.mark.parametrize("name", ["init_epochs", "local_epochs", "patience"])
def test_negative_options_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Local(**{name: -1})

from dataclasses import replace

import pytest
import torch

from polyfed import tasks
from polyfed.core.data import Data
from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.studies.validation import judged


def test_validation_stands_in_the_place_of_the_test() -> None:
    task = tasks.digits()
    for node, real in zip(judged(task, 0, 0), task.nodes(0), strict=True):
        x = torch.cat([real.data["val_es"].x, real.data["val_rb"].x])
        y = torch.cat([real.data[n].y for n in ("val_es", "val_rb")])  # type: ignore[misc]
        assert torch.equal(node.data["test"].x, x)
        assert torch.equal(torch.as_tensor(node.data["test"].y), y)
        assert node.data["train"].fingerprint() == real.data["train"].fingerprint()


@pytest.mark.parametrize("run_seed", [0, 1, 2])
def test_no_test_sample_is_in_what_a_search_sees(run_seed: int) -> None:
    task = tasks.digits()
    real = {tuple(x.flatten().tolist()) for n in task.nodes(0) for x in n.data["test"].x}
    seen = judged(task, 0, run_seed)
    private = [n.data[s].x for n in seen for s in n.data if s != "public"]
    assert not real & {tuple(x.flatten().tolist()) for part in private for x in part}


def test_runs_hold_the_same_data_and_begin_with_other_weights() -> None:
    task = tasks.digits()
    for one, other in zip(judged(task, 0, 0), judged(task, 0, 1), strict=True):
        for name in one.data:
            assert one.data[name].fingerprint() == other.data[name].fingerprint()
        a, b = one.model.state(), other.model.state()
        assert any(not torch.equal(a[n], b[n]) for n in a)
    fresh = task.nodes(1)[0].model.state()
    began = judged(task, 0, 1)[0].model.state()
    assert all(torch.equal(fresh[n], began[n]) for n in fresh)


def test_another_network_is_not_put_in() -> None:
    class Moody(tasks.load("digits")):  # type: ignore[misc]
        def nodes(self, seed: int) -> list[Node]:
            wider = replace(tasks.digits(), representation=8 + seed)
            return wider.nodes(seed)

    assert judged(Moody(), 0, 1)[0].model.spec() == Moody().nodes(0)[0].model.spec()


def test_without_validation_data_the_hub_s_are_taken() -> None:
    task = tasks.digits_sets()
    nodes = {n.name: n for n in judged(task, 0, 0)}
    hub = next(n for n in task.nodes(0) if n.name == "hub").data["val_rb"].fingerprint()
    assert "test" not in nodes["hub"].data
    assert {nodes[n].data["test"].fingerprint() for n in nodes if n != "hub"} == {hub}


def test_without_any_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"digits-permuted .* must not steer .* --hold-out 0.2"):
        judged(tasks.digits_permuted(), 0, 0)


def test_held_out_training_data() -> None:
    task = tasks.digits_permuted()
    for node, real in zip(judged(task, 0, 0, 0.2), task.nodes(0), strict=True):
        held, left = node.data["test"], node.data["train"]
        assert len(held) == round(0.2 * len(real.data["train"]))
        assert len(held) + len(left) == len(real.data["train"])
        joined = torch.cat([held.x, left.x]).flatten(1)
        assert sorted(joined.sum(1).tolist()) == sorted(
            real.data["train"].x.flatten(1).sum(1).tolist()
        )
    again = judged(task, 0, 5, 0.2)[0].data["test"].fingerprint()
    assert again == judged(task, 0, 0, 0.2)[0].data["test"].fingerprint()


def test_labels_go_with_what_is_held_out() -> None:
    task = tasks.digits_permuted()
    real = task.nodes(0)[0].data["train"]
    known = {tuple(x.flatten().tolist()): int(y) for x, y in zip(real.x, real.y, strict=True)}  # type: ignore[arg-type]
    for name in ("train", "test"):
        split = judged(task, 0, 0, 0.3)[0].data[name]
        for x, y in zip(split.x, split.y, strict=True):  # type: ignore[arg-type]
            assert known[tuple(x.flatten().tolist())] == int(y)


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_both_sides_keep_something(share: float) -> None:
    with pytest.raises(ConfigError, match="nothing on one side"):
        judged(tasks.digits_permuted(), 0, 0, share)


def test_what_cannot_be_held_out() -> None:
    with pytest.raises(ConfigError, match="no labels"):
        judged(tasks.digits_sets(), 0, 0, 0.2)


def test_unlabelled_validation_data_do_not_count() -> None:
    class Blind(tasks.load("digits")):  # type: ignore[misc]
        def nodes(self, seed: int) -> list[Node]:
            return [
                replace(
                    n, data=Data(**{k: n.data[k].x if k == "val_es" else n.data[k] for k in n.data})
                )
                for n in super().nodes(seed)
            ]

    with pytest.raises(ConfigError, match="no node validation data"):
        judged(Blind(), 0, 0)

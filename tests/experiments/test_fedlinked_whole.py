"""FedLinked's Figure 4.1: classes in the space of one model, against a literal translation."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed as pf
from polyfed import experiments, tasks
from polyfed.experiments import fedlinked_whole as whole
from polyfed.experiments.experiment import Ref
from polyfed.experiments.runner import AFTER
from polyfed.train import outputs

CIFAR10, SVHN = (experiments.load(f"fedlinked-figure-4.1{letter}") for letter in "ab")
SMALL = {"blocks": 1, "channels": 2, "representation": 5}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pf.Run:
    """A run on 1,800 images of noise, with what the experiment keeps of it in its folder."""
    folder = tmp_path_factory.mktemp("data")
    for b, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = np.random.default_rng(b).integers(0, 256, (300, 1 + 3072), np.uint8)
        rows[:, 0] = np.arange(300) % 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (cell,) = CIFAR10.cells
    task = tasks.make("cifar10", {"data": folder, **cell.task_options, **SMALL})
    method = pf.Local(**{**cell.options, "local_epochs": 1})  # type: ignore[arg-type]
    run = pf.run(method, task, folder=folder / "run", progress=False)
    assert run.folder is not None
    (run.folder / AFTER).write_text(json.dumps(whole.of_classes(run)))
    return run


def literal(run: pf.Run) -> dict[frozenset[str], float]:
    """Distances of class means over their mean, a loop over inputs."""
    (node,) = run.nodes.values()
    split = node.data["test"]
    assert split.y is not None
    Z = outputs(node.model, split.x, "trunk").double().numpy()
    means: dict[str, Any] = {}
    for c, name in enumerate(node.classes):
        rows = [z for z, y in zip(Z, split.y.tolist(), strict=True) if y == c]
        means[name] = sum(rows) / len(rows)
    far = {
        frozenset((a, b)): sum((means[a] - means[b]) ** 2) ** 0.5 for a, b in combinations(means, 2)
    }
    assert len(far) == 45
    scale = sum(far.values()) / 45
    return {pair: float(value / scale) for pair, value in far.items()}


def test_distances_of_pairs_are_the_literal_ones(done: pf.Run) -> None:
    far = literal(done)
    close = [{"automobile", "truck"}, {"airplane", "ship"}, {"deer", "horse"}, {"cat", "dog"}]
    vehicles = {"automobile", "truck", "airplane", "ship"}
    named = {
        "automobile and truck": far[frozenset(close[0])],
        "airplane and ship": far[frozenset(close[1])],
        "deer and horse": far[frozenset(close[2])],
        "cat and dog": far[frozenset(close[3])],
    }
    rest = [d for pair, d in far.items() if pair not in close]
    within = [d for pair, d in far.items() if pair <= vehicles]
    across = [d for pair, d in far.items() if len(pair & vehicles) == 1]
    assert (len(rest), len(within), len(across)) == (41, 6, 24)
    assert whole.distances(done) == pytest.approx(
        {
            **named,
            "the other pairs": sum(rest) / 41,
            "two vehicles": sum(within) / 6,
            "a vehicle and an animal": sum(across) / 24,
        }
    )


def test_digits_are_no_vehicles(done: pf.Run, tmp_path: Path) -> None:
    digits = {f"{a} and {b}": 1.0 + a for a, b in combinations(range(10), 2)}
    (tmp_path / AFTER).write_text(json.dumps({"distances": digits, "map": {}}))
    found = whole.distances(replace(done, folder=tmp_path))
    assert list(found) == ["1 and 7", "3 and 5", "6 and 8", "the other pairs"]
    assert (found["1 and 7"], found["3 and 5"], found["6 and 8"]) == (2, 4, 7)


def test_a_map_has_the_first_test_images(done: pf.Run) -> None:
    ((title, marks),) = whole.plane(done).items()
    (node,) = done.nodes.values()
    y = node.data["test"].y
    assert (title, list(marks)) == ("test images", ["all classes"])
    assert y is not None
    counted = {name: len(text.split()) for name, text in marks["all classes"].items()}
    drawn = y[: whole.POINTS].tolist()
    assert counted == {c: drawn.count(i) for i, c in enumerate(node.classes) if i in drawn}


def test_what_is_claimed() -> None:
    def closer(near: str, far: str = "the other pairs") -> tuple[Ref, str, Ref]:
        return Ref("one model", far), ">", Ref("one model", near)

    said = [(c.left, c.relation, c.right) for c in CIFAR10.claims]
    pairs = ["automobile and truck", "airplane and ship", "deer and horse", "cat and dog"]
    assert said[0] == closer("two vehicles", "a vehicle and an animal")
    assert said[1:] == [closer(pair) for pair in pairs]
    said = [(c.left, c.relation, c.right) for c in SVHN.claims]
    assert said == [closer(pair) for pair in ("1 and 7", "3 and 5", "6 and 8")]


@pytest.mark.parametrize("experiment", [CIFAR10, SVHN], ids=["CIFAR-10", "SVHN"])
def test_one_node_has_all_classes_and_shares_nothing(experiment: Any) -> None:
    (cell,) = experiment.cells
    method, task = cell.make()
    assert (method.name, task.num_nodes, task.partition, task.public) == ("local", 1, "iid", 0)
    assert method.init_epochs + method.local_epochs in (24, 15)

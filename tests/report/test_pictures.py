"""Who holds what is counted from the federation itself."""

import re

import pytest

from polyfed import methods, tasks
from polyfed.report import pictures
from polyfed.report.again import Again
from polyfed.tasks.task import Task


def made(task: Task, method: str = "local") -> Again:
    nodes = task.nodes(0)
    return Again(methods.make(method, {}, task), nodes, nodes)


def drawn(svg: str) -> dict[tuple[str, str], int]:
    """Counts by node and class, from the titles of the circles."""
    found = re.findall(r"<title>(\S+), (\S+): ([\d,]+)</title>", svg)
    return {(node, name): int(n.replace(",", "")) for node, name, n in found}


def test_training_samples_by_class() -> None:
    again = made(tasks.digits())
    counts = drawn(pictures.holdings(again)["svg"])
    for node in again.nodes:
        y = node.data["train"].y
        assert y is not None
        for k, name in enumerate(node.classes):
            assert counts.get((node.name, name), 0) == int((y == k).sum())
    assert sum(counts.values()) == sum(len(node.data["train"]) for node in again.nodes)


def test_sets_without_labels_by_their_proportions() -> None:
    again = made(tasks.make("digits-sets", {}), "fedul")
    found = pictures.holdings(again)
    counts = drawn(found["svg"])
    assert "known class proportions" in found["said"]
    for node in again.nodes:
        total = sum(n for (name, _), n in counts.items() if name == node.name)
        assert abs(total - len(node.data["train"])) <= 10  # rounded, class by class
    assert {name for name, _ in counts} == {node.name for node in again.nodes}


def test_columns_are_classes_of_all_nodes() -> None:
    labels, classes = pictures.labels_of(tasks.digits(heads="own").nodes(0))
    assert sorted(classes) == list("0123456789")
    node = tasks.digits(heads="own").nodes(0)[2]
    y = node.data["train"].y
    assert y is not None
    named = [node.classes[k] for k in y.tolist()]
    assert [classes[k] for k in labels[node.name].tolist()] == named


def test_slices_are_drawn_where_the_method_has_some() -> None:
    sliced = made(tasks.make("digits-permuted", {}), "partial-averaging")
    assert 'class="network"' in pictures.network(sliced)
    assert pictures.network(made(tasks.digits())) == ""


def test_no_classes() -> None:
    again = made(tasks.digits())
    for node in again.nodes:
        node.classes = ()
    assert pictures.holdings(again) == {
        "svg": "",
        "said": "No node of this task has classes to count.",
    }


def test_only_so_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_NODES", 2)
    found = pictures.holdings(made(tasks.digits()))
    assert {name for name, _ in drawn(found["svg"])} == {"M0", "M1"}
    assert found["said"] == "1 more nodes are not drawn."

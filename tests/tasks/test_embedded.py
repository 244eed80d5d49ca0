"""Digits: who holds what, nothing twice, and labels that mean what they say."""

from itertools import combinations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from polyfed import methods, options, tasks
from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.tasks.embedded import GROUPS

PRIVATE = ("train", "val_es", "val_rb", "test")


def rows(x: Tensor) -> list[tuple[int, ...]]:
    """Each image as its inked pixels, 1 to 16, cropped: where it was moved to does not matter."""
    return [cropped(image[0]) for image in ((x + 1) * 8).round().long()]


def cropped(image: Tensor) -> tuple[int, ...]:
    (top, bottom), (left, right) = (
        (int(i.min()), int(i.max()) + 1) for i in image.nonzero().unbind(1)
    )
    inked = image[top:bottom, left:right]
    return (right - left, *inked.flatten().tolist())


def truth() -> dict[tuple[int, ...], int]:
    """The digit of every image, by its pixels; scikit-learn's have no two alike."""
    loaded = load_digits()
    known = {
        cropped(torch.tensor(image).long()): int(digit)
        for image, digit in zip(loaded.images, loaded.target, strict=True)
    }
    assert len(known) == 1797
    return known


def test_every_image_is_moved_by_up_to_one_pixel() -> None:
    """The ink of an 8 x 8 image lies whole on the 10 x 10 canvas, at each of nine places."""
    x = tasks.digits().nodes(0)[0].data["public"].x
    assert x.shape[1:] == (1, 10, 10)
    known = truth()
    assert all(row in known for row in rows(x))
    tops = {int(image[0].nonzero()[0][0]) for image in ((x + 1) * 8).round().long()}
    assert {0, 1, 2} <= tops  # an image that touches its upper edge, moved up, left or down


@pytest.mark.parametrize("labels", [1, 8, 20])
def test_counts(labels: int) -> None:
    nodes = tasks.digits(labels=labels).nodes(0)
    assert [n.name for n in nodes] == ["M0", "M1", "M2"]
    for node, group in zip(nodes, GROUPS, strict=True):
        sizes = {name: len(split) for name, split in node.data.items()}
        assert (sizes["train"], sizes["val_es"], sizes["val_rb"]) == (5 * labels, 25, 25)
        for name, each in (("train", labels), ("val_es", 5), ("val_rb", 5)):
            y = node.data[name].y
            assert y is not None
            assert {c: int((y == c).sum()) for c in y.unique().tolist()} == dict.fromkeys(
                sorted(group), each
            )
    held = sum(len(n.data[s]) for n in nodes for s in PRIVATE)
    public = len(nodes[0].data["public"])
    assert held + public == 1797
    assert public == sum(int(c) // 2 for c in torch.bincount(torch.tensor(load_digits().target)))


@pytest.mark.parametrize("seed", [0, 1])
def test_no_image_is_held_twice(seed: int) -> None:
    nodes = tasks.digits().nodes(seed)
    sets = {f"{n.name} {s}": set(rows(n.data[s].x)) for n in nodes for s in PRIVATE}
    sets["public"] = set(rows(nodes[0].data["public"].x))
    for a, b in combinations(sets, 2):
        assert not sets[a] & sets[b], f"{a} and {b} share images"


@pytest.mark.parametrize("heads", ["own", "all"])
def test_the_class_of_a_label_is_the_digit_of_the_image(heads: str) -> None:
    known = truth()
    for node, group in zip(tasks.digits(heads=heads).nodes(3), GROUPS, strict=True):
        own = tuple(str(c) for c in sorted(group))
        assert node.classes == (own if heads == "own" else tuple("0123456789"))
        assert node.model(node.data["test"].x[:2]).shape == (2, len(node.classes))
        for name in PRIVATE:
            split = node.data[name]
            assert split.y is not None
            got = [node.classes[label] for label in split.y.tolist()]
            assert got == [str(known[row]) for row in rows(split.x)]
            assert set(got) == set(own)


def test_public_inputs_are_one_tensor_without_labels() -> None:
    nodes = tasks.digits().nodes(0)
    first = nodes[0].data["public"]
    assert first.y is None
    assert all(n.data["public"].x is first.x for n in nodes)
    known = truth()
    digits = [known[row] for row in rows(first.x)]
    assert digits != sorted(digits)  # their order says nothing


def same(a: list[Node], b: list[Node]) -> bool:
    return all(
        torch.equal(m.data[s].x, n.data[s].x) for m, n in zip(a, b, strict=True) for s in m.data
    ) and all(
        torch.equal(t, n.model.state()[name])
        for m, n in zip(a, b, strict=True)
        for name, t in m.model.state().items()
    )


def test_a_seed_is_a_federation() -> None:
    task = tasks.digits()
    assert same(task.nodes(0), tasks.digits().nodes(0))
    assert not same(task.nodes(0), task.nodes(1))


def test_initial_weights_are_common_or_own() -> None:
    def weights(init: str) -> list[Tensor]:
        return [n.model.state()["trunk.0.weight"] for n in tasks.digits(init=init).nodes(0)]

    a, b, c = weights("common")
    assert torch.equal(a, b)
    assert torch.equal(b, c)
    a, b, c = weights("own")
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"labels": 0}, "Digits.labels must be >= 1, got 0"),
        ({"labels": 40}, "Digits.labels must be between 1 and .*, got 40"),
        ({"labels": 10_000}, "Digits.labels must be between 1 and .*, got 10000"),
        ({"representation": 0}, "Digits.representation must be > 0"),
        ({"heads": "some"}, "task digits, heads: 'some' does not fit"),
    ],
)
def test_options_that_cannot_be(values: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tasks.digits(**values).nodes(0)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_recipe_fits_its_method(task: str, method: str, quick: bool) -> None:
    recipe = tasks.make(task, {"quick": quick}).recipe(method)
    built = options.build(methods.load(method), recipe, f"method {method}")
    assert all(getattr(built, name) == value for name, value in recipe.items())

"""Many tasks on the same images: each label means what its node's name says."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from polyfed.core.node import Node
from polyfed.errors import ConfigError
from polyfed.tasks.embedded import moved_digits
from polyfed.tasks.shared_inputs import NAMES, Attributes, attributes_of

SPLITS = {"train": 0.25, "val_es": 0.125, "val_rb": 0.125, "test": 0.5}

DIGITS = {
    "even": lambda d: d % 2 == 0,
    "prime": lambda d: d > 1 and all(d % k for k in range(2, d)),
    "high": lambda d: d >= 5,
    "loop": lambda d: d in (0, 6, 8, 9),
    "threefold": lambda d: d % 3 == 0,
    "square": lambda d: any(k * k == d for k in range(4)),
    "power-of-two": lambda d: any(2**k == d for k in range(4)),
    "straight": lambda d: d in (1, 4, 7),
}


def test_attributes_of_the_digit_by_their_definitions() -> None:
    digit = torch.arange(10)
    labels = attributes_of(torch.rand(10, 1, 4, 4), digit)
    for name, holds in DIGITS.items():
        got = labels[:, NAMES.index(name)].tolist()
        assert got == [int(holds(d)) for d in range(10)], name


def literal_ink(image: Tensor) -> dict[str, float]:
    """Eq. (1), pixel by pixel."""
    height, width = image.shape
    ink = {(r, c): float(image[r, c]) + 1 for r in range(height) for c in range(width)}
    total = sum(ink.values())
    row = sum(v * r for (r, _), v in ink.items()) / total
    column = sum(v * c for (_, c), v in ink.items()) / total
    return {
        "heavy": total,
        "wide": sum(v * (c - column) ** 2 for (_, c), v in ink.items()) / total,
        "tall": sum(v * (r - row) ** 2 for (r, _), v in ink.items()) / total,
        "slanted": sum(v * (r - row) * (c - column) for (r, c), v in ink.items()) / total,
    }


def test_attributes_of_the_ink_pixel_by_pixel() -> None:
    x, digit = moved_digits()
    some = torch.arange(0, 1797, 90)  # 20 images; an odd number has its median in it
    x, digit = x[some][:19, :, :, :9], digit[some][:19]
    labels = attributes_of(x, digit)
    figures = [literal_ink(image[0]) for image in x]
    for name in ("heavy", "wide", "tall", "slanted"):
        values = [figure[name] for figure in figures]
        median = sorted(values)[9]
        want = [int(value > median) for value in values]
        assert labels[:, NAMES.index(name)].tolist() == want
        assert sum(want) == 9


def pixels(x: Tensor) -> list[tuple[float, ...]]:
    return [tuple(row) for row in x.flatten(1).tolist()]


def check(nodes: list[Node]) -> None:
    """Labels are those of the images, and no image is in two splits of a node."""
    x, digit = moved_digits()
    truth = dict(zip(pixels(x), attributes_of(x, digit).tolist(), strict=True))
    for k, node in enumerate(nodes):
        assert node.classes == (f"not {node.name}", node.name)
        assert node.model(node.data["test"].x[:2]).shape == (2, 2)
        held = {name: pixels(split.x) for name, split in node.data.items()}
        for name, rows in held.items():
            y = node.data[name].y
            assert y is not None
            assert y.tolist() == [truth[row][k] for row in rows]
        for a, b in combinations(held, 2):
            assert not set(held[a]) & set(held[b])


def test_all_nodes_hold_the_same_images() -> None:
    nodes = Attributes().nodes(0)
    assert [n.name for n in nodes] == list(NAMES)
    assert len(nodes) == 12
    check(nodes)
    for name, share in SPLITS.items():
        assert all(n.data[name].x is nodes[0].data[name].x for n in nodes)
        assert len(nodes[0].data[name]) == pytest.approx(1797 * share, abs=10)
    assert sum(len(s) for s in nodes[0].data.values()) == 1797


def test_apart_each_node_has_its_own_images() -> None:
    whole, apart = Attributes().nodes(0), Attributes(apart=True).nodes(0)
    check(apart)
    for name in ("train", "val_es", "val_rb"):
        dealt = [row for node in apart for row in pixels(node.data[name].x)]
        assert sorted(dealt) == sorted(pixels(whole[0].data[name].x))
        sizes = [len(node.data[name]) for node in apart]
        assert max(sizes) - min(sizes) <= 1
    assert torch.equal(apart[3].data["test"].x, whole[3].data["test"].x)


def test_a_seed_is_a_federation() -> None:
    a, b, c = (Attributes(apart=True).nodes(seed)[0] for seed in (0, 0, 1))
    assert torch.equal(a.data["train"].x, b.data["train"].x)
    assert not torch.equal(a.data["train"].x, c.data["train"].x)
    assert all(torch.equal(t, b.model.state()[n]) for n, t in a.model.state().items())


def test_trunks_are_alike_and_quick_is_a_part() -> None:
    nodes = Attributes(quick=True, representation=7).nodes(0)
    assert [n.name for n in nodes] == list(NAMES[:4])
    states = [n.model.state("trunk") for n in nodes]
    assert all(torch.equal(states[0][name], s[name]) for s in states for name in s)
    assert nodes[0].model.output_size(nodes[0].data["test"].x[:1], "trunk") == 7


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"Attributes\.representation must be > 0"):
        Attributes(representation=0)

"""AG News as a federation, on rows that spell their own number."""

import os
from pathlib import Path

import pytest
import torch

from polyfed.core.node import Node
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.tasks.news import AgNews
from polyfed.tasks.text import CLASSES, Texts, agnews


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 train rows and 200 test rows: row i has label i mod 4 and says i."""
    folder = tmp_path_factory.mktemp("data")
    for name, first, n in (("train", 0, 400), ("test", 400, 200)):
        rows = [
            f'"{i % 4 + 1}","row","number {i - first} of {name}"\n' for i in range(first, first + n)
        ]
        (folder / f"{name}.csv").write_text("".join(rows))
    return folder


def check(nodes: list[Node], texts: Texts, renamed: int = 0) -> int:
    """Every row is a row of the data with its label; how many rows there are."""
    total = 0
    for k, node in enumerate(nodes):
        assert node.classes == CLASSES
        assert node.data.may_miss_classes
        for name, split in node.data.items():
            assert split.y is not None
            total += len(split)
            for x, y in zip(split.x, split.y.tolist(), strict=True):
                same = texts.y[(texts.x == x).all(1)].tolist()
                assert (y in same) or k < renamed, name
    return total


def test_dirichlet(news: Path) -> None:
    nodes = AgNews(data=news, num_nodes=4, length=6).nodes(0)
    texts = agnews(news, length=6)
    assert [n.name for n in nodes] == ["M0", "M1", "M2", "M3"]
    assert check(nodes, texts) == 600
    held = [set(n.data["train"].y.tolist()) for n in nodes]  # type: ignore[union-attr]
    assert min(map(len, held)) < 4
    model = nodes[0].model
    assert model(nodes[0].data["train"].x).shape[1] == 4
    assert model.output_size(nodes[0].data["train"].x, "trunk") == 32
    rows = len(texts.vocabulary)
    assert sum(p.numel() for p in model.parameters()) == rows * 32 + 32 * 4 + 4


def test_a_part_of_the_texts_is_known_by_its_size(news: Path) -> None:
    assert AgNews(data=news).shortfall() == "600 of 127,600 texts"


def test_without_validation_it_is_three_quarters_and_one(news: Path) -> None:
    nodes = AgNews(data=news, num_nodes=3, partition="iid", validation=0).nodes(0)
    for node in nodes:
        assert set(node.data) == {"train", "test"}
        assert len(node.data["train"]) == pytest.approx(150, abs=4)


def test_labels_by_other_names(news: Path) -> None:
    """The first node calls the world sports, and sports the world."""
    task = AgNews(data=news, num_nodes=2, partition="permute:0,1@1", min_count=1)
    plain = AgNews(data=news, num_nodes=2, partition="iid", min_count=1)
    for a, b in zip(task.nodes(0), plain.nodes(0), strict=True):
        ya, yb = a.data["train"].y, b.data["train"].y
        assert ya is not None
        assert yb is not None
        swap = {0: 1, 1: 0} if a.name == "M0" else {}
        assert torch.equal(a.data["train"].x, b.data["train"].x)
        assert ya.tolist() == [swap.get(c, c) for c in yb.tolist()]


def test_quick_is_every_twelfth_text(news: Path) -> None:
    whole, quick = (AgNews(data=news, num_nodes=2, quick=q).nodes(0) for q in (False, True))
    for a, b in zip(whole, quick, strict=True):
        for name in b.data:
            assert torch.equal(b.data[name].x, a.data[name].x[::12])
        assert len(a.data["train"]) > len(b.data["train"]) > 1


def test_a_seed_is_a_federation(news: Path) -> None:
    a, b, c = (AgNews(data=news, num_nodes=2).nodes(s)[0].data["train"].x for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"partition": "dirichlt:1"}, UnknownNameError, "Did you mean 'dirichlet'"),
        ({"num_nodes": 0}, ConfigError, r"AgNews\.num_nodes must be >= 1"),
        ({"length": 0}, ConfigError, r"AgNews\.length must be >= 1"),
        ({"min_count": 0}, ConfigError, r"AgNews\.min_count must be >= 1"),
        ({"width": 0}, ConfigError, r"AgNews\.width must be >= 1"),
        ({"validation": 0.7}, ConfigError, r"AgNews\.validation must be between 0 and 0.5"),
    ],
)
def test_options_that_cannot_be(values: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        AgNews(**values)


@pytest.mark.real_data
def test_agnews_for_real() -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA names no folder of published files")
    try:
        nodes = AgNews(validation=0).nodes(0)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert len(nodes) == 20
    rows = sum(len(s) for n in nodes for s in n.data.values())
    assert rows in (17_599, 127_600)

"""Tables as federations: who holds what, and that a node prepares its table alone."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from polyfed.core.phase import SquaredError
from polyfed.errors import ConfigError, DataError
from polyfed.tasks import tables
from polyfed.tasks.silos import Heart, Landmine, TableTask, Vehicle
from polyfed.tasks.tables import Table
from polyfed.train.evaluate import judged

NAN = float("nan")


def table(name: str, n: int, shift: float) -> Table:
    """Column 0 counts the rows, column 1 has gaps, column 2 is constant, column 3 is empty."""
    count = torch.arange(n, dtype=torch.float32)
    gaps = torch.where(count % 5 == 0, NAN, count**2 + shift)
    x = torch.stack([count, gaps, torch.full((n,), shift), torch.full((n,), NAN)], dim=1)
    return Table(name, x, (torch.arange(n) % 3 == 0).long())


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Heart:
    held = [table("a", 120, 7.0), table("b", 96, -3.0)]
    monkeypatch.setattr(tables, "heart", lambda folder: held)
    return Heart(data=tmp_path)


def test_splits_and_preparation_by_hand(two: Heart) -> None:
    for node, n, shift in zip(two.nodes(0), (120, 96), (7.0, -3.0), strict=True):
        splits = dict(node.data.items())
        assert {k: len(s) for k, s in splits.items()} == {
            "train": n // 2, "val_es": n // 8, "val_rb": n // 8, "test": n // 4,
        }  # fmt: skip
        for split in splits.values():
            assert split.y is not None
            assert int(split.y.sum()) == len(split) // 3
        # all rows in the order of column 0 are the table itself
        x = torch.cat([s.x for s in splits.values()])
        part = torch.cat([torch.full((len(s),), i) for i, s in enumerate(splits.values())])
        order = x[:, 0].argsort()
        x, train = x[order].double(), (part[order] == 0).nonzero().flatten()
        raw = table("", n, shift).x.double()
        filled = raw.clone()
        known = sorted(v for v in raw[train, 1].tolist() if v == v)
        half = len(known) // 2
        median = known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
        filled[raw[:, 1].isnan(), 1] = median
        for c in (0, 1):
            mean, sd = filled[train, c].mean(), filled[train, c].std(correction=0)
            torch.testing.assert_close(x[:, c], (filled[:, c] - mean) / sd, rtol=1e-4, atol=1e-4)
        assert not x[:, 2:].any()  # a constant and an empty column say nothing


def test_networks_and_names(two: Heart) -> None:
    a, b = two.nodes(0)
    assert [a.name, b.name] == ["a", "b"]
    assert a.classes == ("healthy", "ill")
    assert sum(p.numel() for p in a.model.parameters()) == 4 * 16 + 16 + 16 * 2 + 2
    assert all(torch.equal(t, b.model.state()[name]) for name, t in a.model.state().items())


def test_a_seed_is_a_federation(two: Heart) -> None:
    a, b, c = (two.nodes(seed)[0].data["train"].x for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_equal_tables_are_not_cut_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = [table(name, 60, 1.0) for name in "ab"]
    monkeypatch.setattr(tables, "landmine", lambda folder: held)
    a, b = Landmine(data=tmp_path).nodes(0)
    assert a.classes == ("clutter", "mine")
    assert not torch.equal(a.data["train"].x, b.data["train"].x)


def test_linear_models(two: Heart) -> None:
    node = replace(two, hidden=0).nodes(0)[0]
    assert not list(node.model.net.get_submodule("trunk").parameters())
    assert [tuple(p.shape) for p in node.model.parameters()] == [(2, 4), (2,)]


def test_mines_may_be_judged_by_the_area(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "landmine", lambda folder: [table("a", 96, 1.0)])
    (node,) = Landmine(data=tmp_path, measure="auc").nodes(0)
    split = node.data["test"]
    assert split.y is not None
    out = node.model(split.x).detach()
    want = roc_auc_score(split.y, out[:, 1] - out[:, 0])
    assert judged(node, "test") == pytest.approx(want)
    assert judged(Landmine(data=tmp_path).nodes(0)[0], "test") == float(
        (out.argmax(1) == split.y).double().mean()
    )


# ---- vehicle -------------------------------------------------------------------------------------


@pytest.fixture
def sensors(tmp_path: Path) -> Path:
    """Nodes with 50, 51, 300 and 60 samples; a feature is the sample's number, y its parity."""
    owner = np.repeat([0, 1, 2, 5], [50, 51, 300, 60])
    x = np.zeros((len(owner), 100), np.float32)
    x[:, 0] = np.arange(len(owner))
    np.savez(tmp_path / "vehicle.npz", x=x, y=np.arange(len(owner)) % 2 * 2 - 1, node=owner)
    return tmp_path


@pytest.mark.parametrize("outputs", [1, 2])
def test_vehicle(sensors: Path, outputs: int) -> None:
    nodes = Vehicle(data=sensors, outputs=outputs).nodes(0)
    assert [n.name for n in nodes] == ["S01", "S02", "S05"]
    assert [[len(n.data[s]) for s in ("train", "test")] for n in nodes] == [
        [50, 1], [50, 200], [50, 10],
    ]  # fmt: skip
    for node, first, n in zip(nodes, (50, 101, 401), (51, 300, 60), strict=True):
        held = torch.cat([s.x[:, 0] for s in node.data.values()])
        assert len(set(held.tolist())) == len(held)
        assert first <= int(held.min()) <= int(held.max()) < first + n
        for split in node.data.values():
            assert split.y is not None
            assert split.y.tolist() == (split.x[:, 0] % 2).tolist()
            assert split.y.dtype == (torch.float32 if outputs == 1 else torch.int64)
        assert node.model(split.x).shape == (len(split), outputs)
        assert set(node.data) == {"train", "test"}
    first_rows = nodes[1].data["train"].x[:, 0].tolist()
    assert first_rows != sorted(first_rows)  # drawn at random


def test_vehicle_network() -> None:
    """100=50=20=1 with sigmoids, and 100=50=20=2 with ReLU."""
    one, two = Vehicle(outputs=1).make_network(100), Vehicle().make_network(100)
    hidden = 100 * 50 + 50 + 50 * 20 + 20
    assert sum(p.numel() for p in one.parameters()) == hidden + 20 + 1
    assert sum(p.numel() for p in two.parameters()) == hidden + 2 * 20 + 2
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    z = x
    w = list(one.parameters())
    for weight, bias in zip(w[::2], w[1::2], strict=True):
        z = torch.sigmoid(z @ weight.T + bias)
    torch.testing.assert_close(one(x), z)
    torch.testing.assert_close(one.get_submodule("head")(one.get_submodule("trunk")(x)), z)


def test_one_output_has_its_squared_error(sensors: Path) -> None:
    node = Vehicle(data=sensors, outputs=1).nodes(0)[0]
    split = node.data["train"]
    assert split.y is not None
    want = ((node.model(split.x)[:, 0] - split.y) ** 2 / 2).mean()
    torch.testing.assert_close(SquaredError()(node.model, split.x, split.y), want)


def test_too_much_asked_of_the_sensors(sensors: Path) -> None:
    says = r"more than train=300 samples; the largest has 300. Fix: train of at most 299\."
    with pytest.raises(DataError, match=says):
        Vehicle(data=sensors, train=300).nodes(0)
    assert len(Vehicle(data=sensors, train=299).nodes(0)) == 1


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (Vehicle, {"train": 0}, r"Vehicle\.train must be >= 1"),
        (Vehicle, {"test": 0}, r"Vehicle\.test must be >= 1"),
        (Vehicle, {"outputs": 3}, r"Vehicle\.outputs must be one of 1, 2"),
        (Heart, {"hidden": -1}, r"Heart\.hidden must be >= 0"),
        (Landmine, {"hidden": -1}, r"Landmine\.hidden must be >= 0"),
    ],
)
def test_options_that_cannot_be(cls: type[TableTask], values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cls(**values)


# ---- the published files -------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("task", "count", "train"),
    [
        (Landmine(), 29, 345),
        (Heart(), 4, 152),
        (Vehicle(), 8, 50),
    ],
    ids=["landmine", "heart", "vehicle"],
)
def test_for_real(task: TableTask, count: int, train: int) -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA names no folder of published files")
    try:
        nodes = task.nodes(0)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert len(nodes) == count
    assert len(nodes[0].data["train"]) == train
    for node in nodes:
        node.data.check(node.name)
        for name, split in node.data.items():
            assert split.y is not None
            if name != "test":
                assert set(split.y.tolist()) == {0, 1}, f"{node.name} {name}"

"""Maps show the trained networks' representations, and say how they were projected."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed import methods, tasks
from polyfed.maths.procrustes import random_rotation
from polyfed.random import stream
from polyfed.report import maps as module
from polyfed.report.again import Again, make_again
from polyfed.report.collect import collect
from polyfed.report.maps import maps, project
from polyfed.train.evaluate import outputs

TASK = tasks.digits(quick=True)


@pytest.fixture
def by_two_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that can be checked: the first two coordinates."""
    monkeypatch.setattr(module, "project", lambda Z: (Z[:, :2], "the first two"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pf.Run:
    folder = tmp_path_factory.mktemp("maps") / "run"
    return pf.run(methods.make("fedlinked", {"rollback": False}, TASK), TASK, folder=folder)


def again_of(run: pf.Run) -> Again:
    found = make_again(run)
    assert isinstance(found, Again)
    return found


def like(points: Any, panel: dict[str, Any]) -> bool:
    """Whether points are the panel's, but for place and scale."""
    shown = torch.tensor([panel["x"], panel["y"]], dtype=torch.float64).T
    points = points.double() - points.double().mean(0)
    shown = shown - shown.mean(0)
    scale = points.norm() / shown.norm()
    return bool(torch.allclose(points, shown * scale, atol=float(2e-4 * scale)))


@pytest.mark.usefixtures("by_two_coordinates")
def test_a_panel_a_node_of_its_trunk(run: pf.Run) -> None:
    found = maps(again_of(run), pf.Run.open(str(run.folder)))
    assert found["said"] == "Networks after round 2, projected by the first two."
    titles = [panel["title"] for panel in found["panels"]]
    assert titles[:3] == [f"M{k}: test samples by class" for k in range(3)]
    again = again_of(run)
    x = torch.cat([node.data["test"].x for node in again.nodes])
    y = torch.cat([node.data["test"].y for node in again.nodes if node.data["test"].y is not None])
    some = torch.randperm(len(x), generator=stream(0, "report", "maps"))[: module.POINTS]
    for panel, node in zip(found["panels"], run.nodes.values(), strict=False):
        assert like(outputs(node.model, x[some], "trunk")[:, :2], panel)
        assert panel["groups"] == y[some].tolist()


@pytest.mark.usefixtures("by_two_coordinates")
def test_the_turned_space(run: pf.Run) -> None:
    """Node 1 with node 0's trunk in another basis: turned, node 0 lies upon it."""
    again = again_of(run)
    first, second = list(again.parties)[:2]
    rotation = random_rotation(32, stream(0, "turn"))
    second.model.load(first.model.state())
    state = dict(second.model.state())
    last = [name for name in state if name.startswith("trunk") and name.endswith("weight")][-1]
    bias = last.replace("weight", "bias")
    state[last], state[bias] = rotation @ state[last], rotation @ state[bias]
    second.model.load(state)
    panels = list(module._by_node(list(again.parties)))
    assert [p["title"] for p in panels] == [
        "Public inputs before M0's space is turned", "Public inputs after M0's space is turned",
    ]  # fmt: skip
    after = panels[1]
    points = torch.tensor([after["x"], after["y"]]).T
    groups = torch.tensor(after["groups"])
    assert [after["names"][g] for g in sorted(set(after["groups"]))] == ["M1", "M0 turned"]
    torch.testing.assert_close(points[groups == 2], points[groups == 1], atol=1e-3, rtol=0)
    before = panels[0]
    points, groups = torch.tensor([before["x"], before["y"]]).T, torch.tensor(before["groups"])
    assert (points[groups == 0] - points[groups == 1]).abs().max() > 0.1


def test_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    Z = torch.randn(40, 5, generator=stream(0, "Z"), dtype=torch.float64)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    points, name = project(Z)
    assert (tuple(points.shape), name) == ((40, 2), "t-SNE")
    assert torch.equal(project(Z)[0], points)
    assert project(Z[:20])[1] == "PCA"

    class UMAP:
        def __init__(self, **options: Any) -> None:
            assert options["random_state"] == 0

        def fit_transform(self, Z: Any) -> Any:
            return Z[:, :2]

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=UMAP))
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    points, name = project(Z)
    assert name == "UMAP"
    assert torch.equal(points, Z[:, :2])


def test_why_there_are_none(run: pf.Run, tmp_path: Path) -> None:
    assert maps("no files", run) == {"panels": [], "said": "no files"}
    assert run.folder is not None
    bare = pf.Run.open(run.folder)
    object.__setattr__(bare, "folder", tmp_path)
    assert "has no checkpoint" in maps(again_of(run), bare)["said"]
    for node in (again := again_of(run)).parties:
        node.data = pf.Data(train=node.data["train"])
    assert "need nodes with a trunk" in maps(again, pf.Run.open(run.folder))["said"]


@pytest.mark.usefixtures("by_two_coordinates")
def test_only_when_asked_for(run: pf.Run) -> None:
    assert run.folder is not None
    assert collect([run.folder])["runs"][0]["maps"] is None
    assert len(collect([run.folder], with_maps=True)["runs"][0]["maps"]["panels"]) == 5

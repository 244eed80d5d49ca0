"""FedLinked's maps: what is computed of trained nodes, against literal translations; pictures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed import experiments, tasks
from polyfed.errors import DataError
from polyfed.experiments import _public as public
from polyfed.experiments import fedlinked, index, pictures, plot
from polyfed.experiments import fedlinked_maps as maps
from polyfed.experiments.experiment import Experiment, Picture, Quick, Ref
from polyfed.experiments.reproduce import reproduce
from polyfed.random import stream
from polyfed.tasks.files import Images
from polyfed.train import outputs

ALL = {e.name.removeprefix("fedlinked-figure-"): e for e in maps.EXPERIMENTS}
OWN, OTHER, EVERY = "own classes", "other classes", "all classes"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HELD = {
    "M0": {"cat", "deer", "dog", "horse"},
    "M1": {"cat", "deer", "frog"},
    "M2": {"airplane", "automobile", "ship", "truck"},
}
SMALL = {"blocks": 1, "channels": 2, "representation": 5}
SHORT = {"rounds": 1, "batch": 64, "init_epochs": 1, "local_epochs": 1}
LINKED = {**SHORT, "distil_epochs": 1, "finetune_epochs": 1}
SEED = 3  # with which every split of so few images has every class
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 batches of 300 images of noise; the label of each is in its file and nowhere else."""
    folder = tmp_path_factory.mktemp("data")
    for b, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = np.random.default_rng(b).integers(0, 256, (300, 1 + 3072), np.uint8)
        rows[:, 0] = np.arange(300) % 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane that can be checked, and needs no time: the first two coordinates."""
    monkeypatch.setattr(public, "in_plane", lambda Z: Z[:, :2].float())


@pytest.fixture(scope="module")
def done(cifar: Path) -> pf.Run:
    """A small run with its trained nodes."""
    task = tasks.make("cifar10", {"data": cifar, **SMALL})
    return pf.run(pf.FedLinked(**LINKED), task, seed=SEED, progress=False)


def labels_of(run: pf.Run, cifar: Path) -> list[int]:
    """The labels of the public inputs, one by one, from the bytes of the files."""
    known = {}
    for path in cifar.glob("*.bin"):
        for row in np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073):
            known[row[1:].tobytes()] = int(row[0])
    pixels = (run.nodes["M0"].data["public"].x.double() + 1) * 127.5
    return [known[image.round().byte().numpy().tobytes()] for image in pixels]


def representations(run: pf.Run) -> dict[str, Array]:
    return {
        name: outputs(node.model, node.data["public"].x, "trunk").double().numpy()
        for name, node in run.nodes.items()
    }


def literal_share(source: Array, target: Array, y: list[int]) -> float:
    """Eq. (1), a loop over inputs."""
    shares = []
    for i in range(len(y)):
        others = [j for j in range(len(y)) if j != i]
        others.sort(key=lambda j: float(np.linalg.norm(source[i] - target[j])))
        nearest = others[:10]
        shares.append(sum(y[j] == y[i] for j in nearest) / len(nearest))
    return sum(shares) / len(shares)


def literal_square(points: Array) -> Array:
    """Into the square of 0 to 999, centred, with one scale for both axes."""
    span = max(np.ptp(points[:, 0]), np.ptp(points[:, 1]))
    middle = (points.max(0) + points.min(0)) / 2
    return np.asarray(999 * ((points - middle) / span + 0.5))


def read(groups: dict[str, str]) -> list[tuple[str, int, int]]:
    """Class and coordinates of every point."""
    found = []
    for name, text in groups.items():
        found += [(name, *map(int, point.split(","))) for point in text.split()]
    return sorted(found)  # type: ignore[arg-type]


def near(found: list[tuple[str, int, int]], wanted: list[tuple[str, float, float]]) -> bool:
    """The same classes, and each point within a unit, whatever is rounded how."""
    names = [name for name, *_ in found] == [name for name, *_ in sorted(wanted)]
    left = [(name, np.array(at)) for name, *at in wanted]
    for name, *at in found:
        gaps = [float(abs(there - at).max()) if n == name else 1e9 for n, there in left]
        if not gaps or min(gaps) > 1:
            return False
        left.pop(gaps.index(min(gaps)))
    return names and not left


# ---- which there are, and what they run ----------------------------------------------------------


def test_all_figures_are_there_and_listed(tmp_path: Path) -> None:
    assert list(ALL) == ["5.3", "5.4", "5.5", "5.6", "5.7"]
    assert experiments.load("fedlinked-figure-5.3") is ALL["5.3"]
    text = index.pages(tmp_path)[tmp_path / "index.md"]
    listed, left_out = text.split("## Tables and figures that are not above")
    assert all(f"| `fedlinked-figure-{number}` |" in listed for number in ALL)
    assert "5.7" not in left_out


@pytest.mark.parametrize("number", ALL)
def test_the_cells_are_those_of_table_53(number: str) -> None:
    panel = "SVHN" if number in ("5.3", "5.7") else "CIFAR-10"
    table = next(e for e in fedlinked.EXPERIMENTS if e.name == "fedlinked-table-5.3")
    wanted = {c.series: c.make() for c in table.cells if c.panel == panel}
    cells = {c.series: c.make() for c in ALL[number].cells}
    both = ["separated", "FedLinked"]
    assert list(cells) == (both if number < "5.6" else both[1:])
    assert all(cells[series] == wanted[series] for series in cells)
    assert {c.after for c in ALL[number].cells} == {public.public_maps}  # so they share runs
    assert ALL[number].title.endswith(panel)


@pytest.mark.parametrize(
    ("number", "which"),
    [("5.3", (EVERY, OTHER)), ("5.4", (OWN,)), ("5.5", (OTHER,))],
)
def test_claims_of_a_nodes_map(number: str, which: tuple[str, ...]) -> None:
    figures = [f"{node}, {name}" for name in which for node in HELD]
    claims = [(c.left, c.relation, c.right) for c in ALL[number].claims]
    assert claims == [(Ref("FedLinked", f), ">", Ref("separated", f)) for f in figures]


def test_the_claim_of_a_rotation() -> None:
    for number in ("5.6", "5.7"):
        (claim,) = ALL[number].claims
        said = "same class, after the rotation above same class, before the rotation"
        assert str(claim) == f"FedLinked: {said}"


def test_tables_and_figures_share_their_runs() -> None:
    """What every run of a table is asked for is what the maps show, so nothing is run twice."""
    shown = {(c.task, c.method) for e in maps.EXPERIMENTS for c in e.cells}
    for experiment in fedlinked.EXPERIMENTS:
        for cell in experiment.cells:
            plain = replace(cell, options={}, task_options={})
            is_shown = (cell.task, cell.method) in shown and cell.make() == plain.make()
            assert (cell.after is public.public_maps) is is_shown, (experiment.name, cell.label)


def test_quick_says_what_it_scaled() -> None:
    cells = ALL["5.4"].scaled(quick=True)
    says = " ".join(ALL["5.4"].changes(cells, 1, quick=True))
    for part in ("one in twelve", "0.2 instead of 0.79", "distil_epochs 18 → 1"):
        assert part in says


# ---- what is computed of trained nodes -----------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 1024])
def test_same_class_is_the_literal_share(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "_CHUNK", chunk)
    source, target = (
        torch.randn(40, 4, generator=stream(0, name), dtype=torch.float64) for name in "st"
    )
    y = torch.arange(40) % 3
    target[:, 0] += y
    for a, b in ((source, target), (target, source), (target, target)):
        assert public.same_class(a, b, y) == pytest.approx(
            literal_share(a.numpy(), b.numpy(), y.tolist())
        )


def test_same_class_of_groups_far_apart() -> None:
    y = torch.tensor([0] * 12 + [1] * 12)
    Z = 100.0 * y[:, None] + torch.rand(24, 2, generator=stream(0), dtype=torch.float64)
    assert public.same_class(Z, Z, y) == 1
    assert public.same_class(Z, 100 - Z, y) == 0
    assert public.same_class(Z[:3], Z[:3], y[:3]) == 1  # fewer than ten others
    alone = torch.arange(24)
    assert public.same_class(Z, Z, alone) == 0  # nobody is asked about itself
    assert public.same_class(Z[:3], Z[:3], alone[:3]) == 0


def test_labels_are_found_by_pixels() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(64, 1, 2, 2)
    images = Images(pixels, torch.arange(64) % 10, CLASSES, 64)
    some = torch.tensor([63, 5, 5, 0, 40])
    x = pixels[some].float() / 127.5 - 1
    assert public.labels_among(images, x).tolist() == [3, 5, 5, 0, 0]
    with pytest.raises(DataError, match="1 of 4 public inputs are not in the published files"):
        public.labels_among(replace(images, x=pixels[:60], y=images.y[:60]), x)


@pytest.mark.usefixtures("flat")
def test_figures_and_maps_of_every_node(done: pf.Run, cifar: Path) -> None:
    y, Z = labels_of(done, cifar), representations(done)
    found = public.public_maps(done)["nodes"]
    assert list(found) == ["M0", "M1", "M2"]
    assert 100 < len(y) < public.POINTS
    for node, own in HELD.items():
        rows = {
            EVERY: list(range(len(y))),
            OWN: [i for i, c in enumerate(y) if CLASSES[c] in own],
            OTHER: [i for i, c in enumerate(y) if CLASSES[c] not in own],
        }
        wanted = {
            k: literal_share(Z[node][r], Z[node][r], [y[i] for i in r]) for k, r in rows.items()
        }
        assert found[node]["figures"] == pytest.approx(wanted)
        square = literal_square(Z[node][:, :2])
        assert list(found[node]["map"]) == [OWN, OTHER]
        for which in (OWN, OTHER):
            points = [(CLASSES[y[i]], *square[i]) for i in rows[which]]
            assert near(read(found[node]["map"][which]), points)


@pytest.mark.usefixtures("flat")
def test_figures_and_maps_of_the_rotation(done: pf.Run, cifar: Path) -> None:
    y, Z = labels_of(done, cifar), representations(done)
    U, _, Vt = np.linalg.svd(sum(np.outer(a, b) for a, b in zip(Z["M0"], Z["M1"], strict=True)))
    turned = np.stack([Vt.T @ U.T @ a for a in Z["M0"]])
    found = public.public_maps(done)["pair"]
    wanted = {
        f"{what}, {when} the rotation": value
        for when, rows in (("before", Z["M0"]), ("after", turned))
        for what, value in (
            ("distance", np.sqrt(((rows - Z["M1"]) ** 2).sum() / (Z["M1"] ** 2).sum())),
            ("same class", literal_share(rows, Z["M1"], y)),
        )
    }
    assert found["figures"] == pytest.approx(wanted)
    n = public.POINTS // 2
    three = np.concatenate([Z["M0"][:n], turned[:n], Z["M1"][:n]])
    square = literal_square(three[:, :2])
    for when, first in (("before", 0), ("after", n)):
        shown = found["maps"][f"{when} the rotation"]
        assert list(shown) == ["M0", "M1"]
        for node, start in (("M0", first), ("M1", 2 * n)):
            points = [(CLASSES[y[i]], *square[start + i]) for i in range(n)]
            assert near(read(shown[node]), points)


def test_a_map_has_only_so_many_points(done: pf.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "POINTS", 60)
    monkeypatch.setattr(public, "HALF", 30)
    found = public.public_maps(done)
    assert [sum(len(read(g)) for g in n["map"].values()) for n in found["nodes"].values()] == [
        60
    ] * 3
    shown = found["pair"]["maps"]["after the rotation"]
    assert {node: len(read(groups)) for node, groups in shown.items()} == {"M0": 30, "M1": 30}


# ---- from runs to pictures -----------------------------------------------------------------------


OPTIONS = {"local": SHORT, "fedlinked": LINKED}


def small(experiment: Experiment) -> Experiment:
    cells = [
        replace(c, task="cifar10", task_options=SMALL, options=OPTIONS[c.method])
        for c in experiment.cells
    ]
    return replace(experiment, cells=cells, quick=Quick(says="-", task_options={}))


@pytest.mark.usefixtures("flat")
def test_figures_share_runs_and_keep_what_they_show(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "is_available", lambda: False)  # drawing is tested below, and slow
    found = {}
    for number, experiment in ALL.items():
        results = reproduce(
            small(experiment), data=cifar, out=tmp_path, seeds=[SEED], progress=False
        )
        found[number] = results.summary
        folder = tmp_path / experiment.name
        assert (folder / "summary.json").stat().st_size < 60_000
        assert "![" in (folder / "page.md").read_text()
    assert len(list((tmp_path / "runs").iterdir())) == 2  # FedLinked and separated, once each
    kept = {number: [cell["kept"] for cell in s["cells"]] for number, s in found.items()}
    for k in range(2):
        assert list(kept["5.3"][k]) == list(HELD)
        for node, own in HELD.items():
            assert kept["5.4"][k][node] == {OWN: kept["5.3"][k][node][OWN]}
            assert kept["5.5"][k][node] == {OTHER: kept["5.3"][k][node][OTHER]}
            assert set(kept["5.4"][k][node][OWN]) == own
    assert list(kept["5.6"][0]) == ["before the rotation", "after the rotation"]
    figures = [cell["figures"] for cell in found["5.3"]["cells"]]
    assert figures[0] != figures[1]
    assert list(figures[0]) == [f"{node}, {which}" for which in (EVERY, OTHER) for node in HELD]
    assert list(found["5.6"]["cells"][0]["figures"]) == [
        f"{what}, {when} the rotation"
        for when in ("before", "after")
        for what in ("distance", "same class")
    ]
    last = json.loads((tmp_path / "fedlinked-figure-5.6" / "summary.json").read_text())
    assert last["cells"][0]["kept"] == kept["5.6"][0]


def test_a_picture_has_a_row_a_cell_a_colour_a_class_and_a_shape_a_mark() -> None:
    pytest.importorskip("matplotlib", reason="pictures need polyfed[plots]")
    left = {OWN: {"cat": "0,1 2,3", "dog": "4,5"}, OTHER: {"ship": "6,7"}}
    right = {OWN: {"ship": "8,9"}, OTHER: {"cat": "10,11"}}
    cells = [{"series": s, "kept": {"M0": left, "M1": right}} for s in ("separated", "FedLinked")]
    assert isinstance(ALL["5.3"].plot, Picture)
    figure = ALL["5.3"].plot.draw(cells)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "separated: M0", "separated: M1", "FedLinked: M0", "FedLinked: M1",
    ]  # fmt: skip
    cat, dog, ship = figure.axes[2].collections
    assert cat.get_offsets().tolist() == [[0, 1], [2, 3]]
    assert ship.get_offsets().tolist() == [[6, 7]]
    own_ship, other_cat = figure.axes[3].collections
    colours = [tuple(c.get_edgecolor()[0]) for c in (cat, dog, ship)]
    assert len(set(colours)) == 3
    assert [tuple(c.get_edgecolor()[0]) for c in (other_cat, own_ship)] == [colours[0], colours[2]]
    shapes = [c.get_paths()[0].vertices.tolist() for c in (cat, dog, ship, own_ship, other_cat)]
    assert shapes[0] == shapes[1] == shapes[3] != shapes[2] == shapes[4]
    below, above = figure.legends
    assert [text.get_text() for text in below.get_texts()] == ["cat", "dog", "ship"]
    assert [text.get_text() for text in above.get_texts()] == [OWN, OTHER]
    assert {axes.get_xlim() for axes in figure.axes} == {axes.get_ylim() for axes in figure.axes}


def test_one_shape_needs_no_legend() -> None:
    pytest.importorskip("matplotlib", reason="pictures need polyfed[plots]")
    figure = pictures.class_maps([{"series": "a", "kept": {"M0": {OWN: {"cat": "0,1 999,0"}}}}])
    assert len(figure.legends) == 1

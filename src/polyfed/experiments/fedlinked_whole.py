r"""FedLinked's Figure 4.1 (Kadar 2021, section 4.2): classes in the space of one model of all data.

    m_c = mean of trunk(x) over test images x of class c
    d(a, b) = |m_a - m_b| / mean over all pairs of |m - m'|                                      (1)

The paper draws a map and reads off it which classes lie close to each other; its partition of the
classes among three nodes follows from that. Here d of those pairs is held against d of the others.
Deviations from the paper: t-SNE in the place of UMAP; the measure (1) is ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import combinations
from typing import Any, cast

from torch import Tensor

from polyfed.engines.run import Run
from polyfed.experiments._public import POINTS, found_in, groups
from polyfed.experiments.experiment import Cell, Claim, Experiment, Picture, Ref
from polyfed.experiments.fedlinked import CIFAR10, PAPER, QUICK, SVHN, TASKS
from polyfed.experiments.pictures import class_maps
from polyfed.train.evaluate import outputs
from polyfed.train.plane import in_plane

Pair = tuple[str, str]
_ONE = "one model"
_MAP = "all classes"
_REST = "the other pairs"
_WITHIN, _ACROSS = "two vehicles", "a vehicle and an animal"
_VEHICLES = ("airplane", "automobile", "ship", "truck")
CLOSE: Mapping[str, tuple[Pair, ...]] = {
    CIFAR10: (("automobile", "truck"), ("airplane", "ship"), ("deer", "horse"), ("cat", "dog")),
    SVHN: (("1", "7"), ("3", "5"), ("6", "8")),
}
_EPOCHS = {CIFAR10: 24, SVHN: 15}  # as separated learning trains before its first round


def of_classes(run: Run) -> dict[str, Any]:
    """Eq. (1) of every pair of classes, and a map of some test images; of one node that has all."""
    (node,) = run.nodes.values()
    split = node.data["test"]
    y = cast(Tensor, split.y)
    Z = outputs(node.model, split.x, "trunk").double()
    means = [Z[y == c].mean(0) for c in range(len(node.classes))]
    far = {
        _pair(a, b): float((means[j] - means[k]).norm())
        for (j, a), (k, b) in combinations(enumerate(node.classes), 2)
    }
    scale = statistics.fmean(far.values())
    drawn = groups(in_plane(Z[:POINTS]), {_MAP: y[:POINTS] >= 0}, y[:POINTS], node.classes)
    return {"distances": {pair: d / scale for pair, d in far.items()}, "map": drawn}


def distances(run: Run) -> dict[str, float]:
    """The pairs that the paper names, and the mean of the others."""
    far: Mapping[str, float] = found_in(run)["distances"]
    near = [_pair(*pair) for pairs in CLOSE.values() for pair in pairs]
    figures = {pair: far[pair] for pair in near if pair in far}
    figures[_REST] = statistics.fmean(d for pair, d in far.items() if pair not in near)
    for name, vehicles in ((_WITHIN, 2), (_ACROSS, 1)):
        if some := [d for pair, d in far.items() if _vehicles_in(pair) == vehicles]:
            figures[name] = statistics.fmean(some)
    return figures


def plane(run: Run) -> dict[str, Any]:
    """The map."""
    return {"test images": found_in(run)["map"]}


def _pair(a: str, b: str) -> str:
    return f"{a} and {b}"


def _vehicles_in(pair: str) -> int:
    return len(set(pair.split()) & set(_VEHICLES))


def _cell(panel: str) -> Cell:
    return Cell(
        method="local",
        task=TASKS[panel],
        series=_ONE,
        options={"rounds": 1, "init_epochs": 0, "local_epochs": _EPOCHS[panel], "batch": 128},
        task_options={"partition": "iid", "num_nodes": 1, "public": 0.0},
        after=of_classes,
    )


def _closer(near: str, far: str) -> Claim:
    return Claim(Ref(_ONE, far), ">", Ref(_ONE, near))


def _figure(letter: str, panel: str, *more: Claim) -> Experiment:
    return Experiment(
        name=f"fedlinked-figure-4.1{letter}",
        title=f"Classes in the plane, by one model of all of them, {panel}",
        paper=f"{PAPER}, Figure 4.1/{letter}",
        cells=[_cell(panel)],
        figures=distances,
        claims=[*more, *(_closer(_pair(*pair), _REST) for pair in CLOSE[panel])],
        plot=Picture(class_maps, plane),
        quick=QUICK,
        notes=(
            "Figures are distances between the means of two classes, by the representations of "
            "test images, over the mean of all pairs: below 1 is closer than the average. That "
            "measure is ours; the paper reads a map.",
            f"The paper's map is by UMAP, ours by t-SNE, of the first {POINTS} test images (which "
            "are shuffled).",
            "How the paper trained this model it does not say: here as separated learning before "
            f"its first round ({_EPOCHS[panel]} epochs), in batches of 128, which is about what "
            "its batch ratio comes to at a node on CIFAR-10. A quarter of the images is for the "
            "test, a twentieth for each validation set.",
        ),
    )


EXPERIMENTS = [
    _figure("a", CIFAR10, _closer(_WITHIN, _ACROSS)),
    _figure("b", SVHN),
]

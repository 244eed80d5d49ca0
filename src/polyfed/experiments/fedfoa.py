"""FedFoA's tables and figures (Liu et al., sections 4.2 and 4.3) on CIFAR-10 and CIFAR-100.

Networks and hyper-parameters are those of its section 4.1, which the tasks hold as recipes. What it
prints in percent is a share here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.engines.run import Run
from polyfed.experiments._public import Groups, groups
from polyfed.experiments.experiment import (
    ACCURACY,
    Cell,
    Claim,
    Dots,
    Experiment,
    Lines,
    Picture,
    Quick,
    Ref,
    by_round,
)
from polyfed.experiments.pictures import class_maps, heat_maps
from polyfed.tasks.files import CIFAR10_CLASSES

PAPER = "Liu et al., FedFoA, 2022"
CIFAR10, CIFAR100 = "CIFAR-10", "CIFAR-100"
TASKS = {CIFAR10: "cifar10-encoders", CIFAR100: "cifar100-encoders"}
MEAN, LAST, BEST = "mean", "last", "best"
FOA = "FedFoA"
_QUICK = Quick(
    says="images: one in a hundred, half of them set aside; networks a few channels wide",
    seeds=1,
    task_options={"quick": True, "public": 250},  # of CIFAR-10's 500
    options={
        "rounds": 2,
        "warm_up": 1,
        "local_epochs": 1,
        "batch": 64,
        "projection": 8,
        "predictor_hidden": 64,
        "projector_hidden": 64,
        "probe_epochs": 5,
        "distil_steps": 5,
        "alignment": 200,
    },
)
_NOTES = (
    "Rounds, local epochs, momentum, weight decay and the schedule of the learning rate are not "
    "stated: 100 rounds of 5 epochs, 0.9, 5e-4 and a cosine over the rounds, as EasyFL has them.",
    "The projector has a hidden layer of 4,096 with BatchNorm, the paper's is a linear layer: "
    "VGG-9 and AlexNet have no BatchNorm, and BYOL collapses without any.",
    "The linear probe is trained on all labelled training images; the paper does not say which.",
)


def _share(percent: str) -> str:
    """A printed percentage as a share, with as many digits.

    >>> _share("77.93"), _share("41.2"), _share("-")
    ('0.7793', '0.412', '-')
    """
    whole, _, rest = percent.partition(".")
    return percent if percent == "-" else f"0.{whole}{rest}"


# ---- Tables 1 and 2: different networks ----------------------------------------------------------

NETWORKS = {"resnet18": "ResNet-18", "vgg9": "VGG-9", "alexnet": "AlexNet", "resnet34": "ResNet-34"}
_DIFFERENT = {"BYOL": "byol", "FedMD": "fedmd-ssl", "FedDF": "feddf-ssl", FOA: "fedfoa"}
_COLUMNS = (*NETWORKS.values(), MEAN)
_TABLES = {  # rows: methods; columns: networks, then their mean
    CIFAR10: {
        "BYOL": "77.93 73.49 68.74 77.14 74.33",
        "FedMD": "76.45 74.32 70.13 76.74 74.41",
        "FedDF": "78.35 74.54 70.89 78.43 75.55",
        FOA: "80.45 75.86 71.95 81.14 77.35",
    },
    CIFAR100: {
        "BYOL": "50.61 45.59 39.42 49.52 46.29",
        "FedMD": "50.37 45.98 41.2 49.17 46.68",
        "FedDF": "51.35 46.24 41.31 49.87 47.19",
        FOA: "52.85 - 42.06 50.49 48.07",
    },
}


def by_network(run: Run) -> dict[str, float]:
    """Final accuracy of every network, and the mean."""
    found = {NETWORKS[name.partition("-")[2]]: value for name, value in run.accuracy.items()}
    return {**found, MEAN: statistics.fmean(found.values())}


def _linear(**options: Any) -> dict[str, Any]:
    return {"judge": "linear", **options}


def _of_all(**task_options: Any) -> dict[str, Any]:
    return {"probe": "all", **task_options}


def _different(series: str, panel: str) -> Cell:
    more: dict[str, Mapping[str, Any]] = {
        "FedMD": {"public": 5000},
        "FedDF": {"public": 5000, "hub": True},
    }
    return Cell(
        method=_DIFFERENT[series],
        task=TASKS[panel],
        options=_linear(),
        task_options=_of_all(**more.get(series, {})),
        series=series,
    )


def _table(number: int, panel: str) -> Experiment:
    published = {
        Ref(series, column): _share(text)
        for series, row in _TABLES[panel].items()
        for column, text in zip(_COLUMNS, row.split(), strict=True)
        if text != "-"
    }
    others = [name for name in _DIFFERENT if name != FOA]
    shift = (
        "The paper's row of FedFoA has AlexNet's and ResNet-34's numbers one column to the left "
        "and ResNet-34's twice: its mean says so. VGG-9's is missing, and is left out here.",
    )
    subset = (
        "Where there are only 10,000 training images, as in our subset, these are half of them: "
        "nodes of FedMD and FedDF then have 1,250 each, those of the others 2,500.",
    )
    return Experiment(
        name=f"fedfoa-table-{number}",
        title=f"Different networks without labels, {panel}",
        paper=f"{PAPER}, Table {number}",
        cells=[_different(series, panel) for series in _DIFFERENT],
        figures=by_network,
        published=published,
        claims=[
            *(Claim(Ref(FOA, MEAN), ">", Ref(other, MEAN)) for other in others),
            *(Claim(Ref(other, MEAN), ">", Ref("BYOL", MEAN)) for other in ("FedMD", "FedDF")),
            Claim(Ref("BYOL", "ResNet-18"), ">", Ref("BYOL", "AlexNet")),
        ],
        plot=Dots("linear probe, test accuracy", figures=_COLUMNS),
        evaluate_every=1000,
        quick=_QUICK,
        notes=(
            *(shift if panel == CIFAR100 else ()),
            "FedMD and FedDF need public images, of which the paper says nothing: 5,000 training "
            "images are set aside for them, so that their nodes have 11,250 each, not 12,500.",
            *(subset if panel == CIFAR100 else ()),
            *_NOTES,
        ),
    )


# ---- Table 3: equal networks ---------------------------------------------------------------------

_BASES = {"FedBYOL": "fedbyol", "FedU": "fedu", "FedEMA": "fedema"}
_EQUAL = {  # rows: methods; columns: last and best on CIFAR-10, last and best on CIFAR-100
    "FedBYOL": "73.76 74.21 42.56 42.94",
    "FedBYOL+FedFoA": "78.54 79.00 46.89 47.13",
    "FedU": "77.12 77.24 44.85 45.17",
    "FedU+FedFoA": "78.37 78.71 47.29 47.46",
    "FedEMA": "75.48 76.12 43.19 43.83",
    "FedEMA+FedFoA": "78.82 78.82 49.84 49.87",
}
_EQUAL_QUICK = replace(_QUICK, task_options={**_QUICK.task_options, "num_nodes": 3})
_EQUAL_NOTES = (
    "The number of nodes is not stated: 5, as EasyFL has it, with 10,000 images each.",
    "The paper evaluates a global model. FedEMA leaves none at the nodes: the figure is the mean "
    "over nodes, each with its network as it begins the next round.",
)


def _equal(series: str, data: str, options: Mapping[str, Any] | None = None, **at: Any) -> Cell:
    base, _, foa = series.partition("+")
    own = {"base": _BASES[base]} if foa else {}
    return Cell(
        method="fedfoa" if foa else _BASES[base],
        task=TASKS[data],
        options=_linear(**own, **(options or {})),
        task_options=_of_all(encoders="resnet18", num_nodes=5),
        series=series,
        **at,
    )


def last_and_best(run: Run) -> dict[str, float]:
    """Mean accuracy at the end, and the best of all rounds that were evaluated."""
    return {LAST: run.mean_accuracy, BEST: max([*by_round(run).values(), run.mean_accuracy])}


def _table_3() -> Experiment:
    columns = [(panel, figure) for panel in TASKS for figure in (LAST, BEST)]
    published = {
        Ref(series, figure, panel): _share(text)
        for series, row in _EQUAL.items()
        for (panel, figure), text in zip(columns, row.split(), strict=True)
    }
    return Experiment(
        name="fedfoa-table-3",
        title="Equal networks without labels, with FedFoA and without",
        paper=f"{PAPER}, Table 3",
        cells=[_equal(series, panel, panel=panel) for panel in TASKS for series in _EQUAL],
        figures=last_and_best,
        published=published,
        claims=[
            Claim(Ref(f"{base}+{FOA}", LAST, panel), ">", Ref(base, LAST, panel))
            for panel in TASKS
            for base in _BASES
        ],
        plot=Dots("linear probe, test accuracy"),
        evaluate_every=10,
        quick=_EQUAL_QUICK,
        notes=(
            "Best is the best of the rounds that were evaluated, every tenth.",
            *_EQUAL_NOTES,
            *_NOTES,
        ),
    )


# ---- Figures 4 and 5: by round, and by lambda ----------------------------------------------------

LAMBDAS = (0.001, 0.003, 0.01, 0.03, 0.1)


def accuracies(run: Run) -> dict[str, float]:
    """`by_round`, as figures."""
    return {str(tick): value for tick, value in by_round(run).items()}


def _figure_4() -> Experiment:
    pair = ("FedEMA", "FedEMA+FedFoA")
    return Experiment(
        name="fedfoa-figure-4",
        title=f"Accuracy by round, FedEMA with FedFoA and without, {CIFAR100}",
        paper=f"{PAPER}, Figure 4",
        cells=[_equal(series, CIFAR100) for series in pair],
        figures=accuracies,
        claims=[Claim(Ref(pair[1], str(t)), ">", Ref(pair[0], str(t))) for t in (30, 50, 100)],
        plot=Lines("round", "linear probe, mean test accuracy"),
        evaluate_every=10,
        quick=_EQUAL_QUICK,
        notes=(
            "The text says that 40 % are reached after 30 rounds with FedFoA and after more than "
            "50 without. What is put to the test is that FedFoA is ahead after 30, 50 and all "
            "rounds.",
            *_EQUAL_NOTES,
            *_NOTES,
        ),
    )


def _figure_5() -> Experiment:
    series = "FedEMA+FedFoA"
    sweep = [_equal(series, CIFAR100, {"lam": lam}, x=lam) for lam in LAMBDAS]
    return Experiment(
        name="fedfoa-figure-5",
        title=f"Accuracy by lambda, FedEMA with FedFoA, {CIFAR100}",
        paper=f"{PAPER}, Figure 5",
        cells=[*sweep, _equal("FedEMA", CIFAR100)],
        claims=[
            Claim(Ref(series, x=0.01), ">", Ref(series, x=lam)) for lam in LAMBDAS if lam != 0.01
        ],
        plot=Lines("lambda", "linear probe, mean test accuracy", ACCURACY, "log"),
        evaluate_every=10,  # as Table 3 and Figure 4, which share these runs
        quick=replace(_EQUAL_QUICK, points=(0.01, 0.1)),
        notes=(
            "Which values of lambda the figure has cannot be read from the text: ours are five.",
            "FedEMA alone, lambda = 0, is the level across.",
            *_EQUAL_NOTES,
            *_NOTES,
        ),
    )


# ---- Figure 6: distances between triangles -------------------------------------------------------


def stages(run: Run) -> dict[str, dict[str, Any]]:
    """Nodes and matrix of distances in the first, the middle and the last round."""
    noted = [m for m in run.metrics if "distances" in m]
    picked = {"first": 0, "middle": len(noted) // 2, LAST: len(noted) - 1}
    return {
        f"{stage} round ({noted[i]['tick']})": {
            "nodes": [NETWORKS[n.partition("-")[2]] for n in noted[i]["distances"]["nodes"]],
            "rows": noted[i]["distances"]["rows"],
        }
        for stage, i in picked.items()
    }


def pairs(run: Run) -> dict[str, float]:
    """The distance of every pair in these rounds, and the mean over pairs."""
    found: dict[str, float] = {}
    for title, matrix in stages(run).items():
        stage, nodes, rows = title.split()[0], matrix["nodes"], matrix["rows"]
        each = {
            f"{stage}: {nodes[i]} and {nodes[j]}": rows[i][j]
            for i in range(len(nodes))
            for j in range(i + 1, len(nodes))
        }
        found |= {f"{stage}: {MEAN}": statistics.fmean(each.values()), **each}
    return found


def _figure_6() -> Experiment:
    residual = "first: ResNet-18 and ResNet-34"
    return Experiment(
        name="fedfoa-figure-6",
        title=f"How far apart nodes' correlations are, {CIFAR10}",
        paper=f"{PAPER}, Figure 6",
        cells=[_different(FOA, CIFAR10)],
        figures=pairs,
        claims=[
            Claim(Ref(FOA, f"first: {MEAN}"), ">", Ref(FOA, f"{LAST}: {MEAN}")),
            Claim(Ref(FOA, f"first: {MEAN}"), ">", Ref(FOA, residual)),
        ],
        plot=Picture(heat_maps, stages),
        evaluate_every=1000,
        quick=_QUICK,
        notes=(
            "The numbers in the figure's boxes are not in the text: what is put to the test is "
            "that distances fall, and that those between the two ResNets begin below the mean.",
            "The picture is of the first seed.",
            *_NOTES,
        ),
    )


# ---- Figure 7: features in the plane -------------------------------------------------------------


def plane(run: Run) -> dict[str, dict[str, Groups]]:
    """Where the first node's features of test images lie; nowhere if they are not numbers."""
    found = next(m["map"] for m in run.metrics if "map" in m)
    if not found["points"]:
        return {"test images": {}}
    points, y = torch.tensor(found["points"]), torch.tensor(found["labels"])
    return {"test images": groups(points, {"": y >= 0}, y, CIFAR10_CLASSES)}


def _figure_7() -> Experiment:
    options = {"map_samples": 2048, "rounds": 50}
    series = ("FedEMA", "FedEMA+FedFoA")
    return Experiment(
        name="fedfoa-figure-7",
        title=f"Test images in the plane, FedEMA with FedFoA and without, {CIFAR10}",
        paper=f"{PAPER}, Figure 7",
        cells=[_equal(name, CIFAR10, options) for name in series],
        claims=[Claim(Ref(series[1]), ">", Ref(series[0]))],
        plot=Picture(class_maps, plane),
        evaluate_every=1000,
        quick=_EQUAL_QUICK,
        notes=(
            "t-SNE of 2,048 test images, by the first node's network of the first seed after 50 "
            "rounds; the paper's is its round 49.",
            "Clearer boundaries between classes are put to the test as a better linear probe.",
            *_EQUAL_NOTES,
            *_NOTES,
        ),
    )


EXPERIMENTS = [
    _table(1, CIFAR10),
    _table(2, CIFAR100),
    _table_3(),
    _figure_4(),
    _figure_5(),
    _figure_6(),
    _figure_7(),
]

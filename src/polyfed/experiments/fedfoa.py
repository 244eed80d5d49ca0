"""FedFoA's tables (Liu et al., section 4.2) on CIFAR-10 and CIFAR-100.

Networks and hyper-parameters are those of its section 4.1, which the tasks hold as recipes. What it
prints in percent is a share here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyfed.engines.run import Run
from polyfed.experiments.experiment import (
    Cell,
    Claim,
    Dots,
    Experiment,
    Quick,
    Ref,
    by_round,
)

PAPER = "Liu et al., FedFoA, 2022"
CIFAR10, CIFAR100 = "CIFAR-10", "CIFAR-100"
TASKS = {CIFAR10: "cifar10-encoders", CIFAR100: "cifar100-encoders"}
MEAN, LAST, BEST = "mean", "last", "best"
FOA = "FedFoA"
QUICK = Quick(
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
NOTES = (
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


def different(series: str, panel: str) -> Cell:
    """A method on four nodes with networks of different kinds."""
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
    ranked = [
        (FOA, "BYOL"), (FOA, "FedMD"), (FOA, "FedDF"),
        ("FedMD", "BYOL"), ("FedDF", "BYOL"), ("FedDF", "FedMD"),
    ]  # fmt: skip
    alone = [
        ("ResNet-18", "VGG-9"), ("ResNet-18", "AlexNet"), ("ResNet-18", "ResNet-34"),
        ("VGG-9", "AlexNet"), ("ResNet-34", "AlexNet"),
    ]  # fmt: skip
    gains, losses = ("VGG-9", "AlexNet"), ("ResNet-18", "ResNet-34")
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
        cells=[different(series, panel) for series in _DIFFERENT],
        figures=by_network,
        published=published,
        claims=[
            *(Claim(Ref(a, MEAN), ">", Ref(b, MEAN)) for a, b in ranked),
            *(Claim(Ref("BYOL", a), ">", Ref("BYOL", b)) for a, b in alone),
            *(Claim(Ref("FedMD", net), ">", Ref("BYOL", net)) for net in gains),
            *(Claim(Ref("BYOL", net), ">", Ref("FedMD", net)) for net in losses),
        ],
        plot=Dots("linear probe, test accuracy", figures=_COLUMNS),
        evaluate_every=1000,
        quick=QUICK,
        notes=(
            *(shift if panel == CIFAR100 else ()),
            "FedMD and FedDF need public images, of which the paper says nothing: 5,000 training "
            "images are set aside for them, so that their nodes have 11,250 each, not 12,500.",
            *(subset if panel == CIFAR100 else ()),
            "Linear probes are trained on those images, too. Where it says `probe all → trained`, "
            "those of FedMD and FedDF were not, but those of the others were: a handicap.",
            "Of single networks the text says that without averaging ResNet-18 is the best and "
            "AlexNet the worst, and that FedMD improves AlexNet and VGG-9 and harms the ResNets.",
            "Its claim of little traffic is not judged: what a node sends is below.",
            *NOTES,
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
CHAMPION = "FedEMA+FedFoA"
_GAINS = {CIFAR10: "0.027", CIFAR100: "0.0604"}  # over FedEMA, in the text
EQUAL_QUICK = replace(QUICK, task_options={**QUICK.task_options, "num_nodes": 3})
EQUAL_NOTES = (
    "The number of nodes is not stated: 5, as EasyFL has it, with 10,000 images each.",
    "The paper evaluates a global model. FedEMA leaves none at the nodes: the figure is the mean "
    "over nodes, each with its network as it begins the next round.",
)


def equal(series: str, data: str, options: Mapping[str, Any] | None = None, **at: Any) -> Cell:
    """A method, with FedFoA or without, on five nodes with equal networks."""
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
    gains = {
        Ref(CHAMPION, BEST, panel, less=Ref("FedEMA", BEST, panel)): text
        for panel, text in _GAINS.items()
    }
    best = [at for at in columns if at != (CIFAR10, BEST)]  # there its own table contradicts it
    return Experiment(
        name="fedfoa-table-3",
        title="Equal networks without labels, with FedFoA and without",
        paper=f"{PAPER}, Table 3",
        cells=[equal(series, panel, panel=panel) for panel in TASKS for series in _EQUAL],
        figures=last_and_best,
        published={**published, **gains},
        claims=[
            *(
                Claim(Ref(f"{base}+{FOA}", figure, panel), ">", Ref(base, figure, panel))
                for panel, figure in columns
                for base in _BASES
            ),
            *(
                Claim(Ref(CHAMPION, figure, panel), ">", Ref(other, figure, panel))
                for panel, figure in best
                for other in _EQUAL
                if other not in (CHAMPION, "FedEMA")
            ),
        ],
        plot=Dots("linear probe, test accuracy"),
        evaluate_every=10,
        quick=EQUAL_QUICK,
        notes=(
            "Best is the best of the rounds that were evaluated, every tenth.",
            "The gains of 2.7 % and 6.04 % in its text are of the best rounds.",
            "It calls FedEMA with FedFoA the best method. Of the best rounds on CIFAR-10 its own "
            "table has FedBYOL with FedFoA above it, 79.00 % and 78.82 %: not judged there.",
            *EQUAL_NOTES,
            *NOTES,
        ),
    )


EXPERIMENTS = [_table(1, CIFAR10), _table(2, CIFAR100), _table_3()]

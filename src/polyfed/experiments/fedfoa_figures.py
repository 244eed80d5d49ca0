"""FedFoA's figures (Liu et al., sections 4.2 and 4.3): over rounds, over lambda, from inside."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from polyfed.engines.run import Run
from polyfed.experiments._public import Groups, groups
from polyfed.experiments.experiment import (
    ACCURACY,
    Claim,
    Experiment,
    Lines,
    Picture,
    Ref,
    by_round,
)
from polyfed.experiments.fedfoa import (
    CHAMPION,
    CIFAR10,
    CIFAR100,
    EQUAL_NOTES,
    EQUAL_QUICK,
    FOA,
    LAST,
    MEAN,
    NETWORKS,
    NOTES,
    PAPER,
    QUICK,
    different,
    equal,
)
from polyfed.experiments.pictures import class_maps, heat_maps
from polyfed.tasks.files import CIFAR10_CLASSES

FIRST, MIDDLE = "first", "middle"


# ---- Figures 4 and 5: by round, and by lambda ----------------------------------------------------

LAMBDAS = (0.001, 0.003, 0.01, 0.03, 0.1)


def accuracies(run: Run) -> dict[str, float]:
    """`by_round`, as figures."""
    return {str(tick): value for tick, value in by_round(run).items()}


def _figure_4() -> Experiment:
    pair = ("FedEMA", CHAMPION)
    return Experiment(
        name="fedfoa-figure-4",
        title=f"Accuracy by round, FedEMA with FedFoA and without, {CIFAR100}",
        paper=f"{PAPER}, Figure 4",
        cells=[equal(series, CIFAR100) for series in pair],
        figures=accuracies,
        published={Ref(CHAMPION, "30"): "0.40"},
        claims=[Claim(Ref(pair[1], str(t)), ">", Ref(pair[0], str(t))) for t in (30, 50, 100)],
        plot=Lines("round", "linear probe, mean test accuracy"),
        evaluate_every=10,
        quick=EQUAL_QUICK,
        notes=(
            "The text says that 40 % are reached after 30 rounds with FedFoA and after more than "
            "50 without. What is put to the test is that number, and that FedFoA is ahead after "
            "30, 50 and all rounds; that FedEMA has less than 40 % after 50 is not.",
            *EQUAL_NOTES,
            *NOTES,
        ),
    )


def _figure_5() -> Experiment:
    series = CHAMPION
    sweep = [equal(series, CIFAR100, {"lam": lam}, x=lam) for lam in LAMBDAS]
    return Experiment(
        name="fedfoa-figure-5",
        title=f"Accuracy by lambda, FedEMA with FedFoA, {CIFAR100}",
        paper=f"{PAPER}, Figure 5",
        cells=[*sweep, equal("FedEMA", CIFAR100)],
        claims=[
            Claim(Ref(series, x=0.01), ">", Ref(series, x=lam)) for lam in LAMBDAS if lam != 0.01
        ],
        plot=Lines("lambda", "linear probe, mean test accuracy", ACCURACY, "log"),
        evaluate_every=10,  # as Table 3 and Figure 4, which share these runs
        quick=replace(EQUAL_QUICK, points=(0.01, 0.1)),
        notes=(
            "Which values of lambda the figure has cannot be read from the text: ours are five.",
            "FedEMA alone, lambda = 0, is the level across.",
            *EQUAL_NOTES,
            *NOTES,
        ),
    )


# ---- Figure 6: distances between triangles -------------------------------------------------------


def stages(run: Run) -> dict[str, dict[str, Any]]:
    """Nodes and matrix of distances in the first, the middle and the last round."""
    noted = [m for m in run.metrics if "distances" in m]
    picked = {FIRST: 0, MIDDLE: len(noted) // 2, LAST: len(noted) - 1}
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
    nets = list(NETWORKS.values())
    alike, *others = sorted(
        (f"{a} and {b}" for i, a in enumerate(nets) for b in nets[i + 1 :]),
        key=lambda pair: pair != "ResNet-18 and ResNet-34",
    )
    gap = {
        stage: Ref(FOA, f"{stage}: {MEAN}", less=Ref(FOA, f"{stage}: {alike}"))
        for stage in (FIRST, LAST)
    }
    return Experiment(
        name="fedfoa-figure-6",
        title=f"How far apart nodes' correlations are, {CIFAR10}",
        paper=f"{PAPER}, Figure 6",
        cells=[different(FOA, CIFAR10)],
        figures=pairs,
        claims=[
            *(
                Claim(Ref(FOA, f"{a}: {MEAN}"), ">", Ref(FOA, f"{b}: {MEAN}"))
                for a, b in ((FIRST, MIDDLE), (MIDDLE, LAST), (FIRST, LAST))
            ),
            *(
                Claim(Ref(FOA, f"{stage}: {pair}"), ">", Ref(FOA, f"{stage}: {alike}"))
                for stage in (FIRST, LAST)
                for pair in (MEAN, *others)
            ),
            Claim(gap[FIRST], ">", gap[LAST]),
        ],
        plot=Picture(heat_maps, stages),
        evaluate_every=1000,
        quick=QUICK,
        notes=(
            "The numbers in the figure's boxes are not in the text: what is put to the test is "
            "that their mean keeps falling, that the two ResNets are the nearest pair in the first "
            "round and still in the last, and that they then stand out less from the mean.",
            "The picture is of the first seed.",
            *NOTES,
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
    series = ("FedEMA", CHAMPION)
    return Experiment(
        name="fedfoa-figure-7",
        title=f"Test images in the plane, FedEMA with FedFoA and without, {CIFAR10}",
        paper=f"{PAPER}, Figure 7",
        cells=[equal(name, CIFAR10, options) for name in series],
        claims=[Claim(Ref(series[1]), ">", Ref(series[0]))],
        plot=Picture(class_maps, plane),
        evaluate_every=1000,
        quick=EQUAL_QUICK,
        notes=(
            "t-SNE of 2,048 test images, by the first node's network of the first seed after 50 "
            "rounds; the paper's is its round 49.",
            "Clearer boundaries between classes are put to the test as a better linear probe.",
            *EQUAL_NOTES,
            *NOTES,
        ),
    )


EXPERIMENTS = [_figure_4(), _figure_5(), _figure_6(), _figure_7()]

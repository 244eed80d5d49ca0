"""FedLinked's Figures 5.3 to 5.7 (Kadar 2021, sections 5.4 and 5.5): public inputs in the plane.

What they show is computed in `polyfed.experiments._public`, once for every run of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyfed.engines.run import Run
from polyfed.experiments._public import (
    AFTERWARDS,
    ALL,
    BEFORE,
    HALF,
    NEAR,
    OTHER,
    OWN,
    POINTS,
    SAME,
    Groups,
    found_in,
)
from polyfed.experiments.experiment import Cell, Claim, Experiment, Picture, Ref
from polyfed.experiments.fedlinked import (
    CIFAR10,
    LINKED,
    NODES,
    NOTES,
    PAPER,
    QUICK,
    SEPARATED,
    SVHN,
    cell,
)
from polyfed.experiments.pictures import class_maps

# ---- Figures 5.3 to 5.5: every node's map, without collaboration and with it ---------------------

_MEASURE = (
    f"Homogeneous groups are put to the test as the share of an input's {NEAR} nearest others that "
    "have its class, by a node's representations of all public inputs of the classes that are "
    "named; that measure is ours."
)
_PLANE = (
    "The paper's maps are by UMAP, ours by t-SNE, of the first {} public inputs (which are "
    "shuffled); the picture is of the first seed, by its networks at the end, after rollback."
)
_LABELS = "No node has the labels of public inputs: colours and figures take them from the files."


def neighbours(*which: str) -> Callable[[Run], dict[str, float]]:
    """The figures of every node for these classes: own, other, all."""

    def figures(run: Run) -> dict[str, float]:
        nodes = found_in(run)["nodes"]
        return {_of(node, name): nodes[node]["figures"][name] for name in which for node in nodes}

    return figures


def node_maps(*which: str) -> Callable[[Run], dict[str, dict[str, Groups]]]:
    """The map of every node, with the inputs of these classes: own, other."""

    def maps(run: Run) -> dict[str, dict[str, Groups]]:
        nodes = found_in(run)["nodes"]
        return {node: {name: nodes[node]["map"][name] for name in which} for node in nodes}

    return maps


def _of(node: str, which: str) -> str:
    return f"{node}, {which}"


def _cells(panel: str, **methods: str) -> list[Cell]:
    return [cell(method, panel, series=series) for series, method in methods.items()]


def _figure(
    number: str, title: str, panel: str, judged: Sequence[str], shown: Sequence[str], *notes: str
) -> Experiment:
    def above(figure: str) -> Claim:
        return Claim(Ref(LINKED, figure), ">", Ref(SEPARATED, figure))

    return Experiment(
        name=f"fedlinked-figure-{number}",
        title=f"{title}, {panel}",
        paper=f"{PAPER}, Figure {number}",
        cells=_cells(panel, **{SEPARATED: "local", LINKED: "fedlinked"}),
        figures=neighbours(*judged),
        claims=[above(_of(node, which)) for which in judged for node in NODES],
        plot=Picture(class_maps, node_maps(*shown)),
        quick=QUICK,
        notes=(*notes, _MEASURE, _PLANE.format(POINTS), _LABELS, *NOTES),
    )


_ONE_MAP = "Figures 5.4 and 5.5 are the same maps, each with some of the classes."
_HARDER = (
    "That classes are harder to tell apart on CIFAR-10 is between this figure and Figures 5.4 and "
    "5.5, and is not judged."
)


# ---- Figures 5.6 and 5.7: two nodes before and after the rotation --------------------------------


def of_pair(run: Run) -> dict[str, float]:
    """Distances and neighbours of the first node from the second, as it is and turned."""
    return dict(found_in(run)["pair"]["figures"])


def pair_maps(run: Run) -> dict[str, dict[str, Groups]]:
    """Both nodes in the same plane, before and after the rotation."""
    return dict(found_in(run)["pair"]["maps"])


def _rotation_figure(number: str, panel: str) -> Experiment:
    before, after = (Ref(LINKED, f"{SAME}, {when}") for when in (BEFORE, AFTERWARDS))
    first, second = NODES[:2]
    return Experiment(
        name=f"fedlinked-figure-{number}",
        title=f"Public inputs by {first} and {second} before and after {first}'s rotation, {panel}",
        paper=f"{PAPER}, Figure {number}",
        cells=_cells(panel, **{LINKED: "fedlinked"}),
        figures=of_pair,
        claims=[Claim(after, ">", before)],
        plot=Picture(class_maps, pair_maps),
        quick=QUICK,
        notes=(
            f"The same class is the share of the {NEAR} representations by {second} nearest to one "
            f"by {first}, of all public inputs but its own, that have its class: whether classes "
            "come to lie together. That measure is ours.",
            "The distance is |Z_0 - Z_1| / |Z_1|. That the rotation brings M0's to where M1's are "
            "is not judged: it is the one that makes the distance least, so that it cannot fail.",
            "The paper shows a given round and does not say which.",
            _PLANE.format(HALF),
            _LABELS,
            *NOTES,
        ),
    )


EXPERIMENTS = [
    _figure("5.3", "Public inputs in the plane", SVHN, (ALL, OTHER), (OWN, OTHER), _HARDER),
    _figure("5.4", "Public inputs of own classes in the plane", CIFAR10, (OWN,), (OWN,), _ONE_MAP),
    _figure(
        "5.5", "Public inputs of other classes in the plane", CIFAR10, (OTHER,), (OTHER,), _ONE_MAP
    ),
    _rotation_figure("5.6", CIFAR10),
    _rotation_figure("5.7", SVHN),
]

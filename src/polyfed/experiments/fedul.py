"""FedUL with labels at the hub: Alzahrani 2024, Table 2 and Figures 1 to 8, and what goes beyond.

The paper prints error rates of FedUL; those of its Methods 1 and 2 are lost in the text that there
is, their order is not. `fedul-pareto` is ours: the two objectives against each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from polyfed.engines.run import Run
from polyfed.engines.table import rounds_done
from polyfed.experiments.experiment import (
    Cell,
    Claim,
    Dots,
    Experiment,
    Lines,
    Picture,
    Quick,
    Ref,
)
from polyfed.experiments.front import Cells, front

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "Alzahrani, A Bi-Objective Optimization Approach for Enhancing FedUL, 2024"
TASK = "mnist-sets"
IID, NON_IID = "IID", "non-IID"
PANELS: Mapping[str, Mapping[str, Any]] = {IID: {"iid": True}, NON_IID: {"iid": False}}
FEDUL, M1, M2, MGDA = "FedUL", "FedUL + M1", "FedUL + M2", "FedUL + MGDA"
HUB_ONLY, PL, LLP = "hub's labels only", "FedPL", "FedLLP"
SOME, ALL = "FedAvg, 10 % labels", "FedAvg, all labels"
METHODS = {
    FEDUL: "fedul",
    M1: "fedul-m1",
    M2: "fedul-m2",
    MGDA: "fedul-mgda",
    LLP: "fedllp",
    PL: "fedpl",
}
_LABELS = {SOME: 0.1, ALL: 1.0}
_QUICK = Quick(
    says="images: one in twelve; DigitModel with an eighth of its width; two rounds",
    seeds=1,
    task_options={"quick": True},
)
_NOTES = (
    "36,000 images in sets, 12,000 with labels at the hub, 12,000 to validate, 10,000 to test, as "
    "the paper's Table 1; batches of 100, Adam with 1e-4 made afresh every round, 100 rounds of "
    "one epoch. A last batch that is not full is used and not dropped.",
    "The hub trains one epoch on its labels in each round: the paper does not say. Method 2 starts "
    "from the network of the last broadcast and blends by h = 0.5.",
    "The best network by the hub's validation split is kept.",
)


# ---- Table 2 -------------------------------------------------------------------------------------

ERROR, LOWEST, HIGHEST = "error, %", "lowest of a node, %", "highest of a node, %"
_PUBLISHED = {IID: "0.78", NON_IID: "2.98"}


def errors(run: Run) -> dict[str, float]:
    """Test error in percent of the network that was kept: mean, least and most over nodes."""
    found = [100 * (1 - accuracy) for accuracy in run.accuracy.values()]
    return {ERROR: statistics.fmean(found), LOWEST: min(found), HIGHEST: max(found)}


def _cells(series: Iterable[str]) -> list[Cell]:
    return [_cell(name, panel) for panel in PANELS for name in series]


def _cell(series: str, panel: str) -> Cell:
    """The hub's labels do not depend on how sets are dealt out: that control is run once."""
    if series == HUB_ONLY:
        return Cell(method="hub-only", task=TASK, panel=panel, series=series)
    own = {"labels": _LABELS[series]} if series in _LABELS else {}
    method = METHODS.get(series, "fedavg")
    options = {**PANELS[panel], **own}
    return Cell(method=method, task=TASK, task_options=options, panel=panel, series=series)


def _table_2() -> Experiment:
    def above(panel: str, worse: str, better: str) -> Claim:
        return Claim(Ref(worse, ERROR, panel), ">", Ref(better, ERROR, panel))

    def gain(panel: str, method: str) -> Ref:
        return Ref(FEDUL, ERROR, panel, less=Ref(method, ERROR, panel))

    ordered = ((FEDUL, M1), (FEDUL, M2), (M2, M1))
    larger = [Claim(gain(NON_IID, name), ">", gain(IID, name)) for name in (M1, M2)]
    return Experiment(
        name="fedul-table-2",
        title="FedUL with and without labels at the hub, mean error",
        paper=f"{PAPER}, Table 2",
        cells=_cells((FEDUL, M1, M2, MGDA, HUB_ONLY, SOME, ALL, LLP, PL)),
        figures=errors,
        published={Ref(FEDUL, ERROR, panel): text for panel, text in _PUBLISHED.items()},
        claims=[*(above(panel, *pair) for panel in PANELS for pair in ordered), *larger],
        plot=Dots("test error, %", scale="log"),
        quick=_QUICK,
        notes=(
            "The rows of Methods 1 and 2 are lost in the text of the paper that there is. What is "
            "judged is what it says of them: both below FedUL, by more where nodes differ, and "
            "Method 1 below Method 2.",
            "Whether the row of FedUL was run on these 36,000 images or copied from the FedUL "
            "paper, whose code trains on 48,000, is not said.",
            "The paper compares FedUL with Methods 1 and 2 only. FedLLP, FedPL and FedAvg with a "
            "tenth of the labels are those that FedUL's own paper compares it with; FedAvg with "
            "all labels, the hub's labels alone and MGDA are ours.",
            "FedAvg has no hub here: its last round counts, without rotation and penalty.",
            *_NOTES,
        ),
    )


# ---- Figures 1 to 8: losses and errors by round --------------------------------------------------

POINTS = (1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
_EARLY, _LAST = "5", "100"
_SEEN = ("1", _EARLY, "10", "20", "50", _LAST)
_EXACT = 0.02
Figures = Callable[[Run], Mapping[str, float]]


def by_round(metric: str, shown: Callable[[float], float] = float) -> Figures:
    """The mean of a metric over nodes at some rounds: the figures of a run are its points.

    Args:
        metric: its name in `metrics.jsonl`.
        shown: what is drawn of it.
    """

    def figures(run: Run) -> dict[str, float]:
        wanted = {*POINTS, rounds_done(run)}
        found: dict[int, list[float]] = {}
        for m in run.metrics:
            if metric in m and m["tick"] in wanted:
                found.setdefault(m["tick"], []).append(m[metric])
        return {str(tick): shown(statistics.fmean(found[tick])) for tick in sorted(found)}

    return figures


def _falls(series: Iterable[str]) -> list[Claim]:
    """Every loss is lower at each of these rounds than at the one before it."""
    return [
        Claim(Ref(name, before, panel), ">", Ref(name, now, panel))
        for panel in PANELS
        for name in series
        for before, now in pairwise(_SEEN)
    ]


def _above(pairs: Iterable[tuple[str, str]], *rounds: str) -> list[Claim]:
    return [
        Claim(Ref(a, at, panel), ">", Ref(b, at, panel))
        for panel in PANELS
        for a, b in pairs
        for at in rounds
    ]


def _curves(
    part: str,
    title: str,
    series: tuple[str, ...],
    figures: Figures,
    y: str,
    claims: Sequence[Claim],
    *notes: str,
) -> Experiment:
    return Experiment(
        name=f"fedul-{part}",
        title=title,
        paper=f"{PAPER}, Figures {'5 to 8' if part == 'errors' else '1 to 4'}",
        cells=_cells(series),
        figures=figures,
        claims=claims,
        plot=Lines("round", y),
        quick=_QUICK,
        notes=(
            "The paper draws its curves; what is judged is what its appendix says of them.",
            *notes,
            *_NOTES,
        ),
    )


_FASTER = (
    "Figures 2 and 4, in which losses fall much faster than in 1 and 3, are those of Method 2: so "
    "its losses are the lower ones at round 5."
)
_CONSISTENTLY = f"at rounds {', '.join(_SEEN)}"


def _losses_on_sets() -> Experiment:
    exact = Claim(Ref(FEDUL, _LAST, IID), "~", Ref(M1, _LAST, IID), margin=_EXACT)
    return _curves(
        "losses",
        "Loss on the nodes' sets, by round",
        (FEDUL, M1, M2),
        by_round("local_loss"),
        "loss on the sets, with the penalty",
        [*_above(((FEDUL, M1), (FEDUL, M2), (M1, M2)), _EARLY), exact, *_falls((FEDUL, M1, M2))],
        "With labels at the hub the loss falls faster initially: it is lower at round 5.",
        _FASTER,
        "But for that, FedUL's loss and the hybrid's in Figure 1 seem to be exactly the same. Its "
        "caption is lost; judged is Method 1, where nodes are alike, after the last round, within "
        f"{_EXACT:g}, about a hundredth of the loss: a margin of ours.",
        f"That all losses consistently decrease is judged from one to the next {_CONSISTENTLY}.",
        "The loss is the mean over the round's epoch at the nodes, with its L1 penalty.",
    )


def _losses_on_labels() -> Experiment:
    return _curves(
        "supervised-losses",
        "Loss on the hub's labels, by round",
        (M1, M2),
        by_round("supervised_loss"),
        "loss on the hub's labels",
        [*_above(((M1, M2),), _EARLY), *_falls((M1, M2))],
        _FASTER,
        f"That all losses consistently decrease is judged from one to the next {_CONSISTENTLY}.",
        "The loss is the mean over the round's epoch at the hub: of the mean of the nodes' "
        "networks in Method 1, of the hub's own model in Method 2.",
    )


def _errors() -> Experiment:
    return _curves(
        "errors",
        "Mean test error, by round",
        (FEDUL, M1, M2),
        by_round("test_accuracy", lambda accuracy: 100 * (1 - accuracy)),
        "mean test error, %",
        [*_above(((FEDUL, M1), (FEDUL, M2)), *_SEEN), *_above(((M1, M2),), _EARLY)],
        f"That the hybrid has consistently lower error rates is judged {_CONSISTENTLY}, with both "
        "methods: the captions are lost. That it converges faster is judged at round 5.",
        "That Method 2 converges faster than Method 1 is said of losses, and judged here, too, at "
        "round 5. That the decrease is steep where nodes differ is not judged.",
        "The error is that of the round's own network, not of the one that is kept.",
    )


# ---- the two objectives against each other -------------------------------------------------------

SETS_LOSS, LABELS_LOSS = "loss on the sets", "loss on labels"
FIXED, AUTO, WORK = "h fixed", "h = auto", "M1 by hub epochs"
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
HUB_EPOCHS = (0, 1, 2, 5, 10)


def objectives(run: Run) -> dict[str, float]:
    """Both losses and the test error of the network that was kept."""
    on_sets = [m["surrogate_loss"] for m in run.metrics if "surrogate_loss" in m]
    judged = [m for m in run.metrics if "val_rb_loss" in m]
    best = max(judged, key=lambda m: (m["val_rb_accuracy"], m["tick"]))
    return {
        SETS_LOSS: statistics.fmean(on_sets) if on_sets else math.nan,
        LABELS_LOSS: best["val_rb_loss"],
        ERROR: errors(run)[ERROR],
    }


def _front(cells: Cells) -> Figure:
    return front(cells, SETS_LOSS, LABELS_LOSS, ERROR)


def _nothing(run: Run) -> None:
    """All that the picture needs is in the figures."""


def _pareto() -> Experiment:
    def cell(method: str, panel: str, series: str, x: float | None, **options: Any) -> Cell:
        return Cell(
            method=method,
            task="digits-sets",
            options=options,
            task_options=PANELS[panel],
            panel=panel,
            series=series,
            x=x,
        )

    cells = []
    for panel in PANELS:
        cells += [cell("fedul-m2", panel, FIXED, h, h=h) for h in SHARES]
        cells += [cell("fedul-m1", panel, WORK, n, hub_epochs=n) for n in HUB_EPOCHS]
        cells += [
            cell("fedul-m2", panel, AUTO, None, h="auto"),
            cell("fedul-mgda", panel, MGDA, None),
        ]
    return Experiment(
        name="fedul-pareto",
        title="Two objectives: the loss on sets and the loss on labels",
        paper="Ours; the paper aims at Pareto optimality and stops at h = 0.5",
        cells=cells,
        figures=objectives,
        plot=Picture(_front, _nothing),
        evaluate_every=1000,
        quick=Quick(says="two rounds", seeds=1, points=(0.0, 0.5, 1.0)),
        notes=(
            "The loss on labels is that on the hub's validation split; both losses are of the "
            "network that is kept.",
            "h = 0, and no epoch of the hub in Method 1, are FedUL; h = 1 is the hub alone, with "
            "two epochs a round.",
        ),
    )


EXPERIMENTS = [_table_2(), _losses_on_sets(), _losses_on_labels(), _errors(), _pareto()]

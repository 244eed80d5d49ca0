"""What the experiments of partial averaging have in common: levels, claims, notes.

A level of averaging is the number of cells of the second hidden layer that all peers share; so many
of the first belong to it. Where the paper draws a line for each block size and levels along, ours
is the other way round: a line is a level.

Bouchra Pilet, Frey, Taiani. IDA 2021, hal-02373338, section V.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyfed.engines.run import Run
from polyfed.engines.table import rounds_done
from polyfed.experiments.experiment import Cell, Claim, Experiment, Quick, Ref, by_round
from polyfed.methods.partial_averaging import LEVELS, paper_scheme

PAPER = "Bouchra Pilet, Frey, Taïani, IDA 2021"
METHOD = "partial-averaging"
NOTHING = "0%"  # of any network
FLAT, CLOSE = 0.01, 0.02  # "no effect", "close": our margins
RATE = 0.1  # the paper's learning rate

Setting = tuple[Mapping[str, Any], Mapping[str, Any]]  # options of the method and of the task

MARGIN = f"As good is within {FLAT:g}: that margin is ours."
_SGD = (
    "Its training is stochastic gradient descent with steps of 0.1 and sigmoids; ours is one "
    "sample after another by the squared error, with one-hot labels where there are several "
    "outputs. What it calls a mini-batch is then a block of samples."
)
NOTES = (
    "The paper draws its results and prints none: what is judged are the orderings in its text.",
    "Blocks go on through the training set, which is shuffled anew whenever it has been gone "
    "through; the paper does not say.",
    "Its error bars, the second and third quintiles, are read as the 40th and 60th percentiles.",
)
_APART = (
    "How networks start is not said: shared slices start equal on all who share them, the rest "
    "differently on every peer; Xavier's uniform weights, no biases."
)
_ALIKE = (
    "How networks start is not said: all peers start from one network, with uniform weights in "
    "four times Xavier's interval, as Glorot and Bengio have it for logistic units, and no biases. "
    "Of the starts that were tried, most of V.3's orderings hold with this one."
)
_STARTS = {"V.2": _ALIKE, "V.3": _ALIKE, "V.4": _APART}


# ---- levels, claims, figures ---------------------------------------------------------------------


def named(level: int) -> str:
    """The line of a level."""
    return f"level {level}"


def above(
    winners: Iterable[int], others: Iterable[int], *points: float, **where: Any
) -> list[Claim]:
    """Each of these levels is above each of the others, at each point, or in the mean over all."""
    losers = list(others)
    pairs = [(named(winner), named(other)) for winner in winners for other in losers]
    return ranked(pairs, *points, **where)


def ranked(pairs: Iterable[tuple[str, str]], *points: float, **where: Any) -> list[Claim]:
    """The first series of each pair is above the second, likewise."""
    at = points or (None,)
    return [
        Claim(Ref(a, x=x, **where), ">", Ref(b, x=x, **where)) for a, b in list(pairs) for x in at
    ]


def same(left: Ref, right: Ref, margin: float = FLAT) -> Claim:
    """One is as good as the other."""
    return Claim(left, "~", right, margin=margin)


def change(series: str, start: float, end: float) -> Ref:
    """What a series gains from one point to another."""
    return Ref(series, x=end, less=Ref(series, x=start))


def lead(series: str, other: str, x: float) -> Ref:
    """How far a series is ahead of another at a point."""
    return Ref(series, x=x, less=Ref(other, x=x))


def but(*levels: int) -> list[int]:
    """All levels but these."""
    return [level for level in LEVELS if level not in levels]


def after(*blocks: int) -> Callable[[Run], Mapping[str, float]]:
    """Mean accuracy after so many blocks, and at the end: the figures of a run are its points."""

    def figures(run: Run) -> dict[str, float]:
        wanted = {*blocks, rounds_done(run)}
        return {str(block): mean for block, mean in by_round(run).items() if block in wanted}

    return figures


def by_level(
    task: str, points: Mapping[float, Setting], levels: Iterable[int] = tuple(LEVELS)
) -> list[Cell]:
    """A line for every level, through these points."""
    return [
        Cell(
            method=METHOD,
            task=task,
            options={"scheme": paper_scheme(level), **options},
            task_options=task_options,
            series=named(level),
            x=x,
        )
        for level in levels
        for x, (options, task_options) in points.items()
    ]


def section(number: str, figure: str, **fields: Any) -> Experiment:
    """An experiment of the paper's section of that number."""
    trained = [_SGD, _STARTS[number[:3]]] if number[:3] in _STARTS else []
    notes = (*fields.pop("notes", ()), *NOTES, *trained)
    paper = f"{PAPER}, section {number}, {figure}"
    made = {"seeds": 10, "statistic": "median", "paper": paper, "notes": notes, **fields}
    return Experiment(name=f"{METHOD}-{number}", **made)


def quick(
    *points: float,
    rounds: int,
    batch: int = 25,
    task: Mapping[str, Any] | None = None,
    **options: Any,
) -> Quick:
    """Steps of several samples, few rounds, few points, a smaller task, one seed.

    A block that is no multiple of a step is rounded up to one.
    """
    return Quick(
        says=f"{batch} samples a step, at {batch} times the learning rate; blocks of whole steps",
        seeds=1,
        options={"rounds": rounds, "batch": batch, "lr": batch * RATE, **options},
        task_options=task or {},
        points=points,
    )

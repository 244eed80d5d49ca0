"""Experiments: the papers' tables and figures, run and judged. One file a family.

    experiment   what one is: cells x seeds, published numbers, claims, how `--quick` scales it
    runner       run_cells: all cells with all seeds
    reproduce    run, judge, write
    series       all of them, one after the other
    verdict      the rules by which numbers and orderings are judged
    results      the figures of a finished experiment, and its verdicts
    page, plot   Markdown and pictures, made from `summary.json` alone
    index, costs the list of all with their states, and what they cost

To add one, write it into the list EXPERIMENTS of its family's file (and a new family into FAMILIES
below). A figure with a line for each level and a point for each block size is:

    Experiment(
        name="partial-averaging-V.3.a", title="Levels of averaging against block size",
        paper="Bouchra Pilet, Frey, Taiani 2021, Figure 14", seeds=10, statistic="median",
        cells=[Cell(method="partial-averaging", task="mnist-permuted", series=f"level {level}",
                    x=block, options={"level": level, "block": block})
               for level in (0, 80, 100) for block in (50, 500, 3000)],
        claims=[Claim(Ref("level 80"), ">", Ref("level 100")),            # mean over the points
                Claim(Ref("level 80", x=500), ">", Ref("level 0", x=500))],
        plot=Lines("block size", scale="log"), evaluate_every=1000,       # only the last round
        quick=Quick(says="a tenth of the digits", points=(50, 500), options={"rounds": 5}),
    )

What a run yields is its mean accuracy, or what `figures=` makes of it. Cells with the same settings
share their runs, also across experiments. `polyfed reproduce NAME` does the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from polyfed.errors import UnknownNameError

if TYPE_CHECKING:
    from polyfed.experiments.experiment import Experiment

FAMILIES = (
    "fedlinked_whole",
    "fedlinked",
    "fedlinked_maps",
    "partial_averaging",
    "partial_averaging_differences",
    "partial_averaging_more",
    "fedfoa",
    "fedfoa_figures",
    "fedul",
    "li",
    "li_more",
)


def every() -> dict[str, Experiment]:
    """All experiments by name, in the order of their papers."""
    found = [import_module(f"polyfed.experiments.{family}").EXPERIMENTS for family in FAMILIES]
    return {experiment.name: experiment for family in found for experiment in family}


def load(name: str) -> Experiment:
    """The experiment of that name."""
    known = every()
    if name not in known:
        raise UnknownNameError("experiment", name, known)
    return known[name]

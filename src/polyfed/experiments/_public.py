r"""Public inputs by the nodes of a trained run: neighbours, maps (Kadar 2021, sections 5.4, 5.5).

    Z_k = trunk_k(X0)                        of every node, coloured by class   (Figures 5.3 to 5.5)
    Z_0 and Z_1, then Z_0 B_01^T and Z_1     in the same plane                 (Figures 5.6 and 5.7)

What the paper reads off them is put to the test in the space itself, not in the plane, on all of
X0: for every x the 10 other inputs x' whose Z'(x') is nearest to Z(x), and how many have x's class

    same(Z, Z') = mean over x of |{x' of the 10: class(x') = class(x)}| / 10                     (1)

same(Z_k, Z_k) says whether classes are homogeneous groups in node k's space, and same(Z_0 B_01^T,
Z_1) against same(Z_0, Z_1) whether the rotation brings classes to where node 1 has them.
Symbols: X0 = public inputs, Z_k = representations (N x r), B_01 = rotation from node 0's space to
node 1's (Eq. 3.12, `polyfed.maths.procrustes`).
Deviations from the paper: t-SNE in the place of UMAP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from polyfed import tasks
from polyfed.core.node import Node
from polyfed.engines.run import Run
from polyfed.errors import DataError
from polyfed.experiments.runner import AFTER
from polyfed.maths.procrustes import rotation
from polyfed.methods.fedlinked import FedLinked
from polyfed.tasks.files import Images
from polyfed.tasks.images import ImageTask
from polyfed.tasks.task import data_folder
from polyfed.train.evaluate import outputs
from polyfed.train.plane import in_plane

TRUNK, PUBLIC = "trunk", "public"
OWN, OTHER, ALL = "own classes", "other classes", "all classes"
BEFORE, AFTERWARDS = "before the rotation", "after the rotation"
DISTANCE, SAME = "distance", "same class"
NEAR = 10  # neighbours that are asked for their class
POINTS = 300  # in a map
HALF = POINTS // 2
_CHUNK = 1024  # rows whose distances are held at a time
_GRID = 999  # a map's coordinates are whole numbers from 0 to this

Rows = Float[Tensor, "n r"]
Labels = Int64[Tensor, " n"]
Groups = dict[str, str]  # a class: its points, as text: "x,y x,y ..."
Found = dict[str, Any]


def public_maps(done: Run) -> Found:
    """Figures and maps of all nodes and, of FedLinked, of the first two together.

    It is `after` of every cell that could show them, so that tables and figures share their runs.
    """
    nodes = [done.nodes[name] for name in sorted(done.nodes)]
    images = _published(done)
    y = labels_among(images, nodes[0].data[PUBLIC].x)
    Z = [outputs(node.model, node.data[PUBLIC].x, TRUNK).double() for node in nodes]
    each = zip(nodes, Z, strict=True)
    found: Found = {"nodes": {n.name: _of_node(n, z, y, images.classes) for n, z in each}}
    if done.method == FedLinked.name:
        names = nodes[0].name, nodes[1].name
        found["pair"] = _of_pair(names, Z[0], Z[1], y, images.classes)
    return found


def _published(done: Run) -> Images:
    """The published images that a run's task was made of."""
    task = cast(ImageTask, tasks.make(done.config["task"], done.config["task_options"]))
    return task.read(data_folder(task.data, task.name))


def labels_among(images: Images, x: Float[Tensor, "n c h w"]) -> Labels:
    """The labels of public inputs, which no node has, by their pixels among the published images.

    Args:
        images: all that were published.
        x: some of them, scaled to [-1, 1].
    """
    pixels = ((x.cpu() + 1) * 127.5).round().to(torch.uint8).numpy()
    keys = [image.tobytes() for image in pixels]
    wanted, known = set(keys), dict[bytes, int]()
    for image, label in zip(images.x.numpy(), images.y.tolist(), strict=True):
        if (key := image.tobytes()) in wanted:
            known[key] = label
    if len(known) < len(wanted):
        missing = len(wanted) - len(known)
        raise DataError(f"{missing} of {len(wanted)} public inputs are not in the published files.")
    return torch.tensor([known[key] for key in keys]).to(x.device)


def _of_node(node: Node, Z: Rows, y: Labels, classes: Sequence[str]) -> Found:
    own = torch.isin(y, y.new_tensor([classes.index(c) for c in node.classes]))
    judged = {ALL: torch.ones_like(own), OWN: own, OTHER: ~own}
    shown = {OWN: own[:POINTS], OTHER: ~own[:POINTS]}
    return {
        "figures": {name: same_class(Z[of], Z[of], y[of]) for name, of in judged.items()},
        "map": groups(in_plane(Z[:POINTS]), shown, y[:POINTS], classes),
    }


def _of_pair(
    names: tuple[str, str], Z_0: Rows, Z_1: Rows, y: Labels, classes: Sequence[str]
) -> Found:
    turned = Z_0 @ rotation(Z_0, Z_1).T
    figures = {}
    for when, Z in ((BEFORE, Z_0), (AFTERWARDS, turned)):
        figures[f"{DISTANCE}, {when}"] = float((Z - Z_1).norm() / Z_1.norm())
        figures[f"{SAME}, {when}"] = same_class(Z, Z_1, y)
    parts = [Z[:HALF] for Z in (Z_0, turned, Z_1)]
    points, labels = in_plane(torch.cat(parts)), y[:HALF].repeat(3)
    part = torch.arange(3, device=y.device).repeat_interleave(len(parts[0]))

    def written(first: int) -> dict[str, Groups]:
        shown = {names[0]: part == first, names[1]: part == 2}
        return groups(points, shown, labels, classes)

    return {"figures": figures, "maps": {BEFORE: written(0), AFTERWARDS: written(1)}}


@torch.no_grad()
def same_class(source: Rows, target: Rows, y: Labels) -> float:
    """Eq. (1): how many of the rows of `target` nearest to a row of `source` have its class.

    Args:
        source: one representation an input.
        target: one representation of each of the same inputs; an input is not asked about itself.
        y: classes of the inputs.
    """
    found = []
    for rows in torch.arange(len(y), device=y.device).split(_CHUNK):
        distances = torch.cdist(source[rows], target)
        distances.scatter_(1, rows[:, None], torch.inf)
        nearest = distances.topk(min(NEAR, len(y) - 1), largest=False).indices
        found.append((y[nearest] == y[rows, None]).double().mean(1))
    return float(torch.cat(found).mean())


def groups(
    points: Float[Tensor, "m 2"],
    marks: Mapping[str, Bool[Tensor, " m"]],
    y: Int64[Tensor, " m"],
    classes: Sequence[str],
) -> dict[str, Groups]:
    """The points of each mark and class, in a square and small enough for a summary.

    Args:
        points: the plane, on the CPU.
        marks: which points have that mark.
        y: class of each point.
        classes: their names.
    """
    low, high = points.amin(0), points.amax(0)
    square = (points - (low + high) / 2) / (high - low).max() + 0.5
    grid = (_GRID * square).round().int()
    return {
        mark: {
            classes[c]: " ".join(f"{a},{b}" for a, b in grid[(of & (y == c)).cpu()].tolist())
            for c in y[of].unique().tolist()
        }
        for mark, of in marks.items()
    }


def found_in(run: Run) -> Found:
    """What `public_maps` found, from the run's folder."""
    text = ((run.folder or Path()) / AFTER).read_text(encoding="utf-8")
    return cast(Found, json.loads(text))

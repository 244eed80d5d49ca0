"""2-D maps of what trunks make of samples: Figures 5.3 to 5.7 of Kadar 2021, FedLinked.

    by class    each node's representations of the labelled test samples of all nodes, also of
                classes it has no labels of (Figures 5.3 to 5.5 take the public inputs, whose labels
                no node has)
    by node     Z_i, Z_j and Z_i B_ij^T on the public inputs, before and after B_ij rotates i's
                space onto j's (Figures 5.6 and 5.7), for the first two nodes of FedLinked

UMAP where it is installed, else t-SNE; PCA where there are too few points for either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from polyfed.core.node import Node
from polyfed.engines.run import Run
from polyfed.errors import PolyfedError
from polyfed.maths.procrustes import rotation
from polyfed.methods.fedlinked import FedLinked
from polyfed.random import stream
from polyfed.record.checkpoint import latest
from polyfed.report.again import Again
from polyfed.report.pictures import labels_of
from polyfed.train.evaluate import outputs

POINTS = 400  # samples in a map
MOST_NODES = 6
FEWEST = 30  # points, below which neighbours mean nothing
Rows = Float64[Tensor, "samples r"]
Points = Float64[Tensor, "samples 2"]
TRUNK, PUBLIC, TEST = "trunk", "public", "test"


def maps(again: Again | str, run: Run) -> dict[str, Any]:
    """The maps of a run: panels of points, or why there are none.

    Args:
        again: its federation, or why it cannot be made.
        run: with its nodes, or with a folder that has a checkpoint.
    """
    if isinstance(again, str):
        return {"panels": [], "said": again}
    try:
        nodes, when = _trained(again, run)
    except (PolyfedError, RuntimeError) as error:
        return {"panels": [], "said": f"The trained networks cannot be had: {error}"}
    nodes = [node for node in nodes if TRUNK in node.model.parts]
    panels = [*_by_class(nodes), *(_by_node(nodes) if _rotates(again) else ())]
    if not panels:
        return {"panels": [], "said": "Maps need nodes with a trunk and labelled tests."}
    kind = panels[0]["by"]
    return {"panels": panels, "said": f"Networks {when}, projected by {kind}."}


def _rotates(again: Again) -> bool:
    return isinstance(again.method, FedLinked) and again.method.transform


def _trained(again: Again, run: Run) -> tuple[Sequence[Node], str]:
    if run.nodes:
        return list(run.nodes.values()), "as they were in the end"
    point = None if run.folder is None else latest(run.folder / "checkpoints")
    if point is None:
        raise PolyfedError("the run has no checkpoint.")
    seed, moved = run.config["settings"]["seed"], dict[int, Tensor]()
    nodes = [node.working_copy(seed, torch.device("cpu"), moved) for node in again.parties]
    point.load_into(nodes)
    return nodes, f"after round {point.tick}"


def _by_class(nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    labels, classes = labels_of(nodes, TEST)
    alike = [n for n in nodes if n.name in labels and _shape(n, TEST) == _shape(nodes[0], TEST)]
    if not alike:
        return
    x = torch.cat([node.data[TEST].x for node in alike])
    y = torch.cat([labels[node.name] for node in alike])
    some = torch.randperm(len(x), generator=stream(0, "report", "maps"))[:POINTS]
    for node in alike[:MOST_NODES]:
        groups = [name if name in node.classes else f"{name} (not its own)" for name in classes]
        Z = outputs(node.model, x[some.to(x.device)], TRUNK).flatten(1)
        yield _panel(f"{node.name}: test samples by class", Z, y[some], groups)


def _by_node(nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    first = [node for node in nodes if PUBLIC in node.data][:2]
    if len(first) < 2:
        return
    i, j = first
    some = slice(POINTS // 2)
    whole = [outputs(node.model, node.data[PUBLIC].x, TRUNK).flatten(1) for node in first]
    Z_i, Z_j = whole
    turned = Z_i @ rotation(Z_i, Z_j).T
    each = [Z[some] for Z in (Z_i, Z_j, turned)]
    group = torch.cat([torch.full((len(Z),), k) for k, Z in enumerate(each)])
    names = [i.name, j.name, f"{i.name} turned"]
    panel = _panel("", torch.cat(each), group, names)
    for title, shown in (("before", (0, 1)), ("after", (2, 1))):
        keep = [k for k, g in enumerate(panel["groups"]) if g in shown]
        cut = {key: [panel[key][k] for k in keep] for key in ("x", "y", "groups")}
        yield {**panel, **cut, "title": f"Public inputs {title} {i.name}'s space is turned"}


def _shape(node: Node, split: str) -> tuple[int, ...]:
    return tuple(node.data[split].x.shape[1:]) if split in node.data else ()


def _panel(title: str, Z: Tensor, group: Tensor, names: Sequence[str]) -> dict[str, Any]:
    points, by = project(Z.cpu().double())
    low, high = points.amin(0), points.amax(0)
    square = (points - (low + high) / 2) / (high - low).max().clamp(min=1e-12) + 0.5
    x, y = (square.T * 1e4).round().div(1e4).tolist()
    found = {"x": x, "y": y, "groups": group.tolist(), "names": list(names)}
    return {"title": title, "by": by, **found}


def project(Z: Rows) -> tuple[Points, str]:
    """Rows as points of a plane, and what the projection is called.

    Args:
        Z: a row a sample.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    by, made = "t-SNE", TSNE(init="pca", random_state=0)
    if len(Z) < FEWEST:
        by, made = "PCA", PCA(2)
    elif find_spec("umap") is not None:
        by, made = "UMAP", import_module("umap").UMAP(random_state=0, n_jobs=1)
    limits = import_module("threadpoolctl").threadpool_limits  # scikit-learn's own, without types
    with limits(1):  # for so few points more are slower, and sums come in another order
        return torch.as_tensor(made.fit_transform(Z.numpy())).double(), by

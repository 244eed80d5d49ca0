r"""Self-supervision at every node: BYOL on two views of a sample. The family of FedBYOL.

    node        any trunk, a projector to n numbers, a predictor, and a target that follows
    round t     BYOL (train/ssl.py) with  lr_t = lr (1 + cos(pi (t - 1) / T)) / 2              (1)
    evaluation  nearest neighbours or a linear probe after a round, linear probes with all and
                with few labels after the last (train/probe.py)

Grill et al., NeurIPS 2020 (BYOL); (1) is the schedule of EasyFL's fedssl, from which the defaults
are taken, too. A node counts the rounds it took part in.
Labels are looked at by the evaluation only: those of the split `probe` or, where there is none, of
`train`. Batches that are smaller than the others are left out.
Symbols: n = `projection`, T = `rounds`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed import check
from polyfed.core.data import Split
from polyfed.core.method import Method
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Node
from polyfed.core.phase import Objective, OptimiserName, Phase
from polyfed.errors import DataError, ModelError, UnknownNameError
from polyfed.models.siamese import siamese
from polyfed.random import ambient
from polyfed.train import outputs
from polyfed.train.augment_views import ImageViews, VectorViews
from polyfed.train.plane import in_plane
from polyfed.train.probe import few_labels_probe, knn_probe, linear_probe
from polyfed.train.ssl import BYOL, Views, collapse_report

TRUNK, PROJECTOR, PREDICTOR = "trunk", "projector", "predictor"
_ROUND = "round"
_LOOKED_AT = 512  # samples by which a collapse is noticed
_FEW = (0.01, 0.1)  # shares of the labels


class CollapseWarning(UserWarning):
    """Self-supervision that is likely to map all samples to one point."""


@dataclass(frozen=True, kw_only=True)
class SelfTaught(Method):
    """Train by BYOL. Defaults are those of FedFoA's paper, and of EasyFL where it is silent.

    Attributes:
        local_epochs: epochs in each round.
        cosine: let the learning rate fall to 0 over the rounds, as a cosine does.
        projection: numbers in a projection.
        predictor_hidden: width of the predictor's hidden layer.
        projector_hidden: width of the projector's hidden layer; 0 is a single linear layer.
        target_momentum: share of the target that stays at every step.
        crop: least share of an image that a view shows.
        flip: probability that a view is a mirror image; 0 for digits and letters.
        jitter: probability that the colours of a view change.
        noise_views: standard deviation of what is added to a view of plain vectors.
        mask: probability that a view of plain vectors misses a feature.
        neighbours: how many vote when a round is evaluated; all, if there are fewer.
        judge: what a round is evaluated by: nearest neighbours or, slower, a linear probe.
        probe_epochs: epochs of the linear probes; 0 leaves those after the last round out.
        map_samples: test samples that are laid out in the plane after the last round, by t-SNE.
    """

    rounds: int = 100
    batch: float = 500
    lr: float = 0.032
    optimiser: OptimiserName = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    local_epochs: int = 5
    cosine: bool = True
    projection: int = 256
    predictor_hidden: int = 4096
    projector_hidden: int = 0
    target_momentum: float = 0.99
    crop: float = 0.2
    flip: float = 0.5
    jitter: float = 0.8
    noise_views: float = 0.1
    mask: float = 0.2
    neighbours: int = 200
    judge: Literal["neighbours", "linear"] = "neighbours"
    probe_epochs: int = 200
    map_samples: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("local_epochs", "projection", "predictor_hidden", "neighbours"):
            check.at_least(self, name, 1)
        for name in ("projector_hidden", "probe_epochs", "noise_views", "map_samples"):
            check.at_least(self, name, 0)
        check.one_of(self, "judge", ("neighbours", "linear"))
        if self.judge == "linear":
            check.at_least(self, "probe_epochs", 1)
        for name in ("target_momentum", "crop", "flip", "jitter", "mask"):
            check.between(self, name, 0, 1)
        check.positive(self, "crop")

    def prepare(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Around every trunk the same heads, of equal weights where the trunks are as wide."""
        return [self._siamese(node) for node in nodes]

    def check(self, nodes: Sequence[Node]) -> None:
        """Images are from -1 to 1, tests can be evaluated, and nothing is bound to collapse."""
        for node in nodes:
            _check_images(node)
            if "test" in node.data and labelled(node) is None:
                raise DataError(
                    f"node {node.name} has a split 'test', but no labels to evaluate features by: "
                    "one class per sample in 'train', or in a split 'probe' of a few samples. "
                    "Training does not look at them."
                )
        bare = [node.name for node in nodes if not _has_batchnorm(node.model)]
        if bare:
            text = (
                f"{self.name}: {', '.join(bare)} have no BatchNorm in trunk or projector. BYOL "
                "tends to map all samples to one point there: see 'collapsed' in the metrics, and "
                "use projector_hidden."
            )
            warnings.warn(text, CollapseWarning, stacklevel=2)

    def local(self, node: Node) -> Iterable[Phase]:
        """Self-supervision on the node's own samples."""
        t = round_of(node) + 1
        node.memory[_ROUND] = torch.tensor(t)
        objective = self.objective(node)
        self.begin(node)
        yield self.phase(
            "byol",
            objective=objective,
            epochs=self.local_epochs,
            drop_last=True,
            optimiser=replace(self._optimiser(), lr=self._lr(t)),
        )
        self.end(node, objective)
        _note_collapse(node)

    def objective(self, node: Node) -> Objective:
        """What this round minimises."""
        return self.byol(node)

    def begin(self, node: Node) -> None:
        """What a method does before the training of a round."""
        return

    def end(self, node: Node, objective: Objective) -> None:
        """What a method does after it."""
        return

    def finish(self, node: Node) -> Iterable[Phase]:
        """Linear probes of the trunk's output, with all labels and with few; and its map."""
        known = labelled(node)
        if self.probe_epochs and known is not None and "test" in node.data:
            train, test = features(node.model, known), features(node.model, node.data["test"])
            node.notes["linear_probe"] = linear_probe(
                train, test, seed=node.seed, epochs=self.probe_epochs
            )
            for share in _FEW:
                accuracy = few_labels_probe(train, test, share, seed=node.seed)
                node.notes[f"linear_probe_{share:.0%}"] = accuracy
        if self.map_samples and "test" in node.data:
            node.notes["map"] = self._map(node)
        return ()

    def byol(self, node: Node) -> BYOL:
        """The objective of a node on its kind of data."""
        return BYOL(views=self._views(node), momentum=self.target_momentum)

    def _map(self, node: Node) -> dict[str, Any]:
        """Where test samples lie in the plane, and their labels; nothing where it diverged."""
        test = node.data["test"]
        found = outputs(node.model, test.x[: self.map_samples], TRUNK)
        if not found.isfinite().all():
            return {"points": [], "labels": []}
        points = [[round(c, 3) for c in p] for p in in_plane(found, seed=node.seed).tolist()]
        return {"points": points, "labels": torch.as_tensor(test.y)[: len(found)].tolist()}

    def _views(self, node: Node) -> Views:
        if node.data["train"].x.dim() == 4:
            return ImageViews(area=(self.crop, 1.0), flip=self.flip, jitter=self.jitter)
        return VectorViews(noise=self.noise_views, mask=self.mask)

    def _lr(self, t: int) -> float:
        """Apply Eq. (1)."""
        falls = (1 + math.cos(math.pi * (t - 1) / self.rounds)) / 2
        return self.lr * (falls if self.cosine else 1.0)

    def _siamese(self, node: Node) -> Node:
        trunk, out = _trunk(node)
        with ambient(node.seed, "init", "heads"):
            net = siamese(
                "byol",
                trunk,
                out.shape[1],
                projection=self.projection,
                hidden=self.predictor_hidden,
                projector_hidden=self.projector_hidden,
            ).to(out.dtype)
        known = labelled(node)
        score = None if known is None else self._score(node, known)
        return replace(node, model=net.as_model(), score=score, memory=dict(node.memory))

    def _score(self, node: Node, known: Split) -> Callable[[Model, Split], float]:
        if self.judge == "linear":
            return LinearProbe(known, self.probe_epochs, node.seed)
        return Neighbours(known, self.neighbours)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """How well the neighbours of a sample among these tell its label."""

    known: Split
    k: int

    def __call__(self, model: Model, split: Split) -> float:
        """Accuracy on a split; whatever device it is on."""
        known = features(model, self.known.to(split.x.device))
        return knn_probe(known, features(model, split), k=self.k)


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """How well a linear layer that was trained on these tells a sample's label."""

    known: Split
    epochs: int
    seed: int

    def __call__(self, model: Model, split: Split) -> float:
        """Accuracy on a split; whatever device it is on."""
        known = features(model, self.known.to(split.x.device))
        return linear_probe(known, features(model, split), seed=self.seed, epochs=self.epochs)


def features(model: Model, split: Split) -> Split:
    """What the trunk makes of a split."""
    return Split(outputs(model, split.x, TRUNK), split.y)


def labelled(node: Node) -> Split | None:
    """What features are evaluated by: `probe`, else `train`; None without class labels."""
    for name in ("probe", "train"):
        split: Split | None = node.data.get(name)
        if split is not None and _are_classes(split):
            return split
    return None


def round_of(node: Node) -> int:
    """How many rounds the node has taken part in."""
    return int(node.memory.get(_ROUND, 0))


def _are_classes(split: Split) -> bool:
    return split.y is not None and split.y.dim() == 1 and not split.y.is_floating_point()


def _trunk(node: Node) -> tuple[nn.Module, torch.Tensor]:
    """The trunk as a module of its own, and what it puts out for one sample."""
    model, x = node.model, node.data["train"].x[:1]
    if TRUNK not in model.parts:
        raise UnknownNameError(f"part of node {node.name}", TRUNK, model.parts)
    model.output_size(x, TRUNK)
    modules = model.parts[TRUNK]
    whole = len(model.parts) == 1
    if not whole and len(modules) > 1:
        raise ModelError(
            f"the trunk of node {node.name} is {len(modules)} modules ({', '.join(modules)}). "
            "Self-supervision puts other heads on it: make it one module, such as nn.Sequential."
        )
    trunk = model.net if whole else model.net.get_submodule(modules[0])
    if not any(p.dim() > 1 for p in trunk.parameters()):
        raise ModelError(
            f"the trunk of node {node.name} has no weights. It is what self-supervision trains: "
            "give it layers."
        )
    with evaluating(model.net):
        out, wanted = trunk(x), model.output(x, TRUNK)
    if out.shape != wanted.shape:
        raise ModelError(
            f"the trunk of node {node.name} puts out {list(out.shape[1:])} per sample, but "
            f"{list(wanted.shape[1:])} enters the next part: the network does something between "
            "them. Put it into the trunk's module."
        )
    return trunk, out


def _check_images(node: Node) -> None:
    x = node.data["train"].x
    if x.dim() == 4 and (float(x.min()) < -1 or float(x.max()) > 1):
        raise DataError(
            f"the images of node {node.name} have values from {float(x.min()):g} to "
            f"{float(x.max()):g}, expected -1 (black) to 1 (white): views are cut to that. "
            "Rescale them."
        )


def _has_batchnorm(model: Model) -> bool:
    children = dict(model.net.named_children())
    heads = (children[name] for name in (TRUNK, PROJECTOR))
    return any(isinstance(m, _BatchNorm) for part in heads for m in part.modules())


def _note_collapse(node: Node) -> None:
    """Whether projections of samples from all of `train` differ."""
    x = node.data["train"].x
    some = x[:: math.ceil(len(x) / _LOOKED_AT)]
    if len(some) > 1:
        node.notes |= collapse_report(outputs(node.model, some, PROJECTOR))

r"""What frozen features are worth: a linear probe, neighbours, and a probe with few labels.

    linear      softmax regression, Adam 3e-3, 200 epochs, batches of 512, from zero       (SPEC 6)
    neighbours  argmax_c sum over the k nearest i with label c of exp(cos(x, x_i) / tau)        (1)
    few labels  the linear probe on a stratified share, at least one label a class

Eq. (1): Wu et al., CVPR 2018, arXiv:1805.01978, section 3.4, with k = 200, or all there are, and
tau = 0.1, as later work on small images has it (Wu et al.: 0.07).
Features are not augmented, and not scaled unless asked for: Adam takes long to use features that
are small or share a large mean, such as those of a trunk without BatchNorm.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from polyfed.core.data import Data, Split
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.core.phase import Optimiser, Phase, cross_entropy
from polyfed.errors import ConfigError, DataError
from polyfed.random import stream
from polyfed.train.evaluate import accuracy
from polyfed.train.together import Trainer
from polyfed.train.track import Job

_CHUNK = 1024  # test samples compared with all training samples at a time
_MOST = 64  # linear probes whose outcome is remembered
_found: dict[bytes, float] = {}  # these, by what they were given


def linear_probe(
    train: Split,
    test: Split,
    *,
    seed: int = 0,
    epochs: int = 200,
    lr: float = 3e-3,
    batch: int = 512,
    standardise: bool = False,
) -> float:
    """Test accuracy of a linear layer trained on features; what was asked before is remembered.

    Args:
        train: features and labels to learn from.
        test: features and labels to be right about.
        seed: names the order of the batches.
        epochs: passes over the training features.
        lr: learning rate of Adam.
        batch: samples in a batch.
        standardise: give every feature mean 0 and deviation 1 over the training samples.
    """
    classes = _classes(train, test)
    given = _digest(train, test, (seed, epochs, lr, batch, standardise))
    if given not in _found:
        if standardise:
            train, test = _standardised(train, test)
        phase = Phase(
            label="probe",
            objective=cross_entropy,
            epochs=epochs,
            batch=batch,
            optimiser=Optimiser(name="adam", lr=lr),
        )
        if len(_found) == _MOST:
            del _found[next(iter(_found))]
        _found[given] = _trained(train, test, classes, phase, seed)
    return _found[given]


def _trained(train: Split, test: Split, classes: int, phase: Phase, seed: int) -> float:
    x = train.x
    layer = skip_init(nn.Linear, x.shape[1], classes, device=x.device, dtype=x.dtype)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    model = Model.split(nn.Sequential(layer), probe="0")
    node = Node("probe", Data(train=train), model, seed=seed)
    Trainer("always").train([Job(node, phase, ("probe",))])  # on a GPU its steps are a graph
    return accuracy(model, test)


def _digest(train: Split, test: Split, settings: tuple[float, ...]) -> bytes:
    """What a probe is given, in short: of networks that are equal at all nodes one is trained."""
    found = hashlib.blake2b(repr((settings, train.x.device)).encode())
    for t in (train.x, _labels(train), test.x, _labels(test)):
        found.update(repr((t.dtype, t.shape)).encode())
        found.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.digest()


@torch.no_grad()
def knn_probe(train: Split, test: Split, *, k: int = 200, temperature: float = 0.1) -> float:
    """Test accuracy of Eq. (1).

    Args:
        train: features and labels that vote.
        test: features and labels to be right about.
        k: neighbours that vote; all, if there are fewer.
        temperature: the smaller, the more the nearest count (tau).
    """
    classes = _classes(train, test)
    bank, labels = functional.normalize(train.x, dim=1), _labels(train)
    votes = functional.one_hot(labels, classes).to(bank)
    right = torch.zeros((), dtype=torch.int64, device=bank.device)
    for x, y in zip(test.x.split(_CHUNK), _labels(test).split(_CHUNK), strict=True):
        cosine, nearest = (functional.normalize(x, dim=1) @ bank.T).topk(min(k, len(bank)), dim=1)
        weight = ((cosine - 1) / temperature).exp()  # at most 1, so that nothing overflows
        scores = (weight[:, :, None] * votes[nearest]).sum(dim=1)
        right += (scores.argmax(dim=1) == y).sum()
    return float(right) / len(test)


def few_labels_probe(
    train: Split, test: Split, share: float, *, seed: int = 0, standardise: bool = False
) -> float:
    """Test accuracy of the linear probe when only a share of the training labels is known.

    Args:
        train: features and labels to choose from.
        test: features and labels to be right about.
        share: of the labels of each class, such as 0.01 or 0.1.
        seed: names the choice, and the order of the batches.
        standardise: as in `linear_probe`, over all training samples, with labels or without.
    """
    if standardise:
        train, test = _standardised(train, test)
    chosen = labelled_share(_labels(train), share, stream(seed, "probe", "labels"))
    return linear_probe(Split(train.x[chosen], _labels(train)[chosen]), test, seed=seed)


def labelled_share(y: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Indices of a random share of every class, rounded, at least one; in their own order.

    >>> labelled_share(torch.tensor([0, 0, 0, 0, 1]), 0.5, stream(0, "share")).shape
    torch.Size([3])
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share must be above 0 and at most 1, got {share}.")
    shuffled = torch.randperm(len(y), generator=generator).to(y.device)
    by_class = shuffled[y[shuffled].argsort(stable=True)]
    counts = y.bincount()
    quota = (counts.double() * share).round().long().clamp_min(1)
    rank = torch.arange(len(y), device=y.device) - (counts.cumsum(0) - counts)[y[by_class]]
    return by_class[rank < quota[y[by_class]]].sort().values


def _standardised(train: Split, test: Split) -> tuple[Split, Split]:
    mean = train.x.mean(dim=0)
    std = (train.x - mean).square().mean(dim=0).sqrt()
    scale = torch.where(std > 0, std, 1.0)  # a dead feature is 0, and stays
    return Split((train.x - mean) / scale, train.y), Split((test.x - mean) / scale, test.y)


def _labels(split: Split) -> Tensor:
    if split.y is None:
        raise DataError("a probe needs labels, but this split has none.")
    return split.y


def _classes(train: Split, test: Split) -> int:
    for split in (train, test):
        if split.x.dim() != 2 or not len(split):
            raise DataError(
                f"a probe needs features, one vector per sample, got {list(split.x.shape)}."
            )
    if train.x.shape[1] != test.x.shape[1]:
        raise DataError(
            f"training features have {train.x.shape[1]} numbers, test features "
            f"{test.x.shape[1]}. Take both from the same network."
        )
    return int(max(_labels(train).max(), _labels(test).max())) + 1

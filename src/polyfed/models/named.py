"""Networks for images by the name a person types; all are called with (image, classes, width=)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from polyfed.models.alexnet import alexnet
from polyfed.models.coatnet import coatnet
from polyfed.models.fedavg_cnn import fedavg_cnn
from polyfed.models.resnet import resnet18, resnet18_224, resnet34
from polyfed.models.vgg import vgg9

NetworkName = Literal["cnn", "resnet18", "resnet18-224", "resnet34", "vgg9", "alexnet", "coatnet"]
NETWORKS: Mapping[NetworkName, Callable[..., nn.Module]] = {
    "cnn": fedavg_cnn,
    "resnet18": resnet18,
    "resnet18-224": resnet18_224,
    "resnet34": resnet34,
    "vgg9": vgg9,
    "alexnet": alexnet,
    "coatnet": coatnet,
}
TINY = 8  # a width at which each of them trains on a CPU in seconds

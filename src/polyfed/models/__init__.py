"""Networks, written once and small: plain `nn.Module`s, most with children `trunk` and `head`."""

from polyfed.models.alexnet import alexnet
from polyfed.models.associative import AssociativeMemory, Hebbian
from polyfed.models.cnn import conv_net
from polyfed.models.coatnet import coatnet
from polyfed.models.digit_model import digit_model
from polyfed.models.fasttext import fasttext
from polyfed.models.fedavg_cnn import fedavg_cnn
from polyfed.models.mlp import mlp
from polyfed.models.resnet import resnet18, resnet18_224, resnet34
from polyfed.models.siamese import siamese
from polyfed.models.vgg import vgg9

__all__ = [
    "AssociativeMemory",
    "Hebbian",
    "alexnet",
    "coatnet",
    "conv_net",
    "digit_model",
    "fasttext",
    "fedavg_cnn",
    "mlp",
    "resnet18",
    "resnet18_224",
    "resnet34",
    "siamese",
    "vgg9",
]

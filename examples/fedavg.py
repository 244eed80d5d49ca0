"""FedAvg on map-style torch Datasets: four parties with unequal amounts of data, one network."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import polyfed as pf
from polyfed.random import ambient


class Scans(Dataset[tuple[Tensor, int]]):
    """Digits as if they were your own: anything with a length and (input, label) items."""

    def __init__(self, first: int, last: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.items = list(zip(images[first:last], labels[first:last], strict=True))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = self.items[index]
        return torch.tensor(pixels, dtype=torch.float32) / 16, int(label)


def network() -> pf.Model:
    """The same for everybody: names, shapes and, from a named stream, initial weights."""
    with ambient(0, "init"):
        net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    return pf.Model.split(net, all=...)  # FedAvg needs no parts: one name for everything


classes = tuple("0123456789")  # what the outputs mean; FedAvg checks that all nodes agree
bounds = {"north": (0, 80), "east": (80, 240), "south": (240, 560), "west": (560, 1000)}
nodes = [
    pf.Node(name, pf.Data(train=Scans(*own), test=Scans(1000, 1797)), network(), classes)
    for name, own in bounds.items()
]
for method in (pf.Local(local_epochs=2, batch=16), pf.FedAvg(local_epochs=2, batch=16)):
    print(pf.run(method, nodes, seed=0).table(), end="\n\n")

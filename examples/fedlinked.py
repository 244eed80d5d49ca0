"""FedLinked with your own networks and your own tensors.

Three parties, each with its own digits and its own network. Images, labels, class lists and weights
stay; what travels is each trunk's output on 600 unlabelled images that all three hold.
"""

from collections import OrderedDict
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf
from polyfed.random import ambient, stream

with ambient(0, "init"):  # initial weights; the parties agree on one thing, the width 32
    conv = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 32))
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    deep = [nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh()]
    one = nn.Sequential(OrderedDict(features=conv, classifier=nn.Linear(32, 5)))
    two = nn.Sequential(OrderedDict(body=wide, out=nn.Linear(32, 5)))
    three = nn.Sequential(*deep, nn.Linear(48, 32), nn.Linear(32, 5))
parties = {  # any nn.Module, cut by the names of its modules; `...` is everything else
    "M0": ((0, 1, 2, 3, 4), pf.Model.split(one, trunk="features", head="classifier")),
    "M1": ((2, 3, 4, 5, 6), pf.Model.split(two, trunk="body", head="out")),
    "M2": ((0, 6, 7, 8, 9), pf.Model.split(three, trunk=..., head="6")),
}

x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = x.float().reshape(-1, 1, 8, 8) / 16
public, shares = x[:600], {"train": 0.25, "val_es": 0.15, "val_rb": 0.15, "test": 0.45}
nodes = []
for k, (name, (digits, model)) in enumerate(parties.items()):
    own = torch.arange(600 + k, len(x), 3)  # no image belongs to two parties
    own = own[torch.isin(y[own], torch.tensor(digits))]
    labels = torch.searchsorted(torch.tensor(digits), y[own])  # 0 to 4
    splits = pf.tasks.stratified(labels, shares, stream(0, "split", name))
    data: dict[str, Any] = {
        split: (x[own[index]], labels[index]) for split, index in splits.items()
    }
    nodes.append(pf.Node(name, pf.Data(**data, public=public), model))

method = pf.FedLinked(rounds=5, batch=16, lr=2e-3, init_epochs=30, distil_epochs=10)
run = pf.run(method, nodes, seed=0)
print(run.table())
print("bytes that left M0:", run.ledger.bytes_sent("M0"))  # 5 rounds x 4 bytes x 600 x 32
noted = next(m["utilities"] for m in reversed(run.metrics) if "utilities" in m)
for name, row in zip(noted["nodes"], noted["rows"], strict=True):
    print("utility for", name, {n: round(u, 2) for n, u in zip(noted["nodes"], row, strict=True)})

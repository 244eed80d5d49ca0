"""Ways to share some of a network and keep the rest, side by side: ten parties, few digits each."""

from typing import Any

import torch
from sklearn.datasets import load_digits

import polyfed as pf
from polyfed.models.mlp import mlp
from polyfed.random import ambient, stream
from polyfed.tasks.partition import parse

images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = images.float() / 16
shares = {"train": 0.3, "test": 0.7}
nodes = []
for k, held in enumerate(parse("dirichlet:0.1").assign(labels, 10, stream(0, "who"))):
    split = pf.tasks.stratified(labels[held], shares, stream(0, "split", k))
    data = {name: (images[held[i]], labels[held[i]]) for name, i in split.items()}
    with ambient(0, "init"):
        net = mlp(64, [64, 32], 10)
    model = pf.Model.split(net, trunk="trunk", head="head")
    nodes.append(
        pf.Node(f"P{k}", pf.Data(may_miss_classes=True, **data), model, tuple("0123456789"))
    )

same: dict[str, Any] = {"rounds": 12, "batch": 10, "lr": 3e-3}
methods = {
    "local": pf.Local(local_epochs=2, patience=0, rollback=False, **same),
    "fedavg": pf.FedAvg(local_epochs=2, **same),
    "fedper": pf.FedPer(local_epochs=2, **same),
    "fedrep": pf.FedRep(head_epochs=1, trunk_epochs=1, **same),
    "fedbabu": pf.FedBABU(local_epochs=2, finetune_epochs=10, **same),
    "lg-fedavg": pf.LGFedAvg(local_epochs=2, **same),
    "fedala": pf.FedALA(local_epochs=2, **same),
}
print(pf.compare(methods, nodes, seeds=2).table())

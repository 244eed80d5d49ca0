"""Calibrate the head of FedAvg with statistics of features: five parties with two digits each."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf
from polyfed.random import ambient

images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
x, test = images.float() / 16, (images[1200:].float() / 16, labels[1200:])
nodes = []
for k in range(5):
    own = torch.isin(labels[:1200], torch.tensor([2 * k, 2 * k + 1])).nonzero().squeeze(1)
    with ambient(0, "init"):
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = pf.Data(train=(x[own], labels[own]), test=test)  # tested on all ten digits
    model = pf.Model.split(net, trunk=..., head="2")
    nodes.append(pf.Node(f"P{k}", data, model, tuple("0123456789")))

run = pf.run(pf.CCVR(rounds=11, local_epochs=5, virtual=200), nodes, seed=0)
means: dict[int, float] = {}
for t in (9, 10, 11):
    found = [m["test_accuracy"] for m in run.metrics if m["tick"] == t and "test_accuracy" in m]
    means[t] = sum(found) / len(found)
print(f"FedAvg after round 9: {means[9]:.3f}, after round 10: {means[10]:.3f}")
print(f"with the head calibrated in round 11: {means[11]:.3f}")
for t in (10, 11):
    up = next(c for c in run.ledger.crossings() if c.tick == t and c.source == "P0")
    print(f"round {t}: P0 sends {up.bytes} bytes:", ", ".join(n["name"] for n in up.tensors))

"""FedUL on sets of your own: three archives of unlabelled images, and a hub with sixty labels.

Each archive keeps its images in twelve boxes. Nobody knows what is on an image, but from each box
the share of every digit is known. Images and shares stay; what travels is the network.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf
from polyfed.random import ambient, stream
from polyfed.train.surrogate import attach_sets

pixels, digit = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x, classes = pixels.float() / 16, tuple("0123456789")
order = torch.randperm(len(x), generator=stream(0, "order"))
archived, labelled, held_out, test = order.split([1200, 60, 140, 397])


def network() -> pf.Model:
    """The same for everybody, hub included: shapes and, from a named stream, initial weights."""
    with ambient(0, "init"):
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return pf.Model.split(net, all=...)


nodes = []
for k, name in enumerate(("east", "north", "west")):
    own, chance = archived[k::3], stream(0, "boxes", name)
    anywhere = torch.randint(12, (len(own),), generator=chance)
    box = torch.where(torch.rand(len(own), generator=chance) < 0.5, digit[own], anywhere)
    counts = torch.zeros(12, 10)
    counts.index_put_((box, digit[own]), torch.ones(len(own)), accumulate=True)
    data = pf.Data(train=x[own], test=(x[test], digit[test]))  # labels to test with, not to train
    nodes.append(pf.Node(name, data, network(), classes))
    attach_sets(nodes[-1], sets=box, Pi=counts / counts.sum(1, keepdim=True))
labels = pf.Data(train=(x[labelled], digit[labelled]), val_rb=(x[held_out], digit[held_out]))
nodes.append(pf.Node("hub", labels, network(), classes))

chosen = (
    pf.HubOnly(rounds=20, lr=5e-3, hub_epochs=5),
    pf.FedUL(rounds=20, lr=5e-3),
    pf.FedULM1(rounds=20, lr=5e-3),
    pf.FedULM2(rounds=20, lr=5e-3, h="auto"),
)
runs = {method.name: pf.run(method, nodes, seed=0) for method in chosen}
for name, run in runs.items():
    print(f"{name:8} {run.mean_accuracy:.3f}")
up = [c for c in runs["fedul"].ledger.crossings() if c.source == "east"]
print(f"east sends {up[0].bytes} bytes a round:", ", ".join(t["name"] for t in up[0].tensors))
shares = [m["h"] for m in runs["fedul-m2"].metrics if "h" in m]
print("share of the hub's own model:", " ".join(f"{h:.2f}" for h in shares))

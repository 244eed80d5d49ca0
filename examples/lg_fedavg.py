"""Personal trunks under one common head: three parties that measure different things."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import polyfed as pf
from polyfed.random import ambient

images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
pictures = images.float().view(-1, 8, 8) / 16
seen = {  # what each party measures of a digit
    "camera": pictures.flatten(1),
    "rows": torch.cat([pictures.mean(2), pictures.std(2)], 1),
    "columns": torch.cat([pictures.mean(1), pictures.std(1)], 1),
}


def node(k: int, name: str, x: Tensor) -> pf.Node:
    """Every third digit is the party's own; the last 597 are for testing."""
    with ambient(0, "init", name):
        trunk = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        net = nn.Sequential(trunk, nn.Linear(16, 10))
    own = slice(k, 1200, 3)
    data = pf.Data(train=(x[own], labels[own]), test=(x[1200:], labels[1200:]))
    return pf.Node(name, data, pf.Model.split(net, trunk="0", head="1"), tuple("0123456789"))


nodes = [node(k, name, x) for k, (name, x) in enumerate(seen.items())]
alone = pf.Local(rounds=20, local_epochs=2, lr=3e-3, patience=0, rollback=False)
print(pf.run(alone, nodes, seed=0).table(), end="\n\n")
run = pf.run(pf.LGFedAvg(rounds=20, local_epochs=2, lr=3e-3), nodes, seed=0)
print(run.table())
print(f"a message is {run.ledger.crossings()[0].bytes} bytes: the head and a count")

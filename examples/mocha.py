"""Linear models that find out who is related: two groups of parties with opposite questions."""

from typing import Any

import torch
from torch import nn

import polyfed as pf
from polyfed.random import stream

draw = stream(0, "example")
question = torch.randn(20, generator=draw)  # what the first group asks; the second, the opposite
nodes = []
for k in range(6):
    x = torch.randn(340, 20, generator=draw)
    own = (question if k < 3 else -question) + 0.5 * torch.randn(20, generator=draw)
    y = (x @ own > 0).long()
    data = pf.Data(train=(x[:40], y[:40]), test=(x[40:], y[40:]))
    net = nn.Sequential(nn.Flatten(), nn.Linear(20, 2))  # the trunk is fixed: raw inputs
    nodes.append(pf.Node(f"P{k}", data, pf.Model.split(net, trunk="0", head="1"), ("no", "yes")))

common: dict[str, Any] = {"rounds": 20, "local_epochs": 10, "batch": 40, "lr": 1e-2}
run = pf.run(pf.MOCHA(lam1=0.003, **common), nodes, seed=0)
alone = pf.run(pf.Local(patience=0, rollback=False, **common), nodes, seed=0)
print(f"alone {alone.mean_accuracy:.3f}, related {run.mean_accuracy:.3f}")

found = [m["relation"] for m in run.metrics if "relation" in m][-1]
sigma = torch.tensor(found["rows"])
print("correlation of the tasks, as the hub sees it:")
for name, row in zip(found["nodes"], sigma / sigma.diag().outer(sigma.diag()).sqrt(), strict=True):
    print(" ", name, " ".join(f"{r:+.2f}" for r in row.tolist()))

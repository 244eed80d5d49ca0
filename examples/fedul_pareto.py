"""The front between two objectives: FedUL's Method 2 with h from 0 to 1, nodes that are not alike.

A line for each h: the loss on the nodes' sets, the loss and the error on the hub's validation
split. A star marks what no other h beats in both losses.
"""

import statistics

import polyfed as pf
from polyfed import methods

task = pf.tasks.digits_sets(iid=False)
nodes = task.nodes(0)
found: dict[str, tuple[float, float, float]] = {}
for h in (0, 0.5, 1, "auto"):
    method = methods.make("fedul-m2", {"h": h, "rounds": 8}, task)
    run = pf.run(method, nodes, seed=0, evaluate_every=8)
    on_sets = statistics.fmean(m["surrogate_loss"] for m in run.metrics if "surrogate_loss" in m)
    rounds = [m for m in run.metrics if "val_rb_loss" in m]
    best = max(rounds, key=lambda m: (m["val_rb_accuracy"], m["tick"]))  # what the nodes keep
    found[str(h)] = on_sets, best["val_rb_loss"], 1 - best["val_rb_accuracy"]

print("h     sets   labels  error")
for h, (on_sets, on_labels, error) in found.items():
    rivals = [f for f in found.values() if f[:2] != (on_sets, on_labels)]
    is_beaten = any(f[0] <= on_sets and f[1] <= on_labels for f in rivals)
    print(f"{h:5} {on_sets:.3f}  {on_labels:.3f}   {error:.3f} {'' if is_beaten else '*'}".rstrip())

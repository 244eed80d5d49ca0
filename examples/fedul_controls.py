"""What unlabelled sets are worth: FedUL beside its controls, and beside FedAvg with all labels."""

import polyfed as pf
from polyfed import methods

task = pf.tasks.digits_sets(num_nodes=3)
names = ("fedul-m1", "hub-only", "fedllp", "fedpl")
print(pf.compare([methods.make(n, {"rounds": 8}, task) for n in names], task, seeds=1).table())

known = pf.tasks.digits_sets(num_nodes=3, labels=1.0)  # the same images, all with their labels
print("with all labels:", pf.run(methods.make("fedavg", {"rounds": 8}, known), known).table())

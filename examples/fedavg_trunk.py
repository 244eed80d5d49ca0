"""Average the trunk, keep the heads: three parties whose classes differ."""

import polyfed as pf

task = pf.tasks.digits(heads="own")  # five digits a node, and outputs for its own digits only
recipe = task.recipe("fedavg-trunk")  # the settings that `polyfed run fedavg-trunk` takes
run = pf.run(pf.FedAvgTrunk(**recipe), task, seed=0)
print(run.table())

first = run.ledger.crossings()[0]
names = ", ".join(tensor["name"] for tensor in first.tensors)
print(f"{first.source} to {first.to}: {names}; {first.bytes} bytes")
print("accuracy on val_rb, round by round; the best of them is kept:")
for name in run.accuracy:
    own = [m for m in run.metrics if m.get("node") == name]
    print(" ", name, [m["val_rb_accuracy"] for m in own if "val_rb_accuracy" in m])

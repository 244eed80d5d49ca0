"""FedFoA: three different encoders teach themselves, and share how their features correlate."""

import polyfed as pf

task = pf.tasks.digits_encoders()  # no label is looked at before the evaluation
method = pf.methods.make("fedfoa", {"rounds": 5}, task)
run = pf.run(method, task, seed=0, evaluate_every=5)
print(run.table())

print("distance between the triangles of conv and mlp:")
for m in run.metrics:
    if "distances" in m:
        print(f"  round {m['tick']}: {m['distances']['rows'][0][1]:.1f}")
for m in run.metrics:
    if "linear_probe" in m:
        few = m["linear_probe_10%"]
        print(
            f"{m['node']}: linear probe {m['linear_probe']:.3f}, with 10% of the labels {few:.3f}"
        )
up = next(c for c in run.ledger.crossings() if c.to == "hub")
print(
    f"{up.source} tells the hub {up.bytes} bytes a round:", ", ".join(t["name"] for t in up.tensors)
)

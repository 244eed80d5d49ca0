"""FedBYOL, FedU and FedEMA: one encoder for all, averaged three ways, no labels before the end."""

import polyfed as pf

task = pf.tasks.digits_encoders(encoders="mlp")
names = ("byol", "fedbyol", "fedu", "fedema")
methods = {name: pf.methods.make(name, {"rounds": 4, "probe_epochs": 0}, task) for name in names}
done = pf.compare(methods, task, seeds=1, evaluate_every=4)
print(done.table())
for name, what in (("fedu", "predictor"), ("fedema", "mu")):
    noted = [m for m in done.runs[name][0].metrics if what in m and m["node"] == "M0-mlp"]
    print(f"{name}, {what} of M0:", *(f"{m['divergence']:.2f}:{m[what]}"[:9] for m in noted))

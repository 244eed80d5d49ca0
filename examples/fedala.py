"""How much of the mean head each party lets in: the mixing weights of FedALA, round by round."""

import polyfed as pf

task = pf.tasks.digits()
method = pf.FedALA(rounds=6, local_epochs=5, batch=16, lr=3e-3)
run = pf.run(method, task, seed=0)
print(run.table())

print("mean mixing weight (1: the mean head, 0: one's own) and epochs that it took to learn:")
for name in run.accuracy:
    own = [m for m in run.metrics if m.get("node") == name and "mixing_weight" in m]
    print(" ", name, " ".join(f"{m['mixing_weight']:.3f}" for m in own), end=";")
    print("", *(m["mix_epochs"] for m in own))

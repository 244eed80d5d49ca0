"""Automatic slices: six nodes, three of which move digits round. The hub finds out which three."""

import polyfed as pf

task = pf.tasks.digits_permuted(kind="cycle:6", num_nodes=6, permuted=3, train=200)
training = {**task.recipe("auto-slices"), "rounds": 60, "batch": 4, "lr": 2.0}
hidden = "moved=rest@M0+M1+M2;plain=rest@M3+M4+M5"
methods = {
    "80 %": pf.PartialAveraging(**training),
    "80 %, groups found": pf.AutoSlices(**training, after=40),
    "80 %, groups given": pf.PartialAveraging(**training, groups=hidden, depends="global"),
}
compared = pf.compare(methods, task, seeds=2, evaluate_every=60, stack="always")
print(compared.table())
for seed, run in enumerate(compared.runs["80 %, groups found"]):
    found = {m["tick"]: m["groups"] for m in run.metrics if "groups" in m}
    print(f"seed {seed}, from round {min(found)} on: {found[60]}")

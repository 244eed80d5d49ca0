"""All data in one place, beside training alone: what there would be to gain by sharing, if any."""

import polyfed as pf

task = pf.tasks.digits()
methods = {"local": pf.Local(**task.recipe("local")), "joint": pf.Joint(**task.recipe("joint"))}
comparison = pf.compare(methods, task, seeds=2)
print(comparison.table())

alone, pooled = (comparison.runs[name] for name in methods)
for seed, a, b in zip(comparison.seeds, alone, pooled, strict=True):
    print(f"seed {seed}: joint minus local {b.mean_accuracy - a.mean_accuracy:+.3f}")

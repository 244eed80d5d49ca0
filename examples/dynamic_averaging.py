"""Dynamic averaging: slices travel only when they have moved far enough. Accuracy against bytes."""

import polyfed as pf

task = pf.tasks.digits_permuted()
training = task.recipe("partial-averaging")
methods: dict[str, pf.Method] = {
    "every round": pf.PartialAveraging(**training),
    "drift 0.05": pf.DynamicAveraging(**training, drift=0.05),
    "drift 0.2": pf.DynamicAveraging(**training, drift=0.2),
    "alone": pf.PartialAveraging(**{**training, "scheme": "0%"}),
}
print(pf.compare(methods, task, seeds=2, evaluate_every=30, stack="always").table())

run = pf.run(methods["drift 0.2"], task, evaluate_every=30, stack="always")
for crossing in run.ledger.crossings():
    if crossing.source == "M0" and "global" in [tensor["name"] for tensor in crossing.tensors]:
        print(f"round {crossing.tick}: M0 sends its slice, {crossing.bytes} bytes")

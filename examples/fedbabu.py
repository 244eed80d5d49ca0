"""A trunk trained under a random head that nobody moves; the heads are fitted at the very end."""

import polyfed as pf

task = pf.tasks.digits()
for parts in ("all", "head"):
    method = pf.FedBABU(rounds=5, local_epochs=5, finetune_parts=parts, batch=16, lr=3e-3)
    run = pf.run(method, task, seed=0)
    last = [m["test_accuracy"] for m in run.metrics if m.get("tick") == 5 and "test_accuracy" in m]
    before = sum(last) / len(last)
    print(f"fine-tuned {parts}: {before:.3f} under the random head, then {run.mean_accuracy:.3f}")

"""Head and trunk in turn: each fits the head to what it received before it touches the trunk."""

import polyfed as pf

task = pf.tasks.digits()
method = pf.FedRep(rounds=8, head_epochs=5, trunk_epochs=5, batch=16, lr=3e-3)
run = pf.run(method, task, seed=0)
print(run.table())

print("M0, cross-entropy after its head epochs and after its trunk epochs:")
for m in run.metrics:
    if m.get("node") == "M0" and "head_loss" in m:
        print(f"  round {m['tick']:2}: {m['head_loss']:.3f} {m['trunk_loss']:.3f}")

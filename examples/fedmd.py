"""FedMD: three different networks agree on the scores of public images, with labels and without."""

import polyfed as pf

task = pf.tasks.digits_encoders()
local = pf.Local(rounds=3, batch=64, lr=2e-3, init_epochs=3, local_epochs=1, rollback=False)
fedmd = pf.FedMD(rounds=3, batch=64, lr=2e-3, init_epochs=3, revisit_epochs=1, public_batch=64)
print(pf.compare([local, fedmd], task, seeds=1).table())

unlabelled = pf.methods.make("fedmd-ssl", {"rounds": 3, "probe_epochs": 0}, task)
run = pf.run(unlabelled, task, evaluate_every=3)
print(run.table())
up = next(c for c in run.ledger.crossings() if c.to == "hub")
shapes = ", ".join(f"{t['name']} {t['shape']}" for t in up.tensors)
print(f"without labels {up.source} tells: {shapes}")

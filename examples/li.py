"""Loop Improvement on a ring that breaks: the trunk travels, the heads stay, the ring goes on."""

import polyfed as pf
from polyfed.models.integrate import pool_outputs, stack_heads

method = pf.LI(rounds=20, batch=0.2, lr=3e-3, head_epochs=2, trunk_epochs=2, decay_every=0,
               finetune_epochs=6)  # fmt: skip
broken = "cut 0-1 @3; kill M2 @5; heal @8"
run = pf.run(method, pf.tasks.digits(), topology="dual-ring", fail=broken, evaluate_every=20)
print(run.table())
for fault in run.faults:
    print(f"round {fault['tick']}: {fault['node']} {fault['fault']}")
for crossing in run.ledger.crossings()[5:8]:
    way = f"{crossing.source} to {crossing.to}, {crossing.bytes} bytes"
    print(f"round {crossing.tick}: {way} over {crossing.hops} link(s)")

# One model for all digits: the last trunk, all heads, and a transformer over what they say.
nodes = list(run.nodes.values())
stacked = stack_heads(nodes)
pooled = pool_outputs(stacked, nodes)  # outputs and labels leave, inputs do not
joined = pf.run(pf.Local(rounds=1, local_epochs=40, batch=32), [pooled])
stacked.integrator = joined.nodes["pooled"].model.net
print(f"{type(stacked).__name__} of {len(stacked.heads)} heads: {joined.mean_accuracy:.3f}")

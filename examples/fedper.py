"""Average the trunk, keep personal heads: three parties with different digits."""

import polyfed as pf

task = pf.tasks.digits(heads="own")  # every head has outputs for its node's own digits only
method = pf.FedPer(rounds=10, local_epochs=5, batch=16, lr=3e-3)
run = pf.run(method, task, seed=0)
print(run.table())

for name, node in run.nodes.items():
    trunk, head = (sum(t.numel() for t in node.model.state(p).values()) for p in ("trunk", "head"))
    print(f"{name}: {trunk} numbers of the trunk are common, {head} of the head are its own")

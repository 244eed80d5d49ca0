"""FedDF: two kinds of networks; the hub averages each kind and distils all into both."""

import polyfed as pf
from polyfed.train.kinds import with_hub

nodes = pf.tasks.digits_encoders(encoders="mlp,conv", num_nodes=4).nodes(0)
nodes = with_hub(nodes)  # the last: it has the public images, and a network of each kind
print("kinds at the hub:", ", ".join(nodes[-1].model.parts))
for steps in (0, 50):
    method = pf.FedDF(rounds=3, batch=64, lr=2e-3, local_epochs=2, distil_steps=steps)
    run = pf.run(method, nodes, seed=0, evaluate_every=3)
    print(f"mean accuracy with {steps} steps of distillation: {run.mean_accuracy:.3f}")

"""DS-FL: three networks and a hub distil what all predict for public digits, sharpened."""

import polyfed as pf

nodes = pf.tasks.digits_encoders().nodes(0)
data = pf.Data(public=nodes[0].data["public"], test=nodes[0].data["test"])
hub = pf.Node("hub", data, nodes[1].model.copy(), nodes[0].classes)  # has no label to learn from
method = pf.DSFL(rounds=4, batch=64, lr=2e-3, local_epochs=3, distil_epochs=2, public_batch=64)
run = pf.run(method, [*nodes, hub], seed=0)
print(run.table())
print("the hub's own network:")
for m in run.metrics:
    if m.get("node") == "hub":
        print(f"  round {m['tick']}: accuracy {m['test_accuracy']:.3f}, entropy {m['entropy']:.2f}")

"""The whole network travels (CWT), or the trunk alone with heads that stay (LI): compare both."""

import polyfed as pf

methods = [
    pf.CWT(rounds=30, batch=0.2, lr=1e-3, local_epochs=4),
    pf.LI(rounds=30, batch=0.2, lr=3e-3, head_epochs=2, trunk_epochs=2, decay_every=0),
]
print(pf.compare(methods, pf.tasks.digits(), seeds=1, evaluate_every=30).table())

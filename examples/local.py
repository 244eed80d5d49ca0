"""Train alone: the lower control, and its spread over seeds."""

import polyfed as pf

task = pf.tasks.digits()
comparison = pf.compare([pf.Local(**task.recipe("local"))], task, seeds=2)
print(comparison.table())

run = comparison.runs["local"][0]
print("bytes sent:", run.ledger.bytes_sent())
for name in run.accuracy:
    ends = [m for m in run.metrics if m.get("node") == name and "test_accuracy" in m]
    print(name, "by round:", [round(m["test_accuracy"], 3) for m in ends])

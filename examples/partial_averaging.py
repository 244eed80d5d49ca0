"""Partial averaging: most cells for everybody, some for pairs of nodes, the rest for nobody else.

Of four nodes with digits the third calls an 8 a 9 and a 9 an 8, the fourth also exchanges 6 and 7.
"""

import polyfed as pf

task = pf.tasks.digits_permuted(kind="v3e")
training = {**task.recipe("partial-averaging"), "rounds": 20}  # one sample after another
pairs = "alike=rest@M0+M1;near=0-4-2-0@M2+M3"
methods = {
    "alone": pf.PartialAveraging(**{**training, "scheme": "0%"}),
    "everything": pf.PartialAveraging(**{**training, "scheme": "100%"}),
    "80 %": pf.PartialAveraging(**training),
    "80 % and pairs": pf.PartialAveraging(**training, groups=pairs, depends="global"),
}
print(pf.compare(methods, task, seeds=2, evaluate_every=20, stack="always").table())

slices = methods["80 % and pairs"].slices(task.nodes(0))
for topic in slices.topics():
    names = ", ".join(slices.implementers(topic))
    print(f"{topic}: {slices.size(topic)} numbers, shared by {names}")

# A hub for every partial model, or none at all: who says what to whom in a round?
once = pf.PartialAveraging(**{**training, "rounds": 1}, groups=pairs, depends="global")
for topology in ("groups", "gossip:cycles=1"):
    print(f"{topology}, what M2 says and hears:")
    for crossing in pf.run(once, task, topology=topology).ledger.crossings():
        if "M2" in (crossing.source, crossing.to):
            said = ", ".join(tensor["name"] for tensor in crossing.tensors)
            print(f"  {crossing.source} to {crossing.to}: {said}, {crossing.bytes} bytes")

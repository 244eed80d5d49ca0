"""`StackedAdam` against torch's Adam or AdamW of each row, in float64; prints what differs.

Run by test_moments.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import torch
from torch import Tensor

from polyfed.core.phase import Optimiser
from polyfed.random import ambient
from polyfed.train import moments
from polyfed.train.moments import StackedAdam

ROWS = (0.1, 0.1, 0), (0.02, 0.0, 3), (0.002, 0.5, 100_000), (0.01, 0.03, 2000)  # lr, decay, count
SHAPES = (33, 40), (1024,), (), (3,), (7,)
STEPS = 35
UNUSED = 3  # this tensor has no gradient
SMALL, TINY = 4, 1e-8  # and the gradient of this is as small as eps


def main(name: str) -> dict[str, float]:
    """Largest difference of weights, moments and counts; one tensor never has a gradient."""
    settings = [Optimiser(name=name, lr=lr, weight_decay=decay) for lr, decay, _ in ROWS]  # type: ignore[arg-type]
    with ambient(0, "weights"):
        parts = [torch.randn(len(ROWS), *shape) / 9 for shape in SHAPES]
        first = [torch.randn_like(part) for part in parts]
        second = [torch.rand_like(part) + 0.1 for part in parts]
    counts = torch.tensor([float(count) for *_, count in ROWS])
    for m, v in zip(first, second, strict=True):
        m[0], v[0] = 0.0, 0.0  # of the row that begins
    ours = StackedAdam(parts, settings)
    theirs = [[part[row].double().clone() for part in parts] for row in range(len(ROWS))]
    torchs = [own.build(tensors) for own, tensors in zip(settings, theirs, strict=True)]
    for i, part in enumerate(parts):
        if i != UNUSED:
            ours.state[part] = _state(counts.clone(), first[i].clone(), second[i].clone())
        for row, adam in enumerate(torchs):
            own = first[i][row].double(), second[i][row].double()
            adam.state[theirs[row][i]] = _state(counts[row].clone(), *own)
    fewer = StackedAdam([part[:2] for part in parts], settings[:2])
    for part, some in zip(parts, fewer.parts, strict=True):
        fewer.state[some] = {entry: t[:2] for entry, t in ours.state[part].items()}
    for k in range(STEPS):  # in the last of them, of the first two rows only
        stepping = ours if k < STEPS - 5 else fewer
        rows = len(stepping.rates)
        with ambient(k, "gradients"):
            for i, part in enumerate(stepping.parts):
                if i != UNUSED:
                    part.grad = torch.randn_like(part) * (TINY if i == SMALL else 1)
                    for row in range(rows):
                        theirs[row][i].grad = part.grad[row].double()
        stepping.step()
        for adam in torchs[:rows]:
            adam.step()
    assert not ours.state[parts[UNUSED]]
    worst = defaultdict[str, float](float)
    for row, adam in enumerate(torchs):
        for part, wanted in zip(parts, theirs[row], strict=True):
            found = {"weight": part, **ours.state[part]}
            for entry, t in found.items():
                to = wanted if entry == "weight" else adam.state[wanted][entry]
                off = (t[row].double() - to).abs() / to.abs().clamp_min(1)
                worst[entry] = max(worst[entry], float(off.nan_to_num(torch.inf).max()))
    return worst


def _state(count: Tensor, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    return {"step": count, "exp_avg": first, "exp_avg_sq": second}


if __name__ == "__main__":
    moments._MOST = 3  # then there is more than one launch
    print(json.dumps(main(sys.argv[1])))

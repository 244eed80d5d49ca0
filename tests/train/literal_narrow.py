"""`NarrowAdam` against autocast, torch's Adam and a penalty; prints the largest differences.

Run by test_narrow.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
The interpreter cuts float32 off to bfloat16 where a GPU rounds, so copies are compared by that, and
then set to what they would be.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from polyfed.core.model import Model
from polyfed.core.phase import Objective, cross_entropy
from polyfed.random import ambient
from polyfed.train.augment import Rotated
from polyfed.train.narrow import NarrowAdam
from polyfed.train.surrogate import L1Penalty

STEPS, LR = 12, 0.02


class Odd(nn.Module):
    """A parameter that no layer has, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Add the middle row."""
        return x + self.table[1]


def model() -> Model:
    """With more weights in one tensor than one program moves."""
    with ambient(0, "init"):
        trunk = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        net = nn.Sequential(trunk, nn.Linear(24, 120), nn.ReLU(), nn.Linear(120, 5), Odd())
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Model.split(net, all=...)


def main(objective: Objective) -> tuple[float, float, float]:
    """Largest difference of losses, of weights after a step from the same weights, of copies."""
    ours, theirs = model(), model()
    ours.precision = theirs.precision = "bfloat16"
    parameters = list(theirs.net.parameters())
    adam = torch.optim.Adam(parameters, lr=LR)
    narrow = NarrowAdam(list(ours.net.parameters()), objective, STEPS)
    ours.load(theirs.state())
    narrow.begin(LR)
    worst = [0.0, 0.0, 0.0]
    for k in range(STEPS):
        with ambient(k, "data"):
            x, y = torch.randn(7, 2, 4, 4), torch.randint(5, (7,))
        with ambient(k, "noise"):
            loss = objective(theirs, x, y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with ambient(k, "noise"):
            found = narrow.step(ours, x, y)
        worst[0] = max(worst[0], abs(float(found - loss.detach())))
        for i, (p, q) in enumerate(zip(narrow.parameters, parameters, strict=True)):
            worst[1] = max(worst[1], float((p - q).detach().abs().max()))
            p.data.copy_(q.data)
            if i in narrow.copies:
                copy = narrow.copies[i].detach()
                off = (copy.float() - q.detach()).abs() / q.detach().abs().clamp_min(1e-30)
                worst[2] = max(worst[2], float(off.max()))
                copy.copy_(q.data)
    return worst[0], worst[1], worst[2]


def layouts() -> float:
    """Largest difference of weights when the same gradients come in another layout."""
    ends = []
    for layout in (torch.channels_last, torch.contiguous_format):
        parameters = list(model().net.parameters())
        narrow = NarrowAdam(parameters, cross_entropy, STEPS)
        narrow.begin(LR)
        wide: list[Tensor | None] = [None] * len(parameters)
        with ambient(0, "gradients"):
            gradients = [torch.randn(copy.shape).bfloat16() for copy in narrow.copies.values()]
        laid = [g.contiguous(memory_format=layout) if g.dim() == 4 else g for g in gradients]
        narrow._move(laid, wide)
        ends.append(torch.cat([p.detach().flatten() for p in parameters]))
    return float((ends[0] - ends[1]).abs().max())


if __name__ == "__main__":
    weight = float(sys.argv[1])
    plain: Objective = L1Penalty(cross_entropy, weight) if weight else cross_entropy
    print(*main(Rotated(plain, 30.0)), layouts())

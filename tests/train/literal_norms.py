"""`norm_kernels` against torch's BatchNorm of each row; prints the largest differences.

Run by test_norms.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from polyfed.train import norm_kernels, norms

ROWS, SAMPLES = 3, 5
PLAIN, RECTIFIED, BESIDE = "plain", "rectified", "rectified with what lies beside"
KEPT_AND_THEN = ((False, PLAIN), (True, PLAIN), (False, RECTIFIED), (True, BESIDE))


def main() -> None:
    """Of pictures and vectors; all samples count or not, statistics are kept or not."""
    used = []
    for name in ("forward", "backward"):
        own = getattr(norm_kernels, name)
        setattr(norm_kernels, name, lambda *given, own=own: (used.append(own), own(*given))[1])
    for numbers in (64, 4096):  # several blocks for a channel, or one
        norm_kernels._NUMBERS = numbers
        for shape in ((6, 3, 7), (8, 1, 1), (130, 2, 2), (5,)):
            for counted in (False, True):
                for kept, then in KEPT_AND_THEN:
                    given = drawn(shape, counted, kept)
                    norms._kernels = lambda x: norm_kernels
                    found, before = stacked(*given, then), len(used)
                    norms._kernels = lambda x: None
                    wanted = stacked(*given, then)
                    assert len(used) == before == 2 * (len(used) // 2) > 0
                    print(max(map(difference, found, wanted)))
    assert len(used) == 2 * 2 * 4 * 2 * len(KEPT_AND_THEN)


def drawn(shape: tuple[int, ...], counted: bool, kept: bool) -> list[Tensor | None]:
    """A stack of batches with their channels last, weights, biases, what is kept, what counts."""
    x = 3 + draw(ROWS, SAMPLES, *shape[1:], shape[0]).movedim(-1, 2)
    inside = (draw(ROWS, SAMPLES, seed=4) > -0.5).float()
    inside[0], inside[1] = 0, torch.eye(SAMPLES)[0]  # a row without samples, and one with one
    mean, variance = draw(ROWS, shape[0], seed=5), draw(ROWS, shape[0], seed=6).abs()
    return [
        x,
        draw(ROWS, shape[0], seed=1),
        draw(ROWS, shape[0], seed=2),
        mean if kept else None,
        variance if kept else None,
        inside if counted else None,
    ]


def stacked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    inside: Tensor | None,
    then: str,
) -> list[Tensor]:
    """What leaves BatchNorm, and what follows it; gradients; and what it keeps."""
    others_in = [draw(*x.shape, seed=7)] if then == BESIDE else []
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias, *others_in)]
    kept = [None if t is None else t.clone() for t in (mean, variance)]

    def one(m: Tensor, v: Tensor, i: Tensor, x: Tensor, w: Tensor, b: Tensor, *s: Tensor) -> Tensor:
        how = {"beside": s[0] if s else None, "rectify": then != PLAIN}
        return norms.batch_norm(x, m, v, w, b, momentum=0.3, eps=1e-3, inside=i, **how)

    others = [*kept, inside]
    dims = (*(None if t is None else 0 for t in others), *[0] * len(leaves))
    out = vmap(one, in_dims=dims)(*others, *leaves)
    pull = draw(*out.shape, seed=3)
    return [out, *torch.autograd.grad(out, leaves, pull), *(t for t in kept if t is not None)]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, of numbers that are about 1."""
    assert a.shape == b.shape
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()

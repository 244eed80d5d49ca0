"""FedFoA's term: the n x n form of `polyfed.maths.correlation` against the paper's m x n SVD.

    python benchmarks/correlation.py [--device cuda] [--peers 3 31] [--parts] [--json FILE]

Loss and gradient of a batch of 500 projections of 256 numbers, all peers heard, as in training:
what depends on the peers alone is computed once. The literal form
takes the SVD of R_j Z^T for one peer after another; `detached` holds Q* fixed, as ours does,
`through` differentiates the SVD. All are compared with `detached` in float64. The share of a
training step is that of BYOL on a ResNet-18 with 32 x 32 images (on a GPU in bfloat16). On a CPU
one thread is used and its own time is counted, which others on the machine do not lengthen.
`--parts` times what the n x n form is made of on a GPU, each alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyfed.maths.correlation import Bank, triangular, understand
from polyfed.random import ambient, stream

M, N = 500, 256
Loss = Callable[[Tensor, Bank], Tensor]


def literal(Z: Tensor, bank: Bank, *, through: bool) -> Tensor:
    """Algorithm 1, lines 16 to 23, as printed: an SVD of n x m for one peer after another."""
    trace = triangular(Z.detach()).trace()
    loss = Z.new_zeros(())
    for R in bank.R:
        if R.trace() > trace:
            with torch.set_grad_enabled(through):
                U, _, Vh = torch.linalg.svd(R @ Z.mT, full_matrices=False)
                Q = Vh.mT @ U.mT
            loss = loss + torch.linalg.matrix_norm(Z - Q @ R)
    return loss


FORMS: dict[str, Loss] = {
    "n x n": lambda Z, bank: understand(Z, bank).loss,
    "m x n, detached": lambda Z, bank: literal(Z, bank, through=False),
    "m x n, through": lambda Z, bank: literal(Z, bank, through=True),
}


def features(draw: torch.Generator) -> Tensor:
    """Projections whose directions differ in strength by a factor of a hundred."""
    mixing = torch.randn(N, N, generator=draw) / N**0.5 * torch.logspace(0, -2, N)
    found: Tensor = torch.randn(M, N, generator=draw) @ mixing
    return found


def compare(peers: int, device: str, seconds: float) -> dict[str, Any]:
    """Milliseconds, and errors relative to float64, of every form."""
    draw = stream(0, "correlation", peers)
    R = torch.stack([3 * triangular(features(draw)) for _ in range(peers)])
    Z = features(draw)
    wanted, gradient = _evaluated(FORMS["m x n, detached"], Z.double(), Bank(R.double()))
    Z, bank = Z.to(device), Bank(R.to(device))
    found: dict[str, Any] = {}
    for name, form in FORMS.items():
        loss, grad = _evaluated(form, Z, bank)
        found[name] = {
            "loss_error": abs(loss.item() / wanted.item() - 1),
            "gradient_error": float((grad.cpu() - gradient).norm() / gradient.norm()),
        }
    calls = {name: partial(_evaluated, form, Z, bank) for name, form in FORMS.items()}
    for name, ms in best(calls, device, seconds).items():
        found[name]["ms"] = ms
    return found


def _evaluated(form: Loss, Z: Tensor, bank: Bank) -> tuple[Tensor, Tensor]:
    leaf = Z.clone().requires_grad_()
    loss = form(leaf, bank)
    loss.backward()
    return loss.detach(), torch.as_tensor(leaf.grad)


def best(
    calls: Mapping[str, Callable[[], object]], device: str, seconds: float
) -> dict[str, float]:
    """The shortest time of each in milliseconds; they take turns."""
    clock = time.perf_counter if device.startswith("cuda") else time.thread_time
    shortest = dict.fromkeys(calls, float("inf"))
    until, done = clock() + seconds * len(calls), 0
    while clock() < until or done < 3:
        for name, call in calls.items():
            _wait(device)
            begun = clock()
            call()
            _wait(device)
            shortest[name] = min(shortest[name], 1e3 * (clock() - begun))
        done += 1
    return shortest


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def parts_ms(peers: int, device: str, seconds: float) -> dict[str, float]:
    """What a GPU does for the n x n form, each alone; of the steps one."""
    draw = stream(0, "correlation", "parts", peers)
    Z = features(draw).to(device)
    D = Z.double()
    gram = D.mT @ D
    R = torch.linalg.cholesky(gram).mT
    eye = torch.eye(N, dtype=D.dtype, device=device)
    X = torch.randn(peers, N, N, generator=draw).to(device) / N

    def step(X: Tensor) -> Tensor:
        return torch.baddbmm(X, X, torch.bmm(X.mT, X), beta=1.5, alpha=-0.5)

    parts: dict[str, Callable[[], object]] = {
        "Gram": lambda: Z.double().mT @ D,
        "Cholesky": lambda: torch.linalg.cholesky_ex(gram, upper=True),
        "inverse": lambda: torch.linalg.solve_triangular(R, eye, upper=True),
        "look": lambda: torch.cat([R[0, :1], R[1, :1]]).tolist(),
        "step, float32": partial(step, X),
        "step, float64": partial(step, X.double()),
    }
    return best(parts, device, seconds / len(parts))


def step_ms(device: str, seconds: float) -> float:
    """One step of BYOL on a ResNet-18, forward and backward."""
    from polyfed.models.named import NETWORKS
    from polyfed.models.siamese import siamese
    from polyfed.train.augment_views import ImageViews
    from polyfed.train.ssl import BYOL

    with ambient(0, "correlation", "init"):
        trunk = NETWORKS["resnet18"]((3, 32, 32), 10).get_submodule("trunk")
        model = siamese("byol", trunk, 512).as_model()
    model.net.to(device)
    model.precision = "bfloat16" if device.startswith("cuda") else "float32"
    x = torch.rand(M, 3, 32, 32, generator=stream(0, "correlation", "x")).to(device) * 2 - 1
    byol = BYOL(views=ImageViews())

    def step() -> None:
        model.net.zero_grad(set_to_none=True)
        byol(model, x, None).backward()
        byol.after_step(model)

    return best({"step": step}, device, seconds)["step"]


def main() -> None:
    """Print a line a form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", type=int, nargs="+", default=[3, 31])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each form")
    parser.add_argument("--parts", action="store_true", help="what the n x n form is made of")
    parser.add_argument("--json", help="also write here")
    parser.add_argument(
        "--step", action="store_true", help="ResNet-18's step on a CPU too: minutes"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"device": chosen.device, "torch": torch.__version__, "peers": {}}
    if chosen.device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(chosen.device)
        torch.backends.cudnn.benchmark = True
    for peers in chosen.peers:
        forms = found["peers"][peers] = compare(peers, chosen.device, chosen.seconds)
        ours = forms["n x n"]["ms"]
        for name, f in forms.items():
            errors = f"loss off by {f['loss_error']:.0e}, gradient by {f['gradient_error']:.0e}"
            print(f"{peers:3} peers  {name:16} {f['ms']:9.2f} ms  {f['ms'] / ours:6.2f}x  {errors}")
        if chosen.parts:
            parts = found.setdefault("parts", {})
            parts[peers] = parts_ms(peers, chosen.device, chosen.seconds)
            listed = ", ".join(f"{name} {ms:.3f}" for name, ms in parts[peers].items())
            print(f"{peers:3} peers  parts in ms: {listed}")
    if chosen.step or chosen.device.startswith("cuda"):
        step = found["step_ms"] = step_ms(chosen.device, chosen.seconds)
        for peers, forms in found["peers"].items():
            term = forms["n x n"]["ms"]
            share = term / (step + term)
            print(f"BYOL step {step:.1f} ms; with {peers} peers the term is {share:.1%} of a step")
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

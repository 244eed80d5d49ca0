"""Networks for small images: parameters counted by hand, and each forward pass written out."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from polyfed.core.model import Model, evaluating
from polyfed.errors import ConfigError
from polyfed.models.alexnet import alexnet
from polyfed.models.coatnet import coatnet
from polyfed.models.digit_model import digit_model
from polyfed.models.fedavg_cnn import fedavg_cnn
from polyfed.models.named import NETWORKS, TINY, NetworkName
from polyfed.models.resnet import resnet18, resnet18_224, resnet34
from polyfed.models.vgg import vgg9
from polyfed.random import ambient, stream

Make = Callable[..., nn.Module]
ALL: list[Make] = [*NETWORKS.values(), digit_model]


def tiny(make: Make, image: tuple[int, int, int] = (3, 32, 32), classes: int = 5) -> nn.Module:
    with ambient(0, "test"):
        return make(image, classes, width=TINY)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "x"))


def open_gates(net: nn.Module) -> None:
    """CoAtNet's residual branches begin closed."""
    for name, p in net.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(p)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# ---- parameters ----------------------------------------------------------------------------------


def conv(depth: int, following: int, kernel: int) -> int:
    """Weights and biases of a convolution; with kernel 1 also those of a linear layer."""
    return depth * following * kernel**2 + following


def residual_stage(depth: int, following: int, blocks: int) -> int:
    """Convolutions without bias; each followed by a BatchNorm of two numbers a channel."""
    first = 9 * depth * following + 9 * following**2 + 4 * following
    shortcut = depth * following + 2 * following if depth != following else 0
    return first + shortcut + (blocks - 1) * (18 * following**2 + 4 * following)


def resnet_parameters(channels: int, classes: int, blocks: tuple[int, ...]) -> int:
    stem = 9 * channels * 64 + 2 * 64
    sizes = ((64, 64), (64, 128), (128, 256), (256, 512))
    stages = [residual_stage(a, b, n) for (a, b), n in zip(sizes, blocks, strict=True)]
    return stem + sum(stages) + conv(512, classes, 1)


@pytest.mark.parametrize(
    ("make", "image", "want", "by_hand"),
    [
        (fedavg_cnn, (1, 28, 28), 582_026,
         conv(1, 32, 5) + conv(32, 64, 5) + conv(4 * 4 * 64, 512, 1) + conv(512, 10, 1)),
        (fedavg_cnn, (3, 32, 32), 878_538,
         conv(3, 32, 5) + conv(32, 64, 5) + conv(5 * 5 * 64, 512, 1) + conv(512, 10, 1)),
        (resnet18, (3, 32, 32), 11_173_962, resnet_parameters(3, 10, (2, 2, 2, 2))),
        (resnet34, (3, 32, 32), 21_282_122, resnet_parameters(3, 10, (3, 4, 6, 3))),
        (resnet18, (1, 28, 28), 11_172_810, resnet_parameters(1, 10, (2, 2, 2, 2))),
        (resnet18_224, (3, 32, 32), 11_181_642,
         resnet_parameters(3, 10, (2, 2, 2, 2)) + (7 * 7 - 3 * 3) * 3 * 64),
        (vgg9, (3, 32, 32), 3_491_530,
         conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 128, 3) + conv(128, 128, 3)
         + conv(128, 256, 3) + conv(256, 256, 3)
         + conv(4 * 4 * 256, 512, 1) + conv(512, 512, 1) + conv(512, 10, 1)),
        (alexnet, (3, 32, 32), 2_472_266,
         conv(3, 64, 11) + conv(64, 192, 5) + conv(192, 384, 3) + conv(384, 256, 3)
         + conv(256, 256, 3) + conv(256, 10, 1)),
        (digit_model, (3, 28, 28), 14_219_210,
         conv(3, 64, 5) + conv(64, 64, 5) + conv(64, 128, 5) + conv(7 * 7 * 128, 2048, 1)
         + conv(2048, 512, 1) + conv(512, 10, 1) + 2 * (64 + 64 + 128 + 2048 + 512)),
    ],
)  # fmt: skip
def test_parameters(make: Make, image: tuple[int, int, int], want: int, by_hand: int) -> None:
    net = make(image, 10)
    assert count(net) == want == by_hand
    head = [m for m in net.get_submodule("head").modules() if isinstance(m, nn.Linear)]
    assert head[-1] is [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    assert count(net.get_submodule("head")) == count(head[-1])


# ---- what all of them do -------------------------------------------------------------------------


def test_names_are_the_networks() -> None:
    assert get_args(NetworkName) == tuple(NETWORKS)


@pytest.mark.parametrize("make", ALL)
def test_trunk_and_head(make: Make) -> None:
    net = tiny(make)
    model = Model.split(net, trunk="trunk", head="head")
    x = random(3, 3, 32, 32)
    with evaluating(net):
        assert model(x).shape == (3, 5)
        z = model.output(x, "trunk")
        assert z.shape == (3, model.output_size(x, "trunk"))
        torch.testing.assert_close(net.get_submodule("head")(z), model(x))
        torch.testing.assert_close(model(x[1:2]), model(x)[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", ALL)
def test_gradients_reach_every_parameter(make: Make) -> None:
    net = tiny(make)
    open_gates(net)
    f.cross_entropy(net(random(8, 3, 32, 32)), torch.arange(8) % 5).backward()
    without = {n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == (before_norms(net) if make is digit_model else set())


def before_norms(net: nn.Module) -> set[str]:
    layers = list(net.get_submodule("trunk").named_children())
    followed = pairwise(layers)
    return {f"trunk.{name}.bias" for (name, _), (_, m) in followed if "BatchNorm" in repr(m)}


def test_a_bias_before_batchnorm_has_no_gradient() -> None:
    """So DigitModel need not compute it: written out, it is 0, and all else is the same."""
    net = tiny(digit_model).double()
    x, y = random(8, 3, 32, 32).double(), torch.arange(8) % 5
    f.cross_entropy(net(x), y).backward()
    tensors = {name: t for name, t in net.named_parameters() if name.startswith("trunk")}
    leaves = [t.detach().requires_grad_() for t in tensors.values()]
    z = literal_digit_model(x, iter(leaves), batch_norm)
    f.cross_entropy(net.get_submodule("head")(z), y).backward()
    silent = before_norms(net)
    assert len(silent) == 5
    for (name, t), leaf in zip(tensors.items(), leaves, strict=True):
        assert leaf.grad is not None
        if name in silent:
            assert t.grad is None
            assert leaf.grad.abs().max() < 1e-14
        else:
            torch.testing.assert_close(t.grad, leaf.grad)


def test_but_before_a_batchnorm_at_rest_it_has_one() -> None:
    """As where a node has a single sample."""
    net = tiny(digit_model).double()
    for module in net.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()
    net(random(3, 3, 32, 32).double()).square().sum().backward()
    named = dict(net.named_parameters())
    leaves = [t.detach().requires_grad_() for n, t in named.items() if n.startswith("trunk")]
    z = literal_digit_model(random(3, 3, 32, 32).double(), iter(leaves))
    net.get_submodule("head")(z).square().sum().backward()
    for t, leaf in zip(named.values(), leaves, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.any()
        torch.testing.assert_close(t.grad, leaf.grad)


@pytest.mark.parametrize("make", ALL)
def test_what_travels_is_numbers(make: Make) -> None:
    """Besides parameters only BatchNorm's statistics are part of the state."""
    net = tiny(make)
    extra = set(net.state_dict()) - {name for name, _ in net.named_parameters()}
    assert {name.rpartition(".")[2] for name in extra} <= {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip


@pytest.mark.parametrize("make", ALL)
def test_precision_is_kept(make: Make) -> None:
    net = tiny(make).double()
    assert net(random(2, 3, 32, 32).double()).dtype == torch.float64


@pytest.mark.parametrize("make", [m for m in ALL if m is not alexnet])
def test_grey_images_of_28_pixels(make: Make) -> None:
    assert tiny(make, (1, 28, 28), 3)(random(2, 1, 28, 28)).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "least"), [(fedavg_cnn, 16), (vgg9, 8), (alexnet, 29), (coatnet, 8), (digit_model, 4)]
)
def test_the_smallest_image(make: Make, least: int) -> None:
    net = tiny(make, (1, least, least), 2)
    assert net.eval()(random(1, 1, least, least)).shape == (1, 2)
    text = rf"takes images from {least}x{least} on, got {least}x{least - 1}"
    with pytest.raises(ConfigError, match=text):
        make((1, least, least - 1), 2)


@pytest.mark.parametrize("make", ALL)
def test_oblong_images(make: Make) -> None:
    image = (1, 34, 60) if make is coatnet else (1, 33, 60)
    assert tiny(make, image, 2).eval()(random(1, *image)).shape == (1, 2)


def test_filters_of_the_published_resnet_begin_by_what_leaves_them() -> None:
    """Normal, of variance 2 over the number of links that leave a pixel (He et al. 2015)."""
    with ambient(0, "test"):
        net = resnet18_224((3, 32, 32), 10)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach()
            leaving = module.out_channels * weight[0, 0].numel()
            assert weight.std().item() == pytest.approx((2 / leaving) ** 0.5, rel=0.03)
            assert weight.abs().max() > 3 * weight.std()  # not uniform


# ---- written out ---------------------------------------------------------------------------------


def norm(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """BatchNorm as it begins, in eval mode: mean 0, variance 1."""
    scale, shift = next(weights), next(weights)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return x / (1 + 1e-5) ** 0.5 * scale.view(shape) + shift.view(shape)


def batch_norm(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """BatchNorm in training, by the batch's own mean and variance."""
    found: Tensor = f.batch_norm(x, None, None, next(weights), next(weights), training=True)
    return found


def literal_cnn(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w))), 2)
    x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w))), 2)
    return f.relu(f.linear(x.flatten(1), next(w), next(w)))


def literal_vgg(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    for _ in range(3):
        x = f.relu(f.conv2d(x, next(w), next(w), padding=1))
        x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w), padding=1)), 2)
    x = f.relu(f.linear(x.flatten(1), next(w), next(w)))
    return f.relu(f.linear(x, next(w), next(w)))


def literal_alexnet(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w), stride=4, padding=5)), 2)
    x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w), padding=2)), 2)
    x = f.relu(f.conv2d(x, next(w), next(w), padding=1))
    x = f.relu(f.conv2d(x, next(w), next(w), padding=1))
    x = f.max_pool2d(f.relu(f.conv2d(x, next(w), next(w), padding=1)), 2)
    return x.flatten(1)


def literal_digit_model(x: Tensor, w: Iterator[Tensor], norm: Any = norm) -> Tensor:
    x = f.max_pool2d(f.relu(norm(f.conv2d(x, next(w), next(w), padding=2), w)), 2)
    x = f.max_pool2d(f.relu(norm(f.conv2d(x, next(w), next(w), padding=2), w)), 2)
    x = f.relu(norm(f.conv2d(x, next(w), next(w), padding=2), w))
    x = f.relu(norm(f.linear(x.flatten(1), next(w), next(w)), w))
    return f.relu(norm(f.linear(x, next(w), next(w)), w))


def literal_resnet(
    blocks: tuple[int, ...], *, is_large: bool = False
) -> Callable[[Tensor, Iterator[Tensor]], Tensor]:
    """He et al., Figure 5 (left): in stage 2, 3, 4 the first block halves the image.

    For large images the first layers (Table 1) leave a quarter of the lines and columns.
    """

    def forward(x: Tensor, w: Iterator[Tensor]) -> Tensor:
        if is_large:
            x = f.relu(norm(f.conv2d(x, next(w), stride=2, padding=3), w))
            x = f.max_pool2d(x, 3, stride=2, padding=1)
        else:
            x = f.relu(norm(f.conv2d(x, next(w), padding=1), w))
        for stage, count in enumerate(blocks):
            for i in range(count):
                halves = stage > 0 and i == 0
                stride = 2 if halves else 1
                y = f.relu(norm(f.conv2d(x, next(w), stride=stride, padding=1), w))
                y = norm(f.conv2d(y, next(w), padding=1), w)
                if halves:
                    x = norm(f.conv2d(x, next(w), stride=2), w)
                x = f.relu(x + y)
        assert x.shape[2:] == ((1, 1) if is_large else (4, 4))
        return x.mean((2, 3))

    return forward


@pytest.mark.parametrize(
    ("make", "literal"),
    [
        (fedavg_cnn, literal_cnn),
        (vgg9, literal_vgg),
        (alexnet, literal_alexnet),
        (digit_model, literal_digit_model),
        (resnet18, literal_resnet((2, 2, 2, 2))),
        (resnet34, literal_resnet((3, 4, 6, 3))),
        (resnet18_224, literal_resnet((2, 2, 2, 2), is_large=True)),
    ],
)
def test_the_forward_pass_written_out(make: Make, literal: Any) -> None:
    net = tiny(make).double().eval()
    generator = stream(0, "weights")
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:  # biases, and the scales of BatchNorm, that begin as 0 and 1
                p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    x = random(2, 3, 32, 32).double()
    weights = iter(list(net.parameters()))
    z = literal(x, weights)
    torch.testing.assert_close(net.get_submodule("trunk")(x), z)
    torch.testing.assert_close(net(x), f.linear(z, next(weights), next(weights)))
    assert next(weights, None) is None
    assert z.std() > 0.01  # the comparison is not one of zeros

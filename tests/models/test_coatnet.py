"""CoAtNet: relative attention place by place, the blocks written out, parameters by hand."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from polyfed.errors import ConfigError
from polyfed.models.coatnet import RelativeAttention, _mbconv, coatnet
from polyfed.random import ambient, stream


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "x"), dtype=torch.float64)


def shaken(net: nn.Module) -> nn.Module:
    """Every parameter random, so that none is a neutral 0 or 1."""
    generator = stream(1, "weights")
    net = net.double().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def literal_attention(layer: RelativeAttention, x: Tensor, d: int) -> Tensor:
    """Eq. (2), for one image, head after head and place after place."""
    _, height, width = x.shape
    heads = layer.offsets.shape[0]
    weight, bias = layer.query_key_value.weight[:, :, 0, 0], layer.query_key_value.bias
    assert bias is not None
    places = [(r, c) for r in range(height) for c in range(width)]
    out = torch.zeros(heads * d, height, width, dtype=x.dtype)
    for h in range(heads):
        rows = [slice(p * heads * d + h * d, p * heads * d + h * d + d) for p in range(3)]
        q, k, v = ({at: weight[r] @ x[:, at[0], at[1]] + bias[r] for at in places} for r in rows)
        for i in places:
            score = torch.stack([
                q[i] @ k[j] / math.sqrt(d)
                + layer.offsets[h, i[0] - j[0] + height - 1, i[1] - j[1] + width - 1]
                for j in places
            ])  # fmt: skip
            shares = score.exp() / score.exp().sum()
            total = torch.zeros(d, dtype=x.dtype)
            for share, j in zip(shares, places, strict=True):
                total = total + share * v[j]
            out[h * d : h * d + d, i[0], i[1]] = total
    return f.conv2d(out[None], layer.together.weight, layer.together.bias)[0]


def test_relative_attention_place_by_place() -> None:
    layer = shaken(RelativeAttention(6, 8, (2, 3), 4))
    assert isinstance(layer, RelativeAttention)
    x = random(2, 6, 2, 3)
    got = layer(x)
    assert got.shape == (2, 8, 2, 3)
    for image, want in zip(x, got, strict=True):
        torch.testing.assert_close(literal_attention(layer, image, 4), want)


def test_without_offsets_attention_does_not_know_where_it_is() -> None:
    layer = shaken(RelativeAttention(6, 8, (2, 3), 4))
    x, order = random(1, 6, 2, 3), torch.tensor([3, 0, 5, 1, 4, 2])
    moved = x.flatten(2)[..., order].unflatten(2, (2, 3))
    want = layer(x).flatten(2)[..., order]
    assert not torch.allclose(layer(moved).flatten(2), want)
    nn.init.zeros_(layer.get_parameter("offsets"))
    want = layer(x).flatten(2)[..., order]
    torch.testing.assert_close(layer(moved).flatten(2), want)


def batch_norm(x: Tensor, m: nn.Module) -> Tensor:
    assert isinstance(m, nn.BatchNorm2d)
    scale, shift = m.weight.view(1, -1, 1, 1), m.bias.view(1, -1, 1, 1)
    return x / (1 + m.eps) ** 0.5 * scale + shift


@pytest.mark.parametrize(("depth", "following", "stride"), [(4, 4, 1), (4, 6, 2)])
def test_mbconv_written_out(depth: int, following: int, stride: int) -> None:
    block = shaken(_mbconv(depth, following, stride))
    change = block.get_submodule("change")
    m = list(change.children())
    x = random(2, depth, 6, 6)
    y = f.gelu(batch_norm(x, m[0]))
    y = f.gelu(batch_norm(f.conv2d(y, m[2].weight), m[3]))
    y = f.conv2d(y, m[5].weight, stride=stride, padding=1, groups=4 * depth)
    y = f.gelu(batch_norm(y, m[6]))
    squeeze, excite = m[8].squeeze, m[8].excite
    share = f.gelu(f.conv2d(y.mean((2, 3), keepdim=True), squeeze.weight, squeeze.bias))
    y = y * torch.sigmoid(f.conv2d(share, excite.weight, excite.bias))
    y = f.conv2d(y, m[9].weight, m[9].bias)
    kept = x
    if stride == 2:
        (_, match) = block.get_submodule("shortcut").children()
        kept = f.conv2d(f.max_pool2d(x, 2), match.weight, match.bias)
    torch.testing.assert_close(block(x), kept + block.gamma * y)


def test_transformer_blocks_written_out() -> None:
    """The last stage: attention halves 4x4 to 2x2; then the feed-forward block; then again."""
    net = shaken(coatnet((1, 16, 16), 2, width=8))
    layers = list(net.get_submodule("trunk").children())
    last = layers[-7:-3]  # attention, forward, attention, forward; then norm, mean, flatten
    x = random(2, 32, 4, 4)

    def layer_norm(x: Tensor, module: nn.Module) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        scale, shift = (p.view(1, -1, 1, 1) for p in module.parameters())
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    for k in (0, 2):
        y, (norm, _, attention, _) = x, last[k].get_submodule("change").children()
        y = layer_norm(y, norm)
        if k == 0:
            y = f.max_pool2d(y, 2)
            match = list(last[k].get_submodule("shortcut").children())[1]
            x = f.conv2d(f.max_pool2d(x, 2), match.weight, match.bias)
        y = torch.stack([literal_attention(attention, image, 32) for image in y])
        x = x + last[k].gamma * y
        norm, up, _, down, _ = last[k + 1].get_submodule("change").children()
        y = f.gelu(f.conv2d(layer_norm(x, norm), up.weight, up.bias))
        x = x + last[k + 1].gamma * f.conv2d(y, down.weight, down.bias)
    start = random(2, 32, 4, 4)
    got = nn.Sequential(*last)(start)
    torch.testing.assert_close(got, x)
    want = layer_norm(x, layers[-3]).mean((2, 3))
    torch.testing.assert_close(nn.Sequential(*layers[-3:])(x), want)


def linear(a: int, b: int) -> int:
    return a * b + b


def mbconv_parameters(a: int, b: int, matched: bool) -> int:
    m = 4 * a
    norms = 2 * (a + m + m)
    change = a * m + 9 * m + linear(m, m // 4) + linear(m // 4, m) + linear(m, b)
    return change + norms + (linear(a, b) if matched else 0) + 1


def transformer_parameters(a: int, b: int, side: int, matched: bool) -> int:
    attention = 3 * linear(a, b) + linear(b, b) + (b // 32) * (2 * side - 1) ** 2
    forward = linear(b, 4 * b) + linear(4 * b, b)
    return attention + forward + 2 * a + 2 * b + (linear(a, b) if matched else 0) + 2


def test_parameters_by_hand() -> None:
    """SPEC 5.1: channels 64, 64, 128, 256, 512; two blocks each; strides 1, 1, 2, 2, 2."""
    stem = 27 * 64 + 2 * 64 + 9 * 64 * 64 + 64
    s1 = 2 * mbconv_parameters(64, 64, False)
    s2 = mbconv_parameters(64, 128, True) + mbconv_parameters(128, 128, False)
    s3 = transformer_parameters(128, 256, 8, True) + transformer_parameters(256, 256, 8, False)
    s4 = transformer_parameters(256, 512, 4, True) + transformer_parameters(512, 512, 4, False)
    net = coatnet((3, 32, 32), 10)
    assert sum(p.numel() for p in net.get_submodule("head").parameters()) == 5130
    assert sum(p.numel() for p in net.parameters()) == stem + s1 + s2 + s3 + s4 + 2 * 512 + 5130


def test_the_image_is_halved_three_times() -> None:
    net = coatnet((3, 32, 32), 10, width=8).eval()
    sides = []
    x = torch.zeros(1, 3, 32, 32)
    for layer in list(net.get_submodule("trunk").children())[:-2]:
        x = layer(x)
        sides.append(x.shape[-1])
    # stem 4 layers, S1 2 blocks | S2 2 | S3 2 blocks of 2 | S4 2 blocks of 2, norm
    assert sides == [32] * 6 + [16] * 2 + [8] * 4 + [4] * 5


def test_it_begins_as_its_shortcuts() -> None:
    """gamma = 0: what a residual branch computes does not matter at first."""
    with ambient(0, "test"):
        net = coatnet((3, 16, 16), 3, width=8).eval()
    x = torch.randn(2, 3, 16, 16, generator=stream(0, "x"))
    before = net(x)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if ".change." in name:
                p.add_(1)
    assert torch.equal(net(x), before)


def test_dropout() -> None:
    """Behind attention and feed-forward layers of S3 and S4, and in the head."""
    net = coatnet((3, 32, 32), 10, width=8, dropout=0.4)
    trunk, head = net.get_submodule("trunk"), net.get_submodule("head")
    assert [m.p for m in trunk.modules() if isinstance(m, nn.Dropout)] == [0.4] * 8
    assert [m.p for m in head.modules() if isinstance(m, nn.Dropout)] == [0.4]
    standard = coatnet((3, 32, 32), 10, width=8)
    assert {m.p for m in standard.modules() if isinstance(m, nn.Dropout)} == {0.3}


@pytest.mark.parametrize(
    ("image", "width", "text"),
    [
        ((3, 32, 33), 64, "even sides, got 32x33"),
        ((3, 32, 32), 4, "width 4 has 16 channels for attention, which heads of 32 do not divide"),
    ],
)
def test_what_it_cannot_be(image: tuple[int, int, int], width: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        coatnet(image, 10, width=width)

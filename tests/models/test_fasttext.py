"""fastText: a mean of embeddings that does not see padding."""

import torch
from torch.nn import functional as f

from polyfed.core.model import Model
from polyfed.models.fasttext import fasttext

TEXTS = [[5, 2, 2], [7], [], [1, 2, 3, 4, 5]]


def padded(length: int) -> torch.Tensor:
    return torch.tensor([text + [0] * (length - len(text)) for text in TEXTS])


def test_parameters() -> None:
    net = fasttext(1000, 4, width=32)
    assert sum(p.numel() for p in net.parameters()) == 1000 * 32 + 32 * 4 + 4
    assert [n for n, _ in net.named_parameters()] == [
        "trunk.embedding.weight", "head.weight", "head.bias",
    ]  # fmt: skip


def test_the_mean_written_out() -> None:
    net = fasttext(9, 4, width=6).double()
    model = Model.split(net, trunk="trunk", head="head")
    z = model.output(padded(5), "trunk")
    embedding = net.get_parameter("trunk.embedding.weight")
    for row, text in zip(z, TEXTS, strict=True):
        total = torch.zeros(6, dtype=torch.float64)
        for token in text:
            total = total + embedding[token]
        torch.testing.assert_close(row, total / max(1, len(text)))
    assert z.dtype == torch.float64
    assert model(padded(5)).shape == (4, 4)


def test_padding_changes_nothing() -> None:
    net = fasttext(9, 4)
    torch.testing.assert_close(net(padded(5)), net(padded(40)))
    f.cross_entropy(net(padded(8)), torch.arange(4)).backward()
    gradient = net.get_parameter("trunk.embedding.weight").grad
    assert gradient is not None
    seen = gradient.abs().sum(1) > 0
    assert seen.tolist() == [False, True, True, True, True, True, False, True, False]

import pytest
import torch
from torch import nn

from polyfed.core.model import Model
from polyfed.errors import ConfigError
from polyfed.models import conv_net, mlp
from polyfed.models.cnn import Mirrored
from polyfed.random import ambient
from polyfed.tasks.images import Cifar10, Mnist, Svhn


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("task", "image", "trunk", "r"),
    [(Cifar10(), (3, 32, 32), 2_194_240, 256), (Svhn(), (3, 32, 32), 203_280, 128)],
)
def test_fedlinked_networks(task, image: tuple[int, int, int], trunk: int, r: int) -> None:
    """SPEC 1.3, Kadar 2021, section 4.3."""
    net = task.make_network(image, 4)
    model = Model.split(net, trunk="trunk", head="head")
    assert sum(p.numel() for p in model.parameters("trunk")) == trunk
    assert sum(p.numel() for p in model.parameters("head")) == r * 4 + 4
    x = torch.randn(2, *image)
    assert model(x).shape == (2, 4)
    assert model.output_size(x, "trunk") == r
    assert model.output(x, "trunk").min() < 0  # no ReLU after the representation


def test_dropout_is_where_the_paper_has_it() -> None:
    net = Cifar10().make_network((3, 32, 32), 4)
    assert [m.p for m in net.get_submodule("trunk").modules() if isinstance(m, nn.Dropout)] == [
        0.36, 0.36, 0.36,
    ]  # fmt: skip
    head = net.get_submodule("head")
    assert [type(m).__name__ for m in head.children()] == ["Dropout", "Linear"]
    assert head.get_submodule("0").p == 0.79


@pytest.mark.parametrize(
    ("inputs", "hidden", "outputs", "want"),
    [(784, [512], 10, 407_050), (64, [64, 32], 10, 6_570), (2, [3], 1, 13), (9, [], 2, 20)],
)
def test_mlp_parameters(inputs: int, hidden: list[int], outputs: int, want: int) -> None:
    net = mlp(inputs, hidden, outputs)
    assert count(net) == want
    assert net(torch.randn(3, inputs)).shape == (3, outputs)
    assert net(torch.randn(3, 1, 1, inputs)).shape == (3, outputs)  # any shape is flattened


def test_mlp_of_mnist() -> None:
    assert count(Mnist().make_network((1, 28, 28), 10)) == 407_050
    cnn = Mnist(model="cnn").make_network((1, 28, 28), 10)
    assert cnn(torch.randn(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("relu", [True, False])
def test_relu_after_the_representation(relu: bool) -> None:
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    nets = [
        conv_net((1, 8, 8), 3, blocks=2, channels=4, representation=16, relu=relu),
        mlp(64, [32, 16], 3, relu_trunk=relu),
    ]
    for net in nets:
        z = net.get_submodule("trunk")(x)
        assert z.shape == (64, 16)
        assert bool((z >= 0).all()) is relu


def test_images_are_mirrored_by_chance_while_it_trains() -> None:
    x = torch.arange(400.0).reshape(100, 1, 2, 2)
    net = Mirrored()
    with ambient(0, "mirrored"):
        seen, again = net(x), net(x)
    mirrored = (seen == x.flip(3)).flatten(1).all(1)
    assert torch.equal(seen[~mirrored], x[~mirrored])
    assert 30 < int(mirrored.sum()) < 70
    assert not torch.equal(again, seen), "drawn anew"
    assert torch.equal(net.eval()(x), x)


def test_a_network_that_mirrors_is_the_same_at_rest() -> None:
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for mirror in (False, True):
        with ambient(1, "network"):
            net = conv_net((1, 8, 8), 3, blocks=2, channels=4, representation=16, mirror=mirror)
            found.append((net.eval()(x), net.train()(x)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("image", "blocks"), [((1, 8, 8), 3), ((3, 9, 15), 3), ((1, 2, 64), 1)])
def test_small_images_that_fit(image: tuple[int, int, int], blocks: int) -> None:
    net = conv_net(image, 2, blocks=blocks, channels=2, representation=4)
    assert net(torch.randn(1, *image)).shape == (1, 2)


def test_too_small_an_image() -> None:
    with pytest.raises(ConfigError, match="3 blocks halve the image 3 times; 7x32 is too small"):
        conv_net((1, 7, 32), 2)

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed import methods
from polyfed.engines.run import run
from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.models.encoders import SMALL_ENCODERS
from polyfed.models.resnet import resnet18
from polyfed.tasks import files, make
from polyfed.tasks.encoders import Cifar10Encoders, DigitsEncoders
from polyfed.tasks.files import Images

FAMILY = ("byol", "fedbyol", "fedu", "fedema", "fedfoa", "fedmd-ssl", "feddf-ssl")


def test_digits_are_dealt_evenly_and_nobody_has_an_image_twice() -> None:
    nodes = DigitsEncoders().nodes(0)
    assert [node.name for node in nodes] == ["M0-conv", "M1-mlp", "M2-residual"]
    sizes = {n: len(s) for n, s in nodes[0].data.items()}
    assert sizes == {"train": 400, "test": 297, "public": 300}
    held = [nodes[0].data["test"].x, nodes[0].data["public"].x, *(n.data["train"].x for n in nodes)]
    assert sum(map(len, held)) == 1797
    assert len(torch.cat(held).flatten(1).unique(dim=0)) == 1797
    for node in nodes:
        assert node.data["test"].x is nodes[0].data["test"].x
        assert node.data["public"].x is nodes[0].data["public"].x
        assert node.data["public"].y is None
        assert len(node.data["train"].y.unique()) == 10
        assert float(node.data["train"].x.min()) >= -1


def test_seeds_deal_otherwise_but_test_on_the_same_images() -> None:
    one, other, again = (DigitsEncoders().nodes(seed) for seed in (0, 1, 0))
    assert torch.equal(one[1].data["train"].x, again[1].data["train"].x)
    assert not torch.equal(one[1].data["train"].x, other[1].data["train"].x)
    assert torch.equal(one[1].data["test"].x, other[1].data["test"].x)


def test_features_may_be_evaluated_by_the_images_that_any_node_trains_on() -> None:
    nodes = DigitsEncoders(probe="trained").nodes(0)
    assert len(nodes[0].data["probe"]) == 1200
    assert torch.equal(nodes[0].data["probe"].x, torch.cat([n.data["train"].x for n in nodes]))
    assert torch.equal(nodes[0].data["probe"].y, torch.cat([n.data["train"].y for n in nodes]))
    assert nodes[1].data["probe"].x is nodes[0].data["probe"].x


def test_features_may_be_evaluated_by_all_images_those_that_are_set_aside_too() -> None:
    """So a method that needs public images has the probe of one that needs none."""
    with_public, without = (DigitsEncoders(probe="all", public=n).nodes(0) for n in (300, 0))
    probe = with_public[0].data["probe"]
    assert len(probe) == 1500
    assert torch.equal(probe.x[:300], with_public[0].data["public"].x)
    assert torch.equal(probe.x, without[0].data["probe"].x)
    assert probe.y is not None
    assert torch.equal(probe.y, without[0].data["probe"].y)


def test_encoders_are_taken_in_turn_and_equal_ones_begin_alike() -> None:
    nodes = DigitsEncoders(encoders="mlp,conv", num_nodes=4, public=0).nodes(0)
    assert [node.name for node in nodes] == ["M0-mlp", "M1-conv", "M2-mlp", "M3-conv"]
    assert [len(node.data["train"]) for node in nodes] == [375] * 4
    assert "public" not in nodes[0].data
    for name, tensor in nodes[0].model.state().items():
        assert torch.equal(tensor, nodes[2].model.state()[name])
    own = DigitsEncoders(encoders="mlp", num_nodes=2, init="own").nodes(0)
    weight = "trunk.1.weight"
    assert not torch.equal(own[0].model.state()[weight], own[1].model.state()[weight])


@pytest.mark.parametrize("kind", SMALL_ENCODERS)
@pytest.mark.parametrize("image", [(1, 10, 10), (1, 28, 28), (3, 32, 31)])
def test_small_encoders_take_small_images(kind: str, image: tuple[int, int, int]) -> None:
    net = SMALL_ENCODERS[kind](image, 7)
    assert net(torch.zeros(2, *image)).shape == (2, 7)
    assert net.trunk(torch.zeros(2, *image)).shape == (
        2,
        {"conv": 64, "mlp": 96, "residual": 48}[kind],
    )
    assert any(isinstance(m, torch.nn.BatchNorm1d) for m in net.trunk.modules())


def test_too_small_images_are_an_error() -> None:
    with pytest.raises(ConfigError, match="encoder 'conv' takes images from 4x4 on, got 3x8"):
        SMALL_ENCODERS["conv"]((1, 3, 8), 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"encoders": "conv,transformer"}, "unknown encoder 'transformer'"),
        ({"num_nodes": 0}, "num_nodes must be >= 1"),
        ({"public": -1}, "public must be >= 0"),
        ({"probe": "nobody"}, "'own', 'trained' or 'all'"),
    ],
)
def test_wrong_options_are_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        make("digits-encoders", wrong)


def test_more_public_images_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="public=1498 leaves 2 of 1500 images for 3 nodes"):
        DigitsEncoders(public=1498).nodes(0)


@pytest.mark.parametrize("name", FAMILY)
def test_a_quick_run_of_every_method(name: str) -> None:
    """With one encoder for the methods that average; the others with three."""
    alike = {"encoders": "mlp"} if name in ("fedbyol", "fedu", "fedema") else {}
    task = DigitsEncoders(quick=True, hub=name == "feddf-ssl", **alike)
    probes = {} if name == "fedfoa" else {"probe_epochs": 0}
    done = run(methods.make(name, probes, task), task, progress=False)
    assert done.faults == []
    assert min(done.accuracy.values()) > 0.3
    assert len([m for m in done.metrics if "linear_probe" in m]) == (0 if probes else 3)


def test_a_hub_has_a_network_of_each_kind() -> None:
    nodes = DigitsEncoders(hub=True, num_nodes=5).nodes(0)
    assert nodes[-1].name == "hub"
    assert [*nodes[-1].data] == ["public"]
    assert nodes[-1].data["public"].x is nodes[0].data["public"].x
    assert len(nodes[-1].model.parts) == 3
    for i, node in enumerate(nodes[:3]):
        own = {f"kind{i}.{name}": t for name, t in node.model.state().items()}
        found = nodes[-1].model.state(f"kind{i}")
        assert own.keys() == found.keys()
        assert all(torch.equal(own[name], found[name]) for name in own)


def cifar(count: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Images(x, torch.arange(count) % 10, tuple("abcdefghij"), num_train=count - 10)


def test_cifar_has_the_papers_networks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "cifar10", lambda folder: cifar(50))
    nodes = make("cifar10-encoders", {"data": tmp_path}).nodes(0)
    kinds = ["resnet18", "vgg9", "alexnet", "resnet34"]
    assert [node.name for node in nodes] == [f"M{i}-{kind}" for i, kind in enumerate(kinds)]
    assert [len(node.data["train"]) for node in nodes] == [10] * 4
    assert torch.equal(nodes[3].data["test"].y, torch.arange(10))
    wanted = sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    assert sum(p.numel() for p in nodes[0].model.net.parameters()) == wanted
    x = nodes[0].data["train"].x
    assert x.dtype == torch.float32
    assert -1 <= float(x.min()) < -0.9 < 0.9 < float(x.max()) <= 1


@pytest.mark.parametrize(("whole", "said"), [(60, "50 of 60 images"), (50, ""), (0, "")])
def test_a_part_of_a_set(
    whole: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the size of the whole set is not known, nothing is said."""
    monkeypatch.setattr(files, "cifar10", lambda folder: replace(cifar(50), whole=whole))
    assert Cifar10Encoders(data=tmp_path).shortfall() == said
    assert make("digits", {}).shortfall() == ""  # no files


def test_a_quick_look_at_cifar_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "cifar10", lambda folder: cifar(2010))
    task = Cifar10Encoders(data=tmp_path, quick=True)
    nodes = task.nodes(0)
    assert [len(node.data["train"]) for node in nodes] == [5] * 4
    assert len(nodes[0].data["test"]) == 1
    aside = Cifar10Encoders(data=tmp_path, quick=True, public=5000).nodes(0)
    assert [(len(n.data["train"]), len(n.data["public"])) for n in aside] == [(2, 10)] * 4
    assert sum(p.numel() for p in nodes[0].model.net.parameters()) < 200_000
    quick = methods.make("fedfoa", {}, task)
    assert (quick.rounds, quick.warm_up, quick.local_epochs) == (2, 1, 1)
    whole = methods.make("fedfoa", {}, Cifar10Encoders(data=tmp_path))
    assert (whole.rounds, whole.warm_up, whole.local_epochs, whole.lam) == (100, 5, 5, 0.01)


@pytest.mark.real_data
def test_for_real() -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA names no folder of published files")
    try:
        nodes = make("cifar10-encoders", {}).nodes(0)
    except DataError as error:
        if "was not found" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert [len(node.data["train"]) for node in nodes] == [12_500] * 4
    assert len(nodes[0].data["test"]) == 10_000

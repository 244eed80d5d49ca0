import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyfed.core.model import Model
from polyfed.core.phase import EarlyStop, MatchOutput, Optimiser, Phase, SquaredError, cross_entropy
from polyfed.errors import ConfigError


@pytest.mark.parametrize(
    ("batch", "num_examples", "size"),
    [
        (32, 100, 32),
        (32, 10, 10),  # never more than there is
        (1, 10, 1),
        (0.5, 10, 5),
        (0.02, 4374, 87),  # FedLinked, CIFAR-10: round(87.48)
        (0.11, 5450, 600),  # and SVHN: round(599.5), to even
        (0.01, 10, 1),  # never fewer than one
        (2.9, 10, 2),
    ],
)
def test_batch_size(batch: float, num_examples: int, size: int) -> None:
    phase = Phase(label="local", objective=cross_entropy, epochs=1, batch=batch)
    assert phase.batch_size(num_examples) == size


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 1}])
def test_epochs_or_steps(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="phase 'local': give either epochs or steps"):
        Phase(label="local", objective=cross_entropy, **given)


def test_phases_are_values() -> None:
    """Equal phases compare equal: that is how an engine finds nodes to train together."""

    def made() -> Phase:
        return Phase(
            label="distil", objective=MatchOutput("trunk"), steps=3, stop=EarlyStop(patience=2)
        )

    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != dataclasses.replace(made(), batch=8)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": 0.0}, "Optimiser.lr must be > 0, got 0.0"),
        ({"lr": float("nan")}, "Optimiser.lr must be > 0, got nan"),
        ({"momentum": 0.9}, "momentum=0.9 is for sgd, but the optimiser is adam"),
        ({"name": "sgd", "momentum": 1.5}, "between 0 and 1, got 1.5"),
        ({"weight_decay": -1.0}, "Optimiser.weight_decay must be >= 0"),
    ],
)
def test_optimisers_that_cannot_be(settings: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Optimiser(**settings)


@pytest.mark.parametrize(
    ("optimiser", "kind", "want"),
    [
        (Optimiser(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01), torch.optim.SGD,
         {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (Optimiser(lr=0.2), torch.optim.Adam, {"lr": 0.2, "weight_decay": 0.0}),
        (Optimiser(name="adamw", weight_decay=0.3), torch.optim.AdamW, {"weight_decay": 0.3}),
    ],
)  # fmt: skip
def test_build(optimiser: Optimiser, kind: type, want: dict[str, float]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    built = optimiser.build([parameter])
    assert type(built) is kind
    (group,) = built.param_groups
    assert group["params"][0] is parameter
    assert {k: group[k] for k in want} == want
    assert optimiser.build([parameter]) is not built


def test_objectives() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    model = Model.split(net, trunk="0", head="1")
    x, y, z = torch.ones(5, 2), torch.arange(5) % 4, torch.zeros(5, 3)
    assert torch.equal(cross_entropy(model, x, y), functional.cross_entropy(net(x), y))
    expected = 2.5 * net[0](x).square().mean()
    torch.testing.assert_close(MatchOutput("trunk", 2.5)(model, x, z), expected)
    with pytest.raises(ConfigError, match="needs labels"):
        cross_entropy(model, x, None)
    with pytest.raises(ConfigError, match=r"Phase\.target"):
        MatchOutput("trunk")(model, x, None)


@pytest.mark.parametrize("of_labels", [True, False])
def test_squared_error_is_the_mean_of_its_losses(of_labels: bool) -> None:
    model = Model.split(nn.Sequential(nn.Linear(3, 4)), all=...)
    x, labels = torch.randn(5, 3), torch.tensor([0, 3, 1, 1, 2])
    wanted = functional.one_hot(labels, 4).float()
    loss = SquaredError()
    literal = [sum((o - w) ** 2 for o, w in zip(*pair, strict=True)) / 2
               for pair in zip(model(x), wanted, strict=True)]  # fmt: skip
    y = labels if of_labels else wanted
    torch.testing.assert_close(loss.losses(model, x, y), torch.stack(literal))
    torch.testing.assert_close(loss(model, x, y), torch.stack(literal).mean())
    with pytest.raises(ConfigError, match="needs labels or targets"):
        loss(model, x, None)

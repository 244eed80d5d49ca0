"""Associative memory: Algorithms 3 and 4 written out, ties that fire, weights that stay put."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.model import Model
from polyfed.core.phase import Rule
from polyfed.errors import ConfigError, ModelError
from polyfed.models.associative import AssociativeMemory, Hebbian, fires, learn
from polyfed.models.mlp import mlp
from polyfed.random import ambient, stream

Matrix = list[list[float]]


def _literal_compute(
    hidden: Matrix, visible: Matrix, v: list[float], thld: float
) -> tuple[list[float], list[float]]:
    """Algorithm 3, line by line: the outputs of the hidden and of the visible layer."""
    h = [0.0] * len(hidden)
    for i in range(len(hidden)):
        h[i] = 1.0 if sum(v[j] * hidden[i][j] for j in range(len(v))) >= thld else 0.0
    out = [0.0] * len(visible)
    for i in range(len(visible)):
        out[i] = 1.0 if sum(h[j] * visible[i][j] for j in range(len(h))) >= thld else 0.0
    return h, out


def _literal_learn(hidden: Matrix, visible: Matrix, v: list[float], thld: float, l: float) -> None:  # noqa: E741
    """Algorithm 4, line by line, in place."""
    h, _ = _literal_compute(hidden, visible, v, thld)
    for i in range(len(hidden)):
        for j in range(len(v)):
            if v[j] == 1:
                if h[i] == 1:
                    hidden[i][j] += (1 - hidden[i][j]) / 2 * l
                else:
                    hidden[i][j] -= (1 + hidden[i][j]) / 2 * l
    for i in range(len(v)):
        for j in range(len(h)):
            if h[j] == 1:
                if v[i] == 1:
                    visible[i][j] += (1 - visible[i][j]) / 2 * l
                else:
                    visible[i][j] -= (1 + visible[i][j]) / 2 * l


def _memory(
    visible: int = 7, hidden: int = 11, *, seed: int = 0, threshold: float = 0.5
) -> tuple[Model, AssociativeMemory]:
    with ambient(seed, "memory"):
        net = AssociativeMemory(visible, hidden, threshold=threshold).double()
    return Model.split(net, hidden="hidden", visible="visible"), net


def _bits(rows: int, length: int = 7, *, seed: int = 0) -> Tensor:
    return torch.randint(2, (rows, length), generator=stream(seed, "bits")).double()


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 12))


@given(sizes=SIZES, seed=st.integers(0, 1000), threshold=st.sampled_from([-0.3, 0.0, 0.5, 1.2]))
def test_forward_is_the_literal_computation(
    sizes: tuple[int, int], seed: int, threshold: float
) -> None:
    _, net = _memory(*sizes, seed=seed, threshold=threshold)
    x = _bits(6, sizes[0], seed=seed)
    weights = net.hidden.weight.tolist(), net.visible.weight.tolist()
    wanted = [_literal_compute(*weights, v, threshold)[1] for v in x.tolist()]
    assert net(x).tolist() == wanted


@given(
    sizes=SIZES,
    seed=st.integers(0, 1000),
    threshold=st.sampled_from([0.0, 0.5]),
    rate=st.sampled_from([0.1, 0.7, 2.0]),
)
def test_update_is_the_literal_learning_bit_for_bit(
    sizes: tuple[int, int], seed: int, threshold: float, rate: float
) -> None:
    """Later rows meet the weights that earlier rows left."""
    model, net = _memory(*sizes, seed=seed, threshold=threshold)
    hidden, visible = net.hidden.weight.tolist(), net.visible.weight.tolist()
    x = _bits(5, sizes[0], seed=seed)
    for v in x.tolist():
        _literal_learn(hidden, visible, v, threshold, rate)
    Hebbian(rate).update(model, x, None)
    assert net.hidden.weight.tolist() == hidden
    assert net.visible.weight.tolist() == visible


def test_by_hand() -> None:
    """v = (1, 0): h = (1, 0); links out of what is active move half the rate to 1 or -1."""
    model, net = _memory(2, 2)
    model.load(
        {
            "hidden.weight": torch.tensor([[0.75, 0.25], [0.25, 0.5]]),
            "visible.weight": torch.tensor([[0.0, 0.5], [0.5, -0.5]]),
        }
    )
    wrong = Hebbian(0.5).update(model, torch.tensor([[1.0, 0.0]]).double(), None)
    assert net.hidden.weight.tolist() == [[0.8125, 0.25], [-0.0625, 0.5]]
    assert net.visible.weight.tolist() == [[0.25, 0.5], [0.125, -0.5]]
    assert float(wrong) == 1.0  # before it learnt, the network answered (0, 1)


def test_order_matters() -> None:
    x = _bits(4, seed=3)
    ends = []
    for rows in (x, x.flip(0)):
        model, net = _memory()
        Hebbian(0.7).update(model, rows, None)
        ends.append(net.hidden.weight.detach().clone())
    assert not torch.allclose(ends[0], ends[1])


def test_two_batches_are_one() -> None:
    x = _bits(6)
    (one, _), (two, _) = _memory(), _memory()
    Hebbian().update(one, x, None)
    Hebbian().update(two, x[:2], None)
    Hebbian().update(two, x[2:], None)
    assert all(torch.equal(t, two.state()[name]) for name, t in one.state().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(rate=st.floats(0.01, 2.0), seed=st.integers(0, 1000))
def test_weights_never_leave_their_interval(dtype: torch.dtype, rate: float, seed: int) -> None:
    """SPEC 2.9, 11: exactly, also where rounding could carry them out."""
    model, net = _memory(seed=seed)
    net.to(dtype)
    for step in range(4):
        Hebbian(rate).update(model, _bits(8, seed=seed + step).to(dtype), None)
        for weight in model.state().values():
            assert weight.dtype == dtype
            assert float(weight.abs().max()) <= 1


def test_the_full_rate_replaces_active_links() -> None:
    model, net = _memory()
    v = _bits(1, seed=1)
    h = fires(net.hidden(v), 0.5)[0]
    assert 0 < h.sum() < len(h)
    Hebbian(2.0).update(model, v, None)
    used = net.hidden.weight[:, v[0] == 1]
    assert torch.equal(used, (2 * h[:, None] - 1).expand_as(used))


@pytest.mark.parametrize(("total", "fired"), [(0.25, 1.0), (0.2499999, 0.0)])
def test_ties_fire(total: float, fired: float) -> None:
    """SPEC 2.9, 11: in both layers, and while learning."""
    model, net = _memory(2, 1, threshold=0.5)
    weights = {"hidden.weight": torch.tensor([[0.25, total]]), "visible.weight": torch.ones(2, 1)}
    model.load(weights)
    ones = torch.ones(1, 2).double()
    assert net(ones).tolist() == [[fired, fired]]
    model.load(weights | {"visible.weight": torch.tensor([[0.5], [0.4999]])})
    assert net(ones).tolist() == [[fired, 0.0]]
    Hebbian().update(model, ones, None)
    assert bool(net.hidden.weight[0, 0] > 0.25) is bool(fired)


def test_initial_weights_fill_the_interval() -> None:
    """U(-1, 1): mean 0, variance 1/3; 20,000 draws in each layer."""
    with ambient(0, "init"):
        net = AssociativeMemory()
    assert net.hidden.weight.shape == (400, 50)
    assert net.visible.weight.shape == (50, 400)
    assert net.threshold == 0.5
    for weight in (net.hidden.weight.detach(), net.visible.weight.detach()):
        assert float(weight.min()) < -0.999
        assert float(weight.max()) > 0.999
        assert abs(float(weight.mean())) < 0.02
        assert abs(float(weight.var()) - 1 / 3) < 0.01
    assert not torch.equal(net.hidden.weight, net.visible.weight.T)


def test_it_learns_to_complete() -> None:
    """A vector presented often is completed from half of its ones."""
    with ambient(0, "init"):
        model = Model.split(AssociativeMemory(), hidden="hidden", visible="visible")
    v, cue = torch.zeros(2, 1, 50)
    v[0, :8] = cue[0, :4] = 1
    wrong = [float(Hebbian().update(model, v, None)) for _ in range(40)]
    assert wrong[0] > 0.3
    assert wrong[-1] == 0
    assert torch.equal(model(cue), v)


@pytest.mark.parametrize("part", ["hidden", "visible"])
def test_a_part_that_rests_stays(part: str) -> None:
    """The part that moves does as if both moved; neither reads what the other learns."""
    x = _bits(4)
    (both, _), (one, _) = _memory(), _memory()
    before = one.state()
    Hebbian().update(both, x, None)
    with one.moving(part):
        Hebbian().update(one, x, None)
    for name, value in one.state().items():
        moves = name == f"{part}.weight"
        assert torch.equal(value, both.state()[name] if moves else before[name])
        assert torch.equal(value, before[name]) is not moves


def test_the_figure_is_the_share_of_wrong_bits_before_learning() -> None:
    model, net = _memory(seed=2)
    x = _bits(5, seed=2)
    pairs = zip(x.flatten().tolist(), net(x).flatten().tolist(), strict=True)
    differ = sum(a != b for a, b in pairs)
    wrong = Hebbian().update(model, x, None)
    assert 0 < differ < x.numel()
    assert float(wrong) == pytest.approx(differ / x.numel(), abs=1e-12)
    assert not wrong.requires_grad


def test_many_nodes_learn_at_once() -> None:
    """`vmap` over nodes is each node alone."""
    nets = [_memory(seed=k)[1] for k in range(4)]
    x = torch.stack([_bits(3, seed=k) for k in range(4)])
    hidden = torch.stack([n.hidden.weight.detach() for n in nets])
    visible = torch.stack([n.visible.weight.detach() for n in nets])

    def step(wh: Tensor, wv: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return learn(wh, wv, rows, rate=0.1, threshold=0.5)

    together = torch.func.vmap(step)(hidden, visible, x)
    for k in range(4):
        alone = step(hidden[k], visible[k], x[k])
        assert torch.equal(together[0][k], alone[0])
        assert torch.equal(together[1][k], alone[1])


def test_learn_leaves_its_inputs() -> None:
    _, net = _memory()
    weights = net.hidden.weight.detach(), net.visible.weight.detach()
    before = [w.clone() for w in weights]
    after = learn(*weights, _bits(3), rate=0.1, threshold=0.5)
    for w, old, new in zip(weights, before, after, strict=True):
        assert torch.equal(w, old)
        assert not torch.equal(new, old)


def test_parts_are_the_layers() -> None:
    model, net = _memory()
    x = _bits(3)
    assert model.names("hidden") == ["hidden.weight"]
    assert model.names("visible") == ["visible.weight"]
    assert torch.equal(model.output(x, "hidden"), fires(net.hidden(x), 0.5))
    assert torch.equal(model.output(x, "visible"), model(x))


def test_it_is_a_rule() -> None:
    assert isinstance(Hebbian(), Rule)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "Hebbian.rate must be > 0, got 0.0"),
        (2.1, "Hebbian.rate must be between 0 and 2, got 2.1. Above 2 weights leave"),
        (float("nan"), "Hebbian.rate must be > 0, got nan"),
    ],
)
def test_rates_that_cannot_be(rate: float, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Hebbian(rate)


def test_other_networks_are_refused() -> None:
    model = Model.split(mlp(7, [3], 2), trunk="trunk", head="head")
    with pytest.raises(ModelError, match="Hebbian trains an AssociativeMemory, got Sequential"):
        Hebbian().update(model, _bits(2).float(), None)

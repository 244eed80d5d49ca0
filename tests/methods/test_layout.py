"""Numbers laid end to end: the same numbers, in the same networks, whatever moves them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.message import TensorSpec
from polyfed.methods._layout import Plan, State, aligned, state_of

WIDTHS = (5, 7, 3)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.Sigmoid(), nn.Linear(*WIDTHS[1:]))


def with_counter() -> nn.Sequential:
    return nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.BatchNorm1d(WIDTHS[1]), nn.Linear(7, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight


def channels_last() -> nn.Module:
    return nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def of_two_kinds() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).double())


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def plan_for(state: State, picked: dict[str, list[int]]) -> Plan:
    """Topics by their places among tensors without gaps."""
    index = {t: aligned(torch.tensor(where), state.shapes) for t, where in picked.items()}
    return Plan(state.shapes, index, {t: TensorSpec((len(w),)) for t, w in index.items()})


PICKED = {"a": [40, 3, 60, 34, 65], "b": [0, 35, 41, 42]}


@pytest.mark.parametrize("make", [mlp, with_counter])
def test_topics_are_read_and_written_number_by_number(make: Callable[[], nn.Module]) -> None:
    net = make()
    state = state_of(net)
    plan, literal = plan_for(state, PICKED), torch.cat([t.flatten() for t in values(net).values()])
    packed = plan.pack(state)
    assert {t: p.tolist() for t, p in packed.items()} == {
        t: literal[where].tolist() for t, where in PICKED.items()
    }
    new = {t: torch.arange(len(p)) + 100.0 for t, p in packed.items()}
    plan.unpack(state, new)
    for topic, where in PICKED.items():
        literal[where] = new[topic]
    after = torch.cat([t.flatten() for t in net.state_dict().values()])
    assert torch.equal(after, literal)


def test_what_is_sent_is_a_copy() -> None:
    state = state_of(mlp())
    plan = plan_for(state, PICKED)
    sent = plan.pack(state)["b"]
    before = sent.clone()
    plan.unpack(state, {"b": torch.zeros_like(sent)})
    assert torch.equal(sent, before)


def test_parameters_become_pieces_of_one_tensor_and_stay_what_they_are() -> None:
    net = mlp()
    parameters, before = list(net.parameters()), values(net)
    state = state_of(net)
    assert same(values(net), before)
    assert list(net.parameters()) == parameters  # the same objects
    assert all(p.requires_grad and p.is_leaf for p in parameters)
    assert state.flat is not None
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    assert all(p.data_ptr() % 64 == 0 for p in parameters)
    assert state_of(net) is state
    with torch.no_grad():
        parameters[1].fill_(3.0)
    assert int((state.flat == 3).sum()) == len(parameters[1])


@pytest.mark.parametrize("make", [with_counter, Tied, channels_last, of_two_kinds])
def test_other_networks_are_left_as_they_are(make: Callable[[], nn.Module]) -> None:
    net = make()
    places = [t.data_ptr() for t in net.parameters()]
    assert state_of(net).flat is None
    assert [t.data_ptr() for t in net.parameters()] == places


@pytest.mark.parametrize("moved", ["to", "copy"])
def test_a_network_that_was_moved_is_laid_out_again(moved: str) -> None:
    net = mlp()
    old = state_of(net)
    if moved == "copy":
        net = copy.deepcopy(net)
    else:
        for p in net.parameters():
            p.data = p.data.clone()
    state, before = state_of(net), values(net)
    assert state is not old
    plan_for(state, PICKED).unpack(state, {"b": torch.full((4,), 9.0)})
    assert not same(values(net), before)
    assert float(net.state_dict()["0.weight"][0, 0]) == 9.0


def test_counters_stay() -> None:
    net: Any = with_counter()
    many = 2**24 + 1  # which float32 does not have
    net[1].num_batches_tracked += many
    state = state_of(net)
    plan_for(state, PICKED).unpack(state, {"a": torch.zeros(5)})
    assert int(net[1].num_batches_tracked) == many
    assert net[1].num_batches_tracked.dtype == torch.int64


def test_places_skip_the_gaps() -> None:
    shapes = (("a", (3,)), ("b", (33,)), ("c", ()), ("d", (2, 2)))
    places = aligned(torch.arange(41), shapes).tolist()
    assert places == [0, 1, 2, *range(32, 65), 96, 128, 129, 130, 131]


def literal_beginnings(flat: Tensor, sizes: list[int], topics: dict[str, list[int]]) -> Tensor:
    """Number by number: what nobody shares, and topic b, each drawn from its tensor."""
    drawn, shared = flat.clone(), {i for where in topics.values() for i in where}
    local = [i for i in range(len(flat)) if i not in shared]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    for seed, where in enumerate([local, topics["b"]]):
        chance = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(where), dtype=torch.float64, generator=chance)
        for i, u in zip(where, draws, strict=True):
            of = next(k for k, end in enumerate(ends) if i < end)
            drawn[i] = flat[ends[of] - sizes[of] + int(u * sizes[of])]
    return drawn


def test_own_beginnings_come_from_their_tensor() -> None:
    net = mlp()
    state, flat = state_of(net), torch.cat([t.flatten() for t in values(net).values()])
    chances = {"": torch.Generator().manual_seed(0), "b": torch.Generator().manual_seed(1)}
    plan_for(state, PICKED).begin_own(state, chances)
    drawn = torch.cat([t.flatten() for t in values(net).values()])
    assert torch.equal(drawn, literal_beginnings(flat, [35, 7, 21, 3], PICKED))
    assert torch.equal(drawn[PICKED["a"]], flat[PICKED["a"]])

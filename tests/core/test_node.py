import torch
from torch import nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.core.node import Node

CPU = torch.device("cpu")


def draw(generator: torch.Generator) -> list[float]:
    return torch.rand(4, generator=generator).tolist()


def test_streams_are_the_nodes_own() -> None:
    a = Node("A", seed=3)
    assert draw(a.stream("batches", 1)) == draw(Node("A", seed=3).stream("batches", 1))
    others = [a.stream("batches", 2), a.stream("noise", 1)]
    others += [Node("B", seed=3).stream("batches", 1), Node("A", seed=4).stream("batches", 1)]
    assert draw(a.stream("batches", 1)) not in [draw(g) for g in others]


def test_remember_replaces_its_group_and_no_other() -> None:
    node = Node("A", memory={"best": torch.tensor(1.0), "roll/x": torch.tensor(9)})
    node.remember("rollback", {"a.weight": torch.ones(2), "b/c": torch.ones(3)})
    assert node.recall("rollback").keys() == {"a.weight", "b/c"}
    node.remember("rollback", {"a.weight": torch.zeros(2)})
    assert torch.equal(node.recall("rollback")["a.weight"], torch.zeros(2))
    assert node.memory.keys() == {"best", "roll/x", "rollback/a.weight"}
    node.forget("rollback")
    node.forget("never kept")
    assert node.recall("rollback") == {}
    assert node.memory.keys() == {"best", "roll/x"}


def test_working_copy_shares_data_and_nothing_else() -> None:
    x, y = torch.ones(3, 2), torch.tensor([0, 1, 0])
    net = nn.Sequential(nn.Linear(2, 2))
    node = Node("A", Data(train=(x, y)), Model.split(net, head="0"), ("no", "yes"), 0)
    node.memory["m"], node.notes["old"] = torch.ones(1), 1
    twin = node.working_copy(7, CPU, {})
    assert twin.data["train"].x is x
    assert (twin.name, twin.classes, twin.seed, twin.notes) == ("A", ("no", "yes"), 7, {})
    twin.memory["m"].add_(1)
    twin.model.load({"0.bias": torch.full((2,), 5.0)})
    assert node.memory["m"].item() == 1
    assert not torch.equal(net[0].bias, torch.full((2,), 5.0))
    assert node.seed == 0

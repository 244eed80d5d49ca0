from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from polyfed.core.data import Data
from polyfed.core.model import Model
from polyfed.testing import tiny
from polyfed.train.kinds import with_hub


def test_a_hub_has_one_network_of_each_kind_and_the_public_inputs() -> None:
    nodes = tiny()
    net = nn.Sequential(OrderedDict(trunk=nn.Linear(6, 4), head=nn.Linear(4, 3)))
    nodes[1].model = Model.split(net, trunk="trunk", head="head")
    *same, hub = with_hub(nodes)
    assert same == nodes
    assert (hub.name, hub.classes, [*hub.data]) == ("hub", nodes[0].classes, ["public"])
    assert hub.data["public"].x is nodes[0].data["public"].x
    assert [*hub.model.parts] == ["kind0", "kind1"]
    assert [*hub.model.spec("kind1")] == [f"kind1.{name}" for name in nodes[1].model.names()]
    nodes[1].model.load({"head.bias": torch.ones(3)})  # the hub's are copies
    assert not torch.equal(hub.model.state()["kind1.head.bias"], torch.ones(3))


def test_networks_with_other_dtypes_are_of_another_kind() -> None:
    nodes = tiny()[:2]
    nodes[1].model.net.double()
    assert len(with_hub(nodes)[-1].model.parts) == 2


def test_without_public_inputs_the_hub_has_none() -> None:
    node = tiny()[0]
    node.data = Data(train=node.data["train"])
    assert len(with_hub([node])[-1].data) == 0

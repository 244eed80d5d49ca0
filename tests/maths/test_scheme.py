"""Declarations of partial models: R(pi), sizes counted by hand, and everything that is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core.message import Message, TensorSpec
from polyfed.errors import ConfigError, ModelError, UnknownNameError
from polyfed.maths.scheme import Scheme, reduced
from polyfed.maths.slices import Slices
from polyfed.models import conv_net, mlp

FIGURE_6: dict[str, Any] = {
    "scheme": "3-3-2-2",
    "groups": dict.fromkeys(["green", "yellow", "red"], "0-1-1-0"),
    "members": dict.fromkeys(["green", "yellow", "red"], "A, B"),
    "depends": {"green": "global", "yellow": "global", "red": "green, yellow, global"},
}


# ---- R(pi) -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "depends", "minimal"),
    [
        ({"m1", "m2", "m3"}, {"m2": {"m1"}}, {"m2", "m3"}),  # the paper's example
        ({"m1", "m2", "m3"}, {}, {"m1", "m2", "m3"}),  # an antichain stays
        ({"m1", "m2", "m3"}, {"m3": {"m2", "m1"}, "m2": {"m1"}}, {"m3"}),  # a chain: its bottom
        ({"m1"}, {"m1": {"m0"}, "m2": {"m1"}}, {"m1"}),  # only members count
        ({"m1", "m2"}, {"m3": {"m1", "m2"}}, {"m1", "m2"}),
        (set(), {"m2": {"m1"}}, set()),
    ],
)
def test_reduced_is_the_minimal_models(models: set, depends: dict, minimal: set) -> None:
    assert reduced(models, depends) == minimal


def test_owners_in_figure_6() -> None:
    topics, table = Scheme.parse(**FIGURE_6).owners()
    assert list(topics) == ["global", "green", "yellow", "red"]
    g, n, y, r, nobody = 0, 1, 2, 3, -1
    assert table.tolist() == [
        [g, n, y, r, nobody],
        [n, n, nobody, r, nobody],
        [y, nobody, y, r, nobody],
        [r, r, r, r, nobody],
        [nobody] * 5,
    ]


def test_owners_with_cross_model_averaging() -> None:
    topics, table = Scheme.parse(**FIGURE_6, cross=True).owners()
    assert topics["green+yellow"] == {"green", "yellow"}
    assert list(topics) == ["global", "green", "yellow", "green+yellow", "red"] or list(topics) == [
        "global",
        "green",
        "yellow",
        "red",
        "green+yellow",
    ]
    pair = list(topics).index("green+yellow")
    assert table[1, 2] == table[2, 1] == pair
    assert (table == pair).sum() == 2


# ---- numbers of the paper's networks -----------------------------------------------------------


def test_level_80_travels_217140_numbers() -> None:
    """W1 250x784 + 250, W2 80x250 + 80, W3 10x80 + 10: 868,560 bytes of float32."""
    net = mlp(784, [300, 100], 10)
    slices = Slices.parse("784-250-80-10", nets={f"M{i}": net.state_dict() for i in range(16)})
    assert slices.topics() == slices.topics("M3") == ("global",)
    packed = slices.pack("M3", net.state_dict())
    assert Message(packed).nbytes == 4 * 217_140 == 868_560
    gids = slices.gids("M3")
    assert sum(int((g >= 0).sum()) for g in gids.values()) == 217_140
    assert sum(g.numel() for g in gids.values()) == 266_610
    assert (gids["trunk.1.weight"] >= 0).sum(1).tolist() == [784] * 250 + [0] * 50
    assert (gids["trunk.3.weight"] >= 0).sum(1).tolist() == [250] * 80 + [0] * 20
    assert (gids["head.weight"] >= 0).sum(0).tolist() == [10] * 80 + [0] * 20


@pytest.mark.parametrize(
    ("depends", "size", "from_input"),
    [
        (None, 20 * 50 + 50 + 20, 0),
        ({"fr": "global"}, 20 * 50 + 70 + 50 * 784 + 20 * 250 + 80 * 50 + 10 * 20, 50 * 784),
    ],
    ids=["without dependency", "with"],
)
def test_section_v_3_d_dependency_decides_about_weights_between_models(
    depends: dict | None, size: int, from_input: int
) -> None:
    slices = Slices.parse(
        "784-250-80-10",
        nets=dict.fromkeys(["M0", "M1", "M2"], "784=300=100=10"),
        groups={"fr": "0-50-20-0"},
        members={"fr": "M0, M1"},
        depends=depends,
    )
    assert slices.size("fr") == size
    assert slices.size("global") == 217_140
    assert int((slices.gids("M0")["1.weight"][250:] >= 0).sum()) == from_input
    assert int((slices.gids("M2")["1.weight"][250:] >= 0).sum()) == 0


def test_section_v_3_e_groups_of_different_size() -> None:
    slices = Slices.parse(
        "784-220-70-10",
        nets=dict.fromkeys(["0", "1", "2", "3"], "784=300=100=10"),
        groups={"same": "0-80-30-0", "other": "0-40-15-0"},
        members={"same": "0, 1", "other": "2, 3"},
    )
    assert slices.layers("1")[2] == {"global": 70, "same": 30, "local": 0}
    assert slices.layers("2")[1:3] == (
        {"global": 220, "other": 40, "local": 40},
        {"global": 70, "other": 15, "local": 15},
    )
    model, rank = slices.cells("2")[2].model, slices.cells("2")[2].rank
    assert model.tolist() == [0] * 70 + [2] * 15 + [3] * 15
    assert rank.tolist() == [*range(70), *range(15), *range(15)]


def test_kernels_flattened_channels_norms_and_counters_by_hand() -> None:
    """Two channels of a 1x2 kernel, one of them global; B holds it second. Flatten of 2."""
    net = {
        "conv.weight": TensorSpec((2, 1, 1, 2)),
        "conv.bias": TensorSpec((2,)),
        "norm.running_mean": TensorSpec((2,)),
        "norm.num_batches_tracked": TensorSpec((), torch.int64),
        "fc.weight": TensorSpec((1, 4)),
    }
    order = {"B": [torch.tensor([0]), torch.tensor([1, 0]), torch.tensor([0])]}
    slices = Slices(Scheme.parse("1-1-1"), {"A": net, "B": net}, order=order)
    a, b = ({k: g.flatten().tolist() for k, g in slices.gids(n).items()} for n in "AB")
    assert a == {
        "conv.weight": [0, 1, -1, -1],
        "conv.bias": [2, -1],
        "norm.running_mean": [3, -1],
        "norm.num_batches_tracked": [-1],
        "fc.weight": [4, 5, -1, -1],
    }
    assert b["conv.weight"] == [-1, -1, 0, 1]
    assert (b["conv.bias"], b["fc.weight"]) == ([-1, 2], [-1, -1, 4, 5])
    assert slices.index("B")["global"].tolist() == [2, 3, 5, 7, 11, 12]


@pytest.mark.parametrize("level", [0, 100, 350, 400])
def test_section_v_5_associative_memory(level: int) -> None:
    """Visible and hidden read each other: Wh[:level] and Wv[:, :level] are averaged."""
    net = {"hidden.weight": TensorSpec((400, 50)), "visible.weight": TensorSpec((50, 400))}
    slices = Slices.parse(f"50-{level}-50", nets={"A": net, "B": net})
    gids = slices.gids("A")
    assert ((gids["hidden.weight"] >= 0).sum(1) == 50).tolist() == [i < level for i in range(400)]
    assert ((gids["visible.weight"] >= 0).sum(0) == 50).tolist() == [i < level for i in range(400)]
    assert sum(map(slices.size, slices.topics())) == 2 * 50 * level


def test_networks_of_the_library_are_chains() -> None:
    """conv_net: 3 channels, two blocks of two convolutions, representation, classes."""
    net = conv_net((3, 8, 8), 10, blocks=2, channels=4, representation=6).state_dict()
    slices = Slices.parse("3-4-4-8-8-6-10", nets={"A": net, "B": net})
    assert slices.size("global") == sum(t.numel() for t in net.values())
    assert [len(c.model) for c in slices.cells("A")] == [3, 4, 4, 8, 8, 6, 10]


# ---- errors ------------------------------------------------------------------------------------

NETS = dict.fromkeys("ABC", "4=5=3")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"scheme": "4=2=1"}, r"model 'global' must be .* such as 784-300-10, got '4=2=1'"),
        ({"scheme": "4-two-1"}, "got '4-two-1'"),
        ({"scheme": "4"}, "got '4'"),
        ({"scheme": "4--1"}, "got '4--1'"),
        ({"scheme": None}, r"no partial model. .*0-0-0-0 shares nothing"),
        ({"scheme": "4-2", "groups": {}}, "the scheme has 2 layers, the network of A has 3: 4=5=3"),
        ({"groups": {"g": "0-1"}}, "model 'g' has 2 layers and 'global' has 3"),
        ({"groups": {"local": "0-1-1"}}, "a group cannot be called 'local'"),
        ({"groups": {"global": "0-1-1"}}, "a group cannot be called 'global'"),
        ({"groups": {"a+b": "0-1-1"}}, r"a group cannot be called 'a\+b'"),
        ({"groups": {"": "0-1-1"}}, "a group cannot be called ''"),
        ({"members": {}}, r"group 'g' has no members. .*members=\{'g': 'M0, M1'\}"),
        ({"members": {"g": ""}}, "group 'g' has no members"),
        ({"members": {"g": "A", "h": "A"}}, "unknown group 'h'"),
        ({"members": {"g": "A", "global": "A"}}, "unknown group 'global'"),
        ({"members": {"g": "A, D"}}, r"unknown node 'D'.* There are: A, B, C"),
        ({"depends": {"h": "g"}}, "unknown model 'h'"),
        ({"depends": {"g": "h"}}, "unknown model 'h'"),
        ({"depends": {"g": "g"}}, "circle: g -> g"),
        ({"depends": {"g": "global", "global": "g"}}, "circle: g(lobal)? -> g(lobal)? -> g"),
        ({"depends": {"global": "g"}}, "node B implements 'global' but not 'g', on which it"),
        ({"scheme": "4-4-1", "groups": {"g": "0-2-0"}},
         "layer 1 of node A has 5 cells, but its slices need 6: global 4, g 2"),
    ],
)  # fmt: skip
def test_declarations_that_cannot_be_right(declared: dict[str, Any], said: str) -> None:
    good = {"scheme": "4-2-1", "groups": {"g": "0-2-1"}, "members": {"g": "A"}}
    options = {**good, **declared}
    if options["scheme"] is None:
        options["groups"] = options["members"] = {}
    if list(options["groups"]) != ["g"]:
        options["members"] = dict.fromkeys(options["groups"], "A")
    with pytest.raises(ConfigError, match=said):
        Slices.parse(options.pop("scheme"), nets=NETS, **options)


def test_the_good_declaration_is_good() -> None:
    slices = Slices.parse("4-2-1", nets=NETS, groups={"g": "0-2-1"}, members={"g": ["A", "A"]})
    assert slices.scheme.of("A") == ("global", "g")
    assert slices.scheme.members == {"g": ("A",)}


def test_dependencies_must_be_transitively_closed() -> None:
    names = {"fr": "0-1-1", "qc": "0-1-1"}
    with pytest.raises(
        ConfigError, match="'qc' depends on 'fr', which depends on 'global', so"
    ) as e:
        Slices.parse(
            "4-2-1",
            nets=NETS,
            groups=names,
            members=dict.fromkeys(names, "A, B"),
            depends={"fr": "global", "qc": "fr"},
        )
    assert "add 'global' to depends['qc']" in str(e.value)


def test_a_longer_circle_is_named() -> None:
    with pytest.raises(ConfigError) as e:
        Scheme.parse(
            None,
            groups=dict.fromkeys("xyz", "1-1"),
            members=dict.fromkeys("xyz", "A"),
            depends={"x": "y", "y": "z", "z": "x"},
        )
    circle = str(e.value).split("circle: ")[1].split(". ")[0].split(" -> ")
    assert circle[0] == circle[-1]
    assert {f"{a}{b}" for a, b in pairwise(circle)} == {"xy", "yz", "zx"}


def test_a_dependency_that_a_node_does_not_implement() -> None:
    with pytest.raises(ConfigError, match=r"node B implements 'qc' but not 'fr'.*members\['fr'\]"):
        Slices.parse(
            None,
            nets=NETS,
            groups={"fr": "0-1-1", "qc": "0-1-1"},
            members={"fr": "A", "qc": "A, B"},
            depends={"qc": "fr"},
        )


@pytest.mark.parametrize(
    ("net", "error", "said"),
    [
        ("4-5-3", ConfigError, r"the network of B must be .* 784=300=10, got '4-5-3'"),
        ("4=5=3=2", ConfigError, "the scheme has 3 layers, the network of B has 4: 4=5=3=2"),
        ("4=0=3", ModelError, r"'1.bias' of node B .* \[0\], .* a layer of 0 cells"),
        ({"w": (5,)}, ModelError, "network of B has no Linear or Conv2d layer"),
        ({"w": (5, 4), "v": (3, 6)}, ModelError, r"'v' of node B .*\[3, 6\], .* layer of 5 cells"),
        ({"w": (5, 4), "v": (3, 10)}, ModelError, r"'v' .*\[3, 10\], .* layer of 5 cells"),
        ({"w": (5, 4), "b": (10,)}, ModelError, r"'b' .*\[10\]"),
        ({"w": (6, 4, 3, 3), "d": (6, 1, 3, 3)}, ModelError, "no groups of channels"),
        ({"w": (5, 4), "a": (5, 5, 5)}, ModelError, r"'a' .*\[5, 5, 5\]"),
    ],
)  # fmt: skip
def test_networks_that_do_not_fit(net: Any, error: type[Exception], said: str) -> None:
    if not isinstance(net, str):
        net = {name: TensorSpec(shape) for name, shape in net.items()}
    with pytest.raises(error, match=said):
        Slices.parse("4-2-1", nets={"A": "4=5=3", "B": net})


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name.replace("_", "."): TensorSpec(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (specs(c_weight=(4, 1, 5, 5), c_bias=(4,), l_weight=(2, 8)),
         "layer 1 A has 'c.weight' with 3x3 numbers a cell and B has 'c.weight' with 5x5"),
        (specs(c_weight=(4, 1, 3, 3), l_weight=(2, 8)), "A has 'c.bias' .* and B has no bias"),
        (specs(c_weight=(4, 1, 3, 3), c_bias=(4,), n_weight=(4,), l_weight=(2, 8)),
         "A has no weight and B has 'n.weight'"),
        (specs(c_weight=(4, 1, 3, 3), c_bias=(4,), l_weight=(2, 12)), "with 2 numbers .* with 3 "),
    ],
)  # fmt: skip
def test_a_partial_model_is_the_same_on_all_nodes(other: dict, said: str) -> None:
    first = specs(c_weight=(3, 1, 3, 3), c_bias=(3,), l_weight=(2, 6))
    with pytest.raises(ConfigError, match=rf"partial model 'global' must be .*{said}"):
        Slices.parse("1-2-1", nets={"A": first, "B": other})
    Slices.parse("0-0-0", nets={"A": first, "B": other})  # what is not shared may differ


def test_local_layers_may_differ() -> None:
    """Images of different sizes: shared channels, then linear layers of one's own."""
    nets = {
        "A": specs(c_weight=(3, 1, 3, 3), l_weight=(5, 6)),
        "B": specs(c_weight=(3, 1, 3, 3), l_weight=(5, 12)),
    }
    assert Slices.parse("1-3-0", nets=nets).size("global") == 27
    with pytest.raises(ConfigError, match="layer 2"):
        Slices.parse("1-3-1", nets=nets)


@pytest.mark.parametrize(
    "order",
    [
        [torch.arange(4), torch.tensor([0, 1, 2, 3, 3]), torch.arange(3)],
        [torch.arange(4), torch.arange(1, 6), torch.arange(3)],
        [torch.arange(4), torch.arange(4), torch.arange(3)],
        [torch.arange(4), torch.arange(5)],
    ],
    ids=["twice", "too large", "too few", "a layer missing"],
)
def test_orders_that_do_not_cover_a_layer(order: list[Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"order\['A'\] must be a permutation .* 3 layers"):
        Slices(Scheme.parse("4-2-1"), NETS, order={"A": order})


def test_orders_are_of_known_nodes() -> None:
    with pytest.raises(UnknownNameError, match="unknown node 'D'"):
        Slices(Scheme.parse("4-2-1"), NETS, order={"D": []})

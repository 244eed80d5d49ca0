"""The picture of the slices: what it says, where things are, and that it harms no page."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.errors import UnknownNameError
from polyfed.maths.slices import Slices
from polyfed.report.network import network_svg

SVG = "{http://www.w3.org/2000/svg}"
NETS = dict.fromkeys(["M0", "M1", "M2"], "784=300=100=10")


def french(**options: object) -> Slices:
    groups, members = {"fr": "0-50-20-0"}, {"fr": "M0, M1"}
    return Slices.parse("784-250-80-10", nets=NETS, groups=groups, members=members, **options)


def drawn(slices: Slices, node: str | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(network_svg(slices, node))


def texts(picture: ElementTree.Element, kind: str) -> list[str]:
    return [str(t.text) for t in picture.iter(f"{SVG}text") if kind in t.attrib["class"].split()]


def ribbons(picture: ElementTree.Element) -> dict[str, tuple[str, str]]:
    """What each ribbon says: its colour and its class."""
    return {
        str(p.findtext(f"{SVG}title")): (p.attrib["fill"], p.attrib["class"])
        for p in picture.iter(f"{SVG}path")
    }


def colour_of(picture: ElementTree.Element, label: str) -> str:
    """The colour of the bar, or of the legend's square, that stands before a text."""
    for shape, text in pairwise(picture):
        if text.tag == f"{SVG}text" and str(text.text).startswith(label):
            return shape.attrib["fill"]
    raise AssertionError(label)


def test_bars_are_named_and_networks_that_are_alike_are_drawn_once() -> None:
    picture = drawn(french())
    assert texts(picture, "title") == ["M0, M1", "M2"]
    assert texts(picture, "name") == [
        *("global 784", "global 250", "fr 50", "global 80", "fr 20", "global 10"),
        *("global 784", "global 250", "local 50", "global 80", "local 20", "global 10"),
    ]
    assert "784=300=100=10, 217,140 of 266,610 parameters averaged" in texts(picture, "quiet")
    assert texts(picture, "middle")[:4] == ["input", "layer 1", "layer 2", "output"]


def test_one_node() -> None:
    picture = drawn(french(), "M2")
    assert texts(picture, "title") == ["M2"]
    assert "fr: " not in network_svg(french(), "M2")
    assert "fr+global: " in network_svg(french(cross=True))
    assert "fr+global: " not in network_svg(french(cross=True), "M2")
    with pytest.raises(UnknownNameError, match=r"unknown node 'M9'. .*M0, M1, M2"):
        network_svg(french(), "M9")


@pytest.mark.parametrize("depends", [{}, {"fr": "global"}], ids=["without dependency", "with"])
def test_ribbons_have_the_colour_of_who_averages_them(depends: dict[str, str]) -> None:
    picture = drawn(french(depends=depends), "M0")
    found = ribbons(picture)
    blue, red, grey = (colour_of(picture, name) for name in ("global:", "fr:", "local:"))
    assert len({blue, red, grey}) == 3
    assert blue == colour_of(picture, "global 784")
    assert red == colour_of(picture, "fr 50")
    assert found["global 250 from global 784: global"] == (blue, "ribbon")
    assert found["fr 20 from fr 50: fr"] == (red, "ribbon")
    if depends:
        assert found["fr 50 from global 784: fr"] == (red, "ribbon")
        assert found["global 80 from fr 50: fr"] == (red, "ribbon")
    else:
        assert found["fr 50 from global 784: local"] == (grey, "alone")
        assert found["global 80 from fr 50: local"] == (grey, "alone")
    assert len(found) == 2 + 4 + 2


def test_the_pair_of_cross_model_averaging_has_its_own_colour() -> None:
    picture = drawn(french(cross=True), "M0")
    mixed = colour_of(picture, "fr+global: 48,400 parameters averaged by M0, M1; weights between")
    assert ribbons(picture)["fr 50 from global 784: fr+global"] == (mixed, "ribbon")
    blue, red = (int(colour_of(picture, name)[1:3], 16) for name in ("global:", "fr:"))
    assert int(mixed[1:3], 16) == pytest.approx((blue + red) / 2, abs=1)


def test_the_legend_says_who_and_on_what() -> None:
    picture = network_svg(french(depends={"fr": "global"}))
    assert "global: 217,140 parameters averaged by M0, M1, M2" in picture
    assert "fr: 49,470 parameters averaged by M0, M1; depends on global" in picture
    assert "local: stays on its node" in picture
    many = Slices.parse("4-2", nets={f"M{i}": "4=3" for i in range(16)})
    assert "averaged by M0, M1, M2, M3, … (16 nodes)" in network_svg(many)
    alone = Slices.parse("4-1", nets=dict.fromkeys(NETS, "4=3"), groups={"x": "0-2"},
                         members={"x": "M1"})  # fmt: skip
    assert "x: averaged by nobody" in network_svg(alone)


def test_bars_are_in_proportion_and_thick_enough() -> None:
    picture = drawn(Slices.parse("784-250-99-10", nets=NETS), "M0")
    high = {}
    for shape, text in pairwise(picture):
        if shape.tag == f"{SVG}rect" and text.attrib.get("class") == "name":
            high[str(text.text)] = float(shape.attrib["height"]) + 1
    assert high["global 250"] / high["local 50"] == pytest.approx(5, rel=0.01)
    assert high["local 1"] == 19
    assert high["global 784"] > high["global 250"] + high["local 50"] > high["global 10"]


def test_ribbons_fill_the_edges_of_bars() -> None:
    """From the first bar to the last of the layer after it, one ribbon begins where one ends."""
    picture = drawn(french(), "M0")
    starts = []
    for path in picture.iter(f"{SVG}path"):
        if str(path.findtext(f"{SVG}title")).split(": ")[0].endswith("from global 784"):
            numbers = [float(n) for n in re.findall(r"[\d.]+", path.attrib["d"])]
            starts.append((numbers[1], numbers[-1]))
    (a, b), (c, d) = sorted(starts)
    assert b == c
    bar = next(r for r in picture.iter(f"{SVG}rect") if "x" in r.attrib)
    assert a == pytest.approx(float(bar.attrib["y"]), abs=0.6)
    assert d == pytest.approx(float(bar.attrib["y"]) + float(bar.attrib["height"]), abs=0.6)
    assert (b - a) / (d - c) == pytest.approx(250 / 50, rel=0.01)


def test_svg_is_self_contained_and_leaves_the_page_around_it_alone() -> None:
    svg = network_svg(french())
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.findall(r"\bid=", svg)
    style = svg[svg.index("<style>") + 7 : svg.index("</style>")]
    lines = [line for line in style.split("\n") if line]
    assert all(line.startswith((".network ", "@media", "}")) for line in lines)
    assert "prefers-color-scheme: dark" in style


def test_svg_escapes_names() -> None:
    nets = dict.fromkeys(["<A&B>", "C"], "4=3")
    slices = Slices.parse("4-1", nets=nets, groups={"<g>": "0-1"}, members={"<g>": ["<A&B>", "C"]})
    picture = drawn(slices)
    assert texts(picture, "title") == ["<A&B>, C"]
    assert "<g> 1" in texts(picture, "name")


@given(
    layers=st.integers(2, 6),
    groups=st.integers(0, 5),
    nodes=st.integers(2, 9),
    name=st.sampled_from(["g", "a rather long name of a group"]),
    cells=st.sampled_from([1, 8]),
)
def test_everything_is_inside_the_picture(
    layers: int, groups: int, nodes: int, name: str, cells: int
) -> None:
    names = [f"{name} {i}" for i in range(groups)]
    owners = [f"{name} node {i}" for i in range(nodes)]
    picture = drawn(
        Slices.parse(
            "-".join(["30", *["3"] * (layers - 1)]),
            nets={node: "=".join([str(40 + i), *["60"] * (layers - 1)])
                  for i, node in enumerate(owners)},
            groups={g: "-".join([str(cells // 4)] + [str(cells)] * (layers - 1)) for g in names},
            members=dict.fromkeys(names, owners),
            cross=True,
        )
    )  # fmt: skip
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for bar in picture.iter(f"{SVG}rect"):
        x, y = (float(bar.attrib.get(k, 0)) for k in "xy")
        assert x + float(bar.attrib["width"]) <= width
        assert y + float(bar.attrib["height"]) <= height
    for text in picture.iter(f"{SVG}text"):
        kinds, x = text.attrib["class"].split(), float(text.attrib["x"])
        long = (8 if "title" in kinds else 6.2) * len(str(text.text))
        middle = "middle" in kinds or "name" in kinds
        assert (x - long / 2 if middle else x) >= 0
        assert x + (long / 2 if middle else long) <= width
        assert 10 < float(text.attrib["y"]) < height


def test_the_picture_of_nothing_shared() -> None:
    picture = drawn(Slices.parse("0-0", nets={"A": "4=3", "B": "4=3"}))
    assert texts(picture, "name") == ["local 4", "local 3"]
    assert list(ribbons(picture)) == ["local 3 from local 4: local"]

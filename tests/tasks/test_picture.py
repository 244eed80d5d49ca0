import math
import re
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import DataError
from polyfed.random import stream
from polyfed.tasks.picture import SHADES, as_svg, as_text, holdings

SVG = "{http://www.w3.org/2000/svg}"


def names(kind: str, n: int) -> list[str]:
    return [f"{kind} {i}" for i in range(n)]


def counts_of(nodes: int, classes: int, largest: int = 6000) -> Tensor:
    return torch.randint(0, largest + 1, (nodes, classes), generator=stream(0))


def test_holdings_counts() -> None:
    got = holdings({"a": torch.tensor([0, 2, 2]), "b": torch.tensor([], dtype=torch.int64)}, 4)
    assert got.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]
    assert holdings({}, 4).shape == (0, 4)


@pytest.mark.parametrize("label", [-1, 4])
def test_holdings_refuses_unknown_labels(label: int) -> None:
    with pytest.raises(DataError, match=r"node a has labels .*expected 0 to 3"):
        holdings({"a": torch.tensor([1, label])}, 4)


# ---- text ----------------------------------------------------------------------------------------


def test_shades_are_quarters_of_the_largest() -> None:
    text = as_text(torch.tensor([[0, 1, 25, 26, 50, 51, 75, 76, 100]]), ["n"], list("abcdefghi"))
    row = text.splitlines()[1]
    assert "".join(c for c in row if c in "·" + SHADES) == "·░░▒▒▓▓██"


@given(
    nodes=st.integers(1, 25),
    classes=st.integers(1, 200),
    largest=st.sampled_from([0, 1, 99, 6000, 10**6]),
    long=st.booleans(),
)
def test_text_is_aligned_and_fits(nodes: int, classes: int, largest: int, long: bool) -> None:
    counts = counts_of(nodes, classes, largest)
    kind = "a rather long name of" if long else "n"
    text = as_text(counts, names(kind, nodes), names(kind, classes))
    lines = text.splitlines()
    assert len(lines) == nodes + 2
    assert len(set(map(len, lines))) == 1  # every line ends with its total, right-aligned
    assert len(lines[0]) <= 100
    totals = [int(line.split()[-1].replace(",", "")) for line in lines[1:]]
    assert totals == [*counts.sum(1).tolist(), int(counts.sum())]


def test_twenty_nodes_and_ten_classes_show_every_number() -> None:
    counts = counts_of(20, 10)
    lines = as_text(counts, names("node", 20), list("0123456789")).splitlines()
    for row, line in zip(counts.tolist(), lines[1:], strict=False):
        shown = [int(n) for n in re.findall(r"[░▒▓█]\s+(\d+)", line)]
        assert shown == [n for n in row if n]


def test_class_names_stay_whole_where_they_fit() -> None:
    header = as_text(counts_of(2, 3), ["M0", "M1"], ["airplane", "automobile", "bird"])
    assert "airplane  automobile" in header.splitlines()[0]


def test_many_classes_become_columns_of_shade() -> None:
    counts = torch.zeros(2, 100, dtype=torch.int64)
    counts[0, :50], counts[1, 50:] = 7, 7
    lines = as_text(counts, ["a", "b"], names("class", 100)).splitlines()
    assert "100 classes, 2 to a column" in lines[-1]
    assert "█" * 25 + "·" * 25 in lines[1]
    assert "·" * 25 + "█" * 25 in lines[2]
    assert lines[0].split() == ["0", "20", "40", "60", "80", "total"]


def test_classes_of_one_letter_are_named_also_without_numbers() -> None:
    lines = as_text(counts_of(20, 10), names("node", 20), list("0123456789"), 60).splitlines()
    assert lines[0].split() == ["0123456789", "total"]


# ---- SVG -----------------------------------------------------------------------------------------


def drawn(counts: Tensor, nodes: list[str], classes: list[str]) -> ElementTree.Element:
    return ElementTree.fromstring(as_svg(counts, nodes, classes, "Who holds what"))


def test_circle_area_is_proportional_to_the_count() -> None:
    counts = torch.tensor([[400, 100, 0], [25, 1600, 900]])
    picture = drawn(counts, ["M0", "M1"], ["cat", "dog", "frog"])
    radius = {}
    for circle in picture.iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        if title is not None:  # the legend's circles have none
            radius[title.text] = float(circle.attrib["r"])
    assert set(radius) == {
        *("M0, cat: 400", "M0, dog: 100"),
        *("M1, cat: 25", "M1, dog: 1,600", "M1, frog: 900"),
    }
    unit = radius["M1, dog: 1,600"] ** 2 / 1600
    for title, r in radius.items():
        count = int(str(title).split(": ")[1].replace(",", ""))
        assert math.sqrt(unit * count) == pytest.approx(r, abs=0.01)


def test_circles_sit_in_the_row_of_the_node_and_the_column_of_the_class() -> None:
    counts = torch.tensor([[0, 5], [3, 0]])
    picture = drawn(counts, ["M0", "M1"], ["cat", "dog"])
    at = {t.text: (t.attrib["x"], t.attrib["y"]) for t in picture.iter(f"{SVG}text")}
    for circle in picture.iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        if title is not None:
            node, name = str(title.text).split(":")[0].split(", ")
            assert circle.attrib["cx"] == at[name][0]
            assert float(circle.attrib["cy"]) == pytest.approx(float(at[node][1]) - 4)


def test_svg_shows_names_and_totals() -> None:
    counts = torch.tensor([[4000, 0], [1000, 3000]])
    texts = {t.text for t in drawn(counts, ["M0", "M1"], ["cat", "dog"]).iter(f"{SVG}text")}
    assert {"Who holds what", "M0", "M1", "cat", "dog", "5,000", "3,000", "8,000"} <= texts


def test_svg_is_self_contained_and_leaves_the_page_around_it_alone() -> None:
    svg = as_svg(counts_of(3, 4), names("node", 3), list("abcd"), "t")
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    style = svg[svg.index("<style>") + 7 : svg.index("</style>")]
    assert all(line.startswith(".holdings ") for line in style.split("\n") if line)


def test_svg_escapes_names() -> None:
    texts = [
        t.text
        for t in ElementTree.fromstring(
            as_svg(torch.tensor([[1]]), ["<A&B>"], ['"c"'], "<script>")
        ).iter(f"{SVG}text")
    ]
    assert {"<A&B>", '"c"', "<script>"} <= set(texts)


@given(nodes=st.integers(1, 40), classes=st.integers(1, 120), largest=st.sampled_from([0, 1, 6000]))
def test_everything_is_inside_the_picture(nodes: int, classes: int, largest: int) -> None:
    picture = drawn(counts_of(nodes, classes, largest), names("node", nodes), names("c", classes))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for circle in picture.iter(f"{SVG}circle"):
        x, y, r = (float(circle.attrib[k]) for k in ("cx", "cy", "r"))
        assert r <= x <= width - r
        assert r <= y <= height - r
    for text in picture.iter(f"{SVG}text"):
        end = "end" in text.attrib["class"].split()
        room = float(text.attrib["x"]) if end else width - float(text.attrib["x"])
        assert room >= 6.2 * len(str(text.text))  # a letter is about that wide
        assert 10 < float(text.attrib["y"]) < height


# ---- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[], ["a"], ["a", "b", "c"]])
def test_counts_and_names_must_agree(nodes: list[str]) -> None:
    with pytest.raises(DataError, match=rf"counts are \(2, 2\), expected .* {len(nodes)} nodes"):
        as_text(torch.ones(2, 2, dtype=torch.int64), nodes, ["x", "y"])
    with pytest.raises(DataError, match="one column for each of 2 classes"):
        as_svg(torch.ones(2, 3, dtype=torch.int64), ["a", "b"], ["x", "y"], "t")

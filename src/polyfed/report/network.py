"""Who shares which part of a network: layers as bars cut into slices, coloured by partial model.

Bars are slices, in proportion to their cells (but never too thin to be named); ribbons are the
weights between two slices, in the colour of the topic that averages them, grey where they stay on
the node. After Figure 5 of Bouchra Pilet, Frey, Taiani, IDA 2021, hal-02373338.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from xml.sax.saxutils import escape

from polyfed.errors import UnknownNameError
from polyfed.maths.scheme import LOCAL
from polyfed.maths.slices import Slices

_STYLE = """
.network text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }
.network .title { font-size: 15px; font-weight: 600 }
.network .quiet { fill: #616e7c }
.network .middle { text-anchor: middle }
.network .name { fill: #fff; text-anchor: middle }
.network .paper { fill: #fff }
.network .ribbon { fill-opacity: .42 }
.network .alone { fill-opacity: .2 }
@media (prefers-color-scheme: dark) {
.network text { fill: #e4e7eb }
.network .quiet { fill: #9aa5b1 }
.network .name { fill: #fff }
.network .paper { fill: #171d24 }
.network .ribbon { fill-opacity: .6 }
.network .alone { fill-opacity: .25 }
}
"""
_GREY = "#7b8794"
_LETTER, _LARGE = 7.0, 9.0  # widths of letters of 12 and of 15 px, on the safe side
_GAP = 120.0  # between two layers, for the ribbons
_LOW, _HIGH = 60.0, 210.0  # bars of a layer of no cells, and of the widest
_THIN = 19.0  # the thinnest slice that can be named
_MARGIN, _HEAD, _ROW = 20.0, 84.0, 22.0


@dataclass(frozen=True)
class _Bar:
    """One slice of one layer; its place is counted from the middle of the layer."""

    model: str
    cells: int
    top: float
    high: float

    @property
    def label(self) -> str:
        name = self.model if len(self.model) <= 14 else self.model[:13] + "…"
        return f"{name} {self.cells}"

    def edge(self, other: _Bar, beside: Sequence[_Bar]) -> tuple[float, float]:
        """Where the ribbon to another bar begins and ends, if `beside` are all bars it goes to."""
        before = sum(bar.cells for bar in beside[: beside.index(other)])
        total = sum(bar.cells for bar in beside)
        ends = (before / total, (before + other.cells) / total)
        return self.top + self.high * ends[0], self.top + self.high * ends[1]


@dataclass(frozen=True)
class _Panel:
    """One network: the nodes that have it, what is said about it, and its layers."""

    nodes: str
    said: str
    columns: tuple[tuple[_Bar, ...], ...]

    @property
    def high(self) -> float:
        return _HEAD + max(sum(bar.high for bar in bars) for bars in self.columns) + _MARGIN

    @property
    def letters(self) -> float:
        return max(_LARGE * len(self.nodes), _LETTER * len(self.said))


def network_svg(slices: Slices, node: str | None = None) -> str:
    """A self-contained picture of a node's network, or of each network that differs.

    Args:
        slices: the partial models and the networks.
        node: only this one's.
    """
    if node is not None and node not in slices.nodes:
        raise UnknownNameError("node", node, slices.nodes)
    nodes = slices.nodes if node is None else (node,)
    panels, colours = _panels(slices, nodes), _colours(slices)
    legend = list(_legend(slices, {model for n in nodes for model in slices.scheme.of(n)}))
    bars = [bar for panel in panels for column in panel.columns for bar in column]
    wide = 16 + _LETTER * max(len(bar.label) for bar in bars)
    tops = list(accumulate((panel.high for panel in panels), initial=0.0))
    layers = slices.scheme.layers * (wide + _GAP) - _GAP
    named = 26 + _LETTER * max(len(text) for _, text in legend)
    width = 2 * _MARGIN + max(layers, named, *(panel.letters for panel in panels))
    height = tops[-1] + 8 + _ROW * len(legend) + _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" class="network" role="img">',
            f"<title>{escape(f'Partial models of {_listed(nodes)}')}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
            *(
                shape
                for panel, top in zip(panels, tops[:-1], strict=True)
                for shape in _draw(slices, panel, colours, wide, top)
            ),
            *_draw_legend(legend, colours, tops[-1]),
            "</svg>\n",
        )
    )


# ---- what to draw ------------------------------------------------------------------------------


def _panels(slices: Slices, nodes: Sequence[str]) -> list[_Panel]:
    """Networks with equal slices are one panel."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        alike.setdefault(str(slices.layers(node)), []).append(node)
    panels = []
    for names in alike.values():
        layers = slices.layers(names[0])
        widths = [sum(layer.values()) for layer in layers]
        total = sum(gid.numel() for gid in slices.gids(names[0]).values())
        shared = sum(slices.size(topic) for topic in slices.topics(names[0]))
        said = f"{'='.join(map(str, widths))}, {shared:,} of {total:,} parameters averaged"
        columns = tuple(_bars(layer, max(widths)) for layer in layers)
        panels.append(_Panel(_listed(names), said, columns))
    return panels


def _bars(layer: Mapping[str, int], widest: int) -> tuple[_Bar, ...]:
    """The slices of a layer from top to bottom."""
    sizes = {model: cells for model, cells in layer.items() if cells}
    total = sum(sizes.values())
    scale = (_LOW + (_HIGH - _LOW) * math.sqrt(total / widest)) / total
    highs = [max(_THIN, scale * cells) for cells in sizes.values()]
    tops = list(accumulate(highs, initial=-sum(highs) / 2))[:-1]
    found = zip(sizes.items(), tops, highs, strict=True)
    return tuple(_Bar(model, cells, top, high) for (model, cells), top, high in found)


def _colours(slices: Slices) -> dict[str, str]:
    """A hue for every model, the golden angle apart; a pair has the mean of its two colours."""
    colours = {LOCAL: _GREY}
    for i, model in enumerate(slices.scheme.sizes):
        colours[model] = _hex(colorsys.hls_to_rgb((0.58 + 0.382 * i) % 1, 0.38, 0.55))
    for topic in slices.topics():
        if topic not in colours:
            a, b = (bytes.fromhex(colours[model][1:]) for model in topic.split("+"))
            colours[topic] = _hex((x + y) / 510 for x, y in zip(a, b, strict=True))
    return colours


def _hex(parts: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _listed(names: Sequence[str]) -> str:
    """Up to six names, else the first four and how many there are."""
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, … ({len(names)} nodes)"


def _legend(slices: Slices, models: Set[str]) -> Iterator[tuple[str, str]]:
    """Each model and pair that is drawn, with who averages it and what it depends on."""
    for model in slices.scheme.sizes:
        if model in models:
            above = sorted(slices.scheme.depends.get(model, ()))
            depends = f"; depends on {', '.join(above)}" if above else ""
            yield model, _averaged(slices, model) + depends
    for topic in slices.topics():
        if topic not in slices.scheme.sizes and models >= set(topic.split("+")):
            yield topic, f"{_averaged(slices, topic)}; weights between the two"
    yield LOCAL, f"{LOCAL}: stays on its node"


def _averaged(slices: Slices, topic: str) -> str:
    if topic not in slices.topics():
        return f"{topic}: averaged by nobody"
    size, nodes = slices.size(topic), slices.implementers(topic)
    return f"{topic}: {size:,} parameters averaged by {_listed(nodes)}"


# ---- how to draw it ----------------------------------------------------------------------------


def _draw(
    slices: Slices, panel: _Panel, colours: Mapping[str, str], wide: float, top: float
) -> list[str]:
    """The names, then ribbons, those that stay on the node lowest, and on top of them the bars."""
    middle = top + (_HEAD + panel.high - _MARGIN) / 2
    shapes = [
        _text(_MARGIN, top + 28, panel.nodes, "title"),
        _text(_MARGIN, top + 48, panel.said, "quiet"),
    ]
    ribbons, bars = [], []
    for i, column in enumerate(panel.columns):
        x = _MARGIN + i * (wide + _GAP)
        name = {0: "input", len(panel.columns) - 1: "output"}.get(i, f"layer {i}")
        bars.append(_text(x + wide / 2, middle + column[0].top - 7, name, "quiet middle"))
        for bar in column:
            bars += _draw_bar(bar, colours[bar.model], x, wide, middle)
    for i, (before, after) in enumerate(pairwise(panel.columns)):
        x = _MARGIN + i * (wide + _GAP) + wide
        for into in before:
            for out in after:
                owner = slices.owner(out.model, into.model)
                ends = (*into.edge(out, after), *out.edge(into, before))
                said = f"{out.label} from {into.label}: {owner or LOCAL}"
                drawn = _ribbon(x, [middle + y for y in ends], colours[owner or LOCAL], said, owner)
                ribbons.append((owner is not None, drawn))
    return shapes + [drawn for _, drawn in sorted(ribbons, key=lambda r: r[0])] + bars


def _draw_bar(bar: _Bar, colour: str, x: float, wide: float, middle: float) -> list[str]:
    y = middle + bar.top
    return [
        f'<rect x="{x:.1f}" y="{y + 0.5:.1f}" width="{wide:.1f}" height="{bar.high - 1:.1f}" '
        f'rx="3" fill="{colour}"/>',
        _text(x + wide / 2, y + bar.high / 2 + 4, bar.label, "name"),
    ]


def _ribbon(x: float, ends: Sequence[float], colour: str, said: str, owner: str | None) -> str:
    """A band from two heights on the left to two on the right."""
    a, b, c, d = (f"{y:.1f}" for y in ends)
    left, half, right = f"{x:.1f}", f"{x + _GAP / 2:.1f}", f"{x + _GAP:.1f}"
    path = f"M{left} {a}C{half} {a} {half} {c} {right} {c}V{d}C{half} {d} {half} {b} {left} {b}Z"
    kind = "ribbon" if owner else "alone"
    return f'<path class="{kind}" fill="{colour}" d="{path}"><title>{escape(said)}</title></path>'


def _draw_legend(
    legend: Sequence[tuple[str, str]], colours: Mapping[str, str], top: float
) -> list[str]:
    shapes = []
    for i, (name, text) in enumerate(legend):
        y = top + 8 + _ROW * i
        shapes += [
            f'<rect x="{_MARGIN:.1f}" y="{y + 1:.1f}" width="16" height="14" rx="3" '
            f'fill="{colours[name]}"/>',
            _text(_MARGIN + 26, y + 12, text),
        ]
    return shapes


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'

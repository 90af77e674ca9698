"""SVG charts: timelines, heat maps, bars, histograms and curves. Parts have tooltips with their
figures.

Scope: pure. Lengths are in pixels of a page that is 1,176 wide. Colours are classes of the page's
style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.histogram import BUCKET_MIN_S
from .elements import Element, element

WIDTH = 1176
_LABEL = 128
_ROW = 13
_CELL = 20
_LETTER = 6.4
"""Approximate width of a letter at 10 pixels."""
_TICKS = 8
_STEPS = (1.0, 2.0, 5.0, 10.0)
_BARS_OF_RANKS = 128


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a timeline, from ``start`` to ``stop``. ``strength`` runs from 0 (pale) to 1;
    ``colour`` is a class of the style; ``tip`` is the tooltip."""

    name: str
    start: float
    stop: float
    colour: str
    strength: float
    tip: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars that belong together. Overlapping ones are drawn in separate rows."""

    name: str
    bars: Sequence[Bar]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a heat map. ``heat`` runs from 0 to 1."""

    heat: float
    text: str
    tip: str
    marked: bool = False


def timeline(lanes: Sequence[Lane], length: float, unit: str) -> Element:
    """Return lanes below each other, over an axis from 0 to ``length``."""
    scale = (WIDTH - _LABEL) / (length or 1.0)
    drawn: list[Element] = []
    top = 22.0
    for lane in lanes:
        rows = _rows(lane.bars)
        drawn.append(_lane_name(lane.name, top + _ROW - 3, marked=lane.marked))
        for number, row in enumerate(rows):
            for bar in row:
                drawn += _drawn_bar(bar, scale, top + number * _ROW)
        top += max(1, len(rows)) * _ROW + 6
        drawn.append(_line(0, top - 3, WIDTH, top - 3))
    axis: list[Element] = []
    for tick in _ticks(length):
        x = _LABEL + tick * scale
        axis.append(_line(x, 16, x, top - 3))
        if x < WIDTH - 30:
            axis.append(element("text", f"{tick:g} {unit}", x=x + 2, y=11, class_="soft"))
    return _svg(WIDTH, top, *axis, *drawn)


def _rows(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Distribute bars over rows without overlaps. Each bar takes the first row with room."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        for row in rows:
            if row[-1].stop <= bar.start:
                row.append(bar)
                break
        else:
            rows.append([bar])
    return rows


def _drawn_bar(bar: Bar, scale: float, top: float) -> Iterator[Element]:
    x = _LABEL + bar.start * scale
    width = max(1.0, (bar.stop - bar.start) * scale)
    shape = {"x": x, "y": top, "width": width, "height": _ROW - 2, "rx": 2}
    opacity = 0.35 + 0.65 * min(1.0, bar.strength)
    yield element(
        "rect", element("title", bar.tip), **shape, class_=bar.colour, fill_opacity=opacity
    )
    if len(bar.name) * _LETTER + 6 < width:
        pale = opacity < 0.6
        ink = {"class_": "on-bar"} if not pale else {"font_size": 10}
        yield element("text", bar.name, x=x + 3, y=top + _ROW - 4, pointer_events="none", **ink)


def heat_map(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]) -> Element:
    """Return a row of cells for each name in ``rows``, below the column names."""
    slanted = 5.2 * max(map(len, columns), default=0)
    width = min(120.0, (WIDTH - _LABEL - slanted) / max(1, len(columns)))
    top = 10 + slanted
    drawn: list[Element] = []
    for number, name in enumerate(columns):
        x = _LABEL + (number + 0.5) * width
        turned = f"rotate(-38 {x:.0f} {top - 6:.0f})"
        drawn.append(element("text", name, x=x, y=top - 6, transform=turned, class_="soft"))
    for row, (name, cells) in enumerate(rows):
        y = top + row * _CELL
        marked = any(cell.marked for cell in cells)
        drawn.append(_lane_name(name, y + _CELL - 6, marked=marked))
        for number, cell in enumerate(cells):
            drawn += _drawn_cell(cell, _LABEL + number * width, y, width)
    return _svg(WIDTH, top + len(rows) * _CELL + 4, *drawn)


def _drawn_cell(cell: Cell, x: float, y: float, width: float) -> Iterator[Element]:
    shape = {"x": x + 1, "y": y + 1, "width": width - 2, "height": _CELL - 2}
    tip = element("title", cell.tip)
    opacity = 0.04 + 0.96 * min(1.0, cell.heat)
    yield element("rect", tip, **shape, class_="heat", fill_opacity=opacity)
    if cell.marked:
        yield element("rect", **shape, class_="marked", pointer_events="none")
    if len(cell.text) * _LETTER + 4 < width:
        ink = "on-heat" if opacity > 0.5 else ""
        yield element(
            "text",
            cell.text,
            x=x + width / 2,
            y=y + _CELL - 6,
            text_anchor="middle",
            font_size=11,
            pointer_events="none",
            class_=ink,
        )


def bars(
    values: Sequence[tuple[str, float, str]], unit: str, *, width: float = WIDTH, colour: str
) -> Element:
    """Return a bar chart of (name, value, tooltip), with the scale at the left. Names are thinned
    out to fit."""
    height = 150.0
    greatest = max((value for _, value, _ in values), default=0.0)
    scale = (height - 14) / (greatest or 1.0)
    step = (width - _LABEL) / max(1, len(values))
    drawn = list(_levels(greatest, unit, height, scale, width))
    every = math.ceil(max((len(name) for name, _, _ in values), default=1) * 8 / step)
    for number, (name, value, tip) in enumerate(values):
        x = _LABEL + number * step
        drawn.append(
            element(
                "rect",
                element("title", tip),
                x=x + step * 0.1,
                y=height - value * scale,
                width=max(0.5, step * 0.8),
                height=value * scale,
                class_=colour,
            )
        )
        if number % every == 0:
            middle = x + step / 2
            drawn.append(
                element("text", name, x=middle, y=height + 15, text_anchor="middle", class_="soft")
            )
    return _svg(width, height + 20, *drawn)


def histogram_bars(
    counts: Sequence[int], noun: str, *, width: float = WIDTH, colour: str
) -> Element | None:
    """Return a histogram of durations, labelled with ``noun``; None if all counts are 0."""
    counted = [number for number, count in enumerate(counts) if count]
    if not counted:
        return None
    values = []
    for number in range(counted[0], counted[-1] + 1):
        upper = seconds_text(BUCKET_MIN_S * 2.0**number)
        values.append((upper, float(counts[number]), f"{counts[number]:,} {noun} up to {upper}"))
    return bars(values, "", width=width, colour=colour)


def by_rank(
    values: Mapping[int, float],
    unit: str,
    said: Callable[[int], str],
    *,
    width: float = WIDTH,
    colour: str,
) -> Element:
    """Return a bar for each rank. With many ranks, a bar stands for a group and shows its largest
    value. ``said`` gives the tooltip of a rank."""
    drawn = []
    for group in in_groups_of_ranks(list(values), _BARS_OF_RANKS):
        largest = max(group, key=values.__getitem__)
        drawn.append((str(group[0]), values[largest], f"rank {largest}: {said(largest)}"))
    return bars(drawn, unit, width=width, colour=colour)


def in_groups_of_ranks(ranks: Sequence[int], most: int) -> list[Sequence[int]]:
    """Divide ranks into at most ``most`` groups of neighbours."""
    size = math.ceil(len(ranks) / most) or 1
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def seconds_text(seconds: float) -> str:
    """Return a short duration in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def curve(points: Sequence[tuple[float, float, str]], unit: str, *, width: float = 560) -> Element:
    """Return a curve through points (x, value, tooltip), with a value axis from 0."""
    height = 130.0
    first = min(x for x, _, _ in points)
    last = max(x for x, _, _ in points)
    greatest = max(value for _, value, _ in points)
    across = (width - _LABEL - 10) / ((last - first) or 1.0)
    scale = (height - 14) / (greatest or 1.0)
    drawn = list(_levels(greatest, unit, height, scale, width))
    places = [(_LABEL + (x - first) * across, height - value * scale) for x, value, _ in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn.append(element("polyline", points=path, class_="curve"))
    for (x, y), (_, _, tip) in zip(places, points, strict=True):
        drawn.append(element("circle", element("title", tip), cx=x, cy=y, r=4, class_="dot"))
    for x, anchor in {first: "start", last: "end"}.items():
        place = _LABEL + (x - first) * across
        label = element("text", f"{x:,.0f}", x=place, y=height + 15, text_anchor=anchor)
        label.set("class", "soft")
        drawn.append(label)
    return _svg(width, height + 20, *drawn)


def legend(colours: Sequence[tuple[str, str]]) -> Element:
    """Return a legend of (class of the style, label) pairs."""
    drawn: list[Element] = []
    x = 0.0
    for colour, word in colours:
        drawn.append(element("rect", x=x, y=3, width=12, height=12, rx=2, class_=colour))
        drawn.append(element("text", word, x=x + 17, y=13, class_="soft"))
        x += 34 + len(word) * 7.2
    return _svg(WIDTH, 20, *drawn)


def _levels(
    greatest: float, unit: str, height: float, scale: float, width: float
) -> Iterator[Element]:
    for tick in _ticks(greatest, 4):
        y = height - tick * scale
        yield _line(_LABEL, y, width, y)
        yield element(
            "text", f"{tick:g} {unit}", x=_LABEL - 8, y=y + 4, text_anchor="end", class_="soft"
        )


def _ticks(length: float, most: int = _TICKS) -> list[float]:
    """Return round numbers from 0 to ``length``, with at most ``most`` intervals."""
    if length <= 0:
        return [0.0]
    magnitude = 10 ** math.floor(math.log10(length / most))
    step = next(s for s in _STEPS if s * magnitude * most >= length * 0.999) * magnitude
    return [round(number * step, 9) for number in range(math.floor(length / step) + 1)]


def _lane_name(name: str, y: float, *, marked: bool) -> Element:
    return element(
        "text", name, x=_LABEL - 8, y=y, text_anchor="end", class_="alarm" if marked else "soft"
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="grid")


def _svg(width: float, height: float, *drawn: Element) -> Element:
    return element(
        "svg",
        *drawn,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
    )

"""Draws curves with Braille characters, each of which has 2 x 4 dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from shared.view.curves import Point
from shared.view.look import LOOKS, SIGNED, limits, of_metric

SHADES = ("", "bold ", "dim ")
"""Shades of the curves of one picture that have the same colour, because they measure the same kind of work."""
LABEL = 8
"""Width of the labels of the vertical axis."""
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in each row and column of a Braille character."""


@dataclass(frozen=True)
class Series:
    """One curve of a picture."""

    name: str
    points: Sequence[Point]


def plot(title: str, series: Sequence[Series], width: int, height: int) -> list[Text]:
    """Return a picture of `width` x `height` characters: a title with the newest values, the curves and the steps."""
    drawn = [curve for curve in series if curve.points]
    head = _title(title, drawn, width)
    rows = max(height - 2, 1)
    columns = max(width - LABEL - 1, 4)
    if not drawn:
        return [head, *(Text(" " * width) for _ in range(height - 1))]
    first = min(curve.points[0][0] for curve in drawn)
    last = max(curve.points[-1][0] for curve in drawn)
    values = [value for curve in drawn for _, value in curve.points]
    low, high = limits(min(values), max(values), signed=any(curve.name.startswith(SIGNED) for curve in drawn))
    colors = styles([curve.name for curve in drawn])
    cells = [[_BLANK] * columns for _ in range(rows)]
    owner = [[0] * columns for _ in range(rows)]
    for index, curve in enumerate(drawn):
        for x, y in _dots(curve.points, (first, last), (low, high), 2 * columns, 4 * rows):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            owner[y // 4][x // 2] = index
    lines = [head]
    for row in range(rows):
        line = Text(_label(row, rows, low, high).rjust(LABEL), style="dim")
        line.append("┤" if _labelled(row, rows) else "│", style="dim")
        styled = [
            (" ", "") if cell == _BLANK else (chr(cell), colors[index])
            for cell, index in zip(cells[row], owner[row], strict=True)
        ]
        lines.append(append_cells(line, styled))
    left, right = f"{first:g}", f"step {last:g}"
    gap = max(columns - len(left) - len(right), 1)
    lines.append(Text(f"{' ' * LABEL}└{left}{' ' * gap}{right}"[:width].ljust(width), style="dim"))
    return lines


def styles(names: Sequence[str]) -> list[str]:
    """Return a style for each metric: the colour of the kind of work that it measures, in different shades."""
    kinds = [of_metric(name) for name in names]
    shades = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
    return [f"{SHADES[shade % len(SHADES)]}{LOOKS[kind].color}" for kind, shade in zip(kinds, shades, strict=True)]


def append_cells(line: Text, cells: Iterable[tuple[str, str]]) -> Text:
    """Append characters with their styles to a line and return it. Adjacent characters of one style become one span."""
    for style, group in groupby(cells, key=itemgetter(1)):
        line.append("".join(character for character, _ in group), style=style)
    return line


def _title(title: str, series: Sequence[Series], width: int) -> Text:
    head = Text(title, style="bold")
    for style, curve in zip(styles([curve.name for curve in series]), series, strict=True):
        name = curve.name.rpartition("/")[2] if len(series) > 1 else ""
        if curve.name.startswith("eval/"):
            name = curve.name.split("/")[1]
        head.append(f"  {name} " if name else "  ", style=style)
        head.append(number(curve.points[-1][1]), style=style)
    head.truncate(width, overflow="ellipsis", pad=True)
    return head


def _dots(
    points: Sequence[Point], steps: tuple[float, float], values: tuple[float, float], columns: int, rows: int
) -> set[tuple[int, int]]:
    """Return the dots (column, row from the top) of a curve. Points are joined; each column shows its whole range."""
    across = (columns - 1) / max(steps[1] - steps[0], 1e-12)
    up = (rows - 1) / max(values[1] - values[0], 1e-300)
    ranges: dict[int, tuple[int, int]] = {}
    before: tuple[int, int] | None = None
    for step, value in points:
        x = int((step - steps[0]) * across + 0.5)
        y = rows - 1 - int((value - values[0]) * up + 0.5)
        low, high = ranges.get(x, (y, y))
        ranges[x] = (min(low, y), max(high, y))
        if before is not None and x > before[0]:
            _join(ranges, before, (x, y))
        before = (x, y)
    return {(x, y) for x, (low, high) in ranges.items() for y in range(low, high + 1)}


def _join(ranges: dict[int, tuple[int, int]], begin: tuple[int, int], end: tuple[int, int]) -> None:
    """Add a straight line between two dots, so that neighbouring columns touch."""
    (x0, y0), (x1, y1) = begin, end
    slope = (y1 - y0) / (x1 - x0)
    reached = y0
    for x in range(x0 + 1, x1 + 1):
        y = round(y0 + slope * (x - x0))
        low, high = ranges.get(x, (y, y))
        middle = reached if abs(y - reached) <= 1 else reached + (1 if y > reached else -1)
        ranges[x] = (min(low, y, middle), max(high, y, middle))
        reached = y


def _labelled(row: int, rows: int) -> bool:
    return row in (0, rows - 1) or (rows >= 7 and row == rows // 2)


def _label(row: int, rows: int, low: float, high: float) -> str:
    if not _labelled(row, rows):
        return ""
    value = high - (high - low) * row / max(rows - 1, 1)
    return number(0.0 if abs(value) < (high - low) * 1e-6 else value)


def number(value: float) -> str:
    """Format a number in at most 8 characters: `0.5`, `1.2e-5`, `12,345`, `3.20M`."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+", "e")
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if len(text) <= LABEL else f"{value:.2g}"


def bar(share: float, width: int, *, filled: str = "█", empty: str = "░") -> str:
    """Return a bar of `width` characters of which `share` (0 to 1) is filled."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return filled * full + empty * (width - full)

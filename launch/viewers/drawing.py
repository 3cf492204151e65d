"""Draws curves as one SVG picture, with a small chart for each metric and a colour for each run.

The picture is readable on light and dark pages. It is self-contained and has no script, and its size does not depend on
the length of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from launch.viewers.curves import History, Point

COLUMNS = 3
WIDTH, HEIGHT = 330, 190
"""Size of one chart, with its title and axes, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 22
LEGEND_LINE = 20
BUCKETS = 260
"""Maximum number of pieces of a curve, about one per pixel. The lowest and the highest point of each are drawn."""
TITLE_CHARS = 44
TICKS = 4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
"""Mostly Okabe and Ito's palette, whose colours colour-blind people can tell apart on white and on black."""
STYLE = (
    ".chart{--paper:#fff;--ink:#1a1a1a;--line:#dcdcdc}"
    "@media(prefers-color-scheme:dark){.chart{--paper:#15181c;--ink:#e4e4e4;--line:#3a3f45}}"
    ".chart .paper{fill:var(--paper)}.chart text{fill:var(--ink);font:11px system-ui,sans-serif}"
    ".chart .title{font-weight:600}.chart .grid{stroke:var(--line);fill:none}"
    ".chart polyline{fill:none;stroke-width:1.4;stroke-linejoin:round}"
    ".chart .back{stroke-width:1;stroke-dasharray:3 2;opacity:.6}"
)
_CONTROLS = (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
"""Characters that XML does not allow or that are invisible, except tab and newline."""
_DIRECTION = (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
"""Characters that reorder or hide the text around them."""
_SEEN = dict.fromkeys((*_CONTROLS, *_DIRECTION), "\ufffd")


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * ((value - self.low) / ((self.high - self.low) or 1.0))


def visible(text: str, limit_chars: int) -> str:
    """Return text from any source without characters that hide or reorder text, at most `limit_chars` long.

    The text is not escaped.
    """
    seen = text[: limit_chars + 1].translate(_SEEN)
    return seen if len(seen) <= limit_chars else seen[: limit_chars - 1] + "…"


def plain(text: str, limit_chars: int) -> str:
    """Return text from any source as one line, escaped for XML."""
    return escape(" ".join(visible(text, limit_chars).split()), {'"': "&quot;"})


def picture(histories: Sequence[History], metrics: Sequence[str]) -> str:
    """Return the charts of `metrics` as an SVG document. Curves of steps that a run rolled back are thin and dashed."""
    columns = max(1, min(COLUMNS, len(metrics)))
    legend = LEGEND_LINE * len(histories) if len(histories) > 1 else 0
    width, height = columns * WIDTH, math.ceil(len(metrics) / columns) * HEIGHT + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for index, history in enumerate(histories if legend else ()):
        y = LEGEND_LINE * index + 14
        parts.append(f'<path d="M12 {y - 4}h22" stroke="{_colour(index)}" stroke-width="2"/>')
        parts.append(f'<text x="40" y="{y}">{plain(history.name, 120)}</text>')
    for index, metric in enumerate(metrics):
        at = (index % columns * WIDTH, index // columns * HEIGHT + legend)
        parts += _chart(histories, metric, *at)
    return "\n".join([*parts, "</svg>", ""])


def _chart(histories: Sequence[History], metric: str, x0: int, y0: int) -> list[str]:
    title = plain(metric, TITLE_CHARS)
    parts = [f'<g transform="translate({x0} {y0})"><text class="title" x="{LEFT}" y="16">{title}</text>']
    curves = [(history.points(metric), history.taken_back(metric)) for history in histories]
    every = [point for points, back in curves for piece in (points, *back) for point in piece]
    if not every:
        return [*parts, f'<text x="{LEFT}" y="{HEIGHT // 2}">no value yet</text></g>']
    low, high = min(value for _, value in every), max(value for _, value in every)
    ticks = nice_ticks(low, high)
    x = Scale(min(step for step, _ in every), max(step for step, _ in every), LEFT, WIDTH - RIGHT)
    y = Scale(min(low, ticks[0]), max(high, ticks[-1]), HEIGHT - BOTTOM, TOP)
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y.at(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y.at(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for step, anchor in ((x.low, "start"), (x.high, "end")):
        parts.append(f'<text x="{x.at(step):.0f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:.0f}</text>')
    for index, (points, back) in enumerate(curves):
        parts += [_line(piece, x, y, _colour(index), "back") for piece in back]
        if points:
            parts.append(_line(points, x, y, _colour(index), "kept"))
    return [*parts, "</g>"]


def _line(points: Sequence[Point], x: Scale, y: Scale, colour: str, kind: str) -> str:
    seen = thinned(points)
    if len(seen) == 1:
        return f'<circle class="{kind}" cx="{x.at(seen[0][0]):.1f}" cy="{y.at(seen[0][1]):.1f}" r="2" fill="{colour}"/>'
    text = " ".join(f"{x.at(step):.1f},{y.at(value):.1f}" for step, value in seen)
    return f'<polyline class="{kind}" stroke="{colour}" points="{text}"/>'


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return both ends of a curve, and the lowest and the highest point of each of its `BUCKETS` pieces.

    Peaks stay visible.
    """
    if len(points) <= 2 * BUCKETS:
        return points
    found: dict[Point, None] = {points[0]: None}
    for index in range(BUCKETS):
        piece = points[index * len(points) // BUCKETS : (index + 1) * len(points) // BUCKETS]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        found |= dict.fromkeys(sorted(ends))
    return [*found, points[-1]] if points[-1] not in found else list(found)


def nice_ticks(low: float, high: float) -> list[float]:
    """Return up to six round values from about `low` to about `high`."""
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((factor * power for factor in (1.0, 2.0, 2.5, 5.0) if factor * power >= raw), 10 * power)
    first = math.floor(low / step)
    count = math.ceil(high / step) - first
    return [(first + index) * step for index in range(count + 1)]


def short(value: float) -> str:
    """Format a tick: `0.25`, `1.2e-07`, `12k`."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4 and abs(value) < 1e15:
        for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]

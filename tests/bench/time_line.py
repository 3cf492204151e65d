"""Draws the computations of a run over time: one row per process and kind of work, from the spans that services report.

    python -m tests.bench.time_line [--run DIR] [--seconds 6] [--svg docs/time_line.svg]

Attaches to a live run, watches it for `--seconds` and prints the rows as text, with the busy time of each row, and
reports how much of the reference's work overlapped generation or training. It asserts nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proto.messages import TopicRow
from shared.actor.telemetry import SPAN
from shared.rundir import RunDir, newest_run, service_name
from shared.stream import Stream
from shared.view.look import LOOKS, of_span

COLUMNS = 100
ROW, LEFT, WIDTH, TOP = 22, 250, 900, 30
WAIT = "wait for the batch"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Interval of work. `began` and `ended` are seconds since the epoch by the process's clock."""

    process: str
    what: str
    began: float
    ended: float


def spans_of(row: TopicRow) -> Iterable[Span]:
    """Return the work in a telemetry row; the driver's row for a step includes its wait for the batch."""
    process = service_name(row.service, row.instance)
    if row.topic == SPAN and "of" not in row.values:
        yield Span(process, str(row.values["what"]), row.at - float(row.values["seconds"]), row.at)
    elif row.topic == "train":
        began = row.at - float(row.values["time/step"])
        yield Span(process, WAIT, began, began + float(row.values["time/wait_batch"]))


async def watch(run: RunDir, seconds: float) -> list[Span]:
    """Return the spans that end in the next `seconds` seconds, or until the run ends if that is sooner."""
    until = time.time() + seconds
    found: list[Span] = []

    async def collect() -> None:
        async with Stream(run, ended=lambda: not run.sockets.exists()) as stream:
            async for row in stream.rows():
                found.extend(spans_of(row))

    begun = time.time()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(collect(), until - begun)
    # The snapshot also contains earlier spans, which are left out.
    return [span for span in found if span.ended >= begun]


def merged(spans: Iterable[Span]) -> list[Interval]:
    """Return the union of `spans` as intervals."""
    joined: list[Interval] = []
    for began, ended in sorted((span.began, span.ended) for span in spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def common_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return how long, in seconds, the two sets of intervals overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def rows_of(spans: Sequence[Span]) -> dict[tuple[str, str], list[Span]]:
    rows: dict[tuple[str, str], list[Span]] = {}
    for span in sorted(spans, key=lambda each: (each.process, each.what)):
        rows.setdefault((span.process, span.what), []).append(span)
    return rows


def text(spans: Sequence[Span]) -> str:
    """Return a line of COLUMNS characters per row, with `#` where the process was busy for more than half the time and
    `-` where it was busy for less."""
    first, last = min(span.began for span in spans), max(span.ended for span in spans)
    width = (last - first) / COLUMNS
    lines = [f"{last - first:.2f} s, {width * 1000:.0f} ms a character"]
    for (process, what), row in rows_of(spans).items():
        busy = merged(row)
        cells = ""
        for column in range(COLUMNS):
            cell = (first + column * width, first + (column + 1) * width)
            share = common_s([cell], busy) / width
            cells += "#" if share > 0.5 else "-" if share > 0 else " "
        total = sum(ended - began for began, ended in busy)
        lines.append(f"{process:<26}{what:<20}|{cells}| {100 * total / (last - first):3.0f} %")
    reference = merged(span for span in spans if span.process.startswith("reference/"))
    others = merged(span for span in spans if span.process.startswith(("rollout/", "policy-trainer-worker/")))
    if reference:
        total = sum(ended - began for began, ended in reference)
        lines.append(
            f"of the reference's {total:.2f} s, {100 * common_s(reference, others) / total:.0f} % overlap the others"
        )
    return "\n".join(lines)


def drawing(spans: Sequence[Span]) -> str:
    """Return the chart as SVG text."""
    first, last = min(span.began for span in spans), max(span.ended for span in spans)
    rows = rows_of(spans)
    scale = WIDTH / (last - first)
    height = TOP + ROW * len(rows) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="18">{last - first:.1f} s of a run</text>',
    ]
    for index, ((process, what), row) in enumerate(rows.items()):
        top, colour = TOP + index * ROW, LOOKS[of_span(what, waits=what == WAIT)].color
        out.append(f'<text x="8" y="{top + 15}">{process} {what}</text>')
        for span in row:
            left, wide = LEFT + (span.began - first) * scale, max((span.ended - span.began) * scale, 0.5)
            out.append(f'<rect x="{left:.1f}" y="{top + 3}" width="{wide:.1f}" height="{ROW - 6}" fill="{colour}"/>')
    for second in range(int(last - first) + 1):
        x = LEFT + second * scale
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - 24}" stroke="#ccc"/>')
        out.append(f'<text x="{x:.1f}" y="{height - 8}">{second} s</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.time_line")
    parser.add_argument("--run", type=Path, help="run directory; default: the newest under runs/")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long to watch")
    parser.add_argument("--svg", type=Path, help="also draw the chart to this file")
    given = parser.parse_args()
    run = RunDir.open(given.run or newest_run(Path("runs")))
    spans = asyncio.run(watch(run, given.seconds))
    if not spans:
        raise SystemExit(f"run {run.path}: nothing was computed within {given.seconds:g} s")
    print(text(spans))
    if given.svg is not None:
        given.svg.write_text(drawing(spans))


if __name__ == "__main__":
    main()

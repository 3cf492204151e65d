"""Draws docs/staleness.svg: reward against wall-clock time for several staleness bounds, from real runs on this
machine.

    python -m tests.bench.plot_staleness [--steps 120] [--turns 3]

The quickstart runs without its reference (one process samples, one trains), alternating between the bounds; every run
gives one curve. Time starts at the first step's row, so that imports are excluded. A point is the mean of ten steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.cluster_run import ROOT, SAMPLES_PER_STEP, BenchError, measured_cores, run_cluster
from tests.bench.turns import TURNS, by_turns, heading, machine, order_line, spread

PICTURE = ROOT / "docs" / "staleness.svg"
BOUNDS = (0, 1, 4)
NO_REFERENCE = ("algorithm.kl=null", "services.reference=null")
WINDOW = 10
COOL_DOWN = 5
WIDTH, HEIGHT, MARGIN = 720, 420, 56
COLOURS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class Curve:
    """Curve of one run. `reward[i]` is the mean over the WINDOW steps up to time `seconds[i]`."""

    staleness: int
    seconds: list[float]
    reward: list[float]
    samples_per_s: float
    others_cores: float


def measure(staleness: int, steps: int, limit_s: float) -> Curve:
    """Measure one run. Raises BenchError."""
    settings = (*NO_REFERENCE, f"staleness={staleness}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        rows = run_cluster(steps + COOL_DOWN, Path(name), limit_s, settings=settings)[:steps]
    rewards = [each.row["reward/mean"] for each in rows]
    began = rows[0].at_s
    return Curve(
        staleness,
        [each.at_s - began for each in rows[WINDOW - 1 :]],
        [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)],
        SAMPLES_PER_STEP * (len(rows) - 1) / (rows[-1].at_s - began),
        cores.others,
    )


def drawing(curves: list[Curve], caption: str) -> str:
    """Return the plot as SVG text."""
    longest = max(curve.seconds[-1] for curve in curves)
    highest = max(max(curve.reward) for curve in curves)
    lowest = min(min(curve.reward) for curve in curves)

    def x(seconds: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * seconds / longest

    def y(reward: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (reward - lowest) / max(highest - lowest, 1e-9)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 28}" text-anchor="middle">seconds of training</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle" fill="#555" font-size="10">{caption}</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 12}">mean reward of the last {WINDOW} steps</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        seconds, reward = longest * share, lowest + (highest - lowest) * share
        parts.append(f'<text x="{x(seconds):.1f}" y="{HEIGHT - MARGIN + 14}" text-anchor="middle">{seconds:.0f}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(reward) + 4:.1f}" text-anchor="end">{reward:.2f}</text>')
        parts.append(f'<path d="M{MARGIN} {y(reward):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
    for index, (bound, colour) in enumerate(zip(BOUNDS, COLOURS, strict=True)):
        mine = [curve for curve in curves if curve.staleness == bound]
        for curve in mine:
            points = " ".join(
                f"{x(at):.1f},{y(reward):.1f}" for at, reward in zip(curve.seconds, curve.reward, strict=True)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        label = f"staleness {bound}: {spread(curve.samples_per_s for curve in mine).text('.0f')} samples/s"
        parts.append(
            f'<text x="{WIDTH - MARGIN - 250}" y="{HEIGHT - MARGIN - 54 + 17 * index}" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward against wall-clock for several bounds of staleness.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each bound")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a run counts as failed")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()

    def run(staleness: int) -> Curve:
        curve = measure(staleness, args.steps, args.limit_s)
        print(
            f"staleness {staleness}: {curve.samples_per_s:.0f} samples/s, reward {curve.reward[-1]:.3f} after "
            f"{curve.seconds[-1]:.0f} s, {curve.others_cores:.2f} cores used by others",
            flush=True,
        )
        return curve

    sides = {f"staleness {bound}": partial(run, bound) for bound in BOUNDS}
    print(heading())
    print(order_line(sides, args.turns), flush=True)
    try:
        curves = [curve for runs in by_turns(sides, args.turns).values() for curve in runs]
    except BenchError as error:
        sys.exit(f"plot_staleness: {error}")
    busy = max(curve.others_cores for curve in curves)
    caption = (
        f"{args.steps} steps of the quickstart without its reference, {args.turns} runs each, median [minimum, "
        f"maximum]; {machine()}; others used up to {busy:.1f} cores"
    )
    args.picture.parent.mkdir(exist_ok=True)
    args.picture.write_text(drawing(curves, caption), encoding="utf-8")
    print(args.picture)


if __name__ == "__main__":
    main()

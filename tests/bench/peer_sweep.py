"""Finds the settings with which a peer is fastest, and keeps what was measured in a recorded sweep (JSON).

The search measures the given settings, then the neighbours of the fastest ones, until no neighbour is faster. A
neighbour differs in one setting, by a factor of two. The optimum is therefore never at the edge of what was tried,
except where a setting has a limit, such as one thread or all samples of a step. Settings whose rate is at least
CLOSE of the highest are measured REPEATS times; medians are compared.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.bench.cluster_run import ROOT, BenchError, measured_cores
from tests.bench.turns import machine, order

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REPEATS = 3
CLOSE = 0.9
Axes = Mapping[str, tuple[int, int]]
"""The lowest and the highest value of each setting."""


P = TypeVar("P", bound="DataclassInstance")
"""A frozen dataclass of numbers, one for each setting."""


@dataclass(frozen=True)
class PeerRun:
    """One measurement: a rate, where more is better, and the cores that other programs kept busy meanwhile."""

    rate: float
    others_cores: float


Measured = dict[P, list[PeerRun]]


def neighbours(settings: P, axes: Axes) -> Iterator[P]:
    """Yield the settings that differ in one axis by a factor of two, or less at an axis's limit."""
    for name, (lowest, highest) in axes.items():
        value = getattr(settings, name)
        for other in (max(value // 2, lowest), min(value * 2, highest)):
            if other != value:
                yield dataclasses.replace(settings, **{name: other})


def rate(runs: Iterable[PeerRun]) -> float:
    return statistics.median(run.rate for run in runs)


def fastest(measured: Mapping[P, list[PeerRun]], allowed: Callable[[P], bool] = lambda _: True) -> P:
    """Return the settings with the highest median rate. At least one must be allowed."""
    return max(filter(allowed, measured), key=lambda each: rate(measured[each]))


def unmeasured(measured: Mapping[P, list[PeerRun]], axes: Axes, allowed: Callable[[P], bool]) -> list[P]:
    """Return the neighbours of the fastest settings that were never measured."""
    around = neighbours(fastest(measured, allowed), axes)
    return [each for each in around if allowed(each) and each not in measured]


def search(
    start: Iterable[P],
    axes: Axes,
    measure: Callable[[P], float],
    *,
    allowed: Callable[[P], bool] = lambda _: True,
    measured: Mapping[P, list[PeerRun]] | None = None,
    show: Callable[[P, PeerRun], object] = lambda *_: None,
) -> Measured[P]:
    """Return everything measured until no neighbour of the fastest allowed settings is faster.

    `measured` holds the results of an earlier search, which are not measured again.
    """
    found = {settings: list(runs) for settings, runs in (measured or {}).items()}
    waiting = [each for each in start if each not in found]
    turn = 0
    while waiting or not turn:
        for each in order(waiting, turn):
            with measured_cores() as cores:
                speed = measure(each)
            run = PeerRun(speed, cores.others)
            found.setdefault(each, []).append(run)
            show(each, run)
        highest = rate(found[fastest(found, allowed)])
        close = [
            each
            for each, runs in found.items()
            if allowed(each) and len(runs) < REPEATS and rate(runs) >= CLOSE * highest
        ]
        waiting = [*unmeasured(found, axes, allowed), *close]
        turn += 1
    return found


def text(settings: DataclassInstance) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in dataclasses.asdict(settings).items())


def save(path: Path, name: str, measured: Mapping[P, list[PeerRun]], software: str, **work: Any) -> None:
    """Write the sweep `name` into the record at `path`. `work` describes what was measured."""
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded[name] = {
        "machine": machine(),
        "software": software,
        **work,
        "measured": [
            {
                "settings": dataclasses.asdict(settings),
                "rates": [round(run.rate, 3) for run in runs],
                "others_cores": [round(run.others_cores, 2) for run in runs],
            }
            for settings, runs in measured.items()
        ],
    }
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"recorded in {_shown(path)}")


def recorded_best(
    path: Path, name: str, kind: type[P], axes: Axes, allowed: Callable[[P], bool] = lambda _: True
) -> tuple[P, str]:
    """Return the fastest allowed settings of a recorded sweep, and a line that says which they are.

    Raises BenchError if no sweep was recorded, or if it did not measure every neighbour of its optimum.
    """
    shown = _shown(path)
    record = (json.loads(path.read_text()) if path.exists() else {}).get(name)
    if record is None:
        raise BenchError(f"{shown} has no sweep of {name!r}: run this command with --sweep")
    measured: Measured[P] = {
        kind(**each["settings"]): [PeerRun(*run) for run in zip(each["rates"], each["others_cores"], strict=True)]
        for each in record["measured"]
    }
    best = fastest(measured, allowed)
    if missing := unmeasured(measured, axes, allowed):
        raise BenchError(
            f"{shown}: the sweep of {name!r} is fastest with {text(best)}, but did not try {text(missing[0])}: run "
            "this command with --sweep"
        )
    return best, f"{text(best)}: fastest of {len(measured)} in {shown}, recorded on {record['machine']}"


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path

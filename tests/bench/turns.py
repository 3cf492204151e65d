"""Runs the sides of a comparison alternately on this machine, and formats their figures.

Every benchmark that compares two sides uses this module: all sides of a ratio run in one command, several times each,
in an order that is reversed in every second turn. A figure is a median with its minimum and maximum.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeVar

import psutil

TURNS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Values of one quantity over several turns. There is at least one value."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, form: str = ".2f") -> str:
        """Return `median [minimum, maximum]`, or the value alone if there is only one."""
        if len(self.values) == 1:
            return format(self.median, form)
        return f"{self.median:{form}} [{min(self.values):{form}}, {max(self.values):{form}}]"


def spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))


def ratios(mine: Iterable[float], theirs: Iterable[float]) -> Spread:
    """Return `mine` divided by `theirs` for each turn. Raises ValueError if they differ in their number of turns."""
    return spread(one / other for one, other in zip(mine, theirs, strict=True))


def order(sides: Iterable[T], turn: int) -> list[T]:
    """Return the sides in their order for turn `turn` (from 0): as given, or reversed in every second turn."""
    given = list(sides)
    return given[::-1] if turn % 2 else given


def by_turns(sides: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Call every side once in each turn. Return the results of each side, turn by turn."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in order(sides, turn):
            results[name].append(sides[name]())
    return results


def machine() -> str:
    """Describe the cores that this process may use, their model and the memory."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {psutil.virtual_memory().total / 2**30:.1f} GiB"


def versions(packages: Sequence[str], environment: Path | None = None) -> str:
    """Return names and versions of those `packages` installed here or in another virtual environment."""
    where = (
        {} if environment is None else {"path": [str(path) for path in environment.glob("lib/python*/site-packages")]}
    )
    found = {each.name.lower(): each.version for each in distributions(**where)}
    return ", ".join(f"{name} {found[name.lower()]}" for name in packages if name.lower() in found)


def heading(software: str = "") -> str:
    """Return two lines that describe the machine with its load, and the software. `software`, if not empty, replaces
    the default list of package versions."""
    python = f"Python {platform.python_version()}, Linux {platform.release()}"
    return (
        f"machine   {machine()}; load average before {os.getloadavg()[0]:.1f}\n"
        f"software  {python}, {software or versions(('torch', 'transformers', 'numpy'))}"
    )


def order_line(sides: Iterable[str], turns: int) -> str:
    """Describe the number and order of the calls that `by_turns` makes, and how the figures are given."""
    again = "; every second turn in reverse" if turns > 1 else ""
    return (
        f"order     {turns} turn{'s' if turns > 1 else ''}: {', then '.join(sides)}{again}\n"
        "figures   median [minimum, maximum] of the turns; ratios are taken within each turn"
    )

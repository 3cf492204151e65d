"""Records how the processes of a run and the files of its directory grow, and finds those whose growth does not end.

The memory of a process is its anonymous memory: the pages that it has written, without files and shared memory that it
maps. A page that a fork still shares with its parent counts as well. Otherwise a process would appear to grow whenever
it writes to such a page for the first time, although nothing has been allocated.

A quantity grows if it does so in most parts of the time under test. Each part's growth is the median slope of all pairs
of samples (Theil 1950, Sen 1968), so single samples have no influence, and a cache that fills once affects only one
part.
"""

from __future__ import annotations

import fnmatch
import json
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import psutil

MB = 1e6
PARTS = 3
"""Number of parts of the time under test. Growth lasts if it shows in most of them."""
MOST_BYTES_PER_MIN = 0.1 * MB
MOST_COUNT_PER_MIN = 0.0
MIN_SAMPLES = 5
"""Minimum number of samples in each part."""
PAIRED_SAMPLES = 120
"""Maximum number of samples per part that are paired with each other."""
PRESENT = 0.9
"""Minimum share of the samples that contain a process that is judged. Others are short-lived."""


class Usage(NamedTuple):
    """What one process takes up."""

    memory_bytes: int
    descriptors: int
    threads: int


class Quantity(NamedTuple):
    """A field of `Usage`, in `unit`, and the slope per minute above which it counts as growing."""

    name: str
    unit: float
    form: str
    most_per_min: float


QUANTITIES = {
    "memory_bytes": Quantity("memory, MB", MB, ".2f", MOST_BYTES_PER_MIN),
    "descriptors": Quantity("descriptors", 1.0, ".0f", MOST_COUNT_PER_MIN),
    "threads": Quantity("threads", 1.0, ".0f", MOST_COUNT_PER_MIN),
}


@dataclass(frozen=True)
class FileBound:
    """The maximum size of a file in a run directory, or of all files of a folder together."""

    pattern: str
    """Path in the run directory, in which `*` matches any text. With a slash at its end, it names a folder."""
    nbytes: float
    per_step: float = 0.0
    """Bytes that each step may add."""


@dataclass(frozen=True)
class Sample:
    """The processes of a run by name, and the sizes of its files by path, at one moment."""

    minute: float
    step: int
    usage: Mapping[str, Usage]
    files: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps([self.minute, self.step, self.usage, self.files])

    @classmethod
    def from_json(cls, line: str) -> Sample:
        minute, step, usage, files = json.loads(line)
        return cls(minute, step, {name: Usage(*each) for name, each in usage.items()}, files)


# ----------------------------------------------------------------------------------------------------- sampling


def usages(launcher: int) -> dict[str, Usage]:
    """Return what the launcher and each of its descendants takes up, by name, or {} if the launcher is gone."""
    try:
        processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    found: dict[str, Usage] = {}
    for process in processes:
        try:
            name, usage = name_of(process.cmdline()), usage_of(process.pid)
        except (psutil.Error, OSError):
            continue  # it has ended, or has not executed its program yet
        found[name if name not in found else f"{name} ({process.pid})"] = usage
    return found


def usage_of(pid: int) -> Usage:
    """Return what one process takes up. Raises OSError if it has ended."""
    sizes = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    memory = sum(1024 * int(sizes[name].split()[0]) for name in ("Anonymous", "Swap"))
    return Usage(memory, *(len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task")))


def name_of(command: Sequence[str]) -> str:
    """Return a name such as `services.rollout/0`, or the name of the script or program if the process is not a
    service."""
    module = next((part for part in command if part.startswith(("services.", "launch.", "shared."))), "")
    script = next((Path(part).name for part in command if part.endswith(".py")), "")
    instance = command[command.index("--instance") + 1] if "--instance" in command else ""
    return "/".join(part for part in (module or script or Path((command or "?")[0]).name, instance) if part)


def sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file under `folder`, by its path relative to `folder`."""
    found: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                found[str(path.relative_to(folder))] = path.lstat().st_size
            except FileNotFoundError:
                continue
    return found


# ----------------------------------------------------------------------------------------------------- judgement


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points, or 0 if no two points have different first coordinates."""
    slopes = [(later[1] - one[1]) / (later[0] - one[0]) for one, later in combinations(points, 2) if later[0] > one[0]]
    return statistics.median(slopes) if slopes else 0.0


def lasting_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median over `PARTS` equal parts of the slope in each part."""
    size = len(points) / PARTS
    parts = [points[round(part * size) : round((part + 1) * size)] for part in range(PARTS)]
    return statistics.median(slope(part[:: -(-len(part) // PAIRED_SAMPLES)]) for part in parts if part)


class Growth(NamedTuple):
    """One quantity of one process: its median early and late in the time under test, and its lasting slope."""

    process: str
    quantity: Quantity
    early: float
    late: float
    per_min: float

    @property
    def is_too_fast(self) -> bool:
        return self.per_min > self.quantity.most_per_min

    def __str__(self) -> str:
        _, unit, form, most = self.quantity
        early, late = (format(value / unit, form) for value in (self.early, self.late))
        return (
            f"{self.process}: {self.quantity.name}: grows by {self.per_min / unit:.3g} a minute, from {early} to "
            f"{late}; the limit is {most / unit:g}"
        )


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of every quantity of each process that exists in almost all samples.

    Raises ValueError if there are too few samples.
    """
    if len(samples) < PARTS * MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few to judge growth: take {PARTS * MIN_SAMPLES} or more")
    seen = Counter(name for sample in samples for name in sample.usage)
    found: list[Growth] = []
    for name in sorted(name for name, count in seen.items() if count >= PRESENT * len(samples)):
        present = [(sample.minute, sample.usage[name]) for sample in samples if name in sample.usage]
        edge = max(1, len(present) // 10)
        for key, quantity in QUANTITIES.items():
            points = [(minute, float(getattr(usage, key))) for minute, usage in present]
            early, late = (statistics.median(value for _, value in part) for part in (points[:edge], points[-edge:]))
            found.append(Growth(name, quantity, early, late, lasting_slope(points)))
    return found


def too_large(sample: Sample, bounds: Iterable[FileBound]) -> Iterator[str]:
    """Yield a line for each file or folder of a run directory that exceeds its bound, or that has none.

    The first bound whose pattern matches a file applies to it.
    """
    totals: Counter[FileBound] = Counter()
    for path, size in sorted(sample.files.items()):
        bound = next((each for each in bounds if _matches(each, path)), None)
        if bound is None:
            yield f"{path}: {size:,} bytes; the file has no bound"
        elif bound.pattern.endswith("/"):
            totals[bound] += size
        else:
            yield from _excess(path, size, bound, sample.step)
    for bound, size in totals.items():
        yield from _excess(bound.pattern, size, bound, sample.step)


def _matches(bound: FileBound, path: str) -> bool:
    return fnmatch.fnmatchcase(path, f"{bound.pattern}*" if bound.pattern.endswith("/") else bound.pattern)


def _excess(what: str, size: int, bound: FileBound, step: int) -> Iterator[str]:
    most = bound.nbytes + bound.per_step * step
    if size > most:
        yield f"{what}: {size:,} bytes after {step} steps; the bound is {most:,.0f}"

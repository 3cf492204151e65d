"""Reads the curves of a run from its metrics files. The rows of steps that the run rolled back are kept separate.

Reading needs neither the run's processes nor a complete run directory: `metrics.jsonl` is enough.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

METRICS, DISCARDED = "metrics.jsonl", "metrics.discarded.jsonl"
DEFAULTS = (
    "reward/mean",
    "eval/*/accuracy",
    "loss/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "rollout/length_mean",
    "rollout/logprob_mismatch",
    "rollout/kl",
    "rollout/is_eff_sample_size",
    "rollout/is_max",
    "rollout/zero_variance_fraction",
    "time/step",
)
"""The metrics that are drawn if none are named."""
READ_BYTES = 64 << 20
"""Maximum number of bytes read from each file. If a file is longer, only its newest rows are read."""
LARGEST = 1e300
"""Maximum absolute value that is drawn, because differences between larger values overflow."""
Point = tuple[int, float]
Row = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The rows of one run, oldest first."""

    name: str
    rows: list[Row]
    """The rows of the steps that were not rolled back."""
    discarded: dict[int, list[Row]]
    """The rows of the steps that were rolled back, keyed by the lineage of weights that ended then."""

    def points(self, metric: str) -> list[Point]:
        """Return the curve of a metric, built from the rows that contain the metric."""
        return self._curves.get(metric, [])

    def taken_back(self, metric: str) -> list[list[Point]]:
        """Return the discarded pieces of a metric's curve."""
        return [curves[metric] for curves in map(_curves, self.discarded.values()) if curves.get(metric)]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, in the order of their first appearance."""
        return list(self._curves)

    @cached_property
    def _curves(self) -> dict[str, list[Point]]:
        return _curves(self.rows)


def read_history(folder: Path, name: str = "") -> History:
    """Read the metrics of the run in `folder`. Raises a one-line RpcError(bad_request) if the folder has no metrics."""
    path = folder / METRICS
    if not path.is_file():
        text = f"run {folder}: has no {METRICS}; name the directory of a run that has begun"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    discarded: dict[int, list[Row]] = {}
    for row in _rows(folder / DISCARDED):
        discarded.setdefault(int(row.get("lineage", 0)), []).append(row)
    return History(name or folder.absolute().name, _rows(path), discarded)


def read_histories(folders: Sequence[Path]) -> list[History]:
    """Read several runs. Runs whose folders have the same name are identified by their paths."""
    names = [folder.absolute().name for folder in folders]
    return [
        read_history(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def chosen(histories: Iterable[History], wanted: Sequence[str]) -> list[str]:
    """Return the metrics of the runs that match `wanted`: names, or patterns such as `eval/*/accuracy`.

    Raises RpcError(bad_request) with the nearest name if no row has a wanted metric. If `wanted` is empty, the default
    metrics that the runs have are returned.
    """
    known = list(dict.fromkeys(name for history in histories for name in history.metrics))
    found: dict[str, None] = {}
    for pattern in wanted or DEFAULTS:
        matching = [pattern] if pattern in known else fnmatch.filter(known, pattern)
        if not matching and wanted:
            close = difflib.get_close_matches(pattern, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "docs/metrics.md lists them"
            raise RpcError(ErrorCode.BAD_REQUEST, f"metric {pattern!r}: no row in these runs has it; {hint}")
        found |= dict.fromkeys(matching)
    return list(found)


def _curves(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Return the curve of every metric. A curve is empty if its metric has no value that can be drawn."""
    curves: dict[str, list[Point]] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            curve = curves.setdefault(name, [])
            if isinstance(value, int | float) and abs(value) < LARGEST:
                curve.append((step, value))
    curves.pop("step", None)
    return curves


def _rows(path: Path) -> list[Row]:
    """Return the complete rows of a metrics file, or [] if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - READ_BYTES))
            lines = file.read(READ_BYTES).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            row = msgspec.json.decode(line)
        except ValueError:
            continue  # a line that is still being written, or a truncated first line
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return found

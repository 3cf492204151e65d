"""Journals of earlier releases, which this release reads. The module is pure.

Format 14 had one more table, `evals`, which nothing reads. Before format 16, an open evaluation in a snapshot had the
mean and the best reward of each row, instead of a value of each row by metric, and the result of a completed one had
no mean reward, but an accuracy. No shards were held for a server.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from shared.evaluation import ACCURACY, REWARD

WITH_EVALS = "rlbus-scheduler-14"
"""The format with a table `evals`. Without that table, it is `BEFORE`."""
BEFORE = "rlbus-scheduler-15"
"""The format whose snapshots are converted when they are read."""


def converted(head: bytes) -> bytes:
    """Return the first part of a snapshot of the format before as this release writes it.

    Raises MsgspecError, KeyError, TypeError or ValueError for invalid bytes.
    """
    values: dict[str, Any] = msgspec.msgpack.decode(head)
    values["values"]["holds"] = []
    evaluations = values["evaluations"]
    evaluations["open"] = {key: _open(one) for key, one in evaluations["open"].items()}
    for sets in evaluations["done"].values():
        for name, row in sets.items():
            if (accuracy := row.get(f"eval/{name}/{ACCURACY}")) is not None:
                row[f"eval/{name}/{REWARD}"] = accuracy
    return msgspec.msgpack.encode(values)


def _open(one: dict[str, Any]) -> dict[str, Any]:
    """Return an open evaluation with the values that its rows had. The rewards of single samples are lost, so its rows
    have no pass@k but for k = 1 and for all samples."""
    means, best, samples = one.pop("scores"), one.pop("best"), one["samples"]
    values = {REWARD: means} if samples == 1 else {REWARD: means, "pass@1": means, f"pass@{samples}": best}
    sums = [mean * samples for mean in means if not math.isnan(mean)]
    graded = any(abs(total - round(total)) > 1e-9 * samples for total in sums)
    graded |= any(reward not in (0.0, 1.0) for reward in best if not math.isnan(reward))
    scored = {name: rows for name, rows in values.items() if not all(map(math.isnan, rows))}
    return one | {"rows": len(means), "values": scored, "graded": graded}

"""Turns the scheduler's status into the monitor's `cluster/*` topics.

Ages are omitted because they change all the time.
"""

from __future__ import annotations

from proto.messages import Status, TopicRow
from shared.rundir import service_name

SOURCE = "monitor"


def rows_of(status: Status, at: float) -> list[TopicRow]:
    """Return `cluster/status`, `cluster/services`, `cluster/losses` and, if there are any metrics, `cluster/metrics`.

    `at` is in seconds since 1970. `cluster/losses` holds the numbers of `dropped/<reason>` tasks and `lost/<reason>`
    samples so far and, under `<service>/<kind>`, the text of each current trouble.
    """
    values: dict[str, float | str] = {
        "reachable": 1.0,
        "run": status.run,
        "step": status.step,
        "steps": status.steps,
        "lineage": status.lineage,
        "version": status.version,
        "store/bytes": status.store_bytes,
        "store/limit_bytes": status.store_limit_bytes,
        "store/shards": status.store_shards,
    }
    values |= {f"tasks/{state}": count for state, count in status.tasks.items()}
    services: dict[str, float | str] = {}
    for row in status.services:
        name = service_name(row.service, row.instance)
        services[f"{name}/state"] = row.state
        services[f"{name}/pid"] = row.pid
        services[f"{name}/rss_bytes"] = row.rss_bytes
    losses: dict[str, float | str] = {f"dropped/{reason}": count for reason, count in status.dropped.items()}
    losses |= {f"lost/{reason}": count for reason, count in status.lost.items()}
    losses |= {
        f"{service_name(trouble.service, trouble.instance)}/{trouble.kind}": trouble.text for trouble in status.troubles
    }
    rows = [_row("cluster/status", at, values), _row("cluster/services", at, services)]
    rows.append(_row("cluster/losses", at, losses))
    if status.last_row:
        rows.append(_row("cluster/metrics", at, {key: float(value) for key, value in status.last_row.items()}))
    return rows


def unreachable(at: float) -> TopicRow:
    """Return the `cluster/status` row for a scheduler that does not answer."""
    return _row("cluster/status", at, {"reachable": 0.0})


def _row(topic: str, at: float, values: dict[str, float | str]) -> TopicRow:
    return TopicRow(service=SOURCE, instance=0, topic=topic, at=at, values=values)

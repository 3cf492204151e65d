"""Converts the supervisor's view of a run's processes to rows of the topic `cluster/process`."""

from __future__ import annotations

from proto.messages import SupervisorState, TopicRow


def process_rows(state: SupervisorState, at: float) -> list[TopicRow]:
    """Return a row for each process, attributed to that process. `at` is in seconds since 1970."""
    return [
        TopicRow(
            service=row.service,
            instance=row.instance,
            topic="cluster/process",
            at=at,
            values={
                "state": row.state,
                "pid": row.pid,
                "incarnation": f"{row.incarnation:016x}",
                "restarts": row.restarts,
                "cause": row.cause,
            },
        )
        for row in state.processes
    ]
